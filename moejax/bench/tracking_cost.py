"""What measuring costs: the same decode steps bare and with telemetry, step records and trackers, in turns.

    python -m moejax.bench.tracking_cost      # a table on stderr, one line of JSON on stdout

The ratio is the median over pairs of runs that were measured within moments, with its bootstrap interval. On
a machine that others use too that interval is wider than one per cent, so what the added work itself takes is
timed apart as well: a step's record, and a sample over the time between two of them. Trackers are open but
are told nothing while something is measured, as in every experiment.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moejax.bench.statistics import paired_ratio
from moejax.bench.telemetry import open_telemetry
from moejax.core.config import EngineConfig
from moejax.core.errors import MoejaxError
from moejax.engine.llm import LLM
from moejax.engine.request import SamplingParams
from moejax.engine.stats import StepRecord
from moejax.report.progress import progress
from moejax.report.tables import rows_table, stderr_console
from moejax.tracking.base import RunInfo, TrackerConfig, make_tracker
from moejax.tracking.telemetry import Telemetry, TelemetryConfig

LIMIT = 1.01
"""Metrics and tracking add at most one per cent to a measured step (issue 7)."""


@dataclass(frozen=True)
class TrackingCost:
    """A measured step with everything on over a bare one.

    Attributes:
        batch_size: sequences in a step.
        bare_ms, tracked_ms: medians over the runs of the mean step.
        ratio, low, high: median of the pairs' ratios, and its 95 % interval.
        pairs: measured.
        sample_us, record_us: one sample of telemetry; one step's record, made and kept.
        added_percent: both as a share of a bare step: records at each, samples at their interval.
    """

    batch_size: int
    bare_ms: float
    tracked_ms: float
    ratio: float
    low: float
    high: float
    pairs: int
    sample_us: float
    record_us: float
    added_percent: float


def measure(
    model: str,
    batch_sizes: Sequence[int],
    output_len: int,
    pairs: int,
    telemetry: TelemetryConfig,
    tracker: str = "wandb_offline",
) -> list[TrackingCost]:
    """A row for each batch size.

    Raises:
        MoejaxError: the model cannot be opened, or the lengths exceed its limits.
    """
    prompt_len = 16
    config = EngineConfig(
        max_num_seqs=max(batch_sizes),
        max_model_len=prompt_len + output_len,
        seq_buckets=sorted(set(batch_sizes)),
        strict_compile=True,
    )
    llm = LLM(model, engine=config)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    llm.warmup(max_total_len=prompt_len + output_len, sampling_params=[params])
    sampler = open_telemetry(telemetry, llm.parallel_config.num_devices)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        info = RunInfo("tracking_cost", "tracking_cost", Path(folder))
        with make_tracker(TrackerConfig(kind=tracker, dir=folder), info) as open_tracker:
            open_tracker.log({"started": 1}, step=0)
            with progress("measuring", total=len(batch_sizes) * (pairs + 1)) as task:
                for size in batch_sizes:
                    prompts = [
                        [(7 * i + j) % llm.config.vocab_size for j in range(prompt_len)] for i in range(size)
                    ]
                    found.append(_one_size(llm, prompts, params, pairs, sampler, task.advance))
    return found


def _one_size(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    pairs: int,
    sampler: Telemetry,
    advance: Callable[[], None],
) -> TrackingCost:
    times: dict[str, list[float]] = {"bare": [], "tracked": []}
    for pair in range(-1, pairs):  # the first is not counted
        names = list(times) if pair % 2 == 0 else list(reversed(times))
        for name in names:
            gc.collect()
            step = _bare(llm, prompts, params) if name == "bare" else _tracked(llm, prompts, params, sampler)
            if pair >= 0:
                times[name].append(step)
        advance()
    ratio = paired_ratio(times["tracked"], times["bare"])
    bare = statistics.median(times["bare"])
    sample_s, record_s = _sample_seconds(sampler), _record_seconds()
    interval = sampler.config.interval_s
    return TrackingCost(
        len(prompts), 1e3 * bare, 1e3 * statistics.median(times["tracked"]), ratio.estimate, ratio.low,
        ratio.high, pairs, 1e6 * sample_s, 1e6 * record_s, 100 * (record_s / bare + sample_s / interval),
    )  # fmt: skip


def _bare(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Seconds of the mean step, prefill apart."""
    outputs = llm.generate(prompts, params)
    start = max(output.metrics.token_times[0] for output in outputs)
    end = max(output.metrics.token_times[-1] for output in outputs)
    return (end - start) / (len(outputs[0].metrics.token_times) - 1)


def _tracked(llm: LLM, prompts: list[list[int]], params: SamplingParams, sampler: Telemetry) -> float:
    steps: list[StepRecord] = []
    before, llm.on_step = llm.on_step, steps.append
    try:
        with sampler.part(len(prompts)):
            return _bare(llm, prompts, params)
    finally:
        llm.on_step = before


def _sample_seconds(sampler: Telemetry, repeats: int = 200) -> float:
    """One sample of all probes, taken and added up: what holds the interpreter while steps run."""
    return sampler.seconds_per_sample(repeats)


def _record_seconds(repeats: int = 20_000) -> float:
    """A step's record made and kept."""
    steps: list[StepRecord] = []
    start = time.perf_counter()
    for i in range(repeats):
        steps.append(StepRecord(float(i), 1e-3, 0, 8, 8, 8, 8, 0, i, 512, i, 0))
    return (time.perf_counter() - start) / repeats


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--output-len", type=int, default=400, help="tokens of a run; it should outlast the interval"
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--interval", type=float, default=TelemetryConfig().interval_s, help="telemetry.interval_s"
    )
    parser.add_argument("--tracker", default="wandb_offline", choices=["none", "wandb_offline"])
    args = parser.parse_args(argv)
    if min(args.batch_sizes) < 1 or args.output_len < 2 or args.pairs < 2:
        parser.error("--batch-sizes must be at least 1, --output-len and --pairs at least 2")
    try:
        config = TelemetryConfig(interval_s=args.interval)
        rows = measure(args.model, args.batch_sizes, args.output_len, args.pairs, config, args.tracker)
    except MoejaxError as error:
        parser.exit(2, f"error: {error}\n")
    console = stderr_console()
    console.print(rows_table([asdict(row) for row in rows], f"tracked over bare decode steps, limit {LIMIT}"))
    print(json.dumps({"limit": LIMIT, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
