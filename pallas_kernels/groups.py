"""Rows grouped by expert in blocks of equal height: what permutation, expert products and combination share.

    assignments (token-major)   t0e2 t0e0 t1e2 t1e1 …            assignment t·k + j is choice j of token t
    slots (sorted by expert)    e0: t0 · | e1: t1 · | e2: t0 t1 | … (stable; · pads a group to block_m)

Each block of `block_m` slots belongs to one expert, so that a kernel's program needs one weight matrix. How
many blocks there are depends on the routing; the arrays have room for the most there can be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError, bind_shapes, check_dtype, check_that


class Permutation(NamedTuple):
    """Slots of the assignments, sorted by expert in padded blocks.

    Attributes:
        row_assignment: int32 `[P]`: the assignment in each slot; A = T·k in a slot that is padding.
        block_expert: int32 `[P / block_m]`: expert of each block; 0 for those past `num_blocks`.
        num_blocks: int32 `[1]`: blocks in use; those past it are to be skipped.
        counts: int32 `[E]`: assignments per expert.
        slot_of: int32 `[T, k]`: slot of each assignment; P for one whose expert is not among the E of this
            device (an id outside `[0, E)`).
        tokens: int32 `[P]`: the token in each slot, T in padding.
        slots: int32 `[P]`: each slot itself, P in padding.
        weights: float32 `[P]`: the weight of each slot's assignment, 0 in padding; None if none were given.
    """

    row_assignment: jax.Array
    block_expert: jax.Array
    num_blocks: jax.Array
    counts: jax.Array
    slot_of: jax.Array
    tokens: jax.Array
    slots: jax.Array
    weights: jax.Array | None


def padded_rows(assignments: int, num_experts: int, block_m: int) -> int:
    """Returns P: the most slots that A assignments can take, a multiple of `block_m`.

    Each expert that is hit leaves at most block_m - 1 slots of its last block empty.
    """
    most = assignments + min(num_experts, assignments) * (block_m - 1)
    return most // block_m * block_m


def block_m_for(assignments: int, num_experts: int) -> int:
    """Returns the height of blocks: an expert's rows should fit in one while its weights dominate time.

    While an expert has few rows, reading its weights is the cost and a block's height is free on the tensor
    cores, so the least of 16, 32 and 64 that holds about 1.5 times the mean. With many, 64 rows (a
    warpgroup's product on sm_90) waste less padding than 128 until an expert has several hundred.

    Args:
        assignments: those expected on this device: tokens · k · local experts / all experts.
    """
    mean = assignments / num_experts
    if mean <= 10:
        return 16
    if mean <= 20:
        return 32
    return 64 if mean <= 512 else 128


def _erf(x: jax.Array) -> jax.Array:
    """Computes the error function in what Pallas lowers to Triton, which has no erf.

    Float64, so references, exactly; else Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26:
    off by 1.5e-7 at most, about a rounding of float32 near 1.
    """
    if x.dtype == jnp.float64:
        return jax.lax.erf(x)
    t = 1.0 / (1.0 + 0.3275911 * jnp.abs(x))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y = 1.0 - tail * jnp.exp(-x * x)
    return jnp.where(x < 0, -y, y)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x * jax.lax.logistic(x),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x * 0.7071067811865476)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
    "relu": lambda x: jnp.maximum(x, 0.0),
}
"""Activations of a gate, in operations that kernels have: float32 there, float64 in references."""


@dataclass(frozen=True)
class ClampedSwiglu:
    """`(up + 1) · gate · sigmoid(alpha · gate)`, gate at most `limit`, up between it and its negative
    (gpt-oss, arXiv 2508.10925)."""

    limit: float
    alpha: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.maximum(jnp.minimum(up, self.limit), -self.limit)
        return (up + 1.0) * (gate * jax.lax.logistic(self.alpha * gate))

    def __str__(self) -> str:
        return "swiglu_clamped"


Activation = str | ClampedSwiglu
"""Of gate and up: a name in `ACTIVATIONS`, which is the gate's and multiplies up, or `ClampedSwiglu`."""


def gated(activation: Activation) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns an activation as the function of gate and up that it stands for."""
    if isinstance(activation, ClampedSwiglu):
        return activation
    act = ACTIVATIONS[activation]
    return lambda gate, up: act(gate) * up


def check_gated(
    op: str, activation: Activation, gate_bias: jax.Array | None, up_bias: jax.Array | None
) -> None:
    """Raises KernelError unless kernels have the activation, and both biases or neither are there."""
    one = "None" if up_bias is None else "an array"
    check_that(op, "up_bias", (gate_bias is None) == (up_bias is None), one, "both biases or neither")
    known = ", ".join(ACTIVATIONS)
    good = isinstance(activation, ClampedSwiglu) or activation in ACTIVATIONS
    check_that(op, "activation", good, repr(activation), f"one of {known}, or a ClampedSwiglu")


def check_block_m(op: str, block_m: int) -> None:
    """Raises KernelError unless tiles of that height exist: a power of two, 16 to 128."""
    good = 16 <= block_m <= 128 and block_m & (block_m - 1) == 0
    check_that(op, "block_m", good, block_m, "a power of two, 16 to 128")


def check_table(
    op: str, rows: jax.Array, block_expert: jax.Array, num_blocks: jax.Array, block_m: int
) -> None:
    """Raises KernelError unless the arrays are a table of groups: int32 `[P]`, `[P / block_m]`, `[1]`."""
    check_block_m(op, block_m)
    P = rows.shape[0]
    check_that(op, "rows", P % block_m == 0, f"{P} slots", f"a multiple of block_m={block_m}")
    bind_shapes(op, {"block_expert": (block_expert, str(P // block_m)), "num_blocks": (num_blocks, "1")})
    for name, array in (("rows", rows), ("block_expert", block_expert), ("num_blocks", num_blocks)):
        check_dtype(op, name, array, (jnp.int32,))


def check_groups(
    op: str,
    rows: np.ndarray,
    block_expert: np.ndarray,
    num_blocks: np.ndarray,
    *,
    num_experts: int,
    block_m: int,
) -> None:
    """Checks device values on the host, for debugging: a kernel does not test what it indexes weights by.

    Raises:
        KernelError: more blocks than the table has, or an expert in use outside `[0, E)`.
    """
    blocks = int(np.asarray(num_blocks).reshape(-1)[0])
    table = np.asarray(block_expert)
    if len(np.asarray(rows)) != len(table) * block_m:
        raise KernelError(op, "rows", f"{len(rows)} slots", f"{len(table)} blocks of block_m={block_m}")
    if not 0 <= blocks <= len(table):
        raise KernelError(op, "num_blocks", blocks, f"0 to {len(table)}, the length of block_expert")
    used = table[:blocks]
    if blocks and (used.min() < 0 or used.max() >= num_experts):
        at = int(np.argmax((used < 0) | (used >= num_experts)))
        raise KernelError(op, "block_expert", f"{used[at]} at block {at}", f"0 to {num_experts - 1}")
