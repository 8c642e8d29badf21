"""Serves requests that arrive over time: requests/s, tokens/s, goodput, latencies, queue and cache.

python -m experiments.throughput workload.request_rate=8 workload.output_len=64 workload.compare=[static]
"""

from experiments._app import output_dir, run_experiment
from experiments._schema import ThroughputConfig


def main(config: ThroughputConfig) -> None:
    from dataclasses import asdict

    from experiments._model import open_llm
    from moejax.bench.result import print_metrics_line
    from moejax.bench.throughput import run_throughput

    out = output_dir()
    result = run_throughput(
        open_llm(config),
        config.workload,
        config.tracker,
        out,
        config=asdict(config),
        name=config.model.name,
        hardware_kind=config.hardware.kind,
    )
    print_metrics_line(result, out)


if __name__ == "__main__":
    run_experiment(main, "throughput")
