"""Serves requests that arrive over time: requests/s, tokens/s, goodput, latencies, queue and cache.

python -m experiments.throughput workload.request_rate=8 workload.output_len=64 workload.compare=[static]
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import ThroughputConfig


def main(config: ThroughputConfig) -> float | None:
    from experiments.launch.model import open_backends
    from experiments.launch.variants import run_variants
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.objective import objective_value
    from moejax.bench.ramp.run import run_ramp
    from moejax.bench.throughput import run_throughput

    out = output_dir()
    if config.ab.variants:
        run_variants(config, out)
        return None
    with ExperimentRun.open("throughput", config, out) as run, open_backends(config, out) as backends:
        if config.ramp.enabled:
            result = run_ramp(backends, config.workload, config.ramp, run)
        else:
            result = run_throughput(backends, config.workload, run)
    return objective_value(result, config.objective)


if __name__ == "__main__":
    run_experiment(main, "throughput", ahead=True)
