"""Attention of a flat batch of decodes and prompt chunks over paged keys and values."""

from pallas_kernels.ragged_paged_attention.api import OP, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.check import check_block_table

__all__ = ["OP", "check_block_table", "ragged_paged_attention"]
