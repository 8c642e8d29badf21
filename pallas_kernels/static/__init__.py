"""Compilers' reports on the kernels, on machines without a GPU: lower, compile to cubin, count.

`jax.jit(...).lower(lowering_platforms=("cuda",))` gives each Pallas kernel's Triton IR; the Triton wheel
turns it into PTX and its `ptxas` into a cubin for sm_80 or sm_90, in a subprocess, because a compiler can
abort.
JAX itself compiles the same IR with the Triton inside XLA, whose version differs from the wheel's: registers
and instruction counts are this compiler's word, and the row says which version it was.
"""

from pallas_kernels.static.report import Row, failures, report_op

__all__ = ["Row", "failures", "report_op"]
