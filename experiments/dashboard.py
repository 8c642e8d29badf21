"""Writes a W&B workspace that compares our runs: Pareto scatter, medians, CDFs, experts, run comparer.

python -m experiments.dashboard dashboard.entity=ME dashboard.project=moejax
python -m experiments.dashboard dashboard.dry_run=true      # its specification as a file, without a server
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import DashboardExperimentConfig


def main(config: DashboardExperimentConfig) -> None:
    from moejax.tracking.workspace import write_and_print

    write_and_print(config.dashboard, output_dir())


if __name__ == "__main__":
    run_experiment(main, "dashboard")
