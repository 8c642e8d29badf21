"""Times the simulator itself: requests a second of one core, and whether that depends on how many there are.

    python -m tests.bench.simulate_speed          # tables on stderr, one line of JSON on stdout

Qwen3-30B-A3B on A100s: 200 tokens in and 200 out on one engine of eight; 128 in and 32 out on 32 GPUs, four
such engines behind a router. Times are CPU seconds of the process, planning of the requests excluded.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

from moejax.bench.driver import drive
from moejax.bench.simulate.config import SimulateSection, parse_layout
from moejax.bench.simulate.replicas import deploy
from moejax.bench.traffic import ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig, ModelConfig
from moejax.report.tables import rows_table, stderr_console

LAYERS = 48
MODEL = ModelConfig(
    "qwen3_moe", 151936, 2048, LAYERS, 32, 4, 128, 128, 8, 768, 6144, (True,) * LAYERS, (None,) * LAYERS,
    40960, dtype="bfloat16",
)  # fmt: skip
ENGINE = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192, block_size=16, max_model_len=1024)


def measure(requests: int, prompt_len: int, output_len: int, rate: float, replicas: int) -> dict[str, Any]:
    """Returns a row: requests and simulated tokens per CPU second, and the process's largest resident set."""
    section = SimulateSection(replicas=replicas, interval=False)
    deployment = deploy("ep8", MODEL, parse_layout("ep8"), ENGINE, section, "a100_80gb", section.routing.law)
    workload = ThroughputWorkload(
        num_requests=requests, prompt_len=prompt_len, output_len=output_len, request_rate=rate
    )
    plan = plan_requests(workload, MODEL.vocab_size)
    backend = deployment.backend(section)
    start = time.process_time()
    run = drive(backend, plan, workload.sampling, workload=workload, clock=backend.clock, sleep=backend.sleep)
    seconds = time.process_time() - start
    assert len(run.served) == requests and not any(item.failed for item in run.served)
    return {
        "requests": requests,
        "in": prompt_len,
        "out": output_len,
        "GPUs": 8 * replicas,
        "requests_per_s": requests / seconds,
        "tokens_per_s": requests * output_len / seconds,
        "cpu_s": seconds,
        "resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's header."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 20_000, 40_000, 100_000])
    sizes = parser.parse_args(argv).requests
    measure(200, 200, 200, 20.0, 1)  # tables are read, laws are drawn
    rows = [measure(2_000, 200, 200, 20.0, 1)]
    rows += [measure(size, 128, 32, 400.0, 4) for size in sizes]
    stderr_console().print(rows_table(rows, "the simulator's own speed, one core"))
    print(json.dumps(rows), file=sys.stdout)


if __name__ == "__main__":
    main()
