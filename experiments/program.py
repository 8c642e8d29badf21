"""The program that XLA makes of the engine's steps for a GPU, without one: launches, memory, spills.

python -m experiments.program model=qwen3_30b_a3b target=a100
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import ProgramConfig


def main(config: ProgramConfig) -> None:
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.program.run import run_program

    with ExperimentRun.open("program", config, output_dir()) as run:
        run_program(config, run)


if __name__ == "__main__":
    run_experiment(main, "program")
