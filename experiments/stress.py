"""Long prompts, bursts, aborts, too little memory and streams left early, with leak and drift checks.

python -m experiments.stress stress.rounds=10 stress.phases=[abort,memory]
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import StressConfig


def main(config: StressConfig) -> None:
    from dataclasses import asdict

    from experiments.launch.model import open_llm
    from moejax.bench.stress.run import check_stress, run_stress
    from moejax.results.result import print_metrics_line

    out = output_dir()
    result = run_stress(
        open_llm(config),
        config.stress,
        config.tracker,
        out,
        config=asdict(config),
        name=config.model.name,
        hardware_kind=config.hardware.kind,
    )
    print_metrics_line(result, out)
    check_stress(result)


if __name__ == "__main__":
    run_experiment(main, "stress")
