"""Forces a recorded routing on an engine's requests: which row of the trace each token is given. No JAX here.

A request finds its own in the trace by its prompt, when it is submitted, and then every position of each of
its samples has a row: the last one recorded for it. A step's rows are looked up by position, so it makes no
difference how either run was batched, chunked or preempted.
"""

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.plan import StepPlan
from moejax.routing.capture import RoutingCapture, hash_tokens, load_capture

_CHECKED_ROWS = 65_536


class RoutingReplay:
    """A trace that has been checked against the model, and whose requests have been given out how often.

    Args:
        trace: what to replay.
        model: that is to run it.
        source: where the trace is from, for messages.

    Raises:
        ConfigError: the trace is another model's, has no requests, has a weight that is no number, or a token
            with the same expert twice.
    """

    def __init__(self, trace: RoutingCapture, model: ModelConfig, source: str = "routing trace") -> None:
        trace.check_fits(model, source)
        if not trace.num_rows:
            raise ConfigError(f"{source}: it is empty; there is nothing to replay")
        _check_values(trace, source)
        # [MoE layers, experts per token]
        self.shape: tuple[int, int] = (len(trace.layers), trace.top_k)
        self._ids = trace.ids
        self._bits = np.ascontiguousarray(trace.weights, np.float32).view(np.int32)
        self._requests = trace.requests
        self._position = trace.position
        # Rows by request and sample, within these in the order in which they were computed.
        self._samples = int(trace.sample.max()) + 1
        keys = trace.request.astype(np.int64) * self._samples + trace.sample
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self._by_prompt: dict[str, list[int]] = {}
        for index, request in enumerate(trace.requests):
            self._by_prompt.setdefault(request.prompt_hash, []).append(index)
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()  # requests are made outside of the engine's

    def assign(self, requests: Sequence[RequestState], kind: str = "prompt") -> None:
        """Gives each request its recorded one: the n-th with a prompt takes the n-th recorded with it, then
        from the first again, so that repeated runs of a workload each get the same. Generated ones, which
        have no prompt, are given out in their order.

        Whoever cannot end before `max_tokens` must find all of it recorded. Where a stop token or string may
        end a request early, as it may have ended the recorded one, it runs as far as was recorded, and fails
        if it would go on (`moejax.engine.core`).

        Args:
            kind: what the requests are called in messages.

        Raises:
            RequestError: a prompt is not in the trace; a request must need more than was recorded of it. Then
                no request is given anything.
        """
        with self._lock:
            tables_of = self._find(requests, kind)
        for request, tables in zip(requests, tables_of, strict=True):
            for sequence, table in zip(request.sequences, tables, strict=True):
                sequence.routing = table
                # The token sampled at the last recorded position is the last that it can have.
                if not sequence.score and len(table) + 1 < sequence.max_length:
                    sequence.max_length, sequence.limit_reason = len(table) + 1, "error"

    def _find(self, requests: Sequence[RequestState], kind: str) -> list[list[np.ndarray]]:
        """Returns each request's `_tables`; counts what is given out, unless it raises."""
        taken: Counter[str] = Counter()
        tables_of = []
        for i, request in enumerate(requests):
            prompt = request.output.prompt_token_ids
            key = hash_tokens(prompt)
            recorded = self._by_prompt.get(key)
            if recorded is None:
                key = ""
                recorded = self._by_prompt.get(key)
            if recorded is None:
                raise RequestError(
                    f"{kind} {i}: none of the {len(self._requests)} requests of the replayed routing trace"
                    f" has this prompt of {len(prompt)} tokens; run the workload that was recorded, or replay"
                    " a generated trace"
                )
            index = recorded[(self._taken[key] + taken[key]) % len(recorded)]
            taken[key] += 1
            tables_of.append(self._tables(request, index, f"{kind} {i}"))
        self._taken.update(taken)
        return tables_of

    def fill(self, views: Mapping[str, np.ndarray], plan: StepPlan, rows: int) -> None:
        """Writes the rows of a plan into `replay_ids` and `replay_weights`, int32 `[S + T, L, k]`.

        Args:
            rows: place of the first chunk token.
        """
        decodes = zip(plan.decodes, plan.positions, strict=True)
        trace_rows = [np.asarray([sequence.routing[position] for sequence, position in decodes], np.int64)]
        trace_rows += [c.sequence.routing[c.start : c.start + c.count] for c in plan.chunks]
        places = [np.arange(len(plan.decodes))]
        if plan.chunks:
            # Static batching's padding visits the experts of the first token, as a padded loop's would one's.
            tokens = max(plan.min_tokens, plan.chunk_tokens)
            trace_rows.append(np.repeat(trace_rows[1][:1], tokens - plan.chunk_tokens))
            places.append(np.arange(rows, rows + tokens))
        place, row = np.concatenate(places), np.concatenate(trace_rows)
        views["replay_ids"][place] = self._ids[row]
        views["replay_weights"][place] = self._bits[row]

    def _tables(self, request: RequestState, index: int, name: str) -> list[np.ndarray]:
        """Returns each sample's rows of the trace by position, from 0 without a gap."""
        first = request.sequences[0]
        prompt_len, needed = first.prompt_len, first.max_length - (not first.score)
        by_sample = [self._rows(index, sample) for sample in range(self._samples)]
        recorded = sum(bool(len(rows)) for rows in by_sample)
        if not first.score and len(request.sequences) > recorded:
            raise RequestError(
                f"{name}: n={len(request.sequences)}, and the replayed routing trace has {recorded} of its"
                f" samples; lower n to at most {recorded}"
            )
        # A fork's prompt was computed by the first of its group.
        roots = (rows[:prompt_len] for rows in by_sample if len(rows) and rows[0] >= 0)
        whole = next(roots, by_sample[0][:0])
        tables = []
        for rows in by_sample[: len(request.sequences)]:
            table = np.full(max(len(rows), len(whole)), -1, np.int64)
            table[: len(rows)] = rows
            missing = table[: len(whole)] < 0
            table[: len(whole)][missing] = whole[missing]
            gaps = np.flatnonzero(table < 0)
            tables.append(table[: gaps[0]] if len(gaps) else table)
        have = min(len(table) for table in tables)
        ends = first.stop_ids or first.params.stop
        if have < prompt_len:
            raise RequestError(
                f"{name} has {prompt_len} tokens, and the replayed routing trace has {have} of this request;"
                " record whole requests, or generate longer ones"
            )
        if have < needed and not ends:
            raise RequestError(
                f"{name}: its {prompt_len} tokens and max_tokens={first.max_length - prompt_len} need the"
                f" routing of {needed}, and the replayed trace has {have} of this request; lower max_tokens"
                f" to at most {have + 1 - prompt_len}"
            )
        return tables

    def _rows(self, request: int, sample: int) -> np.ndarray:
        """Returns int64: of each position the last row recorded for it, -1 for none."""
        key = request * self._samples + sample
        low, high = np.searchsorted(self._keys, (key, key + 1))
        rows = np.sort(self._order[low:high])
        positions = self._position[rows]
        last_rows = np.full(int(positions.max()) + 1 if len(rows) else 0, -1, np.int64)
        last_rows[positions] = rows
        return last_rows


def open_replay(path: str | os.PathLike[str] | None, model: ModelConfig) -> RoutingReplay | None:
    """Returns the trace of `engine.replay_routing`; None for None.

    Raises:
        ConfigError: it cannot be read, or is not this model's.
    """
    if path is None:
        return None
    source = f"engine.replay_routing={path}"
    if not any(model.moe_layers):
        raise ConfigError(f"{source}: the model has no MoE layer, and so no routing to replay")
    try:
        trace = load_capture(path)
    except ConfigError as error:
        raise ConfigError(f"engine.replay_routing: {error}") from error
    return RoutingReplay(trace, model, source)


def _check_values(trace: RoutingCapture, source: str) -> None:
    """Raises `ConfigError` for what no engine records."""
    for name in ("position", "sample"):
        if (low := int(getattr(trace, name).min())) < 0:
            raise ConfigError(f"{source}: it has a {name} of {low}; they count from 0")
    for start in range(0, trace.num_rows, _CHECKED_ROWS):
        rows = slice(start, start + _CHECKED_ROWS)
        ids = np.sort(trace.ids[rows], axis=-1)
        twice = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] < trace.num_experts)
        if twice.any():
            row = start + int(np.argwhere(twice)[0, 0])
            raise ConfigError(f"{source}: row {row} has a token that visits the same expert twice")
        if not np.isfinite(trace.weights[rows]).all():
            raise ConfigError(f"{source}: it has weights that are not finite")
