"""Named shapes of `rms_norm`: the residual stream of each model, at decode and at prefill."""

import jax
import jax.numpy as jnp

from pallas_kernels.models import MODELS, ModelShape
from pallas_kernels.op import Cost, Spec, make_problem


def _spec(model: ModelShape, phase: str, T: int) -> Spec:
    D, dtype = model.hidden, jnp.bfloat16

    def make(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(a, (T, D), dtype),
            "weight": jax.random.normal(b, (D,), dtype),
            "residual": jax.random.normal(c, (T, D), dtype),
        }

    return Spec(
        name=f"{model.name}/{phase}_{T}",
        make=make,
        static={"eps": 1e-6},
        problem=make_problem(T=T, D=D, dtype=dtype, residual=True),
        cost=Cost(flops=5.0 * T * D, bytes=2 * (4 * T * D + D), unit="float32"),
        tags=frozenset({model.name, phase}),
    )


SPECS = tuple(_spec(model, phase, T) for model in MODELS for phase, T in (("decode", 16), ("prefill", 4096)))
