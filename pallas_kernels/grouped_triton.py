"""`grouped_tiles`' products as a `@triton.jit` kernel through jax-triton: the same tiles.

Pallas's Triton backend is on its way out (docs/decisions.md); this path does not need it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, triton_call
from pallas_kernels.grouped_tiles import Config
from pallas_kernels.op import TRITON_TYPES, Problem, Spec, TritonSource


def source(
    x: Any,
    weight: Any,
    rows: Any,
    config: Config,
    *,
    block_m: int,
    scaled: bool,
    activation: str | None,
    out_dtype: Any,
) -> TritonSource:
    """Returns the kernel for x `[R, D]`, weights `[E, D, F]` and rows `[P]`, as compiled and launched."""
    (R, D), (P,), F = x.shape, rows.shape, weight.shape[2]
    wide, out = (TRITON_TYPES[str(jnp.dtype(dtype))] for dtype in (x.dtype, out_dtype))
    sizes = {"R": R, "D": D, "F": F, "BLOCK_M": block_m}
    tiles = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": config.group}
    tables = {"rows_ptr": "*i32", "block_ptr": "*i32", "num_ptr": "*i32"}
    pointers = {"x_ptr": wide, "w_ptr": wide, "up_ptr": wide, **tables}
    return TritonSource(
        name="grouped_product_kernel",
        module="pallas_kernels.grouped_triton_kernel",
        signature={**pointers, "scale_ptr": "*fp32" if scaled else "*i32", "out_ptr": out},
        constants={**sizes, **tiles, "ACT": activation or "", "SCALED": scaled},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        grid=(P // block_m * cdiv(F, config.block_n),),
    )


def triton_product(
    name: str,
    x: jax.Array,
    matrices: Sequence[jax.Array],
    table: tuple[jax.Array, jax.Array, jax.Array],
    config: Config,
    *,
    row_scale: jax.Array | None = None,
    out_dtype: Any,
    interpret: bool | None,
    **static: Any,
) -> jax.Array:
    """See `grouped_tiles.grouped_product`; `interpret` is not possible.

    Raises:
        KernelError: there is no GPU, jax-triton is not installed, or interpretation is asked for.
    """
    w, up = matrices[0], matrices[-1]  # one alone takes both places, as rows take a missing scale's
    static = {"activation": None, "scaled": row_scale is not None, "out_dtype": out_dtype, **static}
    return triton_call(
        name,
        source(x, w, table[0], config, **static),
        (x, w, up, *table, table[0] if row_scale is None else row_scale),
        out_shape=jax.ShapeDtypeStruct((table[0].shape[0], w.shape[2]), out_dtype),
        interpret=interpret,
    )


def supports(problem: Problem) -> str | None:
    """Returns why the twin does not take a problem: biases and activations of gate and up are Pallas's."""
    return "no biases and a named activation" if {"bias", "activation"} & problem.keys() else None


def sources(spec: Spec, config: Config) -> list[TritonSource]:
    """Returns the kernel of a spec of either operation, for the static report."""
    arrays: dict[str, Any] = dict(spec.abstract)
    static = {"activation": None, "out_dtype": arrays["x"].dtype, "scaled": "row_scale" in arrays}
    weight = arrays.get("gate", arrays.get("w"))
    return [source(arrays["x"], weight, arrays["rows"], config, **{**static, **spec.static})]
