"""Named shapes of `grouped_matmul`: each model's down projection, scaled by routing weights."""

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
    P, E, D, F = len(groups.row_assignment), model.experts, model.expert_hidden, model.hidden
    filled = groups.row_assignment < groups.slot_of.size
    rows = jnp.where(filled, jnp.arange(P), P).astype(jnp.int32)

    def make(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(a, (P, D), dtype),
            "w": jax.random.normal(b, (E, D, F), dtype) * jnp.asarray(D**-0.5, dtype),
            "rows": rows,
            "block_expert": jnp.asarray(groups.block_expert),
            "num_blocks": jnp.asarray(groups.num_blocks),
            "row_scale": jax.random.uniform(c, (P,), jnp.float32),
        }

    n, hit = int(groups.counts.sum()), int((groups.counts > 0).sum())
    return Spec(
        name=spec_name(model, phase, tokens, routing),
        make=make,
        static={"block_m": groups.block_m},
        problem=problem(P, D, F, E, groups.block_m, dtype),
        cost=Cost(flops=2.0 * n * D * F, bytes=2.0 * (hit * D * F + n * (D + F)) + 8.0 * n),
        tags=spec_tags(model, phase, tokens, routing),
    )


SPECS = tuple(make_spec(*case) for case in CASES)
