"""GPU kernels. Imports jax, numpy and, for static reports, triton only; nothing of moejax.

Empty so far: the kernels are the next stage of the project (docs/architecture.md).
"""
