"""Writes a W&B workspace that compares our runs: Pareto scatter, medians, CDFs, experts, run comparer.

python -m experiments.dashboard dashboard.entity=ME dashboard.project=moejax
python -m experiments.dashboard dashboard.dry_run=true      # its specification as a file, without a server
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import DashboardExperimentConfig


def main(config: DashboardExperimentConfig) -> None:
    from moejax.report.tables import stderr_console
    from moejax.results.result import print_ending
    from moejax.tracking.workspace import run_dashboard

    done = run_dashboard(config.dashboard, output_dir())
    where = done["url"] or f"not sent (dashboard.dry_run); its specification: {done['spec']}"
    line = f"workspace of {done['panels']} panels: {where}"
    stderr_console().print(line, soft_wrap=True, highlight=False)
    print_ending("dashboard", output_dir(), done)


if __name__ == "__main__":
    run_experiment(main, "dashboard")
