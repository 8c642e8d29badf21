"""`moe_combine`: checks its arguments and runs an implementation by name."""

from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, check_arrays
from pallas_kernels.moe_combine import pallas_triton
from pallas_kernels.moe_combine.reference import moe_combine_reference
from pallas_kernels.moe_combine.specs import SPECS
from pallas_kernels.op import Implementation, Op, make_problem
from pallas_kernels.run import Options, run

OP = Op(
    name="moe_combine",
    reference=moe_combine_reference,
    implementations={"pallas_triton": Implementation.of(pallas_triton.moe_combine_pallas, pallas_triton)},
    specs=SPECS,
    sizes=("T", "P"),
)


def moe_combine(y: jax.Array, slot_of: jax.Array, **options: Unpack[Options]) -> jax.Array:
    """Computes `Σ_j y[slot_of[t, j]]` for each token t; see `moe_combine_reference`.

    Args:
        y: `[P, D]`, bfloat16, float16 or float32; what its padding slots hold does not matter, NaN included.
        slot_of: int32 `[T, k]`; a slot outside `[0, P)` contributes nothing.
        options: an implementation, "pallas_triton" or "reference", and how it runs; see `Options`.

    Returns:
        `[T, D]` in y's dtype, the same bits for the same input.

    Raises:
        KernelError: shapes that disagree, no tokens, an unsupported dtype.
    """
    arguments = {"y": (y, "P D", FLOATS), "slot_of": (slot_of, "T k", (jnp.int32,))}
    sizes = check_arrays(OP.name, arguments)
    return run(OP, make_problem(**sizes, dtype=y.dtype), arrays_of(arguments), **options)
