"""Times fixed batches: TTFT, TPOT, ITL and end-to-end latency.

python -m experiments.latency workload.batch_size=[1,8] workload.prompt_len=128 workload.output_len=64
"""

from experiments._app import output_dir, run_experiment
from experiments._schema import LatencyConfig


def main(config: LatencyConfig) -> None:
    from dataclasses import asdict

    from experiments._model import open_llm
    from moejax.bench.latency import run_latency
    from moejax.bench.result import print_metrics_line

    out = output_dir()
    result = run_latency(
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
    run_experiment(main, "latency")
