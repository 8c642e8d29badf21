"""Which formats the GPU kernels have products for, and a weight as theirs."""

import jax
import jax.numpy as jnp

from moejax.quantization.formats import QTensor, WeightFormat
from pallas_kernels import qformats


def why_no_kernel(fmt: WeightFormat, D: int, size: int = 0) -> str | None:
    """Returns why the GPU kernels have no product with such a weight of D inputs; None where they have.

    Args:
        size: numbers of the weight, of all its experts, on one device; 0: not known.
    """
    codes = size // 2 if fmt.packed else size
    if codes >= qformats.MOST_CODES:
        return (
            f"{codes} bytes of codes on a device (kernels index fewer than 2^31); spread it over more devices"
        )
    kernel_format = _kernel_format(fmt, D)
    return f"{fmt.name}: {kernel_format}" if isinstance(kernel_format, str) else None


def _kernel_format(fmt: WeightFormat, D: int) -> qformats.Format | str:
    """Returns the kernels' own format, or why there is none."""
    kind = {
        ("int8", "none"): "w8a16",
        ("int8", "dynamic"): "w8a8",
        ("int8", "static"): "w8a8",  # whose codes and scales come from outside the kernel
        ("int4", "none"): "w4a16",
        ("float8_e4m3fn", "none"): "fp8",
        ("float4_e2m1fn", "none"): "mxfp4",
    }.get((fmt.numbers, fmt.activations))
    if kind is None:
        what = "" if fmt.activations == "none" else f" with {fmt.activations} activation scales"
        return f"no kernel for {fmt.numbers}{what}"
    if fmt.scale_dtype not in (("e8m0",) if kind == "mxfp4" else ("float32", "bfloat16", "float16")):
        return f"no kernel with {fmt.scale_dtype} scales"
    if fmt.indexed or fmt.sparse:
        return "no kernel with a group index" if fmt.indexed else "no kernel for 2:4 sparse weights"
    if fmt.granularity == "tensor":
        return "no kernel with one scale for the tensor"
    if not fmt.symmetric and kind != "w4a16":
        return f"no kernel with zero points for {fmt.numbers}"
    groups = qformats.GROUPS[kind]
    if (fmt.granularity == "block") != (kind == "fp8" and fmt.group > 0) or fmt.group not in groups:
        known = ", ".join(str(g) if g else "per channel" for g in groups)
        return f"no kernel for {fmt.granularity} scales of {fmt.group or 'all inputs'}; known: {known}"
    kernel_format = qformats.Format(kind, fmt.group, zeros=not fmt.symmetric)
    if D % kernel_format.block:
        return f"the kernel's inputs are a multiple of {kernel_format.block}, here {D}"
    return kernel_format


def to_kernel(q: QTensor) -> qformats.QuantizedTensor | None:
    """Returns the arrays as the GPU kernels' weight, without copies; None where they have no such format."""
    fmt = _kernel_format(q.format, q.shape[-2])
    if isinstance(fmt, str):
        return None
    assert not q.format.packed or q.pack == qformats.PACK, q.format
    values = q.values
    if fmt.kind == "fp8":
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return qformats.QuantizedTensor(values, q.scales, q.zeros, fmt)
