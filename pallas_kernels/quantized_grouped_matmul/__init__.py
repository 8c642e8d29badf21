"""Products of gathered rows with their experts' quantized weights: the down projection, and SwiGLU."""

from pallas_kernels.quantized_grouped_matmul.api import OP, quantized_grouped_matmul

__all__ = ["OP", "quantized_grouped_matmul"]
