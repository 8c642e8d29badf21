"""`topk_router` as a Pallas kernel: a program holds a few rows of logits in registers and picks k times."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, load, next_power_of_2, pallas_call, program_id, store
from pallas_kernels.op import Problem
from pallas_kernels.topk_router.reference import SMALLEST_SUM

_TAKEN = -(2**31)
"""Below the key of every number, -inf's included."""


@dataclass(frozen=True)
class Config:
    """`rows` per program, a power of two."""

    rows: int
    num_warps: int
    num_stages: int = 1


def heuristic(problem: Problem) -> Config:
    """Takes a warp's width to 16 logits a thread; one warp, so that reductions need no barrier. Of more than
    512 experts a program has one row, and as many warps as hold it so.

    The picks follow one another, so a program's time is their latency: few rows, one per thread group, and
    as many programs as there are. Several rows in a warp pick side by side.
    """
    T, width = int(problem["T"]), _width(int(problem["E"]), int(problem["num_groups"]))
    rows = max(1, (128 if T <= 1024 else 256) // width)
    warps = 1 if int(problem["E"]) <= 512 else min(16, width // 512)
    return Config(min(rows, next_power_of_2(T)), num_warps=warps)


def space(problem: Problem) -> Iterable[Config]:
    """Rows and warps, up to 32 logits a thread."""
    width = _width(int(problem["E"]), int(problem["num_groups"]))
    tiles = (Config(r, w) for r in (1, 2, 4, 8, 16, 32, 64) for w in (1, 2, 4, 8))
    seen = {heuristic(problem)} | {
        c for c in tiles if 32 * c.num_warps <= c.rows * width <= 1024 * c.num_warps
    }
    return sorted(seen, key=lambda c: (c.rows, c.num_warps))


def _width(E: int, groups: int) -> int:
    """Columns of a row in registers: groups and their experts, each filled up to a power of two."""
    return next_power_of_2(groups) * next_power_of_2(E // groups)


def _ordered(x: jax.Array) -> jax.Array:
    """Returns int32 in the order of the floats; NaN as -inf, -0 as 0. All results are above `_TAKEN`."""
    x = jnp.where(x != x, -jnp.inf, jnp.where(x == 0, 0.0, x))
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _pick(keys: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first highest key of each row: its index `[rows]`, and where it stands `[rows, width]`."""
    best = jnp.argmax(keys, axis=1).astype(jnp.int32)
    return best, column[None, :] == best[:, None]


def _kernel(
    x_ref: Any,
    *refs: Any,
    rows: int,
    T: int,
    E: int,
    k: int,
    scoring: str,
    has_bias: bool,
    groups: int,
    top_groups: int,
    by_two: bool,
    renormalize: bool,
    norm_min: float,
    scale: float,
) -> None:
    *given, ids_ref, weights_ref = refs
    bias_ref, valid_ref = (given[:1], given[1:]) if has_bias else ([], given)
    size, size_pad, groups_pad = E // groups, next_power_of_2(E // groups), next_power_of_2(groups)
    column = jnp.arange(groups_pad * size_pad, dtype=jnp.int32)
    # Without gaps in a row the index is the column itself, which lets Triton load 16 bytes at a time.
    expert = column if size == size_pad else column // size_pad * size + column % size_pad
    real = column < E
    if size != size_pad:
        real = (column // size_pad < groups) & (column % size_pad < size)
    row = program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    mask = (row < T)[:, None] & real[None, :]
    x = jnp.zeros(mask.shape, jnp.float32)
    for part in range(x_ref.shape[0]):
        at = x_ref.at[part, row[:, None], expert[None, :]]
        x = x + load(at, mask=mask, other=-jnp.inf).astype(jnp.float32)
    # Rows past T: anything finite.
    x = jnp.where((row < T)[:, None], x, 0.0)

    if scoring == "softmax":
        scores = jnp.exp(x - jnp.max(x, axis=1)[:, None])
        # A NaN must reach every score; a maximum may skip it, the sum does not.
        scores = scores / jnp.sum(scores, axis=1)[:, None]
    else:
        scores = 1.0 / (1.0 + jnp.exp(-x))
    biased = x
    if has_bias:
        biased = scores + load(bias_ref[0].at[expert], mask=real, other=0.0)[None, :]
    keys = jnp.where(real[None, :], _ordered(biased), _TAKEN)
    if top_groups < groups:
        keys = _keep_groups(keys, biased if has_bias else scores, groups, top_groups, by_two)

    slots = next_power_of_2(k)
    slot = jnp.arange(slots, dtype=jnp.int32)

    def body(i: jax.Array, carry: Any) -> Any:
        keys, ids, weights = carry
        best, here = _pick(keys, column)
        weight = jnp.sum(jnp.where(here, scores, 0.0), axis=1)
        chosen = best if size == size_pad else best // size_pad * size + best % size_pad
        ids = jnp.where(slot[None, :] == i, chosen[:, None], ids)
        weights = jnp.where(slot[None, :] == i, weight[:, None], weights)
        return jnp.where(here, _TAKEN, keys), ids, weights

    start = (keys, jnp.zeros((rows, slots), jnp.int32), jnp.zeros((rows, slots), jnp.float32))
    _, ids, weights = jax.lax.fori_loop(0, k, body, start)
    if renormalize:
        total = jnp.sum(weights, axis=1)[:, None] + SMALLEST_SUM
        weights = weights / (jnp.maximum(total, norm_min) if norm_min else total)
    weights = weights * scale
    if valid_ref:
        valid = load(valid_ref[0].at[row], mask=row < T, other=0)[:, None] != 0
        ids, weights = jnp.where(valid, ids, E), jnp.where(valid, weights, 0.0)
    kept = (row < T)[:, None] & (slot < k)[None, :]
    out = (row[:, None], slot[None, :])
    store(ids_ref.at[out], ids, mask=kept)
    store(weights_ref.at[out], weights, mask=kept)


def _keep_groups(keys: jax.Array, biased: jax.Array, groups: int, top_groups: int, by_two: bool) -> jax.Array:
    """Returns `keys` with `_TAKEN` outside of each row's best groups."""
    rows, width = keys.shape
    shape = (rows, next_power_of_2(groups), width // next_power_of_2(groups))
    grouped = keys.reshape(shape)
    if by_two:
        floats = jnp.where(grouped == _TAKEN, -jnp.inf, biased.reshape(shape))
        floats = jnp.where(floats != floats, -jnp.inf, floats)
        first = jnp.argmax(grouped, axis=2).astype(jnp.int32)
        inside = jnp.arange(shape[2], dtype=jnp.int32)
        rest = jnp.where(inside[None, None, :] == first[:, :, None], -jnp.inf, floats)
        score = _ordered(jnp.max(floats, axis=2) + jnp.max(rest, axis=2))
    else:
        score = jnp.max(grouped, axis=2)
    group = jnp.arange(shape[1], dtype=jnp.int32)
    score = jnp.where((group < groups)[None, :], score, _TAKEN)

    def body(i: jax.Array, carry: Any) -> Any:
        score, kept = carry
        _, here = _pick(score, group)
        return jnp.where(here, _TAKEN, score), kept | here.astype(jnp.int32)

    start = (score, jnp.zeros(score.shape, jnp.int32))
    _, kept = jax.lax.fori_loop(0, top_groups, body, start)
    return jnp.where((kept > 0)[:, :, None], grouped, _TAKEN).reshape(keys.shape)


def topk_router_pallas(
    logits: jax.Array,
    *,
    k: int,
    scoring: str = "softmax",
    bias: jax.Array | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    group_score: str = "max",
    renormalize: bool = False,
    norm_min: float = 0.0,
    scale: float = 1.0,
    valid: jax.Array | None = None,
    config: Config,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `topk_router_reference`."""
    *_, T, E = logits.shape
    logits, groups = logits.reshape(-1, T, E), num_groups or 1
    kernel = functools.partial(
        _kernel,
        rows=config.rows,
        T=T,
        E=E,
        k=k,
        scoring=scoring,
        has_bias=bias is not None,
        groups=groups,
        top_groups=top_groups or groups,
        by_two=group_score == "top2",
        renormalize=renormalize,
        norm_min=norm_min,
        scale=scale,
    )
    # As integers, which is one small kernel for all layers.
    flags = None if valid is None else valid.astype(jnp.int32)
    arrays = [array for array in (logits, bias, flags) if array is not None]
    ids, weights = pallas_call(
        kernel,
        name="topk_router",
        grid=(cdiv(T, config.rows),),
        out_shape=[jax.ShapeDtypeStruct((T, k), jnp.int32), jax.ShapeDtypeStruct((T, k), jnp.float32)],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*arrays)
    return ids, weights
