"""GPU kernels: static report without a GPU, times beside other implementations, tuning.

python -m experiments.kernels mode=static ops=[grouped_swiglu]
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import KernelsConfig


def main(config: KernelsConfig) -> None:
    import importlib
    from dataclasses import asdict

    from moejax.results.result import print_metrics_line

    out = output_dir()
    module = importlib.import_module(f"moejax.bench.kernels.{config.mode}")
    run = getattr(module, f"run_{config.mode}")
    result = run(config, config.tracker, out, whole_config=asdict(config))
    print_metrics_line(result, out)


if __name__ == "__main__":
    run_experiment(main, "kernels")
