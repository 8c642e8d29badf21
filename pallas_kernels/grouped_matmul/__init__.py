"""Products of gathered rows with their experts' weights, each row scaled: the down projection."""

from pallas_kernels.grouped_matmul.api import OP, grouped_matmul

__all__ = ["OP", "grouped_matmul"]
