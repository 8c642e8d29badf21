"""Times fixed batches: TTFT, TPOT, ITL and end-to-end latency.

python -m experiments.latency workload.batch_size=[1,8] workload.prompt_len=128 workload.output_len=64
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import LatencyConfig


def main(config: LatencyConfig) -> float | None:
    from dataclasses import asdict

    from experiments.launch.model import open_backends
    from experiments.launch.variants import run_variants
    from moejax.bench.latency import run_latency
    from moejax.bench.objective import objective_value
    from moejax.results.result import print_metrics_line

    out = output_dir()
    if config.ab.variants:
        run_variants(config, out)
        return None
    with open_backends(config, out) as (first, *peers):
        result = run_latency(
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
    run_experiment(main, "latency")
