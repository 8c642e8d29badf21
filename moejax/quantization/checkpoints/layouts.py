"""The tensors of compressed-tensors, for one matrix; fp8 checkpoints have the first kind too.

    int-quantized, float-quantized, naive-quantized, mxfp8-quantized
        weight             int8 or float8_e4m3fn [F, D]; integers of 4 bits are int8, too
    pack-quantized
        weight_packed      int32 [F, ⌈D · bits / 32⌉], the codes plus 2^(bits-1), lowest bits first
        weight_shape       [2], F and D
        weight_g_idx       int32 [D], the group of each input (actorder "group")
    nvfp4-pack-quantized, mxfp4-pack-quantized
        weight_packed      uint8 [F, D / 2], the low nibble first
        weight_global_scale  float32 [1], of nvfp4: by which scales are divided
    all
        weight_scale       [1], [F, 1], [F, G] or [⌈F / b⌉, ⌈D / b⌉]; uint8 exponents in mx formats
        weight_zero_point  int8 in the shape of the scales; packed along F by groups and channels of
                           pack-quantized, int32 [⌈F · bits / 32⌉, G]
        input_scale        [1], of static activations

value = (code - zero point) · scale. Sources: compressed-tensors 0.20, `compressors`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moejax.quantization.arithmetic import pack, unpack
from moejax.quantization.checkpoints.scheme import (
    FLOATS,
    WHOLE,
    Arrays,
    Complain,
    Need,
    Shape,
    WrittenScheme,
    check_finite,
    codes_to_words,
    group_index,
    octet_codes,
    our_codes,
    plain_codes,
    words_to_codes,
    zero_points,
)

ONE: tuple[Shape, ...] = ((1,), ())


@dataclass(frozen=True)
class _Scaled(WrittenScheme):
    """Base of the layouts with scales, int8 zero points and activation scales."""

    def grid(self, D: int, F: int) -> tuple[Shape, ...]:
        """Returns the shapes that scales may have."""
        fmt = self.format
        if fmt.granularity == "tensor":
            return (*ONE, (1, 1))
        if fmt.granularity == "channel":
            return ((F, 1), (F,))
        return (self.place(D, F),)

    def scale_dtypes(self) -> tuple[str, ...]:
        return ("U8", "F8_E8M0") if self.format.scale_dtype == "e8m0" else FLOATS

    def scaled_needs(self, D: int, F: int) -> dict[str, Need]:
        static = self.format.activations == "static"
        return {
            self.scale: Need(self.grid(D, F), self.scale_dtypes()),
            "input_scale": Need((*ONE, (1, 1)), FLOATS, optional=not static, unread=not static),
            "input_zero_point": Need(ONE, ("I8", "F8_E4M3", *WHOLE), optional=True, unread=True),
            "input_global_scale": Need(ONE, FLOATS, optional=True, unread=True),
        }

    def place(self, D: int, F: int) -> Shape:
        """Returns `[O, G]`: the transpose of ours."""
        G, O = self.format.scale_shape(D, F)  # noqa: E741
        return O, G

    def read_scales(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        scales = tensors[self.scale]
        check_finite(self.scale, scales, complain)
        parts = {"scales": scales.reshape(self.place(D, F)).T}
        if self.format.activations == "static":
            check_finite("input_scale", tensors["input_scale"], complain)
            parts["input_scale"] = tensors["input_scale"].reshape(1).astype(np.float32)
        if (stored := tensors.get("weight_zero_point")) is not None:
            if stored.dtype == np.int32:
                zeros = words_to_codes(stored.T, self.format.bits)[:, :F]
            else:
                octets = stored.reshape(self.place(D, F)).T
                zeros = octet_codes("weight_zero_point", octets, self.format, complain)
            parts |= zero_points("weight_zero_point", zeros, self.format, complain)
        return parts

    def write_scales(self, parts: Mapping[str, np.ndarray]) -> Arrays:
        scales = parts["scales"].T
        out = {self.scale: scales.reshape(-1) if self.format.granularity == "tensor" else scales}
        if "input_scale" in parts:
            out["input_scale"] = parts["input_scale"].reshape(1)
        return out


@dataclass(frozen=True)
class PlainScheme(_Scaled):
    """A code an element."""

    def needs(self, D: int, F: int) -> dict[str, Need]:
        code = "I8" if self.format.numbers.startswith("int") else "F8_E4M3"
        zero = Need(self.grid(D, F), (code,), optional=self.format.symmetric)
        return {
            "weight": Need(((F, D),), (code,)),
            **self.scaled_needs(D, F),
            "weight_zero_point": zero,
        }

    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        fmt = self.format
        if fmt.numbers.startswith("float"):
            check_finite("weight", tensors["weight"], complain)
        codes = octet_codes("weight", tensors["weight"], fmt, complain)
        return {"values": our_codes(codes, fmt), **self.read_scales(tensors, D, F, complain)}

    def write(self, parts: Mapping[str, np.ndarray], D: int, F: int) -> Arrays:
        out = {"weight": parts["values"], **self.write_scales(parts)}
        if "zeros" in parts:
            out["weight_zero_point"] = parts["zeros"].T.reshape(out[self.scale].shape)
        return out


@dataclass(frozen=True)
class PackedScheme(_Scaled):
    """Integers of 4 or 8 bits in words."""

    main = words = "weight_packed"

    @property
    def packs_zeros(self) -> bool:
        return self.format.granularity in ("group", "channel")

    def needs(self, D: int, F: int) -> dict[str, Need]:
        bits, fmt = self.format.bits, self.format
        grid = self.grid(D, F)
        if self.packs_zeros:  # older versions did not pack them
            grid = ((-(-F * bits // 32), fmt.scale_shape(D, F)[0]), grid[0])
        return {
            "weight_packed": Need(((F, -(-D * bits // 32)),), ("I32",)),
            "weight_shape": Need(((2,),), WHOLE),
            **self.scaled_needs(D, F),
            "weight_zero_point": Need(grid, ("I32", "I8"), optional=fmt.symmetric),
            "weight_g_idx": Need(((D,),), WHOLE, optional=not fmt.indexed),
        }

    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        fmt, bits = self.format, self.format.bits
        if tuple(tensors["weight_shape"].tolist()) != (F, D):
            complain("weight_shape", f"{tensors['weight_shape'].tolist()} for a weight of {[F, D]}")
        codes = words_to_codes(tensors["weight_packed"], bits)[:, :D]
        parts = {"values": our_codes(codes, fmt), **self.read_scales(tensors, D, F, complain)}
        if "weight_g_idx" in tensors:
            indices = tensors["weight_g_idx"]
            parts |= group_index("weight_g_idx", indices, fmt, D, complain, 'actorder is not "group"')
        return parts

    def write(self, parts: Mapping[str, np.ndarray], D: int, F: int) -> Arrays:
        fmt, bits = self.format, self.format.bits
        codes = plain_codes(parts["values"], fmt, D)
        out = {
            "weight_packed": codes_to_words(codes, bits),
            "weight_shape": np.asarray([F, D], np.int64),
            **self.write_scales(parts),
        }
        if "zeros" in parts:
            zeros = parts["zeros"]  # [G, O]
            if self.packs_zeros:
                out["weight_zero_point"] = codes_to_words(zeros, bits).T
            else:
                whole = zeros.T if bits == 8 else zeros.T.view(np.int8) - np.int8(8)
                out["weight_zero_point"] = whole.reshape(out[self.scale].shape)
        return out


@dataclass(frozen=True)
class Fp4Scheme(_Scaled):
    """nvfp4 and mxfp4."""

    main = "weight_packed"

    def scale_dtypes(self) -> tuple[str, ...]:
        return ("F8_E4M3",) if self.format.has_tensor_scale else super().scale_dtypes()

    def needs(self, D: int, F: int) -> dict[str, Need]:
        needs = {"weight_packed": Need(((F, D // 2),), ("U8",)), **self.scaled_needs(D, F)}
        if self.format.has_tensor_scale:
            needs["weight_global_scale"] = Need(ONE, ("F32",))
        return needs

    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        codes = unpack(tensors["weight_packed"], 2)
        parts = {"values": our_codes(codes, self.format), **self.read_scales(tensors, D, F, complain)}
        if self.format.has_tensor_scale:
            divisor = tensors["weight_global_scale"].reshape(1, 1)
            if not (np.isfinite(divisor).all() and (divisor > 0).all()):
                complain("weight_global_scale", f"{divisor.item()} is no divisor")
                divisor = np.ones_like(divisor)
            parts["tensor_scale"] = np.float32(1) / divisor
        return parts

    def write(self, parts: Mapping[str, np.ndarray], D: int, F: int) -> Arrays:
        codes = plain_codes(parts["values"], self.format, D)
        out = {"weight_packed": pack(codes, 2), **self.write_scales(parts)}
        if self.format.has_tensor_scale:
            # None only where another process has the values, and writes them.
            divisor = divisor_of(parts["tensor_scale"].item()) or np.float32(0)
            out["weight_global_scale"] = np.asarray([divisor], np.float32)
        return out


def divisor_of(scale: float) -> np.float32 | None:
    """Returns the float32 number whose reciprocal is `scale`; some scales have none."""
    target = np.float32(scale)
    with np.errstate(divide="ignore", over="ignore"):
        near = np.float32(1) / target
        for guess in (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))):
            if np.isfinite(guess) and np.float32(1) / guess == target:
                return guess
    return None


LAYOUTS: Mapping[str, tuple[type[WrittenScheme], tuple[tuple[str, int], ...]]] = {
    "pack-quantized": (PackedScheme, (("int", 4), ("int", 8))),
    "int-quantized": (PlainScheme, (("int", 4), ("int", 8))),
    "float-quantized": (PlainScheme, (("float", 8),)),
    "naive-quantized": (PlainScheme, (("int", 4), ("int", 8), ("float", 8))),
    "mxfp8-quantized": (PlainScheme, (("float", 8),)),
    "mxfp4-pack-quantized": (Fp4Scheme, (("float", 4),)),
    "nvfp4-pack-quantized": (Fp4Scheme, (("float", 4),)),
}
"""The scheme of each format's name in compressed-tensors, and the types and bits of the codes it stores."""
