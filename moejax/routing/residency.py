"""Which experts stay in a device memory that cannot hold all of them: policies replayed on routing traces.

An access is a (step, layer, expert), in the order in which a decode makes them: step by step, in each step
layer by layer. All experts that a step's tokens visit in a layer are needed together (a group): those that
are absent are loaded, and none of the group can make room for another. Capacity is a number of slots for
experts, whichever layers they are of. A replay starts empty and loads only what is needed (demand paging).

Policies that evict the lowest of a score run on all traces and capacities in lockstep, as arrays; the queues
of ARC and S3-FIFO go access by access (within a group by rising expert). Numpy only.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moejax.core.errors import ConfigError
from moejax.core.tiers import A2crConfig
from moejax.routing.capture import Floats, Ints, RoutingCapture
from moejax.routing.locality import by_sequence

Bools = NDArray[np.bool_]


class Visits(NamedTuple):
    """Traces side by side. T traces, S steps (of the longest; shorter ones need nothing after their end).

    Attributes:
        needed: bool `[T, S, L, E]`: some token of the step visits the expert.
        mass: float32 `[T, S, L, E]`: sum of those tokens' router weights on it.
    """

    needed: Bools
    mass: NDArray[np.float32]

    @property
    def accesses(self) -> Ints:
        """int64 `[T]`."""
        return self.needed.sum(axis=(1, 2, 3), dtype=np.int64)

    @property
    def largest_group(self) -> int:
        """Experts that some step needs together in some layer: the least capacity."""
        return int(self.needed.sum(axis=3).max(initial=0))


def single_visits(capture: RoutingCapture) -> Visits:
    """Returns every sequence of a trace as one by itself, decoded a token a step, its prompt included."""
    rows = by_sequence(capture)
    first = np.flatnonzero(np.r_[True, np.diff(rows.sequence) != 0])
    step = np.arange(len(rows.rows)) - np.repeat(first, np.diff(np.r_[first, len(rows.rows)]))
    return _visits(capture, rows.rows, rows.sequence, step)


def recorded_visits(capture: RoutingCapture, parts: int = 1) -> Visits:
    """Returns the steps as they were recorded, cut into `parts` runs of steps.

    Raises:
        ConfigError: the trace has fewer steps.
    """
    if capture.num_steps < parts:
        raise ConfigError(f"offload.parts={parts}: the trace has {capture.num_steps} steps; lower it")
    number = np.repeat(np.arange(capture.num_steps), np.diff(np.r_[capture.step_starts, capture.num_rows]))
    bounds = np.linspace(0, capture.num_steps, parts + 1).astype(np.int64)
    part = np.searchsorted(bounds, number, side="right") - 1
    return _visits(capture, np.arange(capture.num_rows), part, number - bounds[part])


def _visits(capture: RoutingCapture, rows: Ints, trace: Ints, step: Ints) -> Visits:
    E, L = capture.num_experts, len(capture.layers)
    ids, weights = capture.ids[rows].astype(np.int64), capture.weights[rows]
    shape = (int(trace.max(initial=-1)) + 1, int(step.max(initial=-1)) + 1, L, E)
    at = ((trace * shape[1] + step)[:, None, None] * L + np.arange(L)[:, None]) * E + ids
    ran = ids < E
    mass = np.bincount(at[ran], weights[ran], int(np.prod(shape))).astype(np.float32)
    needed = np.zeros(len(mass), bool)
    needed[at[ran]] = True
    return Visits(needed.reshape(shape), mass.reshape(shape))


@dataclass(frozen=True)
class ReplayOptions:
    """What some policies need to know: A²CR's numbers, the seconds of compute of a layer, and of "static"
    how popular experts are `[L, E]`, or how many first steps of its own say it; None: other traces do."""

    a2cr: A2crConfig = field(default_factory=A2crConfig)
    compute_s: float = 0.0
    popularity: NDArray[Any] | None = None
    popularity_steps: int | None = None


class _Scores:
    """What a policy by scores knows. B replays, N = L · E experts, of layer l those from l · E.

    Attributes:
        score: float64 `[B, N]`, set at an access; the lowest resident goes, of equal ones the first.
        shifts: whether an eviction changes the other experts' scores.
    """

    shifts = False

    def __init__(self, visits: Visits, replays: Ints, capacity: Ints, options: "ReplayOptions") -> None:
        self.visits, self.replays, self.capacity, self.options = visits, replays, capacity, options
        _, self.S, self.L, self.E = visits.needed.shape
        self.score = np.zeros((len(replays), self.L * self.E))

    def step(self, step: int, resident: Bools) -> None:
        """A step begins; may evict."""

    def use(self, step: int, layer: int, part: slice, needed: Bools, mass: NDArray[Any]) -> None:
        """Experts `needed` `[B, E]` of a layer, its `part`, are used with so much router weight."""
        self.score[:, part][needed] = step * self.L + layer

    def keys(self, rows: Ints, step: int, layer: int, resident: Bools) -> Floats:
        """Returns the scores `[rows, N]` by which these replays evict one expert each."""
        return self.score[rows]


class _Lru(_Scores):
    """Least recently used."""


class _Lfu(_Scores):
    """Least frequently used; counts outlive eviction ("perfect" LFU), ties go by recency."""

    def use(self, step: int, layer: int, part: slice, needed: Bools, mass: NDArray[Any]) -> None:
        own = self.score[:, part]
        own[needed] = np.floor(own[needed]) + 1 + (step * self.L + layer) / (self.S * self.L)


class _LayerLru(_Scores):
    """LRU with a quota for each layer, capacity / L: of the layer that is most above its quota the least
    recently used goes (ties: the least recent of all). No layer can flush the others, which is how LRU fails
    on a model's cyclic turns; a layer that needs more than its quota for one group has it."""

    shifts = True

    def keys(self, rows: Ints, step: int, layer: int, resident: Bools) -> Floats:
        above = resident[rows].reshape(len(rows), self.L, self.E).sum(2) - self.capacity[rows, None] / self.L
        return self.score[rows] - np.repeat(above, self.E, axis=1) * (self.S * self.L + 1.0) * self.L


class _LeastStale(_Scores):
    """After the idea of SpecMD's Least-Stale (arXiv 2602.03921), in our reading: what its layer did not
    use at its last turn is stale and goes first. Of stale ones, and then of the rest, those go whose layer's
    next turn is farthest, the longest unused first."""

    def keys(self, rows: Ints, step: int, layer: int, resident: Bools) -> Floats:
        ago = step * self.L + layer - self.score[rows]  # below L for what the last turn of its layer used
        turn = np.repeat((np.arange(self.L) - layer - 1) % self.L + 1, self.E)
        return -turn - self.L * (ago >= self.L) - ago / (self.S * self.L + 1)


class _Static(_Scores):
    """Keeps the most popular experts; the rest take turns in what room a group needs. Popular is what the
    options say: a given count, the first steps', or that of the other traces (of the trace itself where there
    is no other)."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        counts = self.options.popularity
        if counts is not None:
            self.score += counts.reshape(-1)
        elif self.options.popularity_steps is None:
            self.score = leave_one_out(self.visits.needed.sum(1)).reshape(-1, self.L * self.E)[self.replays]
        self._until = (counts is None and self.options.popularity_steps) or 0

    def use(self, step: int, layer: int, part: slice, needed: Bools, mass: NDArray[Any]) -> None:
        if step < self._until:
            self.score[:, part] += needed


class _Belady(_Scores):
    """Belady's MIN (IBM Systems Journal 5, 1966): the farthest next use goes. No policy has fewer misses."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        needed = self.visits.needed
        at = np.where(needed, np.arange(self.S)[:, None, None] * self.L + np.arange(self.L)[:, None], 1 << 40)
        later = np.full_like(at, 1 << 40)
        later[:, :-1] = np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1][:, 1:]
        self._next = -later

    def use(self, step: int, layer: int, part: slice, needed: Bools, mass: NDArray[Any]) -> None:
        self.score[:, part] = np.where(needed, self._next[self.replays, step, layer], self.score[:, part])


class _A2cr(_Scores):
    """See `A2crConfig`. Where a full cache must make room and nothing is below the threshold, the lowest
    score goes."""

    adaptive = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        config, B = self.options.a2cr, len(self.replays)
        self.last, self.count, self.mass = (np.zeros_like(self.score) for _ in range(3))
        levels = (config.pressures, config.thresholds, config.decays)
        plain = ([0.0], [config.threshold], [config.decay])
        self.pressures, self.thresholds, self.decays = map(np.array, levels if self.adaptive else plain)
        self.level = np.full(B, len(self.pressures) - 1)
        step_seconds = self.L * self.options.compute_s
        self.every = int(max(1, min(config.cleanup_steps, config.cleanup_seconds / max(step_seconds, 1e-9))))

    def step(self, step: int, resident: Bools) -> None:
        pressure, bounds = (resident.sum(1) / self.capacity)[:, None], self.pressures[:-1]
        risen = (pressure <= bounds).sum(1)
        fallen = (pressure <= bounds - self.options.a2cr.hysteresis).sum(1)
        self.level = np.minimum(risen, np.maximum(self.level, fallen))
        self.mass *= 1 - self.options.a2cr.mass_decay
        if step and step % self.every == 0:
            scores = self.keys(np.arange(len(resident)), step, 0, resident)
            resident &= scores >= self.thresholds[self.level][:, None]

    def use(self, step: int, layer: int, part: slice, needed: Bools, mass: NDArray[Any]) -> None:
        self.last[:, part][needed] = step
        self.count[:, part] += needed
        self.mass[:, part] += mass

    def keys(self, rows: Ints, step: int, layer: int, resident: Bools) -> Floats:
        config, terms = self.options.a2cr, (self.mass[rows], np.log1p(self.count[rows]))
        mass, count = (term / np.maximum(term.max(1, keepdims=True), 1e-30) for term in terms)
        recency = np.exp(-self.decays[self.level[rows]][:, None] * (step - self.last[rows]))
        return config.attention * mass + config.frequency * count + config.recency * recency


class _AdaptiveA2cr(_A2cr):
    """A²CR whose threshold and decay follow the pressure."""

    adaptive = True


class _Arc:
    """ARC (Megiddo and Modha, FAST 2003); what is pinned is passed over, in the other list if need be."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self.recent, self.frequent, self.ghost_recent, self.ghost_frequent = (
            OrderedDict[int, None]() for _ in range(4)
        )

    def __contains__(self, key: int) -> bool:
        return key in self.recent or key in self.frequent

    def access(self, key: int, pinned: set[int]) -> None:
        """Uses an expert, after others have made room where it is absent."""
        c, T1, T2, B1, B2 = self.capacity, self.recent, self.frequent, self.ghost_recent, self.ghost_frequent
        if key in self:
            T1.pop(key, None)
            T2.pop(key, None)
            T2[key] = None
        elif key in B1 or key in B2:
            again = key in B2
            ratio = len(B1) / len(B2) if again else len(B2) / len(B1)
            self.target = min(c, max(0.0, self.target + max(1.0, ratio) * (-1 if again else 1)))
            self._demote(pinned, again)
            (B2 if again else B1).pop(key)
            T2[key] = None
        else:
            if len(T1) == c:
                del T1[_oldest(T1, pinned)]
            elif len(T1) + len(B1) == c:
                B1.popitem(last=False)
                self._demote(pinned, False)
            elif (total := len(T1) + len(T2) + len(B1) + len(B2)) >= c:
                if total == 2 * c:
                    B2.popitem(last=False)
                self._demote(pinned, False)
            T1[key] = None

    def _demote(self, pinned: set[int], again: bool) -> None:
        recent, frequent = _oldest(self.recent, pinned), _oldest(self.frequent, pinned)
        size = len(self.recent)
        if frequent < 0 or (recent >= 0 and (size > self.target or (again and size == self.target))):
            del self.recent[recent]
            self.ghost_recent[recent] = None
        else:
            del self.frequent[frequent]
            self.ghost_frequent[frequent] = None


class _S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth of the slots, the main one, and a ghost as
    long as that; what is pinned is passed over, in the other queue if need be."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.least = capacity, max(1, round(capacity / 10))
        self.small, self.main, self.ghost = (OrderedDict[int, int]() for _ in range(3))

    def __contains__(self, key: int) -> bool:
        return key in self.small or key in self.main

    def access(self, key: int, pinned: set[int]) -> None:
        """Uses an expert, after others have made room where it is absent."""
        for queue in (self.small, self.main):
            if key in queue:
                queue[key] = min(queue[key] + 1, 3)
                return
        while len(self.small) + len(self.main) >= self.capacity:
            self._move_one(pinned)
        known = self.ghost.pop(key, None) is not None
        (self.main if known else self.small)[key] = 0

    def _move_one(self, pinned: set[int]) -> None:
        first, old = _oldest(self.small, pinned), _oldest(self.main, pinned)
        if old < 0 or (first >= 0 and len(self.small) >= self.least):
            if self.small.pop(first) > 1:
                self.main[first] = 0
                return
            self.ghost[first] = 0
            if len(self.ghost) > self.capacity - self.least:
                self.ghost.popitem(last=False)
        elif uses := self.main.pop(old):
            self.main[old] = uses - 1


def _oldest(queue: Iterable[int], pinned: set[int]) -> int:
    """Returns the first that is not pinned; -1 where there is none."""
    return next((key for key in queue if key not in pinned), -1)


_SCORED: Mapping[str, type[_Scores]] = {
    "lru": _Lru,
    "lfu": _Lfu,
    "layer_lru": _LayerLru,
    "least_stale": _LeastStale,
    "static": _Static,
    "a2cr": _A2cr,
    "a2cr_adaptive": _AdaptiveA2cr,
    "belady": _Belady,
}
_QUEUED: Mapping[str, Callable[[int], _Arc | _S3Fifo]] = {"arc": _Arc, "s3_fifo": _S3Fifo}
_ENDLESS = 1 << 28
"""Steps that a residency may count."""
_NONE = np.empty(0, np.intp)
POLICIES = ("lru", "lfu", "layer_lru", "arc", "s3_fifo", "least_stale", "static", "a2cr", "a2cr_adaptive",
            "belady")  # fmt: skip


def replay(
    policy: str, visits: Visits, capacities: Sequence[int], options: ReplayOptions | None = None
) -> Bools:
    """Replays every trace under every capacity, each from an empty memory.

    Args:
        policy: one of `POLICIES`.
        capacities: C numbers of slots.

    Returns:
        bool `[T, C, S, L, E]`: the expert was absent when the layer's turn came. Misses are those that were
        needed.

    Raises:
        ConfigError: a capacity that does not hold what one step needs in one layer.
    """
    if min(capacities) < visits.largest_group:
        raise ConfigError(
            f"{min(capacities)} slots for experts do not hold the {visits.largest_group} that one step"
            " needs in one layer; raise offload.shares, or replay fewer tokens a step"
        )
    T, S, L, E = visits.needed.shape
    absent = np.empty((T, len(capacities), S, L, E), bool)
    if policy in _QUEUED:
        for trace in range(T):
            for at, slots in enumerate(capacities):
                _replay_queue(_QUEUED[policy](slots), visits.needed[trace], absent[trace, at])
        return absent
    replays, capacity = np.repeat(np.arange(T), len(capacities)), np.tile(capacities, T)
    state = _SCORED[policy](visits, replays, capacity, options or ReplayOptions())
    resident, flat = np.zeros((len(replays), L * E), bool), absent.reshape(-1, S, L, E)
    for step in range(S):
        state.step(step, resident)
        for layer in range(L):
            flat[:, step, layer] = ~resident[:, layer * E : (layer + 1) * E]
            needed, mass = (x[replays, step, layer] for x in (visits.needed, visits.mass))
            _take_turn(state, resident, step, layer, needed, mass)
    return absent


def _take_turn(
    state: _Scores, resident: Bools, step: int, layer: int, needed: Bools, mass: NDArray[Any]
) -> None:
    """Makes what a layer needs, bool and float `[B, E]`, resident `[B, N]` and evicts what is too much."""
    E = needed.shape[1]
    part = slice(layer * E, (layer + 1) * E)
    resident[:, part] |= needed
    state.use(step, layer, part, needed, mass)
    over = resident.sum(1) - state.capacity
    rows, keys = np.flatnonzero(over > 0), None
    while len(rows):
        if keys is None:
            keys = np.where(resident[rows], state.keys(rows, step, layer, resident), np.inf)
            keys[:, part][needed[rows]] = np.inf
        victims = keys.argmin(1)
        resident[rows, victims] = False
        over[rows] -= 1
        keys[np.arange(len(rows)), victims] = np.inf
        left = over[rows] > 0
        rows, keys = rows[left], None if state.shifts else keys[left]


class Residency:
    """Which experts have a slot, decided turn by turn as they are needed. Numbered as layer · E + expert.

    Args:
        policy: one of `POLICIES` that does not know the future; "static" by what the options say.
        slots: experts that can be resident at a time.
    """

    def __init__(
        self, policy: str, layers: int, experts: int, slots: int, options: ReplayOptions | None = None
    ) -> None:
        self.experts, self.now = experts, -1
        self.resident = np.zeros(layers * experts, bool)
        self._queue = _QUEUED[policy](slots) if policy in _QUEUED else None
        if self._queue is None:
            endless = np.broadcast_to(np.False_, (1, _ENDLESS, layers, experts))  # takes no memory
            visits, one = Visits(endless, np.empty(0, np.float32)), np.zeros(1, np.int64)
            self._state = _SCORED[policy](visits, one, np.array([slots]), options or ReplayOptions())

    def step(self) -> NDArray[np.intp]:
        """Begins a step; returns what a cleanup evicts."""
        self.now += 1
        if self._queue is not None:
            return _NONE
        before = self.resident.copy()
        self._state.step(self.now, self.resident[None])
        return np.flatnonzero(before & ~self.resident)

    def absent(self, layer: int, needed: Bools) -> NDArray[np.intp]:
        """Returns which of those needed `[E]` have no slot."""
        first = layer * self.experts
        return np.flatnonzero(needed & ~self.resident[first : first + self.experts]) + first

    def turn(self, layer: int, needed: Bools, mass: NDArray[Any]) -> NDArray[np.intp]:
        """Makes what a layer needs, bool and float `[E]`, resident; returns what is evicted for it."""
        part = slice(layer * self.experts, (layer + 1) * self.experts)
        if self._queue is None and not (needed & ~self.resident[part]).any():
            self._state.use(self.now, layer, part, needed[None], mass[None])
            return _NONE
        before = self.resident.copy()
        if self._queue is None:
            _take_turn(self._state, self.resident[None], self.now, layer, needed[None], mass[None])
        else:
            group = (np.flatnonzero(needed) + layer * self.experts).tolist()
            for key in group:
                self._queue.access(key, set(group))
            self.resident[group] = True
            held = np.flatnonzero(self.resident)
            self.resident[held] = [key in self._queue for key in held.tolist()]
        return np.flatnonzero(before & ~self.resident)


def _replay_queue(queue: _Arc | _S3Fifo, needed: Bools, absent: Bools) -> None:
    """One trace `[S, L, E]`; writes `absent`."""
    S, L, E = needed.shape
    for step in range(S):
        for layer in range(L):
            first = layer * E
            absent[step, layer] = [first + expert not in queue for expert in range(E)]
            group = (np.flatnonzero(needed[step, layer]) + first).tolist()
            for key in group:
                queue.access(key, set(group))


def leave_one_out(counts: NDArray[Any]) -> Floats:
    """Returns for each trace the sum of the others' counts `[T, ...]`; its own where there is no other."""
    return (counts.sum(0, keepdims=True) - counts if len(counts) > 1 else counts).astype(np.float64)
