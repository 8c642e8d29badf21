"""`moe_combine` as a Pallas kernel: a program adds up a few tokens' rows in registers, choice by choice."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, load, next_power_of_2, pallas_call, program_id, store
from pallas_kernels.op import Problem


@dataclass(frozen=True)
class Config:
    """`rows` tokens by `cols` columns a program, powers of two."""

    rows: int
    cols: int
    num_warps: int
    num_stages: int = 1


def heuristic(problem: Problem) -> Config:
    """Takes 16 bytes a thread and choice, and narrower programs while there are few tokens."""
    T, D = int(problem["T"]), int(problem["D"])
    lanes = 4 if problem["dtype"] == "float32" else 8
    warps = 1 if T <= 32 else 4
    return Config(1, min(32 * warps * lanes, max(16, next_power_of_2(D))), warps)


def space(problem: Problem) -> Iterable[Config]:
    """Columns and warps."""
    seen = {heuristic(problem)} | {
        Config(rows, cols, warps)
        for rows in (1, 2, 4)
        for cols in (256, 512, 1024, 2048)
        for warps in (1, 2, 4)
        if 2 <= rows * cols // (32 * warps) <= 32
    }
    return sorted(seen, key=lambda c: (c.rows, c.cols, c.num_warps))


def sum_rows(y_ref: Any, slot_ref: Any, token: jax.Array, col: jax.Array, T: int, k: int) -> jax.Array:
    """Sums columns of k rows of y for each of some tokens, float32 `[tokens, columns]`; 0 from token T on.

    Args:
        y_ref: `[P, D]`; slot_ref: `[T · k]`, or None for rows j · T + token.
    """
    P, D = y_ref.shape
    total = jnp.zeros((token.shape[0], col.shape[0]), jnp.float32)
    for j in range(k):
        slot = j * T + token
        if slot_ref is not None:
            slot = load(slot_ref.at[token * k + j], mask=token < T, other=P)
        filled = (token < T) & (slot >= 0) & (slot < P)
        mask = filled[:, None] & (col < D)[None, :]
        row = load(y_ref.at[slot[:, None], col[None, :]], mask=mask, other=0.0)
        total = total + row.astype(jnp.float32)
    return total


def _kernel(y_ref: Any, slot_ref: Any, out_ref: Any, *, config: Config, T: int, k: int) -> None:
    token = program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    col = program_id(1) * config.cols + jnp.arange(config.cols, dtype=jnp.int32)
    total = sum_rows(y_ref, slot_ref, token, col, T, k)
    mask = (token < T)[:, None] & (col < y_ref.shape[1])[None, :]
    store(out_ref.at[token[:, None], col[None, :]], total.astype(out_ref.dtype), mask=mask)


def moe_combine_pallas(
    y: jax.Array, slot_of: jax.Array, *, config: Config, interpret: bool | None = None
) -> jax.Array:
    """See `moe_combine_reference`."""
    (T, k), D = slot_of.shape, y.shape[1]
    return pallas_call(
        functools.partial(_kernel, config=config, T=T, k=k),
        name="moe_combine",
        grid=(cdiv(T, config.rows), cdiv(D, config.cols)),
        out_shape=jax.ShapeDtypeStruct((T, D), y.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(y, slot_of.reshape(-1))
