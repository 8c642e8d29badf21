"""RMS normalisation, with the residual added first where there is one."""

from pallas_kernels.rms_norm.api import OP, rms_norm

__all__ = ["OP", "rms_norm"]
