"""Sum of each token's weighted expert outputs in a fixed order."""

from pallas_kernels.moe_combine.api import OP, moe_combine

__all__ = ["OP", "moe_combine"]
