"""Times fixed batches: TTFT, TPOT, ITL and end-to-end latency.

python -m experiments.latency workload.batch_size=[1,8] workload.prompt_len=128 workload.output_len=64
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import LatencyConfig


def main(config: LatencyConfig) -> float | None:
    from experiments.launch.model import open_backends
    from experiments.launch.variants import run_variants
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.latency import run_latency
    from moejax.bench.objective import objective_value

    out = output_dir()
    if config.ab.variants:
        run_variants(config, out)
        return None
    with ExperimentRun.open("latency", config, out) as run, open_backends(config, out) as backends:
        result = run_latency(backends, config.workload, run)
    return objective_value(result, config.objective, config.objective_case)


if __name__ == "__main__":
    run_experiment(main, "latency", ahead=True)
