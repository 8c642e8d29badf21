"""Named shapes of `topk_router`: each model's router, at decode and at prefill, DeepSeek-V3's groups,
and more experts than a warp holds."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import MIXTRAL, NARROW, OLMOE, QWEN3, WIDE64
from pallas_kernels.op import Cost, Spec, make_problem


def _spec(
    model: str, phase: str, T: int, E: int, k: int, static: Mapping[str, Any], has_bias: bool, parts: int = 0
) -> Spec:
    shape, split = ((parts, T, E), {"S": parts}) if parts else ((T, E), {})

    def make(key: jax.Array) -> dict[str, jax.Array]:
        a, b = jax.random.split(key)
        arrays = {"logits": jax.random.normal(a, shape, jnp.float32)}
        return arrays | ({"bias": 0.1 * jax.random.normal(b, (E,), jnp.float32)} if has_bias else {})

    scoring, groups = static.get("scoring", "softmax"), static.get("num_groups", 1)
    # Scores take about 4 operations a logit, a pick compares and masks all of them.
    flops = float(T * E * (4 + 2 * k))
    moved = 4.0 * max(parts, 1) * T * E + 8.0 * T * k + (4.0 * E if has_bias else 0.0)
    return Spec(
        name=f"{model}/{phase}_{T}/{parts}_parts" if parts else f"{model}/{phase}_{T}",
        make=make,
        static={"k": k, **static},
        problem=make_problem(
            T=T, E=E, k=k, dtype=jnp.float32, scoring=scoring, bias=has_bias, num_groups=groups, **split
        ),
        cost=Cost(flops=flops, bytes=moved, unit="float32"),
        tags=frozenset({model, phase}),
    )


_SIZES = (("decode", 1), ("decode", 64), ("prefill", 4096))
_SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "renormalize": True, "scale": 2.5}
_DEEPSEEK = {**_SIGMOID, "num_groups": 8, "top_groups": 4, "group_score": "top2"}

SPECS = tuple(
    _spec(model.name, phase, T, model.total_experts, model.top_k, {"renormalize": renormalize}, False)
    for model, renormalize in ((MIXTRAL, True), (QWEN3, True), (OLMOE, False), (WIDE64, True))
    for phase, T in _SIZES
) + tuple(_spec("deepseek_v3", phase, T, 256, 8, _DEEPSEEK, True) for phase, T in _SIZES)
SPECS += tuple(
    _spec(model.name, "decode", T, model.total_experts, model.top_k, {"renormalize": True}, False, parts=16)
    for model in (MIXTRAL, QWEN3, OLMOE)
    for T in (1, 64)
)
SPECS += tuple(
    _spec(model.name, phase, T, model.total_experts, model.top_k, _SIGMOID, True)
    for model in NARROW
    for phase, T in (("decode", 64), ("prefill", 4096))
)
