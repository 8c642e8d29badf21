"""Dense attention of a prefill, without the score matrix in memory."""

from pallas_kernels.flash_attention.api import OP, flash_attention

__all__ = ["OP", "flash_attention"]
