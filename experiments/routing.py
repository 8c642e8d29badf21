"""Routing traces: loads, skew, co-activation, locality and working sets of experts; and traces made up.

python -m experiments.routing trace=PATH_OR_RUN_FOLDER
python -m experiments.routing model=tiny generate.kind=zipf generate.exponent=1.2
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import RoutingConfig


def main(config: RoutingConfig) -> None:
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.routing.run import run_routing
    from moejax.engine.opening.resolve import find_model

    section = config.model
    model = None if section is None else find_model(section.source, section.load_format)[1]
    with ExperimentRun.open("routing", config, output_dir()) as run:
        run_routing(config, model, run)


if __name__ == "__main__":
    run_experiment(main, "routing", ahead=True)
