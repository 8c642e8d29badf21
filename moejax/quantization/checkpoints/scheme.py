"""Schemes: the checkpoint tensors of one quantized matrix, and their conversion to our arrays.

A matrix of D inputs and F outputs is a module of the checkpoint, `model.layers.0.self_attn.q_proj`, whose
tensors differ in their last name: `qweight`, `weight_scale`, ... A `Scheme` says which of them there must be
and turns them into the arrays of a `QTensor` (`moejax.quantization.formats`) without rounding anything, and
some do the reverse.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from moejax.quantization.arithmetic import pack, unpack
from moejax.quantization.formats import ScaleDtype, WeightFormat

FLOATS = ("F32", "BF16", "F16")
WHOLE = ("I32", "I64")

SCALE_DTYPES: dict[str, ScaleDtype] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "e8m0",
    "F8_E8M0": "e8m0",
}
"""Safetensors' names of the dtypes that scales are kept in."""

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]
Arrays = dict[str, np.ndarray]
Complain = Callable[[str, str], None]
"""Takes the last name of a tensor and what is wrong with its values."""


class Need(NamedTuple):
    """A tensor of a module.

    Attributes:
        shapes: any of these.
        dtypes: any of these, by safetensors' names.
        optional: may be missing.
        unread: known, but nothing of ours.
    """

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    unread: bool = False


@dataclass(frozen=True)
class Scheme(ABC):
    """The layout of one matrix.

    Attributes:
        format: of the weight; where its scales are floats, their dtype is the stored one (`settled`).
    """

    format: WeightFormat

    main = "weight"
    """The tensor with the codes; a module that has it, and `scale`, is quantized."""

    scale = "weight_scale"

    words: ClassVar[str | None] = None
    """The tensor whose codes are packed in words of 32 bits along D."""

    @abstractmethod
    def needs(self, D: int, F: int) -> dict[str, Need]:
        """Returns what there must be, by last name."""

    @abstractmethod
    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        """Returns the parts of a `QTensor` `[D, F]` by name, exactly what is stored.

        Args:
            tensors: all of `needs` that are there and are not unread, of the right shapes and dtypes.
            complain: is called for values that the configuration rules out.
        """

    def settled(self, dtype: str) -> WeightFormat:
        """Returns the format, given the dtype of the stored scales."""
        return dataclasses.replace(self.format, scale_dtype=SCALE_DTYPES[dtype])

    def hint(self, name: str, shape: Shape, D: int, F: int) -> str:
        """Returns a hint at the bits or groups that a tensor of another shape has, as `": …"`, or nothing."""
        if len(shape) != 2:
            return ""
        size = next((n for n, other in (shape, shape[::-1]) if other == F), 0)
        if size and name == self.words and 32 * size % D == 0:
            return f": codes of {32 * size // D} bits, not {self.format.bits}"
        if size and name == self.scale and self.format.granularity == "group" and D % size == 0:
            return f": groups of {D // size}, not {self.format.group}"
        return ""


@dataclass(frozen=True)
class WrittenScheme(Scheme):
    """A layout that models are saved in, too."""

    @abstractmethod
    def write(self, parts: Mapping[str, np.ndarray], D: int, F: int) -> Arrays:
        """Inverts `read`."""


def words_to_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Maps int32 `[..., W]` to codes `[..., W * 32 / bits]`, a word's lowest bits first.

    Codes of 4 bits are uint8; those of 8 bits, which words count from 0, are int8.
    """
    octets = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    return unpack(octets, 2) if bits == 4 else (octets ^ np.uint8(128)).view(np.int8)


def codes_to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Inverts `words_to_codes`; the last word is filled up with zeros."""
    codes = codes if bits == 4 else codes.view(np.uint8) ^ np.uint8(128)
    short = -codes.shape[-1] % (32 // bits)
    filled = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    octets = pack(filled, 2) if bits == 4 else filled
    return np.ascontiguousarray(octets).view("<i4").astype(np.int32, copy=False)


def our_codes(codes: np.ndarray, fmt: WeightFormat) -> np.ndarray:
    """Maps unpacked codes `[F, D]` to the part `values`."""
    return pack(codes, fmt.pack(codes.shape[-1])) if fmt.packed else codes


def plain_codes(values: np.ndarray, fmt: WeightFormat, D: int) -> np.ndarray:
    """Maps the part `values` to unpacked codes `[F, D]`."""
    return unpack(values, fmt.pack(D)) if fmt.packed else values


def octet_codes(name: str, octets: np.ndarray, fmt: WeightFormat, complain: Complain) -> np.ndarray:
    """Returns codes or zero points as we count them: those of 4 bits from 0 in uint8, not int8 from -8."""
    if fmt.numbers != "int4":
        return octets
    if ((octets < -8) | (octets > 7)).any():
        complain(name, f"{octets.min()} to {octets.max()} where 4 bits have -8 to 7")
    return (octets + np.int8(8)).view(np.uint8)


def check_finite(name: str, values: np.ndarray, complain: Complain) -> None:
    """Complains of floats that are not finite, or exponents of e8m0 that are 255, their NaN."""
    bad = (values == 255) if values.dtype == np.uint8 else ~np.isfinite(values)
    if bad.any():
        complain(name, "NaN or infinite")


def zero_points(
    name: str, zeros: np.ndarray, fmt: WeightFormat, complain: Complain, hint: str = ""
) -> Arrays:
    """Returns the part `zeros`; nothing for a symmetric format, whose zero points must be the middle code."""
    if not fmt.symmetric:
        return {"zeros": zeros}
    middle = 8 if fmt.numbers == "int4" else 0
    if (zeros != middle).any():
        low, high = int(zeros.min()), int(zeros.max())
        values = f"{low}" if low == high else f"from {low} to {high}"
        complain(name, f"zero points {values} where a symmetric format has {middle}{hint}")
    return {}


def group_index(
    name: str, indices: np.ndarray, fmt: WeightFormat, D: int, complain: Complain, order: str = ""
) -> Arrays:
    """Returns the part `group_index` of an indexed format; else nothing, and the groups must go by place.

    Args:
        order: names what of the configuration says that groups go by place.
    """
    if fmt.indexed:
        G, _ = fmt.scale_shape(D, 1)
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= G:
            complain(name, f"groups from {indices.min()} to {indices.max()}, and there are {G}")
        return {"group_index": indices.astype(np.int32)}
    by_place = np.arange(D) // fmt.group if fmt.granularity == "group" else np.zeros(D)
    if not (indices == by_place).all() and not (indices == -1).all():
        complain(name, f"groups are not in order, although {order}")
    return {}
