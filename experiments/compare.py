"""Puts results side by side: metrics with their ratio to the first run, and the settings that differ.

python -m experiments.compare 'runs=[outputs/latency/A,outputs/latency/B]' 'metrics=[median_tpot_ms]'
"""

from experiments._app import output_dir, run_experiment
from experiments._schema import CompareConfig


def main(config: CompareConfig) -> None:
    from moejax.report.compare import compare_and_print

    compare_and_print(config.runs, config.metrics or None, output_dir())


if __name__ == "__main__":
    run_experiment(main, "compare")
