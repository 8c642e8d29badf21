"""`grouped_matmul`: checks its arguments and runs an implementation by name."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, check_arrays, check_that
from pallas_kernels.group_specs import problem
from pallas_kernels.grouped_matmul import pallas_triton
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.specs import SPECS
from pallas_kernels.grouped_triton import sources, supports, triton_product
from pallas_kernels.groups import check_table
from pallas_kernels.op import Implementation, Op
from pallas_kernels.run import Options, run

OP = Op(
    name="grouped_matmul",
    reference=grouped_matmul_reference,
    implementations={
        "pallas_triton": Implementation.of(pallas_triton.grouped_matmul_pallas, pallas_triton),
        "triton_jit": Implementation.of(
            functools.partial(pallas_triton.grouped_matmul_pallas, product=triton_product),
            pallas_triton,
            sources=sources,
            supports=supports,
        ),
    },
    specs=SPECS,
    sizes=("P",),
)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    out_dtype: Any = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes `row_scale[p] · (x[rows[p]] @ w[e] + bias[e])` by slot p, e its expert's number.

    Args:
        x: `[R, D]`, w: `[E, D, F]`, of one dtype, bfloat16, float16 or float32.
        rows: int32 `[P]`, P a multiple of `block_m`; what is outside `[0, R)` is padding.
        block_expert: int32 `[P / block_m]`; num_blocks: int32 `[1]`. As `moe_permute` makes them; a table is
            checked by `pallas_kernels.groups.check_groups`, on the host, where its values are at hand.
        block_m: a power of two, 16 to 128.
        bias: `[E, F]`, of any of these dtypes; None for none, as "triton_jit" wants it.
        row_scale: float32 `[P]`, None for ones.
        out_dtype: None: x's; else bfloat16, float16 or float32.
        options: an implementation, "pallas_triton", "triton_jit" (through jax-triton, on a GPU only, with
            the same configurations) or "reference", and how it runs; see `Options`.

    Returns:
        `[P, F]`; padding and blocks past `num_blocks` are undefined.

    Raises:
        KernelError: shapes that disagree, no rows, an unsupported dtype or block_m.
    """
    arguments = {
        "x": (x, "R D", FLOATS),
        "w": (w, "E D F", (x.dtype,)),
        "rows": (rows, "P", (jnp.int32,)),
        "bias": (bias, "E F", FLOATS),
        "row_scale": (row_scale, "P", (jnp.float32,)),
    }
    sizes = check_arrays(OP.name, arguments)
    if out_dtype is not None:
        good = any(jnp.dtype(out_dtype) == jnp.dtype(dtype) for dtype in FLOATS)
        check_that(OP.name, "out_dtype", good, str(jnp.dtype(out_dtype)), "bfloat16, float16 or float32")
    check_table(OP.name, rows, block_expert, num_blocks, block_m)
    return run(
        OP,
        problem(sizes["P"], sizes["D"], sizes["F"], sizes["E"], block_m, x.dtype, biased=bias is not None),
        {
            **arrays_of(arguments),
            "block_expert": block_expert,
            "num_blocks": num_blocks,
            "block_m": block_m,
            "out_dtype": out_dtype,
        },
        **options,
    )
