"""Named shapes of `rms_norm`: each model's residual stream, at decode and at prefill; and beside it sums of
rows, of a token's experts or of the parts of a product; other kinds at Gemma 3's and Phi-3.5-MoE's widths."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.group_specs import spec_groups
from pallas_kernels.models import MIXTRAL, MODELS, OLMOE, QWEN3, ModelShape
from pallas_kernels.op import Cost, Spec, make_problem


def _spec(model: ModelShape, phase: str, T: int, sums: str = "", kind: str = "rms") -> Spec:
    """Returns a spec; `sums`: of experts' outputs under this routing, or of a product's "parts"."""
    D, dtype = model.hidden, jnp.float32 if sums == "parts" else jnp.bfloat16
    k = {"": 1, "parts": 4}.get(sums, model.top_k)
    shape, sizes, slots = ((4, T, D) if sums else (T, D)), ({"k": k} if sums else {}), {}
    if sums not in ("", "parts"):
        groups = spec_groups(model, T, sums)
        shape, slots = (len(groups.row_assignment), D), {"slot_of": groups.slot_of}
        sizes |= {"P": shape[0]}
    other = {} if kind == "rms" else {"kind": kind}

    def make(key: jax.Array) -> dict[str, Any]:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(a, (T, D), jnp.bfloat16),
            "weight": jax.random.normal(b, (D,), jnp.bfloat16),
            "residual": jax.random.normal(c, shape, dtype),
            **({"bias": jax.random.normal(c, (D,), jnp.bfloat16)} if kind == "layer" else {}),
            **{name: jnp.asarray(array) for name, array in slots.items()},
        }

    moved = k * jnp.dtype(dtype).itemsize * T * D + 2 * (3 * T * D + D) + (4 * T * k if slots else 0)
    return Spec(
        name=f"{model.name}/{phase}_{T}" + (f"/{sums}" if sums else ""),
        make=make,
        static={"eps": 1e-6, **other},
        problem=make_problem(T=T, D=D, **sizes, dtype=jnp.bfloat16, residual=True, **other),
        cost=Cost(flops=(4.0 + k) * T * D, bytes=moved, unit="float32"),
        tags=frozenset({model.name, phase, sums or "rows"}),
    )


SPECS = tuple(_spec(model, phase, T) for model in MODELS for phase, T in (("decode", 16), ("prefill", 4096)))
SPECS += tuple(
    _spec(model, "decode", 64, sums) for model in (MIXTRAL, QWEN3, OLMOE) for sums in ("skewed", "parts")
)
SPECS += tuple(
    _spec(replace(MIXTRAL, name=name, hidden=hidden), phase, T, kind=kind)
    for name, hidden, kind in (("gemma3_12b", 3840, "rms_unit_offset"), ("phi3_5_moe", 4096, "layer"))
    for phase, T in (("decode", 16), ("prefill", 4096))
)
