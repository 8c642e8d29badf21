"""The gated first half of experts' feed-forward networks, gate and up in one pass."""

from pallas_kernels.grouped_swiglu.api import OP, grouped_swiglu

__all__ = ["OP", "grouped_swiglu"]
