"""Products with quantized weights, each in three implementations.

    dequantize      the weight in x's dtype, then an ordinary product: what the others are tested against
    xla             scales applied to the output where a scale has a whole output; int8 by int8 exactly
    pallas_triton   the GPU kernels of `pallas_kernels`, which decode a tile at a time (interpreted on CPU)

Where a format quantizes activations too, every implementation multiplies the same codes: "dequantize" has
them as floats, codes times scale.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.errors import ConfigError
from moejax.ops.dot import dot, dot_by_rows
from moejax.quantization.arithmetic import (
    codes_to_values,
    dequantize,
    dequantize_stored,
    is_integer,
    quantize_activations,
    step_and_zero,
    unpacked_codes,
)
from moejax.quantization.formats import QTensor
from moejax.quantization.kernel_formats import to_kernel, why_no_kernel
from moejax.sharding.axes import Names, pmax

_EXACT = 2**24
"""Integers up to here, sums of products among them, are exact in float32."""

_PIECE = 2**21
"""Bytes of a weight that are decoded at a time on a CPU, where XLA writes them down for two rows and more: in
fresh memory, whose pages cost more than the product where they are many (docs/log.md)."""


def matmul(
    x: jax.Array,
    weight: jax.Array | QTensor,
    implementation: str = "xla",
    *,
    split: Names = (),
    out_dtype: Any = None,
) -> jax.Array:
    """Computes `x @ weight`, x `[..., D]` and weight `[D, F]` → `[..., F]`.

    A weight `[E, D, F]` multiplies x `[E, ..., D]`, expert by expert.

    Args:
        weight: quantized, or an array of x's dtype, for which there is one implementation.
        split: mesh axes that D is split over, each device having a part of x and of the weight. The result is
            then this device's part of the sum; only the scales of activations are shared, so that a token's
            codes are those of one device.
        out_dtype: None: x's.

    Raises:
        ConfigError: the kernels do not have the weight's format.
    """
    out = jnp.dtype(out_dtype or x.dtype)
    if not isinstance(weight, QTensor):
        return dot(x, weight, out)
    if weight.scales.ndim > 2:

        def one(rows: jax.Array, expert: QTensor) -> jax.Array:
            return matmul(rows, expert, implementation, split=split, out_dtype=out_dtype)

        return jax.vmap(one)(x, weight)
    products: dict[str, Callable[[jax.Array, QTensor, Names, Any], jax.Array]] = {
        "dequantize": _twin,
        "xla": _xla,
        "pallas_triton": _kernel,
    }
    *lead, D = x.shape
    y = products[implementation](x.reshape(-1, D), weight, split, out)
    return y.reshape(*lead, y.shape[-1])


def activation_codes(x: jax.Array, weight: QTensor, split: Names = ()) -> tuple[jax.Array, jax.Array]:
    """Returns x `[..., D]` in the weight's numbers: codes `[..., D]`, float32 scales `[..., 1]`.

    Args:
        split: mesh axes that D is split over; a dynamic scale is of the whole token.
    """
    fmt = weight.format
    if fmt.activations == "static" or not split:
        return quantize_activations(x, fmt, weight.input_scale)
    # The whole token's largest magnitude goes along as one more number, so that a device's codes and scale
    # are, bit for bit, those that one device would make of all of it.
    most = pmax(jnp.max(jnp.abs(x), axis=-1, keepdims=True), split)
    codes, scale = quantize_activations(jnp.concatenate([x, most], axis=-1), fmt)
    return codes[..., :-1], scale


def rounded_activations(x: jax.Array, weight: QTensor, split: Names = ()) -> jax.Array:
    """Returns x in its dtype as the product sees it: codes times scale for quantized activations."""
    if weight.format.activations == "none":
        return x
    codes, scale = activation_codes(x, weight, split)
    return (codes.astype(jnp.float32) * scale).astype(x.dtype)


def _twin(x: jax.Array, weight: QTensor, split: Names, out: Any) -> jax.Array:
    # The barrier keeps the product from being merged with the decoding: it is, to the bit, the one that the
    # same weight gives when it is stored in floating point, `[D, F]`.
    whole = jax.lax.optimization_barrier(dequantize(weight, x.dtype))
    preferred = None if out == x.dtype else out
    return jnp.matmul(rounded_activations(x, weight, split), whole, preferred_element_type=preferred)


def _xla(x: jax.Array, weight: QTensor, split: Names, out: Any) -> jax.Array:
    """Multiplies x `[N, D]`, on a CPU by a cache's worth of decoded outputs at a time."""
    fmt, scale = weight.format, None
    left = x
    if fmt.activations != "none":
        left, scale = activation_codes(x, weight, split)

    def product(part: QTensor) -> jax.Array:
        return _decoding_product(left, part, x.dtype)

    D, F = weight.shape
    unit = math.lcm(8, fmt.group if fmt.granularity == "block" else 1)
    step = max(unit, _PIECE // (D * x.dtype.itemsize) // unit * unit)
    if jax.default_backend() != "cpu" or F <= step or x.shape[0] == 1:
        y = product(weight)
    else:
        y = jax.lax.map(lambda i: product(weight.outputs(i * step, step)), jnp.arange(F // step))
        y = jnp.moveaxis(y, 0, 1).reshape(x.shape[0], -1)
        if F % step:
            y = jnp.concatenate([y, product(weight.outputs(F - F % step, F % step))], axis=1)
    return (y if scale is None else y * scale).astype(out)


def _decoding_product(x: jax.Array, weight: QTensor, dtype: Any) -> jax.Array:
    """Multiplies x `[N, D]`, or its codes, to float32. The weight's codes are small numbers, exact in any
    dtype: products are rounded by their sum in float32 alone, and scales come last. Scales of groups differ
    along the sum: there the weight is dequantized on the way into the product."""
    fmt = weight.format
    if fmt.packed and _splits_in_halves(weight):
        return _packed_dot(x.astype(dtype), weight)
    if fmt.granularity in ("group", "block"):
        return dot_by_rows(x.astype(dtype), dequantize_stored(weight, dtype), jnp.float32)
    step, zero = step_and_zero(weight.scales, weight.zeros, weight.tensor_scale, fmt)
    codes = unpacked_codes(weight)
    if fmt.activations != "none" and is_integer(fmt):
        y = _integer_dot(x, codes, None if fmt.symmetric else zero)
    else:
        one = jnp.ones((), jnp.float32)
        values = codes_to_values(codes, one[None, None], zero.reshape(-1, 1), fmt)
        y = dot_by_rows(x.astype(dtype), values.astype(dtype), jnp.float32)
    return y * step.reshape(1, -1)


def _splits_in_halves(weight: QTensor) -> bool:
    """Returns whether each half of a piece of packed bytes has whole groups, or is part of one."""
    fmt, half = weight.format, weight.pack // 2
    by_place = fmt.granularity != "block" and not fmt.indexed
    return by_place and (not fmt.group or fmt.group % weight.pack == 0 or half % fmt.group == 0)


def _packed_dot(x: jax.Array, weight: QTensor) -> jax.Array:
    """Multiplies x `[..., D]` by four-bit codes to float32 `[..., F]`, as two products.

    A byte's nibbles are half a piece of inputs apart. Rather than put them in order, which no CPU does fast,
    the inputs are taken in the order of the low nibbles, and then in that of the high ones.
    """
    fmt, (D, F), piece = weight.format, weight.shape, weight.pack
    *lead, _ = x.shape
    step, zero = (a.T for a in step_and_zero(weight.scales, weight.zeros, weight.tensor_scale, fmt))
    # A vector's product on CPU is a loop into which XLA would fuse the reordering and the other product,
    # number by number; kept apart, each half is as fast as a product of bytes (docs/log.md).
    on_cpu = jax.default_backend() == "cpu"
    apart = jax.lax.optimization_barrier if on_cpu else lambda arrays: arrays
    order = np.arange(D).reshape(D // piece, 2, piece // 2)
    # A gather by known places: in a vector's product reshapes and slices would keep LLVM from AVX-512.
    halves = (
        [x[..., order[:, i].reshape(-1)] for i in range(2)]
        if on_cpu and math.prod(lead) == 1
        else [x.reshape(*lead, *order.shape)[..., i, :].reshape(*lead, D // 2) for i in range(2)]
    )
    inputs = apart(tuple(halves))
    products = []
    for i in range(2):
        nibbles = weight.values >> jnp.uint8(4) if i else weight.values & jnp.uint8(15)
        grids = [_of_half(grid, fmt.group, piece, i) for grid in (step, zero)]
        codes = nibbles.reshape(F, grids[0].shape[1], -1)
        scale = grids[0] if fmt.group else jnp.ones((1, 1, 1), jnp.float32)
        values = codes_to_values(codes, scale, grids[1], fmt).reshape(F, D // 2).astype(x.dtype)
        products.append(dot_by_rows(inputs[i], values, jnp.float32))
    low, high = apart(tuple(products))
    total = low + high
    return total if fmt.group else total * step.reshape(*(1,) * (total.ndim - 1), -1)


def _of_half(grid: jax.Array, group: int, piece: int, half: int) -> jax.Array:
    """Maps `[F or 1, G]` of the groups in all inputs to those of the low (0) or high nibbles, each with as
    many inputs: `[F or 1, G', 1]`."""
    if group and group < piece:
        within = piece // group  # groups of a piece, of which the first half are in the low nibbles
        grid = grid.reshape(grid.shape[0], -1, 2, within // 2)[:, :, half].reshape(grid.shape[0], -1)
    return grid[:, :, None]


def _kernel(x: jax.Array, weight: QTensor, split: Names, out: Any) -> jax.Array:
    from pallas_kernels.quantized_matmul import quantized_matmul

    D = x.shape[-1]
    kernel_weight = to_kernel(weight)
    if kernel_weight is None:
        raise ConfigError(f"quant.implementation=pallas_triton: {why_no_kernel(weight.format, D)}")
    rows, scale = x, None
    if weight.format.activations != "none":
        # Here and not in the kernel, whose scales are of the inputs that it sees.
        rows, scales = activation_codes(rows, weight, split)
        scale = scales[:, 0]
    return quantized_matmul(rows, kernel_weight, x_scale=scale, out_dtype=out)


def _integer_dot(x: jax.Array, stored: jax.Array, zero: jax.Array | None) -> jax.Array:
    """Multiplies int8 x `[..., D]` by stored `[F, D]` less its zero points `[1, F or 1]`, float32 `[..., F]`:
    the exact sum, rounded once.

    CPUs have no fast product of int8: there the codes are floats, and the sum goes by parts short enough to
    be exact in float32.
    """
    if jax.default_backend() != "cpu":
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        total = jax.lax.dot_general(x, stored, dims, preferred_element_type=jnp.int32)
        if zero is not None:
            ones = jnp.sum(x.astype(jnp.int32), axis=-1, keepdims=True)
            total = total - ones * zero.astype(jnp.int32).reshape(*(1,) * (x.ndim - 1), -1)
        return total.astype(jnp.float32)
    D = x.shape[-1]
    left, right = x.astype(jnp.float32), stored.astype(jnp.float32)
    if zero is not None:
        right = right - zero.reshape(-1, 1)
    longest = exact_terms(symmetric=zero is None)
    if D <= longest:
        return dot_by_rows(left, right)
    parts = [
        dot_by_rows(left[..., start : start + longest], right[:, start : start + longest]).astype(jnp.int32)
        for start in range(0, D, longest)
    ]
    return sum(parts[1:], parts[0]).astype(jnp.float32)


def exact_terms(*, symmetric: bool) -> int:
    """Returns how many products of an int8 with an int8 (less a zero point) float32 adds up exactly."""
    return _EXACT // (128 * (128 if symmetric else 255))
