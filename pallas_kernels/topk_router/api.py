"""`topk_router`: checks its arguments and runs an implementation by name."""

from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, check_arrays, check_that
from pallas_kernels.op import Implementation, Op, make_problem
from pallas_kernels.run import Options, run
from pallas_kernels.topk_router import pallas_triton
from pallas_kernels.topk_router.reference import topk_router_reference
from pallas_kernels.topk_router.specs import SPECS

MAX_EXPERTS = 4096
MAX_K = 16

OP = Op(
    name="topk_router",
    reference=topk_router_reference,
    implementations={"pallas_triton": Implementation.of(pallas_triton.topk_router_pallas, pallas_triton)},
    specs=SPECS,
    sizes=("T",),
)


def topk_router(
    logits: jax.Array,
    *,
    k: int,
    scoring: str = "softmax",
    bias: jax.Array | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    group_score: str = "max",
    renormalize: bool = False,
    norm_min: float = 0.0,
    scale: float = 1.0,
    valid: jax.Array | None = None,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]:
    """Ids int32 `[T, k]` and weights float32 `[T, k]` of the chosen experts; see `topk_router_reference`.

    Args:
        logits: `[T, E]`, or parts `[S, T, E]` of them, bfloat16, float16 or float32, E at most 4096; bias:
            float32 `[E]`.
        valid: bool `[T]`.
        k: at most 16, and at most the experts in `top_groups` groups.
        options: an implementation, "pallas_triton" or "reference", and how it runs; see `Options`.

    Raises:
        KernelError: shapes that disagree, no tokens, an unsupported dtype, a choice that is not possible.
    """
    arguments = {
        "logits": (logits, "T E" if logits.ndim < 3 else "S T E", FLOATS),
        "bias": (bias, "E", (jnp.float32,)),
        "valid": (valid, "T", (jnp.bool_,)),
    }
    sizes = check_arrays(OP.name, arguments)
    E = sizes["E"]
    check_that(OP.name, "logits", E <= MAX_EXPERTS, f"{E} experts", f"at most {MAX_EXPERTS}")
    check_that(OP.name, "k", 1 <= k <= min(E, MAX_K), k, f"1 to {min(E, MAX_K)} of {E} experts")
    check_that(OP.name, "scoring", scoring in ("softmax", "sigmoid"), repr(scoring), "softmax or sigmoid")
    check_that(OP.name, "group_score", group_score in ("max", "top2"), repr(group_score), "max or top2")
    check_that(OP.name, "norm_min", norm_min >= 0, norm_min, "a number from 0 on")
    _check_groups(E, k, num_groups, top_groups, group_score)
    facts = {"dtype": logits.dtype, "scoring": scoring, "bias": bias is not None}
    return run(
        OP,
        make_problem(**sizes, k=k, num_groups=num_groups or 1, **facts),
        {
            **arrays_of(arguments),
            "k": k,
            "scoring": scoring,
            "num_groups": num_groups,
            "top_groups": top_groups,
            "group_score": group_score,
            "renormalize": renormalize,
            "norm_min": norm_min,
            "scale": scale,
        },
        **options,
    )


def _check_groups(E: int, k: int, num_groups: int | None, top_groups: int | None, score: str) -> None:
    together = (num_groups is None) == (top_groups is None)
    check_that(OP.name, "top_groups", together, top_groups, "num_groups and top_groups, or neither")
    if num_groups is None or top_groups is None:
        return
    fits = num_groups >= 1 and E % num_groups == 0
    check_that(OP.name, "num_groups", fits, num_groups, f"a divisor of {E} experts")
    check_that(OP.name, "top_groups", 1 <= top_groups <= num_groups, top_groups, f"1 to {num_groups}")
    size = E // num_groups
    check_that(OP.name, "num_groups", size >= 2 or score == "max", num_groups, "two experts a group for top2")
    inside = top_groups * size
    check_that(OP.name, "k", k <= inside, k, f"at most the {inside} experts of {top_groups} groups")
