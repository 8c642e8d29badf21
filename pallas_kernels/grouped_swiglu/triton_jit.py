"""`grouped_swiglu` as a `@triton.jit` kernel through jax-triton: the twin of `pallas_triton`, same tiles.

Pallas's Triton backend is on its way out (docs/decisions.md); this path does not need it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, triton_call
from pallas_kernels.grouped_swiglu.pallas_triton import Config
from pallas_kernels.op import TRITON_TYPES, Spec, TritonSource


def source(
    R: int, D: int, F: int, P: int, block_m: int, activation: str, dtype: Any, config: Config
) -> TritonSource:
    """Returns the kernel for x `[R, D]` and P slots, as it is compiled and launched."""
    wide = TRITON_TYPES[str(jnp.dtype(dtype))]
    pointers = {"x_ptr": wide, "gate_ptr": wide, "up_ptr": wide}
    pointers |= {"rows_ptr": "*i32", "block_ptr": "*i32", "num_ptr": "*i32", "out_ptr": wide}
    return TritonSource(
        name="grouped_swiglu_kernel",
        module="pallas_kernels.grouped_swiglu.triton_kernel",
        signature=pointers,
        constants={
            "R": R,
            "D": D,
            "F": F,
            "BLOCK_M": block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP": config.group,
            "ACT": activation,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        grid=(P // block_m * cdiv(F, config.block_n),),
    )


def grouped_swiglu_triton(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    activation: str = "silu",
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `grouped_swiglu_reference`. Undefined elements are not written. `interpret` is not possible.

    Raises:
        KernelError: jax-triton or a CUDA jaxlib is not installed, or interpretation is asked for.
    """
    (R, D), (P, F) = x.shape, (rows.shape[0], gate.shape[2])
    return triton_call(
        "grouped_swiglu",
        source(R, D, F, P, block_m, activation, x.dtype, config),
        (x, gate, up, rows, block_expert, num_blocks),
        out_shape=jax.ShapeDtypeStruct((P, F), x.dtype),
        interpret=interpret,
    )


def sources(spec: Spec, config: Config) -> list[TritonSource]:
    """Returns the kernel of a spec, for the static report."""
    shapes, static = spec.abstract, spec.static
    (R, D), P, F = shapes["x"].shape, shapes["rows"].shape[0], shapes["gate"].shape[2]
    return [source(R, D, F, P, static["block_m"], static["activation"], shapes["x"].dtype, config)]
