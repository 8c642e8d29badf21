"""Times of a device's operations: from measured tables where they have the shape, from a curve of another
shape at the same share of its bound, else the bound over an efficiency. Host arithmetic.

The bound of an operation is the roofline's: bytes over bandwidth or FLOPs over the peak, whichever takes
longer. A table's share of it is carried to shapes that are near, never from one device to another, and never
from one number of expert ranks to another: what a rank computes is looked up as one device's work.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moejax.core.errors import ConfigError, unknown
from moejax.core.hardware import KNOWN, Hardware
from moejax.perf.comm import wire_bytes
from moejax.perf.links import latency, leaving
from moejax.simulate.routing import Loads, RoutingLaw
from moejax.simulate.tables import Curve, Source, load

TABLES = {"a100_80gb": "a100", "h100": "h100", "h200": "h200"}
"""Device kind → the prefix of its tables' names. Attention, products and links of an H200 are an H100's."""

WEIGHTS = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block128": 1.0,
    "w4a16_int4": 0.53,
    "w8a16_int8": 1.0,
    "w8a8_int8": 1.0,
}
"""Bytes of a weight by the tables' name of its dtype, scales included."""

_LIKE = {
    "w8a16_int8": ("w4a16_int4",),
    "fp8": ("fp8_block128",),
    "fp8_block128": ("fp8",),
    "w8a8_int8": ("fp8",),
}
"""Dtypes whose share of their bound stands in where one was not measured; then bfloat16's."""

_PEAKS = {"fp8": "float8", "fp8_block128": "float8", "w8a8_int8": "int8"}

_NEAR, _FAR, _OTHER_STACK, _SAME = 2, 2.5, 0.5, 1e-3
"""Curves of other shapes that an estimate is the mean of; the distance, a sum of logarithms of ratios, from
which on none is near; how much further away another stack's counts, unless its shape is the same; and the
distance below which it is."""

_UNTUNED = 2.5
"""Times as slow as another stack's the experts of a shape are where their kernel was not tuned: some of
TensorRT-LLM's are 3 to 10 times, what stacks differ by otherwise is under 2."""

_LAWS = {"0": RoutingLaw("even"), "1.01": RoutingLaw("power", {"exponent": 1.01})}
"""Laws of a table's curves by their skew."""

_HEAD_KEYS = {"heads": 1, "kv_heads": 1, "head_dim": 576}
"""Columns of a shape of heads, with what DeepSeek's latents have, of which tables of latent attention are."""

EFFICIENCY = {"gemm": 0.62, "experts": 0.61, "decode": 0.4, "prefill": 0.39, "collective": 0.7, "small": 0.6}
"""Share of the bound reached by operations that no table has: medians over shapes and sizes of the A100's
tables; of collectives across nodes what Vidur's two nodes reach of their network with 64 MiB (`vidur_links`);
of small operations an assumption."""


class Estimate(NamedTuple):
    """Seconds of one operation on one device, and where they come from."""

    seconds: float
    source: Source


NONE = Estimate(0.0, "table")


class ExpertShape(NamedTuple):
    """One device's part of a layer's experts: model width, the slice of the hidden width, and how many."""

    hidden: int
    inter: int
    experts: int


class HeadShape(NamedTuple):
    """One device's part of attention: query heads, key/value heads, numbers of a head's key, and vectors that
    the cache has of a token and head (1: a latent, which is key and value)."""

    heads: int
    kv_heads: int
    head_dim: int
    vectors: int = 2


class _Curve(NamedTuple):
    """A measured shape: what its time is, and its bound, at a place of the axis.

    Attributes:
        away: distance from the shape that is asked for; 0 is the same one.
        seconds, bound: of the place.
        measured: whether the place is a cell.
        floor: the least time that its table has, which no share of a bound goes below.
    """

    away: float
    seconds: Callable[..., float]
    bound: Callable[..., float]
    measured: Callable[..., bool]
    floor: float


_Found = tuple[dict[str, str], Curve, float]
"""A curve with its keys and what its stack adds to the distance."""


@dataclass
class Kernels:
    """One device kind's operations as an engine's stack runs them.

    Attributes:
        kind: a device of `moejax.core.hardware.KNOWN`.
        stack: whose kernels are preferred: "vllm", "sglang" or "trtllm"; others' stand in where it was not
            measured.
        weights: the tables' name of the experts' dtype, and `dense` of all other weights'; `cache` of keys
            and values.
        launch_s: the least time of an operation that no table has, in seconds; an assumption.
        naive_attention: attention to prompts writes its scores, reads them for the softmax, and does so with
            the weights again (arXiv 2205.14135, algorithm 0), instead of one kernel.
        left_out: tells of a curve's keys whether it is not used, to hold it against what the others say.
    """

    kind: str
    stack: str = "vllm"
    weights: str = "bf16"
    dense: str = "bf16"
    cache: str = "bf16"
    launch_s: float = 2.5e-6
    naive_attention: bool = False
    hardware: Hardware = field(init=False)
    left_out: Callable[[Mapping[str, str]], bool] | None = None
    _near: dict[Any, list[_Curve]] = field(default_factory=dict, init=False, repr=False)
    _links: dict[str, dict[int, list[Curve]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KNOWN or KNOWN[self.kind].bandwidth is None:
            known = [kind for kind, device in KNOWN.items() if device.bandwidth is not None]
            raise ConfigError(f"hardware.kind: {unknown('device', self.kind, known)}")
        for name in ("weights", "dense", "cache"):
            if getattr(self, name) not in WEIGHTS:
                raise ConfigError(f"simulate.{name}: {unknown('dtype', getattr(self, name), WEIGHTS)}")
        self.hardware = KNOWN[self.kind]
        self.bandwidth = float(self.hardware.bandwidth or 0)
        self.prefix = TABLES.get(self.kind)

    # -- bounds, in seconds ------------------------------------------------------------------------------

    def bound(self, nbytes: float, flops: float, dtype: str = "bf16") -> float:
        """Returns the roofline's bound; int4 weights are computed with in 16 bits."""
        peaks = self.hardware.flops
        peak = peaks.get(_PEAKS.get(dtype, "bfloat16")) or peaks.get("bfloat16") or peaks["float16"]
        return max(nbytes / self.bandwidth, flops / peak)

    def gemm_bound(self, m: float, n: float, k: float, dtype: str) -> float:
        return self.bound(n * k * WEIGHTS[dtype] + 2 * m * (n + k), 2 * m * n * k, dtype)

    def expert_bound(self, shape: ExpertShape, hits: float, rows: float, dtype: str) -> float:
        D, F = shape.hidden, shape.inter
        nbytes = hits * 3 * D * F * WEIGHTS[dtype] + 2 * rows * (4 * D + 3 * F)
        return self.bound(nbytes, 6 * rows * D * F, dtype)

    def decode_bound(self, shape: HeadShape, batch: float, length: float) -> float:
        size = WEIGHTS[self.cache]
        nbytes = batch * shape.head_dim * (shape.vectors * shape.kv_heads * length * size + 4 * shape.heads)
        return self.bound(nbytes, 4 * batch * shape.heads * shape.head_dim * length)

    def prefill_bound(self, shape: HeadShape, tokens: float, pairs: float) -> float:
        nbytes = 4 * tokens * shape.head_dim * (shape.heads + shape.kv_heads)
        return self.bound(nbytes, 4 * pairs * shape.heads * shape.head_dim)

    # -- operations --------------------------------------------------------------------------------------

    def gemm(self, m: float, n: int, k: int) -> Estimate:
        """Returns the time of `[m, k] x [k, n]`."""
        if m <= 0:
            return NONE
        return self._carried("gemm", (n, k), self.gemm_bound(m, n, k, self.dense), m)

    def experts(self, shape: ExpertShape, hits: float, rows: float) -> Estimate:
        """Returns the time of a device's experts in one layer: permutation, products, weighted sum.

        Args:
            hits: distinct experts of the device that are visited.
            rows: (token, expert) pairs that they compute.
        """
        if rows <= 0:
            return NONE
        bound = self.expert_bound(shape, hits, rows, self.weights)
        return self._carried("experts", shape, bound, rows / shape.experts)

    def decode(self, shape: HeadShape, batch: float, length: float) -> Estimate:
        """Returns the time of one layer's attention of so many sequences, each with one query that sees
        `length` tokens in the mean."""
        if batch <= 0:
            return NONE
        bound = self.decode_bound(shape, batch, length)
        return self._carried("decode", shape, bound, batch * shape.kv_heads, length)

    def prefill(self, shape: HeadShape, chunks: Iterable[tuple[int, int]]) -> Estimate:
        """Returns the time of one layer's attention of parts of prompts: (tokens, what the last one sees)."""
        tokens = squares = pairs = 0.0
        for count, end in chunks:
            tokens, squares = tokens + count, squares + count * end
            pairs += count * end - count * (count - 1) / 2
        if not tokens:
            return NONE
        # It has the share of its bound that as many whole prompts have of the length that its tokens see.
        length = squares / tokens
        bound = self.prefill_bound(shape, tokens, pairs)
        found = self._carried("prefill", shape, bound, max(1.0, tokens / length) * shape.kv_heads, length)
        if not self.naive_attention:
            return found
        # Scores are of all pairs, those of later tokens too, and of 16 bits.
        moved = self.small(4 * 2.0 * squares * shape.heads, 2)
        return Estimate(found.seconds + moved.seconds, "roofline")

    def attention(
        self, shape: HeadShape, decodes: float, context: float, chunks: Iterable[tuple[int, int]]
    ) -> list[Estimate]:
        """Returns the times of one layer's attention in a step: of decodes, and of parts of prompts."""
        return [self.decode(shape, decodes, context), self.prefill(shape, chunks)]

    def collective(self, op: str, operand: float, group: int, nodes: int) -> Estimate:
        """Returns the time of a collective of `group` devices, on so many nodes, that put in `operand` bytes
        each."""
        if group <= 1 or not operand:
            return NONE
        sent, known = wire_bytes(op, operand, group), op.removeprefix("ragged-")
        curves = self._collectives(known) if nodes == 1 else {}
        if curves:
            size = operand * group if known == "all-gather" else operand
            at = min(curves, key=lambda measured: abs(math.log(measured / group)))
            best = min(curves[at], key=lambda curve: curve.at(size))
            source: Source = "table" if best.measured(size) else "interpolated"
            scale = sent / wire_bytes(op, operand, at)
            return Estimate(best.at(size) * scale, source if at == group else "nearest")
        away, link = leaving(op, group, nodes), self.hardware.link_bandwidth
        network = self.hardware.network_bandwidth
        if link is None or (away and network is None):
            raise ConfigError(f"hardware.kind={self.kind} has no known rate of links, and {op} needs one")
        seconds = max(sent * (1 - away) / (link / 2), sent * away / (network or math.inf))
        return Estimate(seconds / EFFICIENCY["collective"] + latency(op, group, nodes), "roofline")

    def small(self, nbytes: float, launches: float) -> Estimate:
        """Returns the time of operations that move `nbytes` between products, in so many launches."""
        return Estimate(launches * self.launch_s + nbytes / self.bandwidth / EFFICIENCY["small"], "roofline")

    # -- looking up --------------------------------------------------------------------------------------

    def _carried(self, kind: str, shape: tuple[int, ...], bound: float, *place: float) -> Estimate:
        """Returns a bound over the share of theirs that the nearest curves reach at a place of their axes."""
        near = self._near.get((kind, shape))
        if near is None:
            near = sorted(_MAKERS[kind](self, *shape), key=lambda curve: curve.away)
            near = near[:1] if near and near[0].away < _SAME else near[:_NEAR]
            self._near[kind, shape] = near = [curve for curve in near if curve.away < _FAR]
        if not near:
            return Estimate(bound / EFFICIENCY[kind] + self.launch_s, "roofline")
        if near[0].away < _SAME:
            first = near[0]
            source: Source = "table" if first.measured(*place) else "interpolated"
            scale = bound / first.bound(*place)
            if 0.999 < scale < 1.001:
                return Estimate(first.seconds(*place), source)
            return Estimate(first.floor + (first.seconds(*place) - first.floor) * scale, "nearest")
        seconds = total = 0.0
        for curve in near:
            weight = 1 / curve.away
            slowness = (curve.seconds(*place) - curve.floor) / curve.bound(*place)
            seconds, total = seconds + weight * (curve.floor + bound * slowness), total + weight
        return Estimate(seconds / total, "nearest")

    def _curves(self, kind: str, **wanted: str) -> list[_Found]:
        """Returns a table's curves of the wanted keys with what their stack adds to the distance."""
        device = "h100" if self.prefix == "h200" and kind != "moe" else self.prefix
        table = load(device, kind) if device else None
        found: list[_Found] = []
        if table is None:
            return found
        for key, curve in table.curves.items():
            fields = dict(zip(table.keys, key, strict=True))
            # Half of TensorRT-LLM's decodes are faster than the memory allows.
            impossible = kind == "attention_decode" and fields["stack"].startswith("trtllm")
            if impossible or any(fields[name] != value for name, value in wanted.items()):
                continue
            if self.left_out is not None and self.left_out(fields):
                continue
            stack = fields["stack"].split("-")[0]
            # Of two that stand in vLLM's: its kernels are nearer to their bounds.
            away = 0.0 if stack == self.stack else _OTHER_STACK + 0.1 * (stack == "sglang")
            found.append((fields, curve, away))
        best = min((other for *_, other in found), default=0.0)
        return [(fields, curve, other - best) for fields, curve, other in found]

    def _of_dtype(self, kind: str, wanted: str, **keys: str) -> tuple[str, list[_Found]]:
        """Returns curves of a dtype, or of one that is computed with like it, and which it is."""
        for dtype in dict.fromkeys((wanted, *_LIKE.get(wanted, ()), "bf16")):
            if found := self._curves(kind, dtype=dtype, **keys):
                return dtype, found
        return wanted, []

    @staticmethod
    def _floor(found: list[_Found]) -> float:
        return min((min(curve.seconds) for _, curve, _ in found), default=0.0)

    def _gemms(self, n: int, k: int) -> list[_Curve]:
        dtype, found = self._of_dtype("gemm", self.dense)
        curves, floor = [], self._floor(found)
        for fields, curve, other in found:
            rows, inner = int(fields["n"]), int(fields["k"])
            bound = lambda m, n=rows, k=inner: self.gemm_bound(m, n, k, dtype)  # noqa: E731
            away = abs(math.log(rows / n)) + abs(math.log(inner / k))
            curves.append(_Curve(_away(away, other), curve.at, bound, curve.measured, floor))
        return curves

    def _experts(self, hidden: int, inter: int, experts: int) -> list[_Curve]:
        dtype, found = self._of_dtype("moe", self.weights, ep="1")
        found = _tuned(found)
        curves, floor = [], self._floor(found)
        even = {fields["stack"] for fields, *_ in found if fields["skew"] == "0"}
        for fields, curve, other in found:
            if fields["skew"] != ("0" if fields["stack"] in even else "1.01"):
                continue
            D, F, k, E = (int(fields[name]) for name in ("hidden", "inter", "topk", "experts"))
            local = ExpertShape(D, F // int(fields["tp"]), E)
            loads = _LAWS[fields["skew"]].loads(E, k, 1)

            def bound(rows: float, local: ExpertShape = local, k: int = k, loads: Loads = loads) -> float:
                whole = max(float(k), rows * local.experts)
                return self.expert_bound(local, loads.at(math.ceil(whole / k)).hits, whole, dtype)

            at = lambda rows, c=curve, E=E, k=k: c.at(max(1.0, rows * E / k))  # noqa: E731
            cell = lambda rows, c=curve, E=E, k=k: c.measured(round(rows * E / k, 6))  # noqa: E731
            away = abs(math.log(D / hidden)) + abs(math.log(local.inter / inter))
            away += 0.5 * abs(math.log(E / experts))
            curves.append(_Curve(_away(away, other), at, bound, cell, floor))
        return curves

    def _heads(self, phase: str, heads: int, kv_heads: int, head_dim: int, vectors: int) -> list[_Curve]:
        grids: dict[tuple[str, HeadShape], tuple[dict[int, Curve], float]] = {}
        kind = f"attention_{phase}" if vectors == 2 else f"mla_{phase}"
        wanted = {"kv_dtype": "bf16" if phase == "prefill" else self.cache} if vectors == 2 else {}
        found = self._curves(kind, **wanted)
        for fields, curve, other in found:
            sizes = {name: int(fields.get(name, latent)) for name, latent in _HEAD_KEYS.items()}
            shape = HeadShape(**sizes, vectors=vectors)
            grid, _ = grids.setdefault((fields["stack"], shape), ({}, other))
            grid[int(fields["batch"])] = curve
        curves, floor = [], self._floor(found)
        for (_, shape), (grid, other) in grids.items():
            away = abs(math.log(shape.heads / shape.kv_heads * kv_heads / heads))
            away += 0.5 * abs(math.log(shape.kv_heads / kv_heads)) + abs(math.log(shape.head_dim / head_dim))
            curves.append(_grid(_away(away, other), grid, shape, self._attention_bound(phase), floor))
        return curves

    def _attention_bound(self, phase: str) -> Callable[[HeadShape, float, float], float]:
        if phase == "decode":
            return self.decode_bound
        return lambda shape, b, n: self.prefill_bound(shape, b * n, b * n * (n + 1) / 2)

    def _collectives(self, op: str) -> dict[int, list[Curve]]:
        """Returns the measured curves of a collective by number of devices: an engine's own in a graph, and
        NCCL's, of which an engine takes the faster."""
        if op not in self._links:
            curves: dict[int, list[Curve]] = {}
            for fields, curve, other in self._curves("collectives", op=op):
                if fields["mode"] != "eager" and (not other or fields["stack"].startswith("nccl")):
                    curves.setdefault(int(fields["gpus"]), []).append(curve)
            self._links[op] = curves
        return self._links[op]


_MAKERS: dict[str, Callable[..., list[_Curve]]] = {
    "gemm": Kernels._gemms,
    "experts": Kernels._experts,
    "decode": lambda kernels, *shape: kernels._heads("decode", *shape),
    "prefill": lambda kernels, *shape: kernels._heads("prefill", *shape),
}


def _tuned(found: list[_Found]) -> list[_Found]:
    """Returns expert curves without those for which an engine took a kernel that was not tuned: slower by
    `_UNTUNED` than another stack's of the same shape, in the median over the tokens that both have."""
    same: dict[tuple[str, ...], list[_Found]] = {}
    for one in found:
        shape = tuple(value for name, value in one[0].items() if name not in ("stack", "kernel"))
        same.setdefault(shape, []).append(one)

    def slower(curve: Curve, other: Curve) -> float:
        both = [x for x in curve.xs if other.measured(x)]
        return statistics.median([curve.at(x) / other.at(x) for x in both]) if both else 0.0

    return [
        one
        for alike in same.values()
        for one in alike
        if not any(slower(one[1], other[1]) > _UNTUNED for other in alike)
    ]


def _away(shape: float, other: float) -> float:
    return shape + other if shape else other * _SAME


def _grid(
    away: float,
    grid: dict[int, Curve],
    shape: HeadShape,
    bound: Callable[[HeadShape, float, float], float],
    floor: float,
) -> _Curve:
    """Returns curves of several batch sizes as one over (sequences times key/value heads, length): as much is
    computed side by side there as elsewhere with as many."""
    batches = sorted(grid)

    def seconds(work: float, length: float) -> float:
        batch = work / shape.kv_heads
        place = bisect_left(batches, batch)
        if place == len(batches):
            return grid[batches[-1]].at(length) * batch / batches[-1]
        if place == 0 or batches[place] == batch:
            return grid[batches[place]].at(length)
        low, high = batches[place - 1], batches[place]
        share = (batch - low) / (high - low)
        return (1 - share) * grid[low].at(length) + share * grid[high].at(length)

    return _Curve(
        away,
        seconds,
        lambda work, length: bound(shape, max(work / shape.kv_heads, batches[0]), length),
        lambda work, length: (
            work / shape.kv_heads in grid and grid[int(work / shape.kv_heads)].measured(length)
        ),
        floor,
    )
