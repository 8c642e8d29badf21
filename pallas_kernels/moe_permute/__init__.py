"""Assignments sorted by expert into blocks: counts, stable slots, block table."""

from pallas_kernels.moe_permute.api import OP, moe_permute

__all__ = ["OP", "moe_permute"]
