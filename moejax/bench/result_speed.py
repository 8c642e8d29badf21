"""How long a large result takes to load and to draw: 10,000 requests of 128 tokens, as a run writes them.

    python -m moejax.bench.result_speed                 # a line per part, seconds, best of 3
    python -m moejax.bench.result_speed --requests 1000 --repeats 1

The files are made in a temporary folder by the same functions that a run uses. No JAX here.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.bench.driver import ServedRequest
from moejax.bench.metrics import RequestRecord, Slo, case_row
from moejax.bench.result import (
    REQUESTS_FILE,
    build_result,
    load_requests,
    load_result,
    write_request_rows,
    write_result,
)
from moejax.engine.request import RequestMetrics

SECONDS = 5.0
"""Loading and drawing such a result take no longer (issue 7)."""


def make_records(requests: int, tokens: int, *, rate: float = 200.0, seed: int = 0) -> list[RequestRecord]:
    """Requests that arrive at `rate`/s, wait in a queue, and get a token about every 8 ms, now and then a
    slow one."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, requests))
    first = arrivals + rng.lognormal(-3.0, 0.6, requests)
    steps = rng.lognormal(np.log(8e-3), 0.15, (requests, tokens - 1))
    steps[rng.random(steps.shape) < 0.01] *= 6.0
    times = np.concatenate([first[:, None], first[:, None] + np.cumsum(steps, axis=1)], axis=1)
    return [
        RequestRecord(
            str(index),
            0,
            int(length),
            tokens,
            RequestMetrics(float(arrival), row.tolist(), float(start)),
            "length",
        )
        for index, (arrival, start, row, length) in enumerate(
            zip(arrivals, first - 1e-3, times, rng.integers(16, 256, requests), strict=True)
        )
    ]


def write_run(folder: Path, requests: int, tokens: int) -> None:
    """A throughput run's `result.json` and `requests.jsonl` in `folder`."""
    records = make_records(requests, tokens)
    slo = Slo(ttft_ms=200.0, tpot_ms=15.0)
    end = max(record.metrics.token_times[-1] for record in records)
    fields = {
        "case": 0, "batching": "continuous", "request_rate": 200.0, "num_requests": requests,
        "max_num_seqs": 64, "batch_size": 64, "prompt_len": 136, "output_len": tokens,
    }  # fmt: skip
    row = case_row(fields, records, end, slo)
    metrics = {name: value for name, value in row.items() if name not in fields}
    columns = ("running_max", "waiting_max", "used_blocks_max", "prefill_tokens", "decode_tokens")
    grid = np.linspace(0.0, end, 2000)
    timeline = {
        "case": 0, "batching": "continuous", "num_blocks": 512, "bin_s": float(grid[1]),
        "time_s": grid.tolist(), "seconds": np.full(grid.size, grid[1]).tolist(),
        "preempted": np.zeros(grid.size).tolist(),
        **{name: (50 + 40 * np.sin(grid / (3 + i))).tolist() for i, name in enumerate(columns)},
        "padded_tokens": np.full(grid.size, 200.0).tolist(),
    }  # fmt: skip
    served = [ServedRequest(record, 0.01, 0) for record in records]
    write_result(
        build_result(
            "throughput", metrics=metrics, cases=[row], config={"model": {"name": "synthetic"}},
            provenance={}, slo={"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}, timeline=[timeline],
        ),
        folder,
    )  # fmt: skip
    write_request_rows(
        ({**item.row(0.0, slo), "batching": "continuous", "iteration": 0} for item in served), folder
    )


def parts(folder: Path) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; each does all of its work anew."""
    from moejax.report.html import write_report
    from moejax.report.throughput_plots import save_throughput_plots

    loaded: dict[str, Any] = {}

    def load() -> None:
        loaded["result"], loaded["requests"] = load_result(folder), load_requests(folder)

    def draw() -> None:
        save_throughput_plots(loaded["result"], loaded["requests"], folder)

    def report() -> None:
        write_report([folder, folder], folder)

    return {"load": load, "draw": draw, "report": report}


def measure(requests: int, tokens: int, repeats: int) -> dict[str, float]:
    """Best seconds of each part, and the file's size in megabytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, requests, tokens)
        found = {"requests_mb": (folder / REQUESTS_FILE).stat().st_size / 1e6}
        for part, run in parts(folder).items():
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
            found[part] = min(seconds)
    return found


def main(argv: Sequence[str] | None = None) -> Mapping[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if min(args.requests, args.repeats) < 1 or args.tokens < 2:
        parser.error("--requests and --repeats must be at least 1, --tokens at least 2")
    found = measure(args.requests, args.tokens, args.repeats)
    total = found["load"] + found["draw"]
    print(f"requests.jsonl  {found['requests_mb']:8.1f} MB ({args.requests:,} x {args.tokens} tokens)")
    for part in ("load", "draw"):
        print(f"{part:14s}  {found[part]:8.2f} s")
    print(f"together        {total:8.2f} s (at most {SECONDS:g} s for 10,000 x 128)")
    print(f"report.html     {found['report']:8.2f} s (two such runs, read and laid out)")
    return {**found, "together": total}


if __name__ == "__main__":
    main()
