"""Reuse of a trace's experts over time, and how many of them a stretch of it visits. Numpy only.

A sequence is the tokens of one sample of a request in the order of their positions; of a token that was
computed twice (after preemption) the first computation counts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moejax.core.errors import ConfigError
from moejax.routing.capture import Floats, Ints, RoutingCapture

DISTANCES = 128
UNITS = ("tokens", "steps")


class TemporalLocality(NamedTuple):
    """Likelihood that a sequence comes back to an expert. L layers, D distances.

    Attributes:
        reuse: float64 `[L]`: of the visits by a token that has a next one, the share whose expert that next
            token visits again. NaN where no token has one.
        chance: float64 `[L]`: the same if each token chose independently by popularity: Σ_e q_e p_e, where
            q_e is the share of visits that go to expert e, p_e the share of tokens that visit it.
        distances: float64 `[L, D]`: share of all visits whose expert the sequence had last visited 1, 2, …, D
            tokens before.
        farther: float64 `[L]`: share of visits that come back from farther.
        first: float64 `[L]`: share of visits that are the sequence's first to that expert. With `distances`
            and `farther` they sum to 1.
    """

    reuse: Floats
    chance: Floats
    distances: Floats
    farther: Floats
    first: Floats


class WorkingSet(NamedTuple):
    """The working-set curve (Denning, 1968): distinct experts that a window visits, in the mean over windows.

    Attributes:
        unit: "tokens" of one sequence, or the engine's "steps" with all tokens in them.
        windows: int64 `[W]`: lengths 1, 2, 4, …, as long as any sequence, or the trace.
        experts: float64 `[L, W]`: over every window of that length, of all sequences that are so long.
    """

    unit: str
    windows: Ints
    experts: Floats

    def nbytes(self, expert_bytes: float) -> Floats:
        """Returns float64 `[W]`: of the weights in a window's working set, over all layers."""
        return self.experts.sum(0) * expert_bytes


class _Sequences(NamedTuple):
    """Rows by sequence and position: `rows`, and of each its sequence (from 0) and position."""

    rows: Ints
    sequence: Ints
    position: Ints


def by_sequence(capture: RoutingCapture) -> _Sequences:
    order = np.lexsort((capture.position, capture.sample, capture.request))
    request, sample, position = (
        getattr(capture, name)[order].astype(np.int64) for name in ("request", "sample", "position")
    )
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(request) != 0) | (np.diff(sample) != 0)
    fresh = new.copy()
    fresh[1:] |= np.diff(position) != 0
    return _Sequences(order[fresh], (np.cumsum(new) - 1)[fresh], position[fresh])


def temporal_locality(capture: RoutingCapture, most: int = DISTANCES) -> TemporalLocality:
    """Measures how soon sequences come back to an expert, in every layer.

    Args:
        most: D, the longest distance told apart.
    """
    sequences = by_sequence(capture)
    ids = capture.ids[sequences.rows]
    E, L = capture.num_experts, len(capture.layers)
    span = int(sequences.position.max(initial=0)) + 1
    # A row that the same sequence's next token follows.
    leads = np.zeros(len(ids), bool)
    leads[:-1] = (np.diff(sequences.sequence) == 0) & (np.diff(sequences.position) == 1)
    reuse, chance, farther, first = (np.full(L, np.nan) for _ in range(4))
    distances = np.full((L, most), np.nan)
    for layer in range(L):
        chosen = ids[:, layer].astype(np.int64)
        routed = chosen < E
        visits = int(routed.sum())
        if not visits:
            continue
        keys = (sequences.sequence[:, None] * E + chosen) * span + sequences.position[:, None]
        keys = np.sort(keys[routed])
        again = keys[1:] // span == keys[:-1] // span
        gaps = np.diff(keys)[again]
        by_gap = np.bincount(np.minimum(gaps, most + 1), minlength=most + 2)
        distances[layer] = by_gap[1 : most + 1] / visits
        farther[layer], first[layer] = by_gap[most + 1] / visits, 1 - len(gaps) / visits
        could = int(routed[leads].sum())
        if could:
            reuse[layer] = by_gap[1] / could
        loads = np.bincount(chosen[routed], minlength=E).astype(np.float64)
        tokens = int(routed.any(axis=1).sum())
        chance[layer] = (loads**2).sum() / (visits * tokens)
    return TemporalLocality(reuse, chance, distances, farther, first)


def working_set(capture: RoutingCapture, unit: str = "tokens") -> WorkingSet:
    """Counts over all sliding windows: a window misses an expert if it lies in a gap between its visits.

    Args:
        unit: "tokens": windows of consecutive tokens of one sequence, what an expert cache for one user has
            to hold. "steps": windows of consecutive steps of the engine with every token in them.

    Raises:
        ConfigError: an unknown unit, or a trace without rows.
    """
    if unit not in UNITS:
        raise ConfigError(f"routing: a working set is over {' or '.join(UNITS)}, not {unit!r}")
    capture.require_rows()
    if unit == "tokens":
        sequences = by_sequence(capture)
        rows, sequence = sequences.rows, sequences.sequence
        starts = np.flatnonzero(np.r_[True, np.diff(sequence) != 0])
        time = np.arange(len(rows)) - starts[sequence]
        lengths = np.diff(np.append(starts, len(rows)))
    else:
        rows, sequence = np.arange(capture.num_rows), np.zeros(capture.num_rows, np.int64)
        time, lengths = step_numbers(capture), np.array([capture.num_steps])
    windows = 1 << np.arange(int(lengths.max()).bit_length(), dtype=np.int64)
    curves = [
        _curve(capture.ids[rows, at], sequence, time, lengths, windows, capture.num_experts)
        for at in range(len(capture.layers))
    ]
    return WorkingSet(unit, windows, np.stack(curves))


def _curve(
    ids: NDArray[np.unsignedinteger], sequence: Ints, time: Ints, lengths: Ints, windows: Ints, E: int
) -> Floats:
    """Returns a layer's float64 `[W]`: ids `[R, k]` visited at `time` `[R]`, lengths of sequences `[S]`."""
    S, span = len(lengths), int(lengths.max()) + 2
    chosen = ids.astype(np.int64)
    routed = chosen < E
    visits = ((sequence[:, None] * E + chosen) * span + time[:, None] + 1)[routed]
    # Just before and just after each sequence stands a visit of every expert, so that gaps have two ends.
    pairs = np.arange(S * E, dtype=np.int64) * span
    ends = pairs + np.repeat(lengths + 1, E)
    keys = np.sort(np.concatenate([pairs, visits, ends]))
    gaps = (np.diff(keys) - 1)[keys[1:] // span == keys[:-1] // span]
    number = np.bincount(gaps[gaps > 0], minlength=1)
    length = np.arange(len(number))
    missing = (number[None] * np.maximum(length[None] - windows[:, None] + 1, 0)).sum(1)
    total = np.maximum(lengths[None] - windows[:, None] + 1, 0).sum(1)
    return E - missing / total


def step_numbers(capture: RoutingCapture) -> Ints:
    """Returns int64 `[R]`: each row's step, numbered from 0 without holes."""
    starts = capture.step_starts
    return np.repeat(np.arange(len(starts)), np.diff(np.append(starts, capture.num_rows)))


def hits_per_step(capture: RoutingCapture) -> Ints:
    """Returns int64 `[steps, L]`: distinct experts that a step visits, whose weights it has to read."""
    steps = step_numbers(capture)[:, None]
    hits = np.zeros((capture.num_steps, len(capture.layers)), np.int64)
    for layer in range(len(capture.layers)):
        seen = np.zeros((capture.num_steps, capture.num_experts + 1), bool)
        seen[steps, capture.ids[:, layer]] = True
        hits[:, layer] = seen[:, :-1].sum(1)
    return hits
