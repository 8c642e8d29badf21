"""Products with one quantized matrix: attention projections."""

from pallas_kernels.quantized_matmul.api import OP, quantized_matmul

__all__ = ["OP", "quantized_matmul"]
