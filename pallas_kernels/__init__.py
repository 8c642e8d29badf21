"""GPU kernels of attention and experts: Pallas lowered to Triton, for sm_80 and newer.

One folder an operation (`rms_norm/` is the shortest to read): `reference.py` the contract, `pallas_triton.py`
the kernel, `specs.py` the shapes, `api.py` the checked entry. Imports jax, numpy and, for `@triton.jit`
twins, triton; nothing of moejax. docs/adding-a-kernel.md tells how to add one.
"""
