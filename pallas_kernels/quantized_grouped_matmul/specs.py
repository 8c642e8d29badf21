"""Named shapes of the quantized grouped products: each model's down projection and SwiGLU, over formats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.group_specs import Groups, given_groups, spec_groups, spec_name, spec_tags
from pallas_kernels.models import MIXTRAL, OLMOE, QWEN3, WIDE64, ModelShape
from pallas_kernels.op import Cost, Problem, Spec
from pallas_kernels.qformats import Format, random_quantized

W4, W4_G64, W4_G64Z, W4_G32 = (
    Format("w4a16", 128),
    Format("w4a16", 64),
    Format("w4a16", 64, True),
    Format("w4a16", 32),
)
W8, W8_G128, W8A8, FP8, FP8_BLOCKS = (
    Format("w8a16"),
    Format("w8a16", 128),
    Format("w8a8"),
    Format("fp8"),
    Format("fp8", 128),
)

DOWN = (
    (MIXTRAL, "decode", 1, "balanced", W4),
    (MIXTRAL, "decode", 16, "balanced", W4_G64),
    (MIXTRAL, "decode", 64, "balanced", W4),
    (MIXTRAL, "decode", 64, "balanced", W8),
    (MIXTRAL, "decode", 64, "balanced", FP8_BLOCKS),
    (MIXTRAL, "prefill", 2048, "balanced", W4),
    (QWEN3, "decode", 16, "skewed", W4_G32),
    (QWEN3, "decode", 64, "balanced", FP8_BLOCKS),
    (QWEN3, "prefill", 2048, "balanced", FP8_BLOCKS),
    (OLMOE, "decode", 64, "balanced", W8A8),
    (WIDE64, "decode", 64, "skewed", W4_G64Z),
)

SWIGLU = (
    (MIXTRAL, "decode", 1, "balanced", W4),
    (MIXTRAL, "decode", 64, "balanced", W4),
    (MIXTRAL, "prefill", 2048, "balanced", W8A8),
    (QWEN3, "decode", 16, "balanced", W4),
    (QWEN3, "decode", 64, "skewed", FP8),
    (QWEN3, "prefill", 2048, "balanced", W4_G64),
    (OLMOE, "decode", 16, "balanced", W8_G128),
    (WIDE64, "decode", 64, "balanced", W4),
)


def problem(
    P: int, D: int, F: int, E: int, block_m: int, dtype: Any, fmt: Format, activation: str | None = None
) -> Problem:
    """D is the reduction, F the columns of the output; with an activation there are two matrices."""
    sizes: dict[str, int | str] = {
        "P": P,
        "D": D,
        "F": F,
        "E": E,
        "block_m": block_m,
        "dtype": str(jnp.dtype(dtype)),
        "kind": fmt.kind,
        "group": fmt.group,
        "zeros": int(fmt.zeros),
        "matrices": 1 if activation is None else 2,
    }
    return sizes if activation is None else sizes | {"activation": activation}


def weight_bytes(fmt: Format, D: int, F: int) -> float:
    """Returns the bytes of one matrix with bfloat16 scales."""
    (outputs, inputs), (rows, columns) = fmt.shapes(D, F)
    return outputs * inputs + rows * columns * (3.0 if fmt.zeros else 2.0)


def _table(groups: Groups) -> dict[str, jax.Array]:
    return {
        "block_expert": jnp.asarray(groups.block_expert),
        "num_blocks": jnp.asarray(groups.num_blocks),
    }


def _cost(groups: Groups, fmt: Format, D: int, F: int, matrices: int, rows_read: int) -> Cost:
    n, hit = int(groups.counts.sum()), int((groups.counts > 0).sum())
    return Cost(
        flops=2.0 * n * D * F * matrices,
        bytes=matrices * hit * weight_bytes(fmt, D, F) + 2.0 * (rows_read * D + n * F) + 4.0 * n,
        unit="int8" if fmt.kind == "w8a8" else "bfloat16",
    )


def make_down(
    model: ModelShape,
    phase: str,
    tokens: int,
    routing: str,
    fmt: Format,
    ids: np.ndarray | None = None,
) -> Spec:
    """Makes the spec of a named routing (`models.expert_ids`), or of a given one, int `[tokens, top_k]`."""
    groups = spec_groups(model, tokens, routing) if ids is None else given_groups(model, ids)
    P, E, D, F = len(groups.row_assignment), model.experts, model.expert_hidden, model.hidden
    filled = groups.row_assignment < groups.slot_of.size

    def make(key: jax.Array) -> dict[str, Any]:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(a, (P, D), jnp.bfloat16),
            "w": random_quantized(b, (E, D, F), fmt),
            "rows": jnp.where(filled, jnp.arange(P), P).astype(jnp.int32),
            **_table(groups),
            "row_scale": jax.random.uniform(c, (P,), jnp.float32),
        }

    return Spec(
        name=f"{spec_name(model, phase, tokens, routing)}/{fmt.name}",
        make=make,
        static={"block_m": groups.block_m},
        problem=problem(P, D, F, E, groups.block_m, jnp.bfloat16, fmt),
        cost=_cost(groups, fmt, D, F, 1, int(groups.counts.sum())),
        tags=spec_tags(model, phase, tokens, routing) | {fmt.kind, fmt.name},
    )


def make_swiglu(
    model: ModelShape,
    phase: str,
    tokens: int,
    routing: str,
    fmt: Format,
    ids: np.ndarray | None = None,
) -> Spec:
    """Makes the spec of a named routing (`models.expert_ids`), or of a given one, int `[tokens, top_k]`."""
    groups = spec_groups(model, tokens, routing) if ids is None else given_groups(model, ids)
    P, E, D, F = len(groups.row_assignment), model.experts, model.hidden, model.expert_hidden

    def make(key: jax.Array) -> dict[str, Any]:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(a, (tokens, D), jnp.bfloat16),
            "gate": random_quantized(b, (E, D, F), fmt),
            "up": random_quantized(c, (E, D, F), fmt),
            # Assignment t·k + j is of token t; padding comes to lie past the last.
            "rows": jnp.asarray(groups.row_assignment // model.top_k),
            **_table(groups),
        }

    used = groups.row_assignment[groups.row_assignment < groups.slot_of.size] // model.top_k
    return Spec(
        name=f"{spec_name(model, phase, tokens, routing)}/{fmt.name}",
        make=make,
        static={"block_m": groups.block_m},
        problem=problem(P, D, F, E, groups.block_m, jnp.bfloat16, fmt, "silu"),
        cost=_cost(groups, fmt, D, F, 2, len(set(used.tolist()))),
        tags=spec_tags(model, phase, tokens, routing) | {fmt.kind, fmt.name},
    )


SPECS = tuple(make_down(*case) for case in DOWN)
SWIGLU_SPECS = tuple(make_swiglu(*case) for case in SWIGLU)
