"""Memory that does not hold all experts: policies of keeping them resident, replayed on routing traces.

python -m experiments.offload offload.trace=FILE_OR_RUN 'offload.shares=[0.1,0.2]'
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import OffloadConfig


def main(config: OffloadConfig) -> None:
    from functools import partial

    from experiments.launch.model import open_capturing
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.offload.run import run_offload
    from moejax.engine.opening.resolve import find_model

    model = find_model(config.model.source, config.model.load_format)[1]
    with ExperimentRun.open("offload", config, output_dir()) as run:
        run_offload(partial(open_capturing, config), model, config.offload, run, seed=config.seed)


if __name__ == "__main__":
    run_experiment(main, "offload", ahead=True)
