"""GPU kernels: static report without a GPU, times beside other implementations, tuning.

python -m experiments.kernels mode=static ops=[grouped_swiglu]
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import KernelsConfig


def main(config: KernelsConfig) -> None:
    import importlib

    from moejax.bench.experiment_run import ExperimentRun

    module = importlib.import_module(f"moejax.bench.kernels.{config.mode}")
    with ExperimentRun.open("kernels", config, output_dir()) as run:
        getattr(module, f"run_{config.mode}")(config, run)


if __name__ == "__main__":
    run_experiment(main, "kernels", ahead=True)
