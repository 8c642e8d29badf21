"""Named shapes of `moe_permute`: the routings of each model."""

import jax
import jax.numpy as jnp

from pallas_kernels.group_specs import CASES, spec_groups, spec_name, spec_tags
from pallas_kernels.models import ModelShape, expert_ids
from pallas_kernels.op import Cost, Spec, make_problem


def _spec(model: ModelShape, phase: str, tokens: int, routing: str) -> Spec:
    groups = spec_groups(model, tokens, routing)
    A, E, P = groups.slot_of.size, model.experts, len(groups.row_assignment)

    def make(key: jax.Array) -> dict[str, jax.Array]:
        ids = expert_ids(model, tokens, routing)
        return {"ids": jnp.asarray(ids), "weights": jax.random.uniform(key, ids.shape)}

    return Spec(
        name=spec_name(model, phase, tokens, routing),
        make=make,
        static={"num_experts": E, "block_m": groups.block_m},
        problem=make_problem(A=A, E=E, block_m=groups.block_m),
        # An id is compared with every expert by this method, but counting and placing need two steps each.
        cost=Cost(flops=4.0 * A, bytes=4.0 * (3 * A + 4 * P + P // groups.block_m + E + 1), unit="float32"),
        tags=spec_tags(model, phase, tokens, routing),
    )


SPECS = tuple(_spec(*case) for case in CASES if case[3] == "balanced" or case[2] > 64)
