"""`flash_attention` as a Pallas kernel (FlashAttention-2, arXiv 2307.08691; exponentials to base 2).

A program has a tile of rows of one KV head and goes over its keys block by block. Its rows are queries times
the G query heads of that KV head, a query's heads following one another as they do in memory: so few queries
fill a tile, and each block of keys and values serves all G heads. Blocks that no row sees are skipped, and
only those on a mask's edge are masked: up to three loops.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import both, cdiv, dot, load, next_power_of_2, pallas_call, program_id, store
from pallas_kernels.op import Problem

_LOG2E = math.log2(math.e)
_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Config:
    """`block_q` rows (queries times heads of a group) and `block_k` keys, powers of two from 16 on."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


def heuristic(problem: Problem) -> Config:
    """Takes the largest tile whose accumulator stays in registers, smaller if programs are too few.

    With 128 columns, 128 rows over 8 warps are 64 registers of accumulator a thread and 32 of scores; on
    sm_90 two warp groups of 64 rows. Two stages of 64 keys leave room for two programs of 64 rows on an SM.
    """
    Tq, H, K = int(problem["Tq"]), int(problem["H"]), int(problem["K"])
    width, rows = _pad(int(problem["Dh"])), Tq * H // K
    if problem["dtype"] == "float32":  # no tensor cores: every operand passes through registers
        return Config(16 if rows <= 16 else 32, 32 if width <= 128 else 16, 4, 2)
    fill = int(problem["B"]) * K * cdiv(rows, 128)
    if width > 128:
        return Config(64, 32, 8, 2) if rows > 32 else Config(_pad(rows), 32, 4, 2)
    if fill >= 2 * 132:
        return Config(128, 64, 8 if width == 128 else 4, 3)
    return Config(64 if rows > 32 else _pad(rows), 64, 4, 2)


def space(problem: Problem) -> Iterable[Config]:
    """Rows, keys, warps and stages."""
    seen = {heuristic(problem)}
    for rows, keys in ((16, 64), (32, 64), (64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)):
        for warps in (4, 8):
            seen |= {Config(rows, keys, warps, s) for s in (2, 3, 4) if rows >= 16 * warps or warps == 4}
    return sorted(seen, key=lambda c: (c.block_q, c.block_k, c.num_warps, c.num_stages))


def _pad(width: int) -> int:
    return max(16, next_power_of_2(width))


def _tanh(x: jax.Array) -> jax.Array:
    """Returns tanh by one exponential, exact at infinities; absolute error about 2^-23, as of the scores."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2 * _LOG2E)) + 1.0)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
    config: Config,
    shape: tuple[int, int, int, int, int, int],
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    has_lengths: bool,
    q_offset: int,
) -> None:
    *optional, out_ref = refs
    sinks_ref: Any = optional[0] if has_sinks else None
    lengths_ref: Any = optional[-1] if has_lengths else None
    Tq, Tk, K, G, Dh, tiles = shape
    block_q, block_k = config.block_q, config.block_k
    batch, head = program_id(1) // K, program_id(1) % K
    # The last tiles have the most keys: they start first, so that the short ones fill the end.
    tile = tiles - 1 - program_id(0) if causal else program_id(0)
    row = tile * block_q + jnp.arange(block_q, dtype=jnp.int32)
    query, q_head = row // G, head * G + row % G
    position = query + q_offset
    column = jnp.arange(_pad(Dh), dtype=jnp.int32)
    inside = None if Dh == _pad(Dh) else (column < Dh)[None, :]
    kept = both((row < Tq * G)[:, None], inside)
    at = (batch, query[:, None], q_head[:, None], column[None, :])
    q = load(q_ref.at[at], mask=kept, other=0.0)

    end: Any = Tk
    if has_lengths:
        end = jnp.clip(load(lengths_ref.at[batch]), 0, Tk)
    first = tile * block_q // G + q_offset
    last = jnp.minimum((tile * block_q + block_q - 1) // G, Tq - 1) + q_offset
    # Blocks [start, stop) are seen by some row, [full_start, full_stop) of them whole by all.
    start: Any = 0
    full_start, stop, full_stop = start, end, end
    if causal:
        stop = jnp.maximum(jnp.minimum(end, last + 1), 0)
        full_stop = jnp.maximum(jnp.minimum(end, first + 1), 0)
    stop, full_stop = (stop + block_k - 1) // block_k, full_stop // block_k
    stop = stop * (first < end).astype(jnp.int32)  # none where all queries are padding
    if window is not None:
        start = jnp.maximum(first - window + 1, 0) // block_k
        full_start = (jnp.maximum(last - window + 1, 0) + block_k - 1) // block_k
        full_start = jnp.minimum(jnp.maximum(full_start, start), jnp.maximum(start, stop))
    full_stop = jnp.maximum(jnp.minimum(full_stop, stop), full_start)

    # Scores are kept in units of 1 / factor of an exponent of 2.
    factor = (scale if soft_cap is None else 1.0) * _LOG2E

    def body(block: jax.Array, carry: Any, masked: bool) -> Any:
        largest, total, out = carry
        key = block * block_k + jnp.arange(block_k, dtype=jnp.int32)
        index = (batch, key[:, None], head, column[None, :])
        mask = both((key < end)[:, None] if masked else None, inside)
        scores = dot(q, load(k_ref.at[index], mask=mask, other=0.0), trans_b=True)
        if soft_cap is not None:
            scores = soft_cap * _tanh(scores * (scale / soft_cap))
        if masked:
            seen = jnp.broadcast_to((key < end)[None, :], scores.shape)
            if causal:
                seen = seen & (key[None, :] <= position[:, None])
            if window is not None:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = jnp.where(seen, scores, -jnp.inf)
        highest = jnp.maximum(largest, jnp.max(scores, axis=1) * factor)
        weights = jnp.exp2(scores * factor - highest[:, None])
        shrink = jnp.exp2(largest - highest)
        total = total * shrink + jnp.sum(weights, axis=1)
        values = load(v_ref.at[index], mask=mask, other=0.0)
        return highest, total, out * shrink[:, None] + dot(weights.astype(values.dtype), values)

    carry = (
        jnp.full(block_q, _LOWEST, jnp.float32),
        jnp.zeros(block_q, jnp.float32),
        jnp.zeros((block_q, _pad(Dh)), jnp.float32),
    )
    if has_sinks:
        sink = load(sinks_ref.at[q_head], mask=row < Tq * G, other=0.0)
        carry = (jnp.maximum(sink * _LOG2E, _LOWEST), jnp.ones(block_q, jnp.float32), carry[2])
    edge, whole = functools.partial(body, masked=True), functools.partial(body, masked=False)
    if window is not None:
        carry = jax.lax.fori_loop(start, full_start, edge, carry)
    carry = jax.lax.fori_loop(full_start, full_stop, whole, carry)
    if causal or has_lengths or Tk % block_k:
        carry = jax.lax.fori_loop(full_stop, stop, edge, carry)
    _, total, out = carry
    seen = (total != 0) & (position < end)  # a NaN must show
    out = jnp.where(seen[:, None], out / jnp.where(seen, total, 1.0)[:, None], 0.0)
    store(out_ref.at[at], out.astype(out_ref.dtype), mask=kept)


def flash_attention_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    lengths: jax.Array | None = None,
    q_offset: int | None = None,
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `flash_attention_reference`."""
    B, Tq, H, Dh = q.shape
    Tk, K = k.shape[1:3]
    G = H // K
    tiles = cdiv(Tq * G, config.block_q)
    kernel = functools.partial(
        _kernel,
        config=config,
        shape=(Tq, Tk, K, G, Dh, tiles),
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        has_lengths=lengths is not None,
        q_offset=Tk - Tq if q_offset is None else q_offset,
    )
    arrays = [q, k, v, *(x for x in (sinks, lengths) if x is not None)]
    return pallas_call(
        kernel,
        name="flash_attention",
        grid=(tiles, B * K),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*arrays)
