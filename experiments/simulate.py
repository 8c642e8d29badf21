"""An engine on GPUs that are not here, under a workload: latencies, throughput, and how wrong they may be.

python -m experiments.simulate model=mixtral_8x7b 'simulate.layouts=[tp8,ep8]' 'simulate.rates=[2,8,32]'
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import SimulateConfig


def main(config: SimulateConfig) -> None:
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.simulate.plan import run_plan
    from moejax.bench.simulate.run import Asked, run_simulate
    from moejax.bench.simulate.validate import run_calibrate, run_validate

    modes = {"run": run_simulate, "plan": run_plan, "validate": run_validate, "calibrate": run_calibrate}
    model = config.model
    with ExperimentRun.open("simulate", config, output_dir()) as run:
        asked = Asked(model.source, model.load_format, config.simulate, config.engine, config.workload)
        modes[config.simulate.mode](asked, run)


if __name__ == "__main__":
    run_experiment(main, "simulate", ahead=True)
