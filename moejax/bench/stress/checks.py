"""Checks of an idle engine: nothing is held or leaked, and it gives the same tokens at the same speed."""

import dataclasses
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import psutil

from moejax.bench.stress.config import StressSection
from moejax.bench.stress.phases import greedy
from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.state import RequestState

# A probe that is slow is asked again so often, with a pause: a busy machine passes, a slower engine stays.
_RETRIES, _PAUSE_S = 4, 0.5


@dataclass(frozen=True)
class Snapshot:
    """Memory, arrays, programs and requests that an idle process holds.

    Attributes:
        rss_bytes: resident memory of the process.
        live_arrays, live_bytes: arrays that JAX keeps on devices.
        programs: steps compiled by the engine.
        live_requests: request objects of the engine that are still reachable.
    """

    rss_bytes: int
    live_arrays: int
    live_bytes: int
    programs: int
    live_requests: int


def snapshot(llm: LLM) -> Snapshot:
    """After a garbage collection."""
    gc.collect()
    arrays = jax.live_arrays()
    return Snapshot(
        psutil.Process().memory_info().rss,
        len(arrays),
        sum(array.nbytes for array in arrays),
        len(llm.ledger.entries),
        sum(type(item) is RequestState for item in gc.get_objects()),
    )


def idle_faults(llm: LLM) -> list[str]:
    """Returns a line for everything that an idle engine holds and should not."""
    faults = []
    stats = llm.stats()
    for key, what in (("running", "sequences still run"), ("waiting", "requests still wait"),
                      ("used_blocks", "cache blocks not returned")):  # fmt: skip
        if stats[key]:
            faults.append(f"{stats[key]} {what}")
    try:
        llm.engine.scheduler.check_integrity()
    except AssertionError as error:
        faults.append(f"integrity: {error}")
    if stats["failed_steps"]:
        faults.append(f"{stats['failed_steps']} steps failed")
    return faults


@dataclass(frozen=True)
class Probe:
    """Greedy completions of fixed prompts.

    Attributes:
        tokens: [prompts, tokens].
        tpot_ms: median time per output token, over the repeats.
        over_control: the median over the repeats of that time over the control's right beside it.
    """

    tokens: np.ndarray
    tpot_ms: float
    over_control: float


class Prober:
    """Completes the same prompts on the engine and, in turns, on a small engine of the same weights that is
    never stressed: what slows both is the machine, what slows one is drift.

    Args:
        llm: warmed up. The control compiles three steps or so of its own.
    """

    def __init__(self, llm: LLM, section: StressSection) -> None:
        rng = np.random.default_rng([section.seed, 2**31])
        length = max(1, min(16, llm.max_model_len - section.probe_tokens))
        self.prompts = rng.integers(0, llm.config.vocab_size, size=(section.probes, length)).tolist()
        self.section, self.llm = section, llm
        self.control = llm.variant(_small(llm.engine_config, section.probes, length + section.probe_tokens))
        for _ in range(2):
            self._run(self.control)
        self.before = self.take()

    def take(self, repeats: int = 5) -> Probe:
        """Raises `AssertionError`: two repeats gave different tokens."""
        times: list[tuple[float, float]] = []
        tokens: np.ndarray | None = None
        for repeat in range(repeats):
            turns = (self.llm, self.control)[:: -1 if repeat % 2 else 1]
            runs = {llm is self.llm: self._run(llm) for llm in turns}
            if tokens is not None and not np.array_equal(tokens, runs[True][0]):
                raise AssertionError("the same greedy prompts gave different tokens one after the other")
            tokens = runs[True][0]
            times.append((runs[True][1], runs[False][1]))
        assert tokens is not None
        pairs = np.array(times)
        return Probe(tokens, float(np.median(pairs[:, 0])), float(np.median(pairs[:, 0] / pairs[:, 1])))

    def drift(self, probe: Probe) -> float:
        """The time per token over that before all, the machine's own slowness taken out."""
        return probe.over_control / self.before.over_control

    def check(self) -> tuple[Probe, list[str]]:
        """The probe again, and what is different from before."""
        try:
            after = self.take()
        except AssertionError as error:
            return self.before, [str(error)]
        if not np.array_equal(self.before.tokens, after.tokens):
            different = int((self.before.tokens != after.tokens).any(axis=1).sum())
            return after, [f"{different} of {len(self.prompts)} probes give other tokens than before"]
        for _ in range(_RETRIES):
            if self.drift(after) > self.section.tpot_band:
                time.sleep(_PAUSE_S)
                after = min(after, self.take(), key=self.drift)
        if self.drift(after) <= self.section.tpot_band:
            return after, []
        return after, [
            f"the probes take {self.drift(after):.2f} times as long per token as before, beside an engine "
            f"that was left alone (allowed: {self.section.tpot_band:g})"
        ]

    def _run(self, llm: LLM) -> tuple[np.ndarray, float]:
        """Tokens, and the prompts' median TPOT in milliseconds."""
        outputs = llm.generate(self.prompts, greedy(self.section.probe_tokens))
        tokens = np.array([output.outputs[0].token_ids for output in outputs])
        return tokens, float(np.median([output.metrics.tpot for output in outputs])) * 1e3


def _small(config: EngineConfig, num_seqs: int, total_len: int) -> EngineConfig:
    """An engine for these requests and no more: on a GPU there is no room for a second cache."""
    return dataclasses.replace(
        config,
        max_model_len=total_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_seqs, min(config.max_num_batched_tokens, num_seqs * total_len)),
        num_blocks=num_seqs * math.ceil(total_len / config.block_size),
        seq_buckets=None,
        token_buckets=None,
        block_buckets=None,
        strict_compile=False,
        capture_routing=False,
    )


def growth(values: Sequence[float]) -> float:
    """Slope a round (least squares), from the second value on: the first round fills caches and pools."""
    later = np.asarray(values[1:], dtype=np.float64)
    if len(later) < 2:
        return 0.0
    rounds = np.arange(len(later)) - (len(later) - 1) / 2  # centred: for whole numbers the sums are exact
    return float(rounds @ later / (rounds @ rounds))


def leak_faults(snapshots: Sequence[Snapshot], section: StressSection) -> tuple[dict[str, float], list[str]]:
    """Growth a round over the snapshots at the rounds' ends, and what of it is beyond the limits."""
    grown = {
        "rss_mb_per_round": growth([s.rss_bytes for s in snapshots]) / 1e6,
        "live_mb_per_round": growth([s.live_bytes for s in snapshots]) / 1e6,
        "live_arrays_per_round": growth([s.live_arrays for s in snapshots]),
        "programs_per_round": growth([s.programs for s in snapshots]),
    }
    faults = []
    for key, what in (("rss_mb_per_round", "resident memory"), ("live_mb_per_round", "JAX arrays")):
        limit = getattr(section, key)
        if grown[key] > limit:
            faults.append(f"{what} grow by {grown[key]:.3g} MB a round (allowed: {limit:g})")
    if grown["live_arrays_per_round"] >= 1:
        faults.append(f"{grown['live_arrays_per_round']:.3g} more JAX arrays each round")
    if grown["programs_per_round"] >= 1:
        faults.append(f"{grown['programs_per_round']:.3g} more compiled steps each round")
    if snapshots and snapshots[-1].live_requests:
        faults.append(f"{snapshots[-1].live_requests} requests are still reachable")
    return grown, faults
