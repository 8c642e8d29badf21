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


def _kernel(*refs: Any, config: Config, T: int, k: int, weighted: bool) -> None:
    y_ref, slot_ref, out_ref = refs[0], refs[1], refs[-1]
    P, D = y_ref.shape
    token = program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    col = program_id(1) * config.cols + jnp.arange(config.cols, dtype=jnp.int32)
    total = jnp.zeros((config.rows, config.cols), jnp.float32)
    for j in range(k):
        slot = load(slot_ref.at[token * k + j], mask=token < T, other=P)
        filled = (slot >= 0) & (slot < P)
        mask = filled[:, None] & (col < D)[None, :]
        row = load(y_ref.at[slot[:, None], col[None, :]], mask=mask, other=0.0).astype(jnp.float32)
        if weighted:
            row = row * load(refs[2].at[token * k + j], mask=filled, other=0.0)[:, None]
        total = total + row
    mask = (token < T)[:, None] & (col < D)[None, :]
    store(out_ref.at[token[:, None], col[None, :]], total.astype(out_ref.dtype), mask=mask)


def moe_combine_pallas(
    y: jax.Array,
    slot_of: jax.Array,
    weights: jax.Array | None = None,
    *,
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `moe_combine_reference`."""
    (T, k), D = slot_of.shape, y.shape[1]
    inputs = [y, slot_of.reshape(-1)] + ([] if weights is None else [weights.reshape(-1)])
    return pallas_call(
        functools.partial(_kernel, config=config, T=T, k=k, weighted=weights is not None),
        name="moe_combine",
        grid=(cdiv(T, config.rows), cdiv(D, config.cols)),
        out_shape=jax.ShapeDtypeStruct((T, D), y.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*inputs)
