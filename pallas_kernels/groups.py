"""Rows grouped by expert in blocks of equal height: what permutation, expert products and combination share.

    assignments (token-major)   t0e2 t0e0 t1e2 t1e1 …            assignment t·k + j is choice j of token t
    slots (sorted by expert)    e0: t0 · | e1: t1 · | e2: t0 t1 | … (stable; · pads a group to block_m)

Each block of `block_m` slots belongs to one expert, so that a kernel's program needs one weight matrix. How many
blocks there are depends on the routing; the arrays have room for the most there can be.
"""

from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels.errors import KernelError


class Permutation(NamedTuple):
    """Where each assignment stands.

    Attributes:
        row_assignment: int32 `[P]`: the assignment in each slot; A = T·k in a slot that is padding.
        block_expert: int32 `[P / block_m]`: expert of each block; 0 for those past `num_blocks`.
        num_blocks: int32 `[1]`: blocks in use; those past it are to be skipped.
        counts: int32 `[E]`: assignments per expert.
        slot_of: int32 `[T, k]`: slot of each assignment; P for one whose expert is not among the E of this
            device (an id outside `[0, E)`).
    """

    row_assignment: jax.Array
    block_expert: jax.Array
    num_blocks: jax.Array
    counts: jax.Array
    slot_of: jax.Array


def padded_rows(assignments: int, num_experts: int, block_m: int) -> int:
    """P: the most slots that A assignments can take, a multiple of `block_m`.

    Each expert that is hit leaves at most block_m - 1 slots of its last block empty.
    """
    most = assignments + min(num_experts, assignments) * (block_m - 1)
    return most // block_m * block_m


def check_groups(
    op: str, rows: np.ndarray, block_expert: np.ndarray, num_blocks: np.ndarray, *, num_experts: int, block_m: int
) -> None:
    """Debug check of device values, on the host: a kernel does not test what it indexes weights by.

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
