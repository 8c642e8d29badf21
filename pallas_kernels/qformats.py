"""Weight formats of the quantized kernels: what the numbers mean, and how they lie in memory.

A weight of D inputs and F outputs is `[..., D, F]`; leading axes (experts) are optional. Its codes are stored
transposed, inputs contiguous, as checkpoints store the weights of linear layers:

    kind    values                       scales                                   zeros
    w8a16   int8  [..., F, D]            [..., 1, F]; by groups, [..., D/g, F]    none
    w4a16   uint8 [..., F, D/2] packed   [..., D/g, F]                            none, or uint8 [..., D/g, F]
    w8a8    int8  [..., F, D]            [..., 1, F]                              none
    fp8     uint8 [..., F, D] e4m3 bits  [..., 1, F] or [..., ⌈D/128⌉, ⌈F/128⌉]   none
    mxfp4   uint8 [..., F, D/2] packed   uint8 [..., D/32, F] e8m0                none

Packed values may also lie in tiles, `[..., D/64, F, 32]` (`tile_codes`), as `QuantizedTensor.tiled` says.

- Inputs contiguous, because a thread of a tensor-core product wants neighbours along the reduction: it then
  reads four codes in one go and decodes them packed. With outputs contiguous the compiler reads byte by byte,
  and a 4-bit weight costs 5 instructions in place of 3 (sm_80, counted in SASS), an e4m3 one 11 in place of
  4; more than about 5 and 9, and an A100 decodes more slowly than its memory delivers. int8 products need it
  on either target.
- `w4a16`: a nibble n stands for (n - z) s with z = 8 where there are no zeros. D is cut into blocks of 64;
  byte r of a block's 32 holds input r in the low nibble and input r + 32 in the high one. A kernel so gets
  two whole tiles from one tile of bytes, with nothing to interleave, whatever tile sizes it is tuned to.
- `mxfp4`: nibbles are e2m1 numbers, packed as those of `w4a16`; a scale's byte b stands for 2^(b - 127), the
  least for 0; above 2^65 products are unspecified (OCP Microscaling Formats v1.0).
- In tiles, one block of all outputs lies together: a program reads runs of 32 n bytes of its n outputs, not n
  times 32 bytes, D/2 apart, and a warp's 512 bytes are four whole lines, not a quarter of sixteen. Marlin
  (Frantar et al., arXiv 2408.11743) also fixes n, and the order within; here no size is padded, and devices
  split D and F as before.
- `w8a8`: activations are quantized per row as `quantize_rows` does.
- `fp8`: values must be finite; what a NaN code stands for in a product is unspecified. With group 128, one
  scale for each 128 × 128 block (DeepSeek-V3, arXiv 2412.19437, whose checkpoints have the scales
  transposed).

Scales are bfloat16, float16 or float32, where nothing else is said.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type
from pallas_kernels.errors import bind_shapes, check_dtype, check_that
from pallas_kernels.fp8 import decode_e2m1, decode_e4m3

PACK = 64
"""Rows of a pack block of four-bit codes: two halves of 32."""

FP8_BLOCK = 128

MOST_CODES = 2**31
"""Bytes of codes, on one device, that are too many: kernels index them with 32 bits."""

GROUPS = {
    "w8a16": (0, 32, 64, 128),
    "w4a16": (32, 64, 128),
    "w8a8": (0,),
    "fp8": (0, FP8_BLOCK),
    "mxfp4": (32,),
}


@dataclass(frozen=True)
class Format:
    """`group` rows share a scale; 0: one scale per output. `zeros`: a zero point beside every scale."""

    kind: str
    group: int = 0
    zeros: bool = False

    def __post_init__(self) -> None:
        if self.kind not in GROUPS or self.group not in GROUPS[self.kind]:
            known = "; ".join(f"{kind}: group {', '.join(map(str, g))}" for kind, g in GROUPS.items())
            raise ValueError(f"no format {self.kind!r} with group {self.group}; known: {known}")
        if self.zeros and self.kind != "w4a16":
            raise ValueError(f"{self.kind} has no zero points")

    @property
    def name(self) -> str:
        """Name of the format as in spec names: `w4a16_g64z`."""
        return self.kind + (f"_g{self.group}" if self.group else "") + ("z" if self.zeros else "")

    @property
    def packed(self) -> bool:
        """True if a byte holds two codes."""
        return self.kind in ("w4a16", "mxfp4")

    @property
    def block(self) -> int:
        """D must be a multiple of it."""
        if self.kind == "fp8":
            return 1
        return max(self.group, PACK if self.packed else 1)

    @property
    def scale_columns(self) -> int:
        """Outputs that share a scale."""
        return FP8_BLOCK if self.kind == "fp8" and self.group else 1

    def shapes(self, D: int, F: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of values and scales, without leading axes."""
        values = (F, D // 2 if self.packed else D)
        rows = -(-D // self.group) if self.group else 1
        return values, (rows, -(-F // self.scale_columns))

    def weight_bytes(self, D: int, F: int) -> float:
        """Returns the bytes of one matrix with bfloat16 scales."""
        (outputs, inputs), (rows, columns) = self.shapes(D, F)
        scale = 3.0 if self.zeros else 1.0 if self.kind == "mxfp4" else 2.0
        return outputs * inputs + rows * columns * scale

    @property
    def problem(self) -> dict[str, int | str]:
        """The part of a problem (`pallas_kernels.op.Problem`) that says which format it is of."""
        return {"kind": self.kind, "group": self.group, "zeros": int(self.zeros)}

    @classmethod
    def of(cls, problem: Mapping[str, int | str]) -> "Format":
        """Returns the format of a problem."""
        return cls(str(problem["kind"]), int(problem["group"]), bool(problem["zeros"]))

    @property
    def value_dtype(self) -> Any:
        return jnp.int8 if self.kind in ("w8a16", "w8a8") else jnp.uint8

    @property
    def scale_dtypes(self) -> tuple[Any, ...]:
        floats = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
        return (jnp.uint8,) if self.kind == "mxfp4" else floats


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values", "scales", "zeros"), meta_fields=("format",)
)
@dataclass(frozen=True)
class QuantizedTensor:
    """A weight in one of the formats above; a pytree."""

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    format: Format

    @property
    def tiled(self) -> bool:
        """True if the values are as `tile_codes` has them."""
        return self.values.ndim > self.scales.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., D, F]` of the weight that this stands for."""
        *lead, F, D = self.values.shape
        if self.tiled:
            D *= lead.pop()
        return (*lead, 2 * D if self.format.packed else D, F)


def tile_codes(values: Any) -> Any:
    """Puts packed values `[..., F, D/2]` into tiles, `[..., D/64, F, 32]`; an array of JAX or NumPy."""
    *lead, F, width = values.shape
    return values.reshape(*lead, F, 2 * width // PACK, PACK // 2).swapaxes(-3, -2)


def untile_codes(values: Any) -> Any:
    """Undoes `tile_codes`."""
    *lead, blocks, F, width = values.shape
    return values.swapaxes(-3, -2).reshape(*lead, F, blocks * width)


def check_quantized(op: str, argument: str, w: Any, dims: str, **known: int) -> dict[str, int]:
    """Shapes and dtypes of a weight; returns its sizes by name.

    Args:
        dims: names of its axes, "E D F" or "D F"; known: sizes bound beforehand.

    Raises:
        KernelError: what is not a QuantizedTensor, or one whose parts do not fit each other or `known`.
    """
    check_that(op, argument, isinstance(w, QuantizedTensor), type(w).__name__, "a QuantizedTensor")
    fmt, lead = w.format, dims.split()[:-2]
    check_dtype(op, f"{argument}.values", w.values, (fmt.value_dtype,))
    check_dtype(op, f"{argument}.scales", w.scales, fmt.scale_dtypes)
    tiled = w.values.shape[-1:] == (PACK // 2,) and w.tiled and fmt.packed
    shape, expected = list(w.values.shape), f"{len(lead) + 2} dimensions [{dims}]"
    check_that(op, f"{argument}.values", len(shape) == len(lead) + 2 + tiled, f"shape {shape}", expected)
    sizes = dict(known) | dict(zip(lead, w.values.shape, strict=False))
    for name, size in zip(dims.split(), w.shape, strict=True):
        want = known.get(name, size)
        check_that(
            op, argument, size == want, f"shape {list(w.shape)} ({fmt.name})", f"[{dims}] with {name}={want}"
        )
        check_that(op, argument, size > 0, f"shape {list(w.shape)}", f"at least one element along {name}")
        sizes[name] = size
    D, F = w.shape[-2:]
    check_that(op, argument, D % fmt.block == 0, f"D={D}", f"a multiple of {fmt.block} for {fmt.name}")
    scales = " ".join([*lead, *map(str, fmt.shapes(D, F)[1])])
    bind_shapes(op, {f"{argument}.scales": (w.scales, scales)}, **{n: sizes[n] for n in lead})
    expected = f"{'an array' if fmt.zeros else 'None'} ({fmt})"
    check_that(op, f"{argument}.zeros", fmt.zeros == (w.zeros is not None), type(w.zeros).__name__, expected)
    if w.zeros is not None:
        check_dtype(op, f"{argument}.zeros", w.zeros, (jnp.uint8,))
        bind_shapes(op, {f"{argument}.zeros": (w.zeros, scales)}, **{n: sizes[n] for n in lead})
    return sizes


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """Returns numbers below 16, `[..., D]`, of packed uint8 `[..., D/2]`."""
    *lead, half = packed.shape
    blocks = packed.reshape(*lead, 2 * half // PACK, PACK // 2)
    pair = jnp.stack([blocks & jnp.uint8(15), blocks >> jnp.uint8(4)], axis=-2)
    return pair.reshape(*lead, 2 * half)


def spread(scales: jax.Array, D: int, F: int, fmt: Format) -> jax.Array:
    """Returns scales or zeros, one for each weight: `[..., D, F]`."""
    if fmt.scale_columns > 1:
        scales = jnp.repeat(scales, fmt.scale_columns, axis=-1)[..., :F]
    return jnp.repeat(scales, fmt.group or D, axis=-2)[..., :D, :]


def scale_values(scales: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns scales as numbers in `dtype`: bytes are biased exponents."""
    if scales.dtype != jnp.uint8:
        return scales.astype(dtype)
    return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32).astype(dtype)


def dequantize(w: QuantizedTensor, dtype: Any = jnp.float32) -> jax.Array:
    """Returns `[..., D, F]` in `dtype`, computed in float32 (float64 where the scales or `dtype` are)."""
    D, F = w.shape[-2:]
    wide = wide_type(w.scales.dtype, dtype)
    if w.format.kind == "fp8":
        values = decode_e4m3(w.values)
    elif w.format.packed:
        codes = unpack_nibbles(untile_codes(w.values) if w.tiled else w.values)
        values = decode_e2m1(codes) if w.format.kind == "mxfp4" else codes.astype(jnp.int32) - 8
        if w.zeros is not None:
            zeros = spread(w.zeros, D, F, w.format).astype(jnp.int32)
            values = values + 8 - jnp.swapaxes(zeros, -1, -2)
    else:
        values = w.values
    values = jnp.swapaxes(values, -1, -2).astype(wide)
    return (values * spread(scale_values(w.scales, wide), D, F, w.format)).astype(dtype)


def random_quantized(
    key: jax.Array,
    shape: tuple[int, ...],
    fmt: Format,
    scale_dtype: Any = jnp.bfloat16,
    *,
    tiled: bool = False,
) -> QuantizedTensor:
    """Returns any codes at all (fp8: but NaN), scaled as weights of variance about 1/D. Cheap at any size.

    Args:
        tiled: four-bit codes in tiles, as models have them at load where these kernels run.
    """
    *lead, D, F = shape
    a, b, c = jax.random.split(key, 3)
    value_shape, scale_shape = fmt.shapes(D, F)
    values = jax.random.bits(a, (*lead, *value_shape), jnp.uint8)
    deviation = {"w4a16": 4.6, "fp8": 90.0, "mxfp4": 2.9}.get(fmt.kind, 74.0)  # of codes drawn evenly
    if fmt.kind == "fp8":
        values = jnp.where((values & 0x7F) == 0x7F, jnp.uint8(0), values)
    scales = jax.random.uniform(b, (*lead, *scale_shape), jnp.float32, 0.5, 1.5) / (deviation * D**0.5)
    zeros = jax.random.randint(c, (*lead, *scale_shape), 5, 11).astype(jnp.uint8) if fmt.zeros else None
    values = jax.lax.bitcast_convert_type(values, fmt.value_dtype)
    values = tile_codes(values) if tiled and fmt.packed else values
    if fmt.kind == "mxfp4":  # a power of two below
        exponents = jax.lax.bitcast_convert_type(scales, jnp.int32) >> 23
        return QuantizedTensor(values, exponents.astype(jnp.uint8), None, fmt)
    return QuantizedTensor(values, scales.astype(scale_dtype), zeros, fmt)


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Activations for `w8a8`: int8 `[R, D]` and float32 scales `[R]` with x ≈ values · scales.

    In float32 whatever x's dtype: scale = max|x| / 127, values = round half to even of x · (127 / max|x|). A
    row of zeros has scale 0. Rows with an infinity or NaN have scale NaN and whatever values.
    """
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=-1)
    inverse = jnp.where(most > 0, 127.0 / jnp.maximum(most, 1e-30), 0.0)
    values = jnp.clip(jnp.round(wide * inverse[..., None]), -127, 127).astype(jnp.int8)
    return values, jnp.where(jnp.isfinite(most), most * (1.0 / 127.0), jnp.nan)
