"""Keeps which experts every computed token visited, until somebody asks for the trace. No JAX here.

Rows are kept step by step: nothing is copied as the trace grows. Steps are read `LAG` steps after they were
run, when their arrays have come from the device beside the work that followed.
"""

from collections import deque
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.engine.routing.cached import CachedRouting, places_of
from moejax.engine.scheduling.plan import Draft, Plan, StepPlan
from moejax.engine.scheduling.sequence import Sequence
from moejax.routing.capture import CapturedRequest, RoutingCapture, hash_tokens, id_dtype

LAG = 4
_INDEX = ("step", "request", "sample", "position", "prefill", "cached")
_STEP, _POSITION, _PREFILL, _CACHED = 0, 3, 4, 5


class _Pending(NamedTuple):
    """A step, or a part of one, to be read: see `RoutingRecorder.add`."""

    step: int
    plan: Plan
    rows: int | None
    ids: Any
    weights: Any
    places: Items[list[np.ndarray]]


class _Decoding(NamedTuple):
    """Rows that decode: their columns of `_INDEX`, and their prompts' lengths."""

    sequences: list[Sequence]
    columns: np.ndarray
    prompt_len: np.ndarray


class RoutingRecorder:
    """Takes the routing of steps in the order in which they ran.

    It grows by L · k · (1 or 2 + 4) + 24 bytes a token, and some hundred bytes a step, until `reset`, and
    keeps each request's prompt. Tokens that were found computed have the rows of who computed them.

    Args:
        model: whose layers are recorded.
        num_blocks, block_size, groups: of the cache, where it remembers prefixes; 0 where it does not.

    `meta` is the trace's.
    """

    def __init__(self, model: ModelConfig, num_blocks: int = 0, block_size: int = 0, groups: int = 1) -> None:
        self._layers = tuple(i for i, sparse in enumerate(model.moe_layers) if sparse)
        self._experts, self._top_k = model.num_experts, model.num_experts_per_tok
        self._id_dtype = id_dtype(model.num_experts)
        self.meta: dict[str, Any] = {}
        cache = num_blocks, block_size, (len(self._layers), self._top_k), self._id_dtype
        self._cached = [CachedRouting(*cache) for _ in range(groups if num_blocks else 0)]
        self._pending: deque[_Pending] = deque()
        self.reset()

    def reset(self) -> None:
        """Forgets all but what the cache has; steps count from 0 again."""
        while self._pending:
            self._read(self._pending.popleft())
        self._steps = 0
        self._place: dict[str, int] = {}
        self._requests: list[tuple[str, list[int], str | None]] = []
        self._decoding = _Decoding([], np.zeros((0, len(_INDEX)), np.int32), np.zeros(0, np.int32))
        # Of each step: ids and weights `[rows, L, k]`, and int32 `[rows, 6]`, `_INDEX`.
        self._rows: list[tuple[np.ndarray, ...]] = []
        shape = (0, len(self._layers), self._top_k)
        self._write(np.empty(shape), np.empty(shape), np.empty((0, len(_INDEX)), np.int32))

    def follow(self, other: "RoutingRecorder") -> None:
        """Goes on with the cache that another recorder was made for, and with what it knows of the engine."""
        while self._pending:
            self._read(self._pending.popleft())
        self._cached, self.meta = other._cached, other.meta

    def next_step(self) -> None:
        """Begins a step: rows added from now on were computed in it."""
        self._steps += 1

    def places(self, plan: Plan) -> list[list[np.ndarray]]:
        """Returns what `add` must know of a plan that is about to be launched."""
        both = zip(plan.groups, self._cached, strict=False)
        return [places_of(part, cached.block_size) for part, cached in both]

    def add(
        self, plan: Plan, rows: int | None, ids: Any, weights: Any, places: Items[list[np.ndarray]] = ()
    ) -> None:
        """Takes the rows that a step, or a microbatch of it, computed.

        Args:
            plan: what it was asked for.
            rows: S, places of decoding rows in each data-parallel group's part, before its chunk tokens;
                None: as many as decode.
            ids, weights: `[groups · (S + T), L, k]`, on a device or not. What is not an array yet
                (`numpy.asarray` makes it one) should be on its way; None for a plan that only saves blocks.
            places: what `places` gave.
        """
        self._pending.append(_Pending(self._steps - 1, plan, rows, ids, weights, places))
        # Not of a step whose drafts nobody has judged yet, however many parts it has.
        while len(self._pending) > LAG and self._pending[0].step < self._steps - 1:
            self._read(self._pending.popleft())

    def trace(self) -> RoutingCapture:
        """Returns all that was recorded, as copies."""
        while self._pending:
            self._read(self._pending.popleft())
        ids, weights, index = map(np.concatenate, zip(*self._rows, strict=True))
        columns = dict(zip(_INDEX, np.ascontiguousarray(index.T), strict=True))
        columns |= {name: columns[name].astype(np.bool_) for name in ("prefill", "cached")}
        requests = (
            CapturedRequest(request_id, hash_tokens(prompt), len(prompt), adapter=adapter)
            for request_id, prompt, adapter in self._requests
        )
        return RoutingCapture(
            ids,
            weights,
            **columns,
            requests=tuple(requests),
            layers=self._layers,
            num_experts=self._experts,
            meta=dict(self.meta),
        )

    def _read(self, pending: _Pending) -> None:
        step, plan, rows, *arrays, places = pending
        for moved, part in zip(self._cached, plan.groups, strict=False):
            moved.move(part)
        if arrays[0] is None:
            return
        ids, weights = (np.asarray(x) for x in arrays)
        each = len(ids) // len(plan.groups)
        for group, part in enumerate(plan.groups):
            first, active = group * each, len(part.decodes) - part.idle
            cached, where = (self._cached[group], places[group]) if places else (None, [])
            if active:
                # A wrong draft's token is none of its sequence's.
                drafts: dict[int, Draft] = part.drafts
                mine: slice | list[int] = slice(active)
                if drafts:
                    mine = [row for row in range(active) if row not in drafts or drafts[row].accepted]
                index = self._decoded(part, active)[mine]
                index[:, _STEP] = step
                new = ids[first : first + active][mine], weights[first : first + active][mine]
                self._write(*new, index)
                if cached:
                    cached.write(np.concatenate(where[:active])[mine], *new)
            first += active if rows is None else rows
            for number, chunk in enumerate(part.chunks, active):
                new = ids[first : first + chunk.count], weights[first : first + chunk.count]
                index = np.empty((chunk.found + chunk.count, len(_INDEX)), np.int32)
                index[:] = step, *self._whose(chunk.sequence), 0, True, False
                index[:, _POSITION] = range(chunk.start - chunk.found, chunk.start + chunk.count)
                if cached:
                    found, own = np.split(where[number], [chunk.found])
                    index[: chunk.found, _CACHED] = True
                    self._write(cached.rows[0][found], cached.rows[1][found], index[: chunk.found])
                    cached.write(own, *new)
                self._write(*new, index[chunk.found :])
                first += chunk.count

    def _decoded(self, part: StepPlan, active: int) -> np.ndarray:
        """Returns the decoding rows' columns but for the step, int32 `[active, 6]`. Mostly the rows are of
        the same requests as in the step before."""
        sequences = part.decodes[:active]
        if sequences != self._decoding.sequences:
            index = np.asarray([(0, *self._whose(s), 0, 0, 0) for s in sequences], np.int32)
            self._decoding = _Decoding(sequences, index, np.asarray([s.prompt_len for s in sequences]))
        _, index, prompt_len = self._decoding
        index[:, _POSITION] = part.positions[:active]
        index[:, _PREFILL] = index[:, _POSITION] < prompt_len
        return index

    def _whose(self, sequence: Sequence) -> tuple[int, int]:
        """Returns a sequence's request in the trace's table, and which of its samples it is."""
        live, sample = sequence.owner
        output = live.output
        index = self._place.get(output.request_id)
        if index is None:
            index = self._place[output.request_id] = len(self._requests)
            adapter = None if sequence.adapter is None else sequence.adapter.name
            self._requests.append((output.request_id, output.prompt_token_ids, adapter))
        return index, sample

    def _write(self, ids: np.ndarray, weights: np.ndarray, index: np.ndarray) -> None:
        """Keeps copies of rows of one step."""
        self._rows.append((ids.astype(self._id_dtype), weights.astype(np.float32), index.copy()))


def check_capture(capture: bool, model: ModelConfig) -> None:
    """Raises `ConfigError` where routing is to be captured and there is none."""
    if capture and not any(model.moe_layers):
        raise ConfigError("engine.capture_routing: the model has no MoE layer, and so no routing to capture")


def require_recorder(recorder: RoutingRecorder | None) -> RoutingRecorder:
    """Returns a runner's recorder.

    Raises:
        ConfigError: there is none; the runner captures nothing.
    """
    if recorder is None:
        raise ConfigError(
            "no routing is captured; set engine.capture_routing=true (EngineConfig(capture_routing=True))"
        )
    return recorder
