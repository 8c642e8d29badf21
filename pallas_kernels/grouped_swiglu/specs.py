"""Named shapes of `grouped_swiglu`: gate and up projections of each model's experts."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.group_specs import CASES, given_groups, problem, spec_groups, spec_name, spec_tags
from pallas_kernels.models import ModelShape
from pallas_kernels.op import Cost, Spec


def make_spec(
    model: ModelShape, phase: str, tokens: int, routing: str, ids: np.ndarray | None = None
) -> Spec:
    """Makes the spec of a named routing (`models.expert_ids`), or of a given one, int `[tokens, top_k]`."""
    groups = spec_groups(model, tokens, routing) if ids is None else given_groups(model, ids)
    dtype = jnp.bfloat16
    P, E, D, F = len(groups.row_assignment), model.experts, model.hidden, model.expert_hidden

    def make(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        scale = jnp.asarray(D**-0.5, dtype)
        return {
            "x": jax.random.normal(a, (tokens, D), dtype),
            "gate": jax.random.normal(b, (E, D, F), dtype) * scale,
            "up": jax.random.normal(c, (E, D, F), dtype) * scale,
            "rows": jnp.asarray(groups.row_assignment // model.top_k),
            "block_expert": jnp.asarray(groups.block_expert),
            "num_blocks": jnp.asarray(groups.num_blocks),
        }

    n, hit = int(groups.counts.sum()), int((groups.counts > 0).sum())
    # Of x, the tokens with an expert here are read once.
    seen = int((groups.slot_of < P).any(axis=1).sum())
    return Spec(
        name=spec_name(model, phase, tokens, routing),
        make=make,
        static={"block_m": groups.block_m, "activation": "silu"},
        problem=problem(P, D, F, E, groups.block_m, dtype),
        cost=Cost(flops=4.0 * n * D * F, bytes=2.0 * (2 * hit * D * F + seen * D + n * F) + 4.0 * n),
        tags=spec_tags(model, phase, tokens, routing),
    )


SPECS = tuple(make_spec(*case) for case in CASES)
