"""Named shapes of `moe_combine`: each model's expert outputs, already weighted by the down projection."""

import jax
import jax.numpy as jnp

from pallas_kernels.group_specs import CASES, spec_groups, spec_name, spec_tags
from pallas_kernels.models import ModelShape
from pallas_kernels.op import Cost, Spec, make_problem


def _spec(model: ModelShape, phase: str, tokens: int, routing: str) -> Spec:
    groups, dtype = spec_groups(model, tokens, routing), jnp.bfloat16
    P, k, D = len(groups.row_assignment), model.top_k, model.hidden

    def make(key: jax.Array) -> dict[str, jax.Array]:
        return {"y": jax.random.normal(key, (P, D), dtype), "slot_of": jnp.asarray(groups.slot_of)}

    rows = int(groups.counts.sum())
    return Spec(
        name=spec_name(model, phase, tokens, routing),
        make=make,
        static={},
        problem=make_problem(T=tokens, P=P, k=k, D=D, dtype=dtype),
        cost=Cost(flops=1.0 * rows * D, bytes=2.0 * (rows + tokens) * D + 4.0 * tokens * k, unit="float32"),
        tags=spec_tags(model, phase, tokens, routing),
    )


SPECS = tuple(_spec(*case) for case in CASES if case[3] == "balanced" and case[2] != 1)
