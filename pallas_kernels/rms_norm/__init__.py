"""RMS and layer normalisation, with rows summed and the residual added first where there are any."""

from pallas_kernels.rms_norm.api import OP, rms_norm

__all__ = ["OP", "rms_norm"]
