"""`moe_permute`: checks its arguments and runs an implementation by name."""

from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.errors import arrays_of, check_arrays, check_that
from pallas_kernels.groups import Permutation, check_block_m
from pallas_kernels.moe_permute import pallas_triton
from pallas_kernels.moe_permute.reference import moe_permute_reference
from pallas_kernels.moe_permute.specs import SPECS
from pallas_kernels.op import Implementation, Op, make_problem
from pallas_kernels.run import Options, run

OP = Op(
    name="moe_permute",
    reference=moe_permute_reference,
    implementations={"pallas_triton": Implementation.of(pallas_triton.moe_permute_pallas, pallas_triton)},
    specs=SPECS,
    sizes=("A",),
)

_MOST_EXPERTS = 4096


def moe_permute(
    ids: jax.Array,
    *,
    num_experts: int,
    block_m: int,
    weights: jax.Array | None = None,
    **options: Unpack[Options],
) -> Permutation:
    """Sorts assignments stably by expert into blocks; see `moe_permute_reference`.

    Args:
        ids: int32 `[T, k]`; an id outside `[0, num_experts)` (another device's expert) gets no slot.
        num_experts: of this device, at most 4096.
        block_m: a power of two, 16 to 128.
        weights: float32 `[T, k]`.
        options: an implementation, "pallas_triton" or "reference", and how it runs; see `Options`.

    Raises:
        KernelError: no tokens, ids that are not int32, an unsupported block_m or number of experts.
    """
    arguments = {"ids": (ids, "T k", (jnp.int32,)), "weights": (weights, "T k", (jnp.float32,))}
    sizes = check_arrays(OP.name, arguments)
    within = 1 <= num_experts <= _MOST_EXPERTS
    check_that(OP.name, "num_experts", within, num_experts, f"1 to {_MOST_EXPERTS}")
    check_block_m(OP.name, block_m)
    return run(
        OP,
        make_problem(A=sizes["T"] * sizes["k"], E=num_experts, block_m=block_m),
        {**arrays_of(arguments), "num_experts": num_experts, "block_m": block_m},
        **options,
    )
