"""`grouped_swiglu`: checks its arguments and runs an implementation by name."""

import functools
from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, check_arrays
from pallas_kernels.group_specs import problem
from pallas_kernels.grouped_swiglu import pallas_triton
from pallas_kernels.grouped_swiglu.reference import grouped_swiglu_reference
from pallas_kernels.grouped_swiglu.specs import SPECS
from pallas_kernels.grouped_triton import sources, supports, triton_product
from pallas_kernels.groups import Activation, check_gated, check_table
from pallas_kernels.op import Implementation, Op
from pallas_kernels.run import Options, run

OP = Op(
    name="grouped_swiglu",
    reference=grouped_swiglu_reference,
    implementations={
        "pallas_triton": Implementation.of(pallas_triton.grouped_swiglu_pallas, pallas_triton),
        "triton_jit": Implementation.of(
            functools.partial(pallas_triton.grouped_swiglu_pallas, product=triton_product),
            pallas_triton,
            sources=sources,
            supports=supports,
        ),
    },
    specs=SPECS,
    sizes=("P",),
)


def grouped_swiglu(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: Activation = "silu",
    **options: Unpack[Options],
) -> jax.Array:
    """Computes `act(x[rows[p]] @ gate[e] + gate_bias[e]) · (x[rows[p]] @ up[e] + up_bias[e])` by slot p.

    Args:
        x: `[R, D]`, gate, up: `[E, D, F]`, of one dtype, bfloat16, float16 or float32.
        rows: int32 `[P]`, P a multiple of `block_m`; what is outside `[0, R)` is padding.
        block_expert: int32 `[P / block_m]`; num_blocks: int32 `[1]`. As `moe_permute` makes them; a table is
            checked by `pallas_kernels.groups.check_groups`, on the host, where its values are at hand.
        block_m: a power of two, 16 to 128.
        gate_bias, up_bias: `[E, F]`, of any of these dtypes; None for none, as "triton_jit" wants them.
        activation: "silu", "gelu", "gelu_tanh" or "relu"; or a `pallas_kernels.groups.ClampedSwiglu`, which
            "triton_jit" does not have.
        options: an implementation, "pallas_triton", "triton_jit" (through jax-triton, on a GPU only, with
            the same configurations) or "reference", and how it runs; see `Options`.

    Returns:
        `[P, F]` in x's dtype; padding and blocks past `num_blocks` are undefined.

    Raises:
        KernelError: shapes that disagree, no rows, an unsupported dtype, block_m or activation.
    """
    arguments = {
        "x": (x, "R D", FLOATS),
        "gate": (gate, "E D F", (x.dtype,)),
        "up": (up, "E D F", (x.dtype,)),
        "gate_bias": (gate_bias, "E F", FLOATS),
        "up_bias": (up_bias, "E F", FLOATS),
        "rows": (rows, "P", (jnp.int32,)),
    }
    sizes = check_arrays(OP.name, arguments)
    check_table(OP.name, rows, block_expert, num_blocks, block_m)
    check_gated(OP.name, activation, gate_bias, up_bias)
    shape = sizes["P"], sizes["D"], sizes["F"], sizes["E"], block_m, x.dtype
    return run(
        OP,
        problem(*shape, activation=activation, biased=gate_bias is not None),
        {
            **arrays_of(arguments),
            "block_expert": block_expert,
            "num_blocks": num_blocks,
            "block_m": block_m,
            "activation": activation,
        },
        **options,
    )
