"""Weight formats: what the numbers mean, and how they lie in memory.

A weight of D inputs and F outputs, `[..., D, F]`, is stored output-major, `[..., F, D]`, as checkpoints store
the weights of linear layers and as `pallas_kernels.qformats` wants them; leading axes (experts) are optional.

    numbers           values                              one code stands for
    int8              int8  [..., F, D]                   q · s, or (q - z) · s
    int4              uint8 [..., F, D/2], two a byte     (n - 8) · s, or (n - z) · s, n in 0..15
    float8_e4m3fn     float8_e4m3fn [..., F, D]           v · s
    float8_e5m2       float8_e5m2 [..., F, D]             v · s
    float4_e2m1fn     uint8 [..., F, D/2], two a byte     v · s (mxfp4), v · s · t (nvfp4)
    float32, bfloat16, float16                            v (2:4 sparse weights alone; s is 1)

Scales are `[..., G, O]`: by `granularity` one for the "tensor" (G = O = 1), for each output "channel"
(G = 1, O = F), for each "group" of `group` inputs of an output (G = D / group, O = F), or for each "block" of
`group` × `group` weights (G = ⌈D / group⌉, O = ⌈F / group⌉). Zero points lie as the scales do.

Packed bytes: D is cut into pieces of `pack` inputs, and byte r of a piece's pack/2 holds input r in the low
nibble and input r + pack/2 in the high one. With pack 64 that is the order of the GPU kernels.

2:4 sparse (arXiv 2104.08378): of every four inputs in order an output has two, whose codes alone are stored,
`[..., F, D/2]`. `kept`, uint8 `[..., F, D/8]`, has their places: a nibble for each four inputs, the first
in its lower two bits.

MX formats: OCP Microscaling Formats (MX) v1.0; nvfp4: a float8_e4m3fn scale for each 16 inputs and one
float32 scale for the tensor.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from moejax.core.checked import Checked, NonNegativeInt
from moejax.core.errors import ConfigError, unknown

Numbers = Literal[
    "int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float32", "bfloat16", "float16"
]
Granularity = Literal["tensor", "channel", "group", "block"]
ScaleDtype = Literal["float32", "bfloat16", "float16", "e8m0", "float8_e4m3fn"]
Activations = Literal["none", "dynamic", "static"]

BITS: dict[str, int] = {"int8": 8, "int4": 4, "float8_e4m3fn": 8, "float8_e5m2": 8, "float4_e2m1fn": 4}
BITS |= {"float32": 32, "bfloat16": 16, "float16": 16}


class Part(NamedTuple):
    """An array of a quantized weight: `axes` are logical names, None for one that is never split."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


@dataclass(frozen=True)
class WeightFormat(Checked, section="weight format"):
    """Storage format of a weight, and quantization of its product's other operand.

    Attributes:
        group: inputs that share a scale, for "group"; rows and columns of a block, for "block"; else 0.
        symmetric: False has a zero point beside every scale (integers only).
        scale_dtype: "e8m0" is a power of two, stored as its biased exponent in a byte.
        activations: of `x @ w`, x is quantized too: "dynamic" with a scale for each token, "static" with one
            scale that calibration has found. In the weight's numbers (int8 or float8).
        indexed: inputs belong to groups by a `group_index` of their own instead of by their place (the
            `g_idx` of GPTQ's activation order).
        sparse: 2:4, two of every four inputs of an output are kept.
    """

    numbers: Numbers
    granularity: Granularity = "channel"
    group: NonNegativeInt = 0
    symmetric: bool = True
    scale_dtype: ScaleDtype = "float32"
    activations: Activations = "none"
    indexed: bool = False
    sparse: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        grouped = self.granularity in ("group", "block")
        if grouped != (self.group > 0):
            raise ConfigError(f"weight format: granularity {self.granularity!r} with group {self.group}")
        if not self.symmetric and not self.numbers.startswith("int"):
            raise ConfigError(f"weight format: {self.numbers} has no zero points")
        if self.activations != "none" and self.bits != 8:
            raise ConfigError(f"weight format: activations are quantized to 8 bits, not to {self.numbers}")
        if self.indexed and self.granularity != "group":
            raise ConfigError("weight format: a group index needs groups")
        if self.sparse and (self.packed or not self.symmetric or self.indexed):
            raise ConfigError("weight format: 2of4 is for floats and symmetric 8-bit codes, by place")
        plain = (self.sparse, self.granularity, self.scale_dtype) == (True, "tensor", "float32")
        if self.bits > 8 and not plain:
            raise ConfigError(f"weight format: {self.numbers} is for 2:4 weights alone, {self.numbers}_2of4")

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return BITS[self.numbers]

    @property
    def packed(self) -> bool:
        """True if a byte holds two codes."""
        return self.bits == 4

    @property
    def code_dtype(self) -> Any:
        """Dtype of one code, not packed."""
        return jnp.dtype(jnp.uint8 if self.packed else self.numbers)

    @property
    def has_tensor_scale(self) -> bool:
        """nvfp4's second scale: its float8 scales count in units of it."""
        return self.scale_dtype == "float8_e4m3fn"

    @property
    def name(self) -> str:
        """Short and unique, read back by `parse_format`: `int4_g64_asym`, `float8_e4m3fn_a8`, `mxfp4`."""
        if self == MXFP4 or self == NVFP4:
            return "mxfp4" if self == MXFP4 else "nvfp4"
        parts: list[str] = [self.numbers]
        if self.granularity == "tensor":
            parts += [] if self.bits > 8 else ["tensor"]
        elif self.group:
            parts.append(f"{self.granularity[0]}{self.group}")
        if not self.symmetric:
            parts.append("asym")
        if self.scale_dtype != default_scale_dtype(self.granularity):
            parts.append(_SCALE_NAMES[self.scale_dtype])
        if self.indexed:
            parts.append("indexed")
        if self.sparse:
            parts.append("2of4")
        if self.activations != "none":
            parts.append("a8" if self.activations == "dynamic" else "a8static")
        return "_".join(parts)

    def check(self, path: str, D: int, F: int) -> None:
        """Raises `ConfigError` where a weight `[..., D, F]` cannot be stored so."""
        if self.granularity == "group" and D % self.group:
            fits = [g for g in (128, 64, 32, 16) if D % g == 0]
            hint = f"use {' or '.join(map(str, fits))}" if fits else "use a format per channel"
            raise ConfigError(f"{path}: groups of {self.group} do not divide its {D} inputs; {hint}")
        if self.packed and D % 2:
            raise ConfigError(
                f"{path}: {self.numbers} packs two codes a byte and needs an even number of inputs, not {D}"
            )
        if self.sparse and D % 8:
            raise ConfigError(f"{path}: 2of4 needs a multiple of 8 inputs, whose places fill a byte, not {D}")

    def pack(self, D: int) -> int:
        """Returns the number of inputs of a piece of packed bytes."""
        return 64 if D % 64 == 0 else 2

    def scale_shape(self, D: int, F: int) -> tuple[int, int]:
        """Returns `[G, O]`."""
        if self.granularity == "tensor":
            return 1, 1
        if self.granularity == "channel":
            return 1, F
        return -(-D // self.group), F if self.granularity == "group" else -(-F // self.group)

    def parts(self, shape: tuple[int, ...], axes: tuple[str | None, ...] | None = None) -> dict[str, Part]:
        """Returns the arrays of a weight `[..., D, F]` by their attribute in `QTensor`.

        Args:
            axes: logical axes of `shape`. Scales of groups and blocks go with the axes of what they scale.
        """
        *lead, D, F = shape
        *lead_axes, in_axis, out_axis = axes or (None,) * len(shape)
        G, O = self.scale_shape(D, F)  # noqa: E741
        grouped = self.granularity in ("group", "block")
        split_in = in_axis if grouped and not self.indexed else None
        split_out = out_axis if self.granularity != "tensor" else None
        width = D // 2 if self.packed or self.sparse else D
        scale = {"e8m0": jnp.uint8}.get(self.scale_dtype) or jnp.dtype(self.scale_dtype)
        place = (*lead_axes, split_in, split_out)
        parts = {
            "values": Part((*lead, F, width), self.code_dtype, (*lead_axes, out_axis, in_axis)),
            "scales": Part((*lead, G, O), jnp.dtype(scale), place),
        }
        if not self.symmetric:
            zero = jnp.uint8 if self.numbers == "int4" else jnp.int8
            parts["zeros"] = Part((*lead, G, O), jnp.dtype(zero), place)
        if self.has_tensor_scale:
            parts["tensor_scale"] = Part((*lead, 1, 1), jnp.dtype(jnp.float32), (*lead_axes, None, None))
        if self.indexed:
            parts["group_index"] = Part((*lead, D), jnp.dtype(jnp.int32), (*lead_axes, in_axis))
        if self.sparse:
            parts["kept"] = Part((*lead, F, D // 8), jnp.dtype(jnp.uint8), (*lead_axes, out_axis, in_axis))
        if self.activations == "static":
            parts["input_scale"] = Part((*lead, 1), jnp.dtype(jnp.float32), (*lead_axes, None))
        return parts

    def bits_held(self, shape: tuple[int, ...]) -> int:
        """Counts the bits of all arrays of a weight `[..., D, F]`, scales included."""
        return sum(8 * math.prod(p.shape) * p.dtype.itemsize for p in self.parts(shape).values())


_SCALE_NAMES: dict[str, str] = {
    "float32": "sf32", "bfloat16": "sbf16", "float16": "sf16", "e8m0": "se8m0", "float8_e4m3fn": "se4m3"
}  # fmt: skip

MXFP4 = WeightFormat("float4_e2m1fn", "group", 32, scale_dtype="e8m0")
NVFP4 = WeightFormat("float4_e2m1fn", "group", 16, scale_dtype="float8_e4m3fn")


PARTS = ("values", "scales", "zeros", "tensor_scale", "group_index", "input_scale", "kept")
"""Names of the arrays of a quantized weight."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=PARTS, meta_fields=("format", "pack"))
@dataclass(frozen=True)
class QTensor:
    """A quantized weight; a pytree, so that `jax.tree.map(lambda a: a[e], w)` is expert e's.

    Attributes:
        values, scales, zeros: see the module.
        tensor_scale: float32 `[..., 1, 1]`, of nvfp4.
        group_index: int32 `[..., D]`, the group of each input; None where it goes by place.
        input_scale: float32 `[..., 1]`, static scale of the activations: x ≈ code · input_scale.
        pack: inputs of a piece of packed bytes; of the whole weight, also where this is a device's part.
        kept: uint8 `[..., F, D/8]`, of 2:4 sparse formats.
    """

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    tensor_scale: jax.Array | None
    group_index: jax.Array | None
    input_scale: jax.Array | None
    format: WeightFormat
    pack: int = 64
    kept: jax.Array | None = None

    @classmethod
    def of(cls, parts: Mapping[str, Any], fmt: WeightFormat, D: int) -> "QTensor":
        """Returns the weight of D inputs with these arrays by name; one that is not named is None."""
        arrays: dict[str, Any] = {name: parts.get(name) for name in PARTS}
        return cls(**arrays, format=fmt, pack=fmt.pack(D))

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., D, F]` of the weight that this stands for."""
        *lead, F, width = self.values.shape
        if self.values.ndim > self.scales.ndim:  # in the GPU kernels' tiles, `[..., D/64, F, 32]`
            width *= lead.pop()
        return (*lead, 2 * width if self.format.packed or self.format.sparse else width, F)

    def outputs(self, start: int | jax.Array, count: int) -> "QTensor":
        """Returns the weight of `count` of its outputs from `start` on: whole blocks, but for the last."""

        def part(array: Any, axis: int, per: int) -> Any:
            if array is None or array.shape[axis] == 1:  # one scale for all
                return array
            return jax.lax.dynamic_slice_in_dim(array, start // per, -(-count // per), axis)

        per = self.format.group if self.format.granularity == "block" else 1
        scales, zeros = (part(grid, -1, per) for grid in (self.scales, self.zeros))
        values, kept = (part(rows, -2, 1) for rows in (self.values, self.kept))
        return replace(self, values=values, scales=scales, zeros=zeros, kept=kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as stored in memory."""
        return sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(self))


def default_scale_dtype(granularity: str) -> ScaleDtype:
    """Returns bfloat16 for groups (codes rounded with it absorb its rounding), else float32."""
    return "bfloat16" if granularity == "group" else "float32"


_ALIASES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_block128": "float8_e4m3fn_b128",
    "w8a8": "int8_a8",
    "w8a8_static": "int8_a8static",
    "bf16_2of4": "bfloat16_2of4",
}
KNOWN_FORMATS = (
    "int8", "int8_asym", "int8_tensor", "int8_g64", "int8_g128", "int4", "int4_g32", "int4_g64", "int4_g128",
    "int4_g64_asym", "int4_g128_asym", *_ALIASES, "fp8_a8", "mxfp4", "nvfp4", "int8_2of4",
)  # fmt: skip
"""Formats that a message lists; any parts of `WeightFormat.name` may follow a name of numbers or an alias."""


def parse_format(name: str) -> WeightFormat:
    """Returns the format of a name such as `int8`, `int4_g64_asym`, `fp8_block128`, `w8a8`, `mxfp4`.

    Raises:
        ConfigError: no such name.
    """
    if name in ("mxfp4", "nvfp4"):
        return MXFP4 if name == "mxfp4" else NVFP4
    short = max((a for a in _ALIASES if name == a or name.startswith(f"{a}_")), key=len, default="")
    full = _ALIASES.get(short, "") + name[len(short) :]
    numbers = next((n for n in BITS if full == n or full.startswith(f"{n}_")), None)
    if numbers is None:
        raise ConfigError(f"quant.format: {unknown('format', name, KNOWN_FORMATS)}")
    options: dict[str, Any] = {"granularity": "tensor" if BITS[numbers] > 8 else "channel"}
    scale_dtypes = {short: dtype for dtype, short in _SCALE_NAMES.items()}
    for part in full[len(numbers) :].split("_")[1:]:
        if part == "tensor":
            options["granularity"] = "tensor"
        elif part[:1] in ("g", "b") and part[1:].isdecimal():
            options |= {"granularity": "group" if part[0] == "g" else "block", "group": int(part[1:])}
        elif part == "asym":
            options["symmetric"] = False
        elif part in ("indexed", "2of4"):
            options["indexed" if part == "indexed" else "sparse"] = True
        elif part in scale_dtypes:
            options["scale_dtype"] = scale_dtypes[part]
        elif part in ("a8", "a8static"):
            options["activations"] = "dynamic" if part == "a8" else "static"
        else:
            raise ConfigError(f"quant.format: {unknown('format', name, KNOWN_FORMATS)}")
    options.setdefault("scale_dtype", default_scale_dtype(options["granularity"]))
    return WeightFormat(numbers, **options)  # type: ignore[arg-type]
