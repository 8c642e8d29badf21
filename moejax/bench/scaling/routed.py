"""Expert parallelism under a trace's real assignments: bytes that devices send, and the load on them.

Every step and layer of the trace is dealt out to a layout: requests to data-parallel groups in turn, experts
to ranks in order (replicas by a token's place in its group's batch, as `moejax.moe.replicas` picks them). A
token's row goes once to each other rank that holds any of its experts, and a result comes back. No JAX.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.moe.exchange_cost import exchange_hops
from moejax.moe.exchange_size import HopSize, capacity_buckets, mean_rows
from moejax.perf.comm import Exchange, exchange_terms, role_sizes, wire_bytes
from moejax.perf.sizes import DTYPE_BYTES
from moejax.routing.analysis import PHASES
from moejax.routing.capture import Ints, RoutingCapture
from moejax.routing.locality import step_numbers

_MOST_CELLS = 1 << 22


class _Dealt(NamedTuple):
    """Some consecutive steps of one replica's expert group of R ranks, in one layer.

    Attributes:
        sent: `[steps, R, R]`: tokens of a rank that have any expert on a rank, itself included.
        load: `[steps, R]`: assignments that a rank's experts get.
        tokens: `[steps, R]`: tokens that are at home on a rank.
        prefill: bool `[steps]`: a step that computes any part of a prompt.
        node_sent: `[steps, R, G]`: tokens of a rank that have any expert on a node.
    """

    sent: Ints
    load: Ints
    tokens: Ints
    prefill: NDArray[np.bool_]
    node_sent: Ints

    def only(self, chosen: NDArray[np.bool_]) -> "_Dealt":
        """Some of the steps."""
        return _Dealt._make(array[chosen] for array in self)


class _Sums:
    """Over steps and layers of one phase, in bytes of one step's layer."""

    def __init__(self) -> None:
        self.steps = 0
        self.bytes_mean = self.bytes_max = self.even = self.wire = self.wire_even = 0.0
        self.load_max = self.load_mean = 0.0


def routed_row(
    capture: RoutingCapture, model: ModelConfig, parallel: ParallelConfig, methods: dict[str, str]
) -> dict[str, Any]:
    """A layout's flat fields, of both phases; a step that computes any part of a prompt is "prefill".

    Per step of the trace, over all layers (of a device's own stage, in the mean over stages):
    `routed_<phase>_bytes_even`: what a device sends if all choices of k experts are equally likely;
    `…_bytes_mean`: what it sends under the trace, in the mean over ranks; `…_bytes_max`: layer by layer what
    the rank sends that sends most, which the others wait for; `…_imbalance`: of these max over mean;
    `…_wire_bytes`, `…_wire_bytes_even`: what the layout's exchange puts on the wire for it, with what stays
    empty. `…_load_imbalance`: load of the rank with most assignments over the mean. Fields about
    bytes are None where no tokens are exchanged.

    Args:
        model: its `dtype` is that of the activations.
        methods: phase → the exchange that the layout uses for it.
    """
    if parallel.ep == 1:
        return {}
    exchanged = parallel.attention == "data"
    sums = {phase: _Sums() for phase in PHASES}
    for dealt in _deal(capture, model, parallel):
        for phase in PHASES:
            chosen = dealt.prefill if phase == "prefill" else ~dealt.prefill
            if chosen.any():
                part = dealt.only(chosen)
                _add(sums[phase], part, model, parallel, methods[phase] if exchanged else "none")
    row: dict[str, Any] = {}
    if exchanged:
        row["routed_idle_groups"] = max(0, parallel.data_groups - len(capture.requests))
    for phase, phase_sums in sums.items():
        if phase_sums.steps:
            row |= {f"routed_{phase}_{name}": v for name, v in _fields(phase_sums, capture, parallel).items()}
    return row


def _fields(sums: _Sums, capture: RoutingCapture, parallel: ParallelConfig) -> dict[str, float]:
    fields = {"load_imbalance": sums.load_max / sums.load_mean if sums.load_mean else 1.0}
    if sums.wire_even:
        each = len(capture.layers) / parallel.pp / sums.steps
        fields |= {
            "bytes_even": sums.even * each,
            "bytes_mean": sums.bytes_mean * each,
            "bytes_max": sums.bytes_max * each,
            "imbalance": sums.bytes_max / sums.bytes_mean if sums.bytes_mean else 1.0,
            "wire_bytes": sums.wire * each,
            "wire_bytes_even": sums.wire_even * each,
        }
    return fields


def _deal(capture: RoutingCapture, model: ModelConfig, parallel: ParallelConfig) -> Iterator[_Dealt]:
    """Every replica and layer, some steps at a time."""
    R, E = parallel.ep, capture.num_experts
    slots = np.arange(E + parallel.redundant_experts) % E
    copies = np.bincount(slots, minlength=E)
    per_rank = len(slots) // R
    group = capture.request.astype(np.int64) % parallel.data_groups
    step, starts = step_numbers(capture), np.append(capture.step_starts, capture.num_rows)
    size = max(1, _MOST_CELLS // (R * R))
    turn = _turns(step * parallel.data_groups + group)
    for replica in range(parallel.dp):
        mine = group // (parallel.data_groups // parallel.dp) == replica
        for first in range(0, len(starts) - 1, size):
            last = min(first + size, len(starts) - 1)
            rows = np.arange(starts[first], starts[last])
            rows = rows[mine[rows]]
            if not len(rows):
                continue
            source = group[rows] % R if parallel.attention == "data" else np.zeros(len(rows), np.int64)
            at = step[rows] - first
            prefill = np.zeros(last - first, bool)
            np.logical_or.at(prefill, at, capture.prefill[rows])
            tokens = np.bincount(at * R + source, minlength=(last - first) * R).reshape(-1, R)
            busy = tokens.sum(1) > 0
            for layer in range(len(capture.layers)):
                ids = capture.ids[rows, layer].astype(np.int64)
                chosen = ids < E
                which = np.where(chosen, ids, 0)
                # Physical expert e + E · i is the i-th copy of e.
                physical = which + E * (turn[rows][:, None] % copies[which])
                rank = np.where(chosen, physical // per_rank, R)
                sent, load, node_sent = _count(rank, at, source, last - first, R, parallel.expert_nodes)
                yield _Dealt(sent, load, tokens, prefill, node_sent).only(busy)


def _turns(key: Ints) -> Ints:
    """Returns for each row how many of its key stand before it."""
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(key[order]) != 0])
    place = np.arange(len(key)) - np.repeat(starts, np.diff(np.append(starts, len(key))))
    turns = np.empty_like(place)
    turns[order] = place
    return turns


def _count(rank: Ints, at: Ints, source: Ints, steps: int, R: int, nodes: int) -> tuple[Ints, Ints, Ints]:
    """Ranks `[n, k]` of the rows' experts → `sent`, `load`, `node_sent` of `_Dealt`."""
    visits = np.zeros((len(rank), R + 1), bool)
    np.put_along_axis(visits, rank, True, axis=1)
    visits = visits[:, :R]
    load = np.bincount((at[:, None] * (R + 1) + rank).reshape(-1), minlength=steps * (R + 1))
    sent = []
    for there in (visits, visits.reshape(len(rank), nodes, -1).any(2)):
        row, column = np.nonzero(there)
        key = (at[row] * R + source[row]) * there.shape[1] + column
        sent.append(np.bincount(key, minlength=steps * R * there.shape[1]).reshape(steps, R, -1))
    return sent[0], load.reshape(steps, R + 1)[:, :R], sent[1]


def _add(sums: _Sums, dealt: _Dealt, model: ModelConfig, parallel: ParallelConfig, method: str) -> None:
    sums.load_max += float(dealt.load.max(1).sum())
    sums.load_mean += float(dealt.load.mean(1).sum())
    sums.steps += len(dealt.load)
    if method == "none":
        return
    row = model.hidden_size * DTYPE_BYTES[model.dtype]
    there, back = row + 8 * model.num_experts_per_tok, row
    hops = exchange_hops(method, model, parallel)
    leaving, needs = _hop_rows(dealt, hops)
    # A rank sends its tokens there, and back the results of those that it was sent.
    sent = sum(rows.sum(2) * there + rows.sum(1) * back for rows in leaving)
    assert isinstance(sent, np.ndarray)
    sums.bytes_max += float(sent.max(1).sum())
    sums.bytes_mean += float(sent.mean(1).sum())
    each = dealt.tokens.mean(1)
    for hop, rows in zip(hops, mean_rows(1, model.num_experts_per_tok, hops), strict=True):
        sums.even += float(each.sum()) * (hop.size - 1) * rows * (there + back)
    for tokens, need, actual in zip(dealt.tokens.max(1), needs, sent.mean(1), strict=True):
        even, wire = _wire(method, model, parallel, int(tokens), need)
        sums.wire_even += even
        # The ragged exchange has no empty capacity: it moves the rows themselves, and each rank's counts.
        sums.wire += float(actual) + 4 * parallel.ep * (parallel.ep - 1) if method == "ragged" else wire


def _hop_rows(dealt: _Dealt, hops: list[HopSize]) -> tuple[list[Ints], list[tuple[int, ...]]]:
    """Returns each hop's rows between ranks, `[steps, R, R]` with none to itself; and each step's greatest
    number between a pair on each hop, itself included, which decides the capacity."""
    R = dealt.sent.shape[1]
    if len(hops) == 1:
        away = dealt.sent * (1 - np.eye(R, dtype=np.int64))
        return [away], [(int(n),) for n in dealt.sent.max((1, 2))]
    nodes, local = hops[0].size, hops[1].size
    steps = len(dealt.sent)
    first = np.zeros((steps, R, R), np.int64)
    second = np.zeros((steps, R, R), np.int64)
    ranks = np.arange(R)
    # Tokens of all ranks of one local rank are, after the first hop, on the device of that local rank.
    gathered = dealt.sent.reshape(steps, nodes, local, R).sum(1)
    for node in range(nodes):
        # To the device of the same local rank on that node.
        first[:, ranks, node * local + ranks % local] += dealt.node_sent[:, :, node]
        members = slice(node * local, (node + 1) * local)
        second[:, members, members] = gathered[:, :, members]
    greatest = np.stack([first.max((1, 2)), second.max((1, 2))], axis=1)
    needs = [tuple(int(n) for n in pair) for pair in greatest]
    first[:, ranks, ranks] = 0
    second[:, ranks, ranks] = 0
    return [first, second], needs


@functools.lru_cache(maxsize=4096)
def _wire(
    method: str, model: ModelConfig, parallel: ParallelConfig, tokens: int, need: tuple[int, ...]
) -> tuple[float, float]:
    """Bytes that a device sends in one layer's exchange of `tokens` tokens: with the least capacity,
    and with the capacity for `need` rows."""
    k, row = model.num_experts_per_tok, model.hidden_size * DTYPE_BYTES[model.dtype]
    hops = exchange_hops(method, model, parallel)
    buckets: list[tuple[float, ...]] = [()]
    if method == "ragged":
        buckets = [tuple(mean_rows(tokens, k, hops))]
    elif method != "allgather":
        buckets = list(capacity_buckets(tokens, k, hops))
    holds = [each for each in buckets if all(a >= b for a, b in zip(each, need, strict=False))]
    sizes = role_sizes(model, parallel)
    wire = []
    for capacities in (buckets[0], (holds or buckets)[0 if holds else -1]):
        terms = exchange_terms(Exchange(method, capacities, len(buckets)), parallel, tokens, row, k)
        wire.append(sum(wire_bytes(kind, size, sizes[role]) for _, kind, role, size in terms))
    return wire[0], wire[1]
