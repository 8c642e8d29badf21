"""Long prompts, bursts, aborts, too little memory and streams left early, with leak and drift checks.

python -m experiments.stress stress.rounds=10 stress.phases=[abort,memory]
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import StressConfig


def main(config: StressConfig) -> None:
    from experiments.launch.model import open_llm
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.stress.run import check_stress, run_stress

    with ExperimentRun.open("stress", config, output_dir()) as run, open_llm(config) as llm:
        result = run_stress(llm, config.stress, run)
    check_stress(result)


if __name__ == "__main__":
    run_experiment(main, "stress", ahead=True)
