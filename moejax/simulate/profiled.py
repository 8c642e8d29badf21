"""Times of a device that was profiled with one model: products and what follows them, attention of decodes
and parts of prompts together, and experts by how many are visited. Host arithmetic.

The tables are LLMServingSim 2.0's, of an RTX PRO 6000 that runs Qwen3-30B-A3B with vLLM (README and LICENSES
in `moejax/assets/gpu_tables`). Other shapes are the roofline's, experts' at the same share of their bound.
"""

import functools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moejax.perf.comm import wire_bytes
from moejax.simulate.kernels import NONE, Estimate, ExpertShape, HeadShape, Kernels
from moejax.simulate.tables import FOLDER, Curve, rows_of

_PRODUCTS = {
    (5120, 2048): ("qkv_proj", "layernorm", "qk_norm", "rotary_emb"),
    (2048, 4096): ("o_proj", "layernorm"),
    (151936, 2048): ("lm_head", "embedding", "final_layernorm", "sampler"),
    (128, 2048): (),  # the router's is in the experts' time
}
"""Products by (n, k), with the operations beside them that the table has."""

_HEADS, _EXPERTS, _TOP_K = HeadShape(32, 4, 128), ExpertShape(2048, 768, 128), 8


@functools.cache
def _dense() -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows_of(FOLDER / "rtxpro6000_dense.csv.gz"):
        points.setdefault(row["layer"], []).append((float(row["n"]), float(row["us"])))
    return {name: Curve(sorted(each)) for name, each in points.items()}


@functools.cache
def _grid(file: str) -> dict[float, Any]:
    """Returns a table's last column, in seconds, by its other columns, one inside the other."""
    grid: dict[float, Any] = {}
    for row in rows_of(FOLDER / file):
        *keys, last, value = map(float, row.values())
        level = grid
        for key in keys:
            level = level.setdefault(key, {})
        level[last] = 1e-6 * value
    return _sorted(grid)


def _sorted(grid: dict[float, Any]) -> dict[float, Any]:
    return {k: _sorted(v) if isinstance(v, dict) else v for k, v in sorted(grid.items())}


def _between(grid: Any, place: tuple[float, ...]) -> float:
    """Returns the value at a place of nested axes, along straight lines, the outermost ones first; beyond an
    axis's end it grows as the last line does."""
    if not place:
        return float(grid)
    keys, x = list(grid), place[0]
    if x in grid:
        return _between(grid[x], place[1:])
    if len(keys) == 1 or x < keys[0]:
        return _between(grid[keys[0]], place[1:])
    at = min(bisect_left(keys, x), len(keys) - 1)
    low, high = (_between(grid[key], place[1:]) for key in keys[at - 1 : at + 1])
    return low + (high - low) * (x - keys[at - 1]) / (keys[at] - keys[at - 1])


@dataclass
class ProfiledKernels(Kernels):
    """`Kernels` of an RTX PRO 6000.

    Attributes:
        link_bandwidth: bytes/s that a device sends; `link_s`: seconds that a collective takes besides.
    """

    kind: str = "rtxpro6000"
    link_bandwidth: float = 16e9
    link_s: float = 20e-6

    def gemm(self, m: float, n: int, k: int) -> Estimate:
        if m <= 0 or (n, k) not in _PRODUCTS:
            return super().gemm(m, n, k)
        seconds = sum(_dense()[name].at(m) for name in _PRODUCTS[n, k])
        return Estimate(seconds, "interpolated")

    def experts(self, shape: ExpertShape, hits: float, rows: float) -> Estimate:
        if rows <= 0:
            return NONE
        seconds = _between(_grid("rtxpro6000_moe_hits.csv"), (rows / _TOP_K, hits))
        if shape[:2] == _EXPERTS[:2]:
            return Estimate(seconds, "interpolated")
        scale = self.expert_bound(shape, hits, rows, self.weights)
        scale /= self.expert_bound(_EXPERTS, hits, rows, self.weights)
        return Estimate(seconds * scale, "nearest")

    def attention(
        self, shape: HeadShape, decodes: float, context: float, chunks: Iterable[tuple[int, int]]
    ) -> list[Estimate]:
        if shape != _HEADS:
            return super().attention(shape, decodes, context, chunks)
        tokens = past = 0.0
        for count, end in chunks:
            tokens, past = tokens + count, past + count * (end - count)
        if not tokens and not decodes:
            return []
        place = (tokens, past / tokens if tokens else 0.0, decodes, context if decodes else 0.0)
        return [Estimate(_between(_grid("rtxpro6000_attention_mixed.csv.gz"), place), "interpolated")]

    def small(self, nbytes: float, launches: float) -> Estimate:
        """Nothing: the products' times have it."""
        return NONE

    def collective(self, op: str, operand: float, group: int, nodes: int) -> Estimate:
        if group <= 1:
            return NONE
        return Estimate(self.link_s + wire_bytes(op, operand, group) / self.link_bandwidth, "roofline")
