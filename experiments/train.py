"""Trains a small mixture-of-experts language model on the prose that every Python installation carries.

    python -m experiments.train export_dir=DIR

Started again after a kill it goes on from its newest checkpoint. The model that ships with the package is
made by this command with `export_dir=moejax/assets/tiny`.
"""

import shlex

from hydra.core.hydra_config import HydraConfig

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import TrainExperimentConfig


def main(config: TrainExperimentConfig) -> None:
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.train.run import run_training

    overrides = HydraConfig.get().overrides.task
    command = shlex.join(["python", "-m", "experiments.train", *overrides])
    with ExperimentRun.open("train", config, output_dir()) as run:
        run_training(config, run, command=command)


if __name__ == "__main__":
    run_experiment(main, "train", ahead=True)
