"""Quantization methods on one model: perplexity, routing, size, time and speed beside full precision.

python -m experiments.quantization 'quantization.methods=[int8,int4_rtn_g64,int4_gptq_g64]'
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import QuantizationConfig


def main(config: QuantizationConfig) -> None:
    import functools
    from dataclasses import asdict

    from experiments.launch.model import open_quantized
    from moejax.bench.quantization.run import check_methods, run_quantization
    from moejax.results.result import print_metrics_line

    out = output_dir()
    result = run_quantization(
        functools.partial(open_quantized, config),
        config.quantization,
        config.tracker,
        out,
        config=asdict(config),
        name=config.model.name,
        hardware_kind=config.hardware.kind,
        seed=config.seed,
        telemetry=config.telemetry,
    )
    print_metrics_line(result, out)
    check_methods(result)


if __name__ == "__main__":
    run_experiment(main, "quantization")
