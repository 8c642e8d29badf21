"""`rms_norm` as a Pallas kernel: a program normalises a few whole rows, held in registers. Residuals that are
sums of rows it makes first."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, load, next_power_of_2, pallas_call, program_id, store
from pallas_kernels.moe_combine.pallas_triton import sum_rows
from pallas_kernels.op import Problem


@dataclass(frozen=True)
class Config:
    """`rows` per program, a power of two."""

    rows: int
    num_warps: int
    num_stages: int = 1


def heuristic(problem: Problem) -> Config:
    """Returns one row a program until the card is full; about 16 elements a thread, and with sums 8."""
    T, D, lanes = int(problem["T"]), int(problem["D"]), 8 if "k" in problem else 16
    rows = 1 if T <= 1024 or "k" in problem else 4
    return Config(rows, num_warps=max(1, min(8, rows * next_power_of_2(D) // (32 * lanes))))


def space(problem: Problem) -> Iterable[Config]:
    """Rows and warps."""
    seen = {heuristic(problem)} | {Config(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8)}
    return sorted(seen, key=lambda c: (c.rows, c.num_warps))


def _kernel(
    x_ref: Any, w_ref: Any, *refs: Any, rows: int, T: int, D: int, eps: float, k: int, kind: str, biased: bool
) -> None:
    *given, out_ref, total_ref = refs if k else (*refs, None)
    bias_ref = given.pop() if biased else None
    row = program_id(0) * rows + jnp.arange(rows)
    col = jnp.arange(next_power_of_2(D))
    mask = (row < T)[:, None] & (col < D)[None, :]
    at = (row[:, None], col[None, :])
    x = load(x_ref.at[at], mask=mask, other=0.0)
    if k:
        slot_ref = given[1] if len(given) > 1 else None
        x = x + sum_rows(given[0], slot_ref, row, col, T, k).astype(x.dtype)
        store(total_ref.at[at], x, mask=mask)
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = jnp.where(mask, wide - (jnp.sum(wide, axis=1) / D)[:, None], 0.0)
    scale = jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) / D + eps)
    w = load(w_ref.at[col], mask=col < D, other=0.0).astype(x.dtype if kind == "rms" else jnp.float32)
    place = out_ref.at[at]
    if kind == "rms":
        out = (wide * scale[:, None]).astype(x.dtype) * w[None, :]
    else:
        w = w + 1.0 if kind == "rms_unit_offset" else w
        out = wide * scale[:, None] * w[None, :]
        if bias_ref is not None:
            out += load(bias_ref.at[col], mask=col < D, other=0.0).astype(jnp.float32)[None, :]
    store(place, out.astype(x.dtype), mask=mask)


def rms_norm_pallas(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    slot_of: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    kind: str = "rms",
    config: Config,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `rms_norm_reference`."""
    T, D = x.shape
    rest = [] if slot_of is None else [slot_of.reshape(-1)]
    rest += [] if bias is None else [bias]
    k = 0 if residual is None else residual.size // x.size if slot_of is None else slot_of.shape[1]
    sizes: dict[str, Any] = {"rows": config.rows, "T": T, "D": D, "eps": eps, "k": k}
    kernel = functools.partial(_kernel, **sizes, kind=kind, biased=bias is not None)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pallas_call(
        kernel,
        name="rms_norm_sum" if k > 1 else "rms_norm_residual" if k else "rms_norm",
        grid=(cdiv(T, config.rows),),
        out_shape=[shape] * (2 if k else 1),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if residual is not None:
        out, total = call(x, weight, residual.reshape(-1, D), *rest)
        return out, total
    return call(x, weight, *rest)[0], x
