"""Named shapes of `quantized_matmul`: attention projections of each model, over formats."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import GPT_OSS_20B, MIXTRAL, OLMOE, QWEN3, WIDE64, ModelShape
from pallas_kernels.op import Cost, Spec, make_problem
from pallas_kernels.qformats import Format, random_quantized

CASES = (
    (MIXTRAL, "qkv", "decode", 1, Format("w4a16", 128)),
    (MIXTRAL, "qkv", "decode", 16, Format("w4a16", 128)),
    (MIXTRAL, "o", "decode", 64, Format("w4a16", 128)),
    (MIXTRAL, "qkv", "prefill", 2048, Format("w4a16", 128)),
    (QWEN3, "qkv", "decode", 16, Format("fp8", 128)),
    (QWEN3, "o", "decode", 64, Format("w4a16", 32, True)),
    (OLMOE, "qkv", "decode", 16, Format("w8a16")),
    (WIDE64, "o", "decode", 64, Format("w8a8")),
    (WIDE64, "qkv", "prefill", 2048, Format("w8a8")),
    (GPT_OSS_20B, "qkv", "decode", 16, Format("mxfp4", 32)),
)


def _spec(model: ModelShape, which: str, phase: str, T: int, fmt: Format) -> Spec:
    heads = model.heads * model.head_dim
    qkv = (model.hidden, heads + 2 * model.kv_heads * model.head_dim)
    D, F = qkv if which == "qkv" else (heads, model.hidden)

    def make(key: jax.Array) -> dict[str, Any]:
        a, b = jax.random.split(key)
        x = jax.random.normal(a, (T, D), jnp.bfloat16)
        return {"x": x, "w": random_quantized(b, (D, F), fmt, tiled=True)}

    return Spec(
        name=f"{model.name}/{phase}_{T}/{which}/{fmt.name}",
        make=make,
        static={},
        problem=make_problem(T=T, D=D, F=F, dtype=jnp.bfloat16, **fmt.problem),
        cost=Cost(
            flops=2.0 * T * D * F,
            bytes=fmt.weight_bytes(D, F) + 2.0 * T * (D + F),
            unit="int8" if fmt.kind == "w8a8" else "bfloat16",
        ),
        tags=frozenset({model.name, phase, f"tokens_{T}", which, fmt.kind, fmt.name}),
    )


SPECS = tuple(_spec(*case) for case in CASES)
