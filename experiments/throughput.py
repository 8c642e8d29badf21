"""Serves requests that arrive over time: requests/s, tokens/s, goodput, latencies, queue and cache.

python -m experiments.throughput workload.request_rate=8 workload.output_len=64 workload.compare=[static]
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import ThroughputConfig


def main(config: ThroughputConfig) -> float | None:
    from dataclasses import asdict
    from functools import partial

    from experiments.launch.model import open_backends
    from experiments.launch.variants import run_variants
    from moejax.bench.objective import objective_value
    from moejax.bench.ramp.run import run_ramp
    from moejax.bench.throughput import run_throughput
    from moejax.results.result import print_metrics_line

    out = output_dir()
    if config.ab.variants:
        run_variants(config, out)
        return None
    run = partial(run_ramp, ramp=config.ramp) if config.ramp.enabled else run_throughput
    with open_backends(config, out) as (first, *peers):
        result = run(
            first,
            config.workload,
            config.tracker,
            out,
            config=asdict(config),
            name=config.model.name,
            hardware_kind=config.hardware.kind,
            peers=peers,
            telemetry=config.telemetry,
            price=config.hardware.price,
        )
    print_metrics_line(result, out)
    return objective_value(result, config.objective)


if __name__ == "__main__":
    run_experiment(main, "throughput")
