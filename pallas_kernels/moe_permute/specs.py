"""Named shapes of `moe_permute`: the routings of each model."""

import jax
import jax.numpy as jnp

from pallas_kernels.group_specs import CASES, spec_name, spec_tags
from pallas_kernels.groups import block_m_for, padded_rows
from pallas_kernels.models import NARROW, ModelShape, expert_ids
from pallas_kernels.op import Cost, Spec, make_problem


def _spec(model: ModelShape, phase: str, tokens: int, routing: str) -> Spec:
    A, E = tokens * model.top_k, model.experts
    block_m = block_m_for(max(A * E // model.total_experts, 1), E)
    P = padded_rows(A, E, block_m)

    def make(key: jax.Array) -> dict[str, jax.Array]:
        ids = expert_ids(model, tokens, routing)
        return {"ids": jnp.asarray(ids), "weights": jax.random.uniform(key, ids.shape)}

    return Spec(
        name=spec_name(model, phase, tokens, routing),
        make=make,
        static={"num_experts": E, "block_m": block_m},
        problem=make_problem(A=A, E=E, block_m=block_m),
        # An id is compared with every expert by this method, but counting and placing need two steps each.
        cost=Cost(flops=4.0 * A, bytes=4.0 * (3 * A + 4 * P + P // block_m + E + 1), unit="float32"),
        tags=spec_tags(model, phase, tokens, routing),
    )


SPECS = tuple(_spec(*case) for case in CASES if case[3] == "balanced" or case[2] > 64)
SPECS += tuple(
    _spec(model, phase, tokens, "balanced")
    for model in NARROW
    for phase, tokens in (("decode", 64), ("prefill", 1024))
)
