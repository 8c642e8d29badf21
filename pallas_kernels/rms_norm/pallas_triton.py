"""`rms_norm` as a Pallas kernel: a program normalises a few whole rows, held in registers."""

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
    """`rows` per program, a power of two."""

    rows: int
    num_warps: int
    num_stages: int = 1


def heuristic(problem: Problem) -> Config:
    """Returns one row a program until the card is full; about 16 elements a thread."""
    T, D = int(problem["T"]), int(problem["D"])
    rows = 1 if T <= 1024 else 4
    return Config(rows, num_warps=max(1, min(8, rows * next_power_of_2(D) // (32 * 16))))


def space(problem: Problem) -> Iterable[Config]:
    """Rows and warps."""
    seen = {heuristic(problem)} | {Config(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8)}
    return sorted(seen, key=lambda c: (c.rows, c.num_warps))


def _kernel(x_ref: Any, w_ref: Any, *refs: Any, rows: int, T: int, D: int, eps: float, add: bool) -> None:
    out_ref = refs[1] if add else refs[0]
    row = program_id(0) * rows + jnp.arange(rows)
    col = jnp.arange(next_power_of_2(D))
    mask = (row < T)[:, None] & (col < D)[None, :]
    at = (row[:, None], col[None, :])
    x = load(x_ref.at[at], mask=mask, other=0.0)
    if add:
        x = x + load(refs[0].at[at], mask=mask, other=0.0)
        store(refs[2].at[at], x, mask=mask)
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) / D + eps)
    w = load(w_ref.at[col], mask=col < D, other=0.0).astype(x.dtype)
    store(out_ref.at[at], (wide * scale[:, None]).astype(x.dtype) * w[None, :], mask=mask)


def rms_norm_pallas(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    *,
    eps: float,
    config: Config,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `rms_norm_reference`."""
    T, D = x.shape
    add = residual is not None
    kernel = functools.partial(_kernel, rows=config.rows, T=T, D=D, eps=eps, add=add)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pallas_call(
        kernel,
        name="rms_norm_residual" if add else "rms_norm",
        grid=(cdiv(T, config.rows),),
        out_shape=[shape] * (2 if add else 1),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if add:
        out, total = call(x, weight, residual)
        return out, total
    return call(x, weight)[0], x
