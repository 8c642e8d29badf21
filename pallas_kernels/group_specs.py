"""Routings and group tables for the specs of the expert kernels, made on the host."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.groups import block_m_for, padded_rows
from pallas_kernels.models import MIXTRAL, OLMOE, QWEN3, WIDE64, ModelShape, expert_ids
from pallas_kernels.op import Problem

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


def problem(P: int, D: int, F: int, E: int, block_m: int, dtype: Any) -> Problem:
    """Returns the problem; D is the reduction, F the columns of the output."""
    return {"P": P, "D": D, "F": F, "E": E, "block_m": block_m, "dtype": str(jnp.dtype(dtype))}


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
