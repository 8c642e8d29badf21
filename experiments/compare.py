"""Puts runs side by side: which inputs differ, which metrics differ beyond noise, and which run is better.

python -m experiments.compare outputs/latency/A outputs/latency/B [FOLDER/wandb/offline-run-…] [html=true]
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import CompareConfig


def main(config: CompareConfig) -> None:
    from moejax.report.compare import compare_and_print

    compare_and_print(
        config.runs,
        config.metrics or None,
        output_dir(),
        across=config.across,
        floor=config.noise_floor,
        html=config.html,
    )


if __name__ == "__main__":
    run_experiment(main, "compare", positional="runs")
