"""What capturing routing costs: the same requests with `engine.capture_routing` and without, in turns.

    python -m moejax.bench.overhead      # a table on stderr, one line of JSON on stdout

Each pair of runs is measured within moments, and the ratio is the median over the pairs with its bootstrap
interval. The trace is kept in memory all the while, as in an experiment; writing it is not part of a step.
"""

import argparse
import dataclasses
import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from moejax.bench.statistics import paired_ratio
from moejax.core.config import EngineConfig
from moejax.core.errors import MoejaxError
from moejax.engine.llm import LLM
from moejax.engine.request import SamplingParams
from moejax.report.progress import progress
from moejax.report.tables import rows_table, stderr_console

LIMIT = 1.10
"""The issue's: at most a tenth slower."""


@dataclass(frozen=True)
class Overhead:
    """Time with capture over time without, of one phase.

    Attributes:
        phase: "decode" (median time between tokens) or "prefill" (time to the last first token).
        batch_size: requests at a time.
        plain_ms, captured_ms: medians over the runs.
        ratio, low, high: median of the pairs' ratios, and its 95 % interval.
        bytes_per_token: of the trace in memory.
        pairs: measured.
    """

    phase: str
    batch_size: int
    plain_ms: float
    captured_ms: float
    ratio: float
    low: float
    high: float
    bytes_per_token: float
    pairs: int


def measure(
    model: str, batch_sizes: Sequence[int], prompt_len: int, output_len: int, pairs: int
) -> list[Overhead]:
    """Two rows for each batch size, decode and prefill.

    Raises:
        MoejaxError: the model cannot be opened, or the lengths exceed its limits.
    """
    config = EngineConfig(
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=max(batch_sizes) * max(prompt_len, 1),
        max_model_len=prompt_len + output_len,
        # One bucket each: both engines run the same shapes.
        seq_buckets=sorted(set(batch_sizes)),
        token_buckets=sorted({size * prompt_len for size in batch_sizes}),
        strict_compile=True,
    )
    plain = LLM(model, engine=config)
    engines = {"plain": plain, "captured": plain.variant(dataclasses.replace(config, capture_routing=True))}
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    for llm in engines.values():
        llm.warmup(max_total_len=prompt_len + output_len, sampling_params=[params])
    found: list[Overhead] = []
    with progress("measuring", total=len(batch_sizes) * (pairs + 1)) as task:
        for size in batch_sizes:
            draw = np.random.default_rng(size)
            prompts = draw.integers(1, plain.config.vocab_size, (size, prompt_len)).tolist()
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for pair in range(-1, pairs):  # the first warms up
                for name in list(engines)[:: 1 if pair % 2 else -1]:
                    gc.collect()
                    times[name].append(_run(engines[name], prompts, params))
                task.advance()
            trace = engines["captured"].routing_capture()
            engines["captured"].reset_capture()
            for place, phase in enumerate(("decode", "prefill")):
                each = {name: [run[place] for run in runs[1:]] for name, runs in times.items()}
                found.append(_row(phase, size, each, trace.nbytes / trace.num_rows))
    return found


def _row(phase: str, batch_size: int, seconds: dict[str, list[float]], bytes_per_token: float) -> Overhead:
    ratio = paired_ratio(seconds["captured"], seconds["plain"])
    plain, captured = (statistics.median(seconds[name]) * 1e3 for name in ("plain", "captured"))
    how = (ratio.estimate, ratio.low, ratio.high)
    return Overhead(phase, batch_size, plain, captured, *how, bytes_per_token, ratio.samples)


def _run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, float]:
    """Seconds between tokens (median), and from the first arrival to the last first token."""
    every = [out.metrics for out in llm.generate(prompts, params)]
    gaps = [gap for metrics in every for gap in metrics.itl]
    first = max(m.token_times[0] for m in every) - min(m.arrival_time for m in every)
    return statistics.median(gaps), first


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's header."""
    parser = argparse.ArgumentParser(
        prog="python -m moejax.bench.overhead", description="Times what capturing routing costs."
    )
    parser.add_argument("--model", default="tiny", help="a shipped model's name, or a directory")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens")
    parser.add_argument("--output-len", type=int, default=64, help="tokens, at least 2")
    parser.add_argument("--pairs", type=int, default=40, help="runs of each, in turns")
    options = parser.parse_args(argv)
    sizes = {
        "--prompt-len": options.prompt_len,
        "--output-len": options.output_len - 1,
        "--pairs": options.pairs,
    }
    sizes |= {"--batch-sizes": min(options.batch_sizes)}
    if wrong := [name for name, value in sizes.items() if value < 1]:
        parser.error(f"{wrong[0]} is too small")
    try:
        rows = measure(
            options.model, options.batch_sizes, options.prompt_len, options.output_len, options.pairs
        )
    except MoejaxError as error:
        parser.error(str(error))
    title = f"cost of engine.capture_routing on {options.model} (ratio: at most {LIMIT:.2f})"
    stderr_console().print(rows_table([asdict(row) for row in rows], title))
    print(json.dumps({"model": options.model, "limit": LIMIT, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
