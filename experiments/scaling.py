"""Parallel layouts side by side: bytes by axis, memory per device, modelled GPU time, measured CPU time.

python -m experiments.scaling model=qwen3_30b_a3b scaling.batch_size=128
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import ScalingConfig


def main(config: ScalingConfig) -> None:
    from moejax.sharding.mesh import virtual_devices

    virtual_devices(config.scaling.devices)  # before anything starts JAX's backend
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.scaling.run import run_scaling

    model = config.model
    with ExperimentRun.open("scaling", config, output_dir()) as run:
        run_scaling(
            model.source,
            config.scaling,
            run,
            load_format=model.load_format,
            dtype="bfloat16" if model.dtype == "auto" else model.dtype,
            block_size=config.engine.block_size,
            seed=config.seed,
        )


if __name__ == "__main__":
    run_experiment(main, "scaling", ahead=True)
