"""An engine on GPUs that are not here, under a workload: latencies, throughput, and how wrong they may be.

python -m experiments.simulate model=mixtral_8x7b 'simulate.layouts=[tp8,ep8]' 'simulate.rates=[2,8,32]'
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import SimulateConfig


def main(config: SimulateConfig) -> None:
    from experiments.launch.variants import job_variants
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.simulate.machine import run_machine
    from moejax.bench.simulate.plan import run_plan
    from moejax.bench.simulate.run import Asked, run_simulate
    from moejax.bench.simulate.stages import run_stages
    from moejax.bench.simulate.validate import run_calibrate, run_validate

    modes = {"run": run_simulate, "plan": run_plan, "validate": run_validate, "calibrate": run_calibrate,
             "machine": run_machine}  # fmt: skip

    def asked(one: SimulateConfig) -> Asked:
        return Asked(one.model.source, one.model.load_format, one.simulate, one.engine, one.workload)

    with ExperimentRun.open("simulate", config, output_dir()) as run:
        if config.ablation.stages:
            stages = {name: asked(one) for name, one in job_variants(config).items()}
            run_stages(stages, config.ablation, run)
        else:
            modes[config.simulate.mode](asked(config), run)


if __name__ == "__main__":
    run_experiment(main, "simulate", ahead=True)
