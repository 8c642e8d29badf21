"""Routings and group tables of the expert kernels' specs, made on the host; specs of the grouped products."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.groups import Activation, ClampedSwiglu, block_m_for, padded_rows
from pallas_kernels.models import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    MIXTRAL,
    OLMOE,
    QWEN3,
    WIDE64,
    ModelShape,
    expert_ids,
)
from pallas_kernels.op import Cost, Problem, Spec, make_problem
from pallas_kernels.qformats import Format, QuantizedTensor, random_quantized

CASES: tuple[tuple[ModelShape, str, int, str], ...] = (
    (MIXTRAL, "decode", 1, "balanced"),
    (MIXTRAL, "decode", 8, "balanced"),
    (MIXTRAL, "decode", 64, "balanced"),
    (MIXTRAL, "decode", 64, "skewed"),
    (MIXTRAL, "prefill", 512, "skewed"),
    (MIXTRAL, "prefill", 4096, "balanced"),
    (QWEN3, "decode", 1, "balanced"),
    (QWEN3, "decode", 8, "balanced"),
    (QWEN3, "decode", 64, "balanced"),
    (QWEN3, "decode", 64, "skewed"),
    (QWEN3, "prefill", 512, "skewed"),
    (QWEN3, "prefill", 4096, "balanced"),
    (QWEN3, "prefill", 4096, "skewed"),
    (OLMOE, "decode", 1, "balanced"),
    (OLMOE, "decode", 16, "skewed"),
    (OLMOE, "decode", 64, "balanced"),
    (OLMOE, "prefill", 4096, "balanced"),
    (WIDE64, "decode", 8, "balanced"),
    (WIDE64, "decode", 64, "balanced"),
    (WIDE64, "decode", 64, "skewed"),
    (WIDE64, "prefill", 4096, "balanced"),
    (GPT_OSS_20B, "decode", 1, "balanced"),
    (GPT_OSS_20B, "decode", 64, "balanced"),
    (GPT_OSS_20B, "prefill", 4096, "balanced"),
    (GPT_OSS_120B, "decode", 64, "skewed"),
    (GPT_OSS_120B, "prefill", 4096, "balanced"),
)
"""(model, phase, tokens, routing) of the expert kernels. Of the model on expert parallelism, tokens are those
of all devices together, and most assignments go elsewhere."""


class Groups(NamedTuple):
    """A routing laid out in blocks: `groups.Permutation` as numpy arrays, and its `block_m`."""

    row_assignment: np.ndarray
    block_expert: np.ndarray
    num_blocks: np.ndarray
    counts: np.ndarray
    slot_of: np.ndarray
    block_m: int


def problem(
    P: int,
    D: int,
    F: int,
    E: int,
    block_m: int,
    dtype: Any,
    fmt: Format | None = None,
    activation: Activation | None = None,
    biased: bool = False,
) -> Problem:
    """Returns the problem of a grouped product; D is the reduction, F the columns of the output.

    Args:
        fmt: of quantized weights, of which there are two matrices with an `activation`.
        biased: the products have biases.
    """
    others: dict[str, int | str] = {"bias": 1} if biased else {}
    if fmt is not None:
        others |= {**fmt.problem, "matrices": 1 if activation is None else 2}
    if isinstance(activation, ClampedSwiglu) or (fmt is not None and activation is not None):
        others["activation"] = str(activation)
    return make_problem(P=P, D=D, F=F, E=E, block_m=block_m, dtype=dtype, **others)


def spec_name(model: ModelShape, phase: str, tokens: int, routing: str) -> str:
    return f"{model.name}/{phase}_{tokens}/{routing}"


def spec_tags(model: ModelShape, phase: str, tokens: int, routing: str) -> frozenset[str]:
    return frozenset({model.name, phase, routing, f"tokens_{tokens}"})


def lay_out(ids: np.ndarray, num_experts: int, block_m: int) -> Groups:
    """Computes `moe_permute` in plain numpy, as its twin."""
    T, k = ids.shape
    A = T * k
    P = padded_rows(A, num_experts, block_m)
    rows = np.full(P, A, np.int32)
    slot_of = np.full(A, P, np.int32)
    blocks = np.zeros(P // block_m, np.int32)
    counts = np.zeros(num_experts, np.int32)
    flat, start = ids.reshape(-1), 0
    for expert in range(num_experts):
        mine = np.flatnonzero(flat == expert).astype(np.int32)
        counts[expert] = len(mine)
        rows[start : start + len(mine)] = mine
        slot_of[mine] = np.arange(start, start + len(mine))
        stop = start + -(-len(mine) // block_m) * block_m
        blocks[start // block_m : stop // block_m] = expert
        start = stop
    number = np.array([start // block_m], np.int32)
    return Groups(rows, blocks, number, counts, slot_of.reshape(T, k), block_m)


@lru_cache(maxsize=64)
def spec_groups(model: ModelShape, tokens: int, routing: str) -> Groups:
    """Returns the groups of a spec, with the height of blocks that `moe_mlp` would choose."""
    return given_groups(model, expert_ids(model, tokens, routing))


def given_groups(model: ModelShape, ids: np.ndarray) -> Groups:
    """Returns the groups of a routing, int `[tokens, top_k]`, of all experts; an id beyond them is none."""
    local = ids.size * model.experts // model.total_experts
    return lay_out(ids, model.experts, block_m_for(max(local, 1), model.experts))


def down_spec(
    model: ModelShape,
    phase: str,
    tokens: int,
    routing: str,
    fmt: Format | None = None,
    ids: np.ndarray | None = None,
) -> Spec:
    """Makes the spec of a model's down projection, scaled by routing weights.

    Args:
        routing: a name of `models.expert_ids`, or any if `ids` are given, int `[tokens, top_k]`.
        fmt: of quantized weights; None: bfloat16.
    """
    groups = spec_groups(model, tokens, routing) if ids is None else given_groups(model, ids)
    P, E, D, F = len(groups.row_assignment), model.experts, model.expert_hidden, model.hidden
    filled = groups.row_assignment < groups.slot_of.size

    def make(key: jax.Array) -> dict[str, Any]:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(a, (P, D), jnp.bfloat16),
            "w": _weights(b, (E, D, F), fmt),
            "rows": jnp.where(filled, jnp.arange(P), P).astype(jnp.int32),
            **_table(groups),
            "row_scale": jax.random.uniform(c, (P,), jnp.float32),
            **_biases(model, a, F, "bias"),
        }

    rows = int(groups.counts.sum())
    # Each slot's row number, and where the weights are floats its routing weight.
    slot_bytes = 8.0 if fmt is None else 4.0
    return _spec((model, phase, tokens, routing), groups, make, D, F, rows, slot_bytes, fmt)


def swiglu_spec(
    model: ModelShape,
    phase: str,
    tokens: int,
    routing: str,
    fmt: Format | None = None,
    ids: np.ndarray | None = None,
) -> Spec:
    """Makes the spec of a model's gate and up projections; arguments as of `down_spec`."""
    groups = spec_groups(model, tokens, routing) if ids is None else given_groups(model, ids)
    E, D, F = model.experts, model.hidden, model.expert_hidden

    def make(key: jax.Array) -> dict[str, Any]:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(a, (tokens, D), jnp.bfloat16),
            "gate": _weights(b, (E, D, F), fmt),
            "up": _weights(c, (E, D, F), fmt),
            # Assignment t·k + j is of token t; padding comes to lie past the last.
            "rows": jnp.asarray(groups.row_assignment // model.top_k),
            **_table(groups),
            **_biases(model, a, F, "gate_bias", "up_bias"),
        }

    # Of x, the tokens with an expert here are read once.
    seen = int((groups.slot_of < len(groups.row_assignment)).any(axis=1).sum())
    return _spec((model, phase, tokens, routing), groups, make, D, F, seen, 4.0, fmt, model.activation)


def _biases(model: ModelShape, key: jax.Array, F: int, *names: str) -> dict[str, jax.Array]:
    keys = jax.random.split(key, len(names)) if model.biased else ()
    shape = model.experts, F
    return {name: jax.random.normal(k, shape, jnp.bfloat16) for name, k in zip(names, keys, strict=False)}


def _weights(key: jax.Array, shape: tuple[int, int, int], fmt: Format | None) -> jax.Array | QuantizedTensor:
    if fmt is not None:
        return random_quantized(key, shape, fmt, tiled=True)
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(shape[1] ** -0.5, jnp.bfloat16)


def _table(groups: Groups) -> dict[str, jax.Array]:
    return {"block_expert": jnp.asarray(groups.block_expert), "num_blocks": jnp.asarray(groups.num_blocks)}


def _spec(
    case: tuple[ModelShape, str, int, str],
    groups: Groups,
    make: Callable[[jax.Array], dict[str, Any]],
    D: int,
    F: int,
    rows_read: int,
    slot_bytes: float,
    fmt: Format | None,
    activation: Activation | None = None,
) -> Spec:
    """Returns the spec of a product with one matrix an expert, or with two where there is an activation."""
    matrices, matrix = 1 if activation is None else 2, 2.0 * D * F if fmt is None else fmt.weight_bytes(D, F)
    matrix += 2.0 * F if case[0].biased else 0.0
    n, hit = int(groups.counts.sum()), int((groups.counts > 0).sum())
    P, E, block_m = len(groups.row_assignment), case[0].experts, groups.block_m
    name, tags = spec_name(*case), spec_tags(*case)
    return Spec(
        name=name if fmt is None else f"{name}/{fmt.name}",
        make=make,
        static={"block_m": block_m} | ({} if activation is None else {"activation": activation}),
        problem=problem(P, D, F, E, block_m, jnp.bfloat16, fmt, activation, case[0].biased),
        cost=Cost(
            flops=2.0 * n * D * F * matrices,
            bytes=matrices * hit * matrix + 2.0 * (rows_read * D + n * F) + slot_bytes * n,
            unit="int8" if fmt is not None and fmt.kind == "w8a8" else "bfloat16",
        ),
        tags=tags if fmt is None else tags | {fmt.kind, fmt.name},
    )
