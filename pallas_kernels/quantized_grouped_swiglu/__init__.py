"""SwiGLU with quantized experts; it lives with `quantized_grouped_matmul`, whose kernel it shares."""

from pallas_kernels.quantized_grouped_matmul.api import SWIGLU_OP as OP
from pallas_kernels.quantized_grouped_matmul.api import quantized_grouped_swiglu

__all__ = ["OP", "quantized_grouped_swiglu"]
