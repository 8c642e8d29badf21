"""An expert layer from the four kernels: permute, gate and up, down, combine."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_swiglu import grouped_swiglu
from pallas_kernels.groups import block_m_for
from pallas_kernels.moe_combine import moe_combine
from pallas_kernels.moe_permute import moe_permute


def moe_mlp(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    block_m: int | None = None,
    activation: str = "silu",
    total_experts: int | None = None,
    implementation: str = "pallas_triton",
    interpret: bool | None = None,
) -> jax.Array:
    """Computes `Σ_j weights[t, j] · (act(x[t] @ gate[e]) · (x[t] @ up[e])) @ down[e]`, e = ids[t, j].

    The hidden activations are rounded to x's dtype, and so is each expert's output, after its weight. Nothing
    is dropped; the sum over j is in float32 and in order, so that results are the same bits every time.

    Args:
        x: `[T, D]`; gate, up: `[E, D, F]`; down: `[E, F, D]`, of one dtype, bfloat16, float16 or float32.
        ids: int32 `[T, k]`; one outside `[0, E)` is another device's expert and contributes nothing here.
        weights: float32 `[T, k]`.
        block_m: height of blocks (`pallas_kernels.groups`); None: `block_m_for`.
        total_experts: of all devices, where these E are a part of them: what `block_m` is chosen by.
        implementation: of all four operations, "pallas_triton" or "reference".
        interpret: None: on CPU only.

    Raises:
        KernelError: see the four operations.
    """
    options: dict[str, Any] = {"implementation": implementation, "interpret": interpret}
    slots = sort_into_slots(ids, weights, gate.shape[0], block_m, total_experts, options)
    hidden = grouped_swiglu(
        x, gate, up, slots.tokens, *slots.table, block_m=slots.block_m, activation=activation, **options
    )
    out = grouped_matmul(
        hidden, down, slots.rows, *slots.table, block_m=slots.block_m, row_scale=slots.scale, **options
    )
    return moe_combine(out, slots.slot_of, **options)


class Slots(NamedTuple):
    """Assignments sorted by expert, in blocks; P slots, padding among them.

    Attributes:
        tokens: int32 `[P]`, the token of each slot, T in padding.
        rows: int32 `[P]`, each slot itself, P in padding.
        scale: float32 `[P]`, the assignment's weight.
        table: `block_expert` and `num_blocks`, see `pallas_kernels.groups`.
        slot_of: int32 `[T, k]`.
        block_m: height of the blocks.
    """

    tokens: jax.Array
    rows: jax.Array
    scale: jax.Array
    table: tuple[jax.Array, jax.Array]
    slot_of: jax.Array
    block_m: int


def sort_into_slots(
    ids: jax.Array,
    weights: jax.Array,
    num_experts: int,
    block_m: int | None,
    total_experts: int | None,
    options: Mapping[str, Any],
) -> Slots:
    """Sorts assignments into slots, an expert layer's first step; arguments as of `moe_mlp`."""
    (T, k), E = ids.shape, num_experts
    A = T * k
    if block_m is None:
        block_m = block_m_for(max(1, A * E // (total_experts or E)), E)
    groups = moe_permute(ids, num_experts=E, block_m=block_m, **options)
    count = groups.row_assignment.shape[0]
    # XLA makes these three of the table in one small kernel.
    filled = groups.row_assignment < A
    tokens = groups.row_assignment // k  # T, so none, in padding
    rows = jnp.where(filled, jnp.arange(count, dtype=jnp.int32), count)
    scale = weights.reshape(A)[jnp.minimum(groups.row_assignment, A - 1)]
    return Slots(tokens, rows, scale, (groups.block_expert, groups.num_blocks), groups.slot_of, block_m)
