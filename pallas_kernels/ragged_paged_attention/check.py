"""A debug check on the host of what the kernels cannot check: the values of block table and lengths."""

from typing import Any

import numpy as np

from pallas_kernels.errors import KernelError


def check_block_table(
    block_table: Any, kv_lens: Any, cu_q_lens: Any, *, num_pages: int, block_size: int, num_tokens: int
) -> None:
    """Waits for the arrays and looks at each used entry; for debugging, not for every step.

    Args:
        block_table, kv_lens, cu_q_lens: as `ragged_paged_attention` takes them.
        num_pages, block_size: N and bs of the pools. num_tokens: T of q.

    Raises:
        KernelError: a page out of range that a sequence uses, more keys than its table holds, lengths that do
            not rise from 0 to at most T, or more queries than keys.
    """

    def fail(argument: str, got: str, expected: str) -> None:
        raise KernelError("ragged_paged_attention", argument, got, expected)

    table, kv_lens, cu = np.asarray(block_table), np.asarray(kv_lens), np.asarray(cu_q_lens)
    M, q_lens = table.shape[1], np.diff(cu)
    if cu[0] != 0 or (q_lens < 0).any():
        fail("cu_q_lens", str(cu.tolist()), "numbers that rise from 0")
    if cu[-1] > num_tokens:
        fail("cu_q_lens", f"{cu[-1]} at its end", f"at most T={num_tokens}")
    for s, (keys, queries, row) in enumerate(zip(kv_lens.tolist(), q_lens.tolist(), table, strict=True)):
        if not 0 <= keys <= M * block_size:
            fail("kv_lens", f"{keys} in row {s}", f"0 to M·bs={M * block_size}")
        if queries > keys:
            fail("kv_lens", f"{keys} in row {s}", f"at least its {queries} queries")
        used = row[: -(-keys // block_size)]
        wrong = np.flatnonzero((used < 0) | (used >= num_pages))
        if wrong.size:
            fail("block_table", f"page {used[wrong[0]]} at [{s}, {wrong[0]}]", f"0 to N-1={num_pages - 1}")
