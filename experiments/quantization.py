"""Quantization methods on one model: perplexity, routing, size, time and speed beside full precision.

python -m experiments.quantization 'quantization.methods=[int8,int4_rtn_g64,int4_gptq_g64]'
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import QuantizationConfig


def main(config: QuantizationConfig) -> None:
    from functools import partial

    from experiments.launch.model import open_quantized
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.quantization.run import check_methods, run_quantization

    with ExperimentRun.open("quantization", config, output_dir()) as run:
        open_model = partial(open_quantized, config)
        result = run_quantization(open_model, config.quantization, run, seed=config.seed)
    check_methods(result)


if __name__ == "__main__":
    run_experiment(main, "quantization", ahead=True)
