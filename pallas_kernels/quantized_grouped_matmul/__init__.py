"""Products of gathered rows with their experts' quantized weights: the down projection, and SwiGLU."""

from pallas_kernels.quantized_grouped_matmul.api import (
    OP,
    SWIGLU_OP,
    quantized_grouped_matmul,
    quantized_grouped_swiglu,
)

__all__ = ["OP", "SWIGLU_OP", "quantized_grouped_matmul", "quantized_grouped_swiglu"]
