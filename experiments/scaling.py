"""Parallel layouts side by side: bytes by axis, memory per device, modelled GPU time, measured CPU time.

python -m experiments.scaling model=qwen3_30b_a3b scaling.batch_size=128
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import ScalingConfig


def main(config: ScalingConfig) -> None:
    from dataclasses import asdict

    from moejax.results.result import print_metrics_line
    from moejax.sharding.mesh import virtual_devices

    virtual_devices(config.scaling.devices)  # before anything starts JAX's backend
    from moejax.bench.scaling.run import run_scaling

    out, model = output_dir(), config.model
    result = run_scaling(
        model.path if model.path is not None else model.hf_config,
        config.scaling,
        config.tracker,
        out,
        config=asdict(config),
        name=model.name,
        hardware_kind=config.hardware.kind,
        load_format=model.load_format,
        dtype="bfloat16" if model.dtype == "auto" else model.dtype,
        block_size=config.engine.block_size,
        seed=config.seed,
    )
    print_metrics_line(result, out)


if __name__ == "__main__":
    run_experiment(main, "scaling")
