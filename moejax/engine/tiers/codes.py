"""Experts in fewer bits below the device, after the numbers of GGML's q8_K and q4_K. Numpy only; lossy.

Values are taken in blocks of 256, in the order in which they lie; the last block is filled up with zeros.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FLOATS = ("float32", "bfloat16", "float16")
"""Dtypes of what is put into codes."""
BLOCK = 256
_PARTS = 8
"""Of a block of q4_k, each with a scale and a minimum of six bits."""


class Codec(NamedTuple):
    """Bytes of a block, and the ways between float32 `[blocks, 256]` and uint8 `[blocks, bytes]`."""

    block_bytes: int
    to_bytes: Callable[[Floats], Bytes]
    to_values: Callable[[Bytes], Floats]

    def nbytes(self, size: int) -> int:
        """Returns the bytes of so many values."""
        return -(-size // BLOCK) * self.block_bytes

    def encode(self, values: np.ndarray) -> Bytes:
        """Returns the bytes of values of any shape."""
        flat = np.asarray(values, np.float32).reshape(-1)
        return self.to_bytes(np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)).reshape(-1)

    def decode(self, data: Bytes, size: int) -> Floats:
        """Returns the first `size` values, float32 `[size]`."""
        return self.to_values(data.reshape(-1, self.block_bytes)).reshape(-1)[:size]


def _to_q8(values: Floats) -> Bytes:
    """A float32 scale a block, the largest value over 127, and codes of eight bits."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(values / np.where(scale == 0, 1, scale)).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)


def _from_q8(data: Bytes) -> Floats:
    scale = np.ascontiguousarray(data[:, :4]).view(np.float32)
    return data[:, 4:].view(np.int8).astype(np.float32) * scale


def _to_q4(values: Floats) -> Bytes:
    """Four bits a value between a part's minimum (at most 0) and its maximum; minima and steps in 63rds of
    the block's largest, which are float16."""
    parts = values.reshape(-1, _PARTS, BLOCK // _PARTS)
    least = np.maximum(-parts.min(axis=2), 0)
    step = np.maximum(parts.max(axis=2) + least, 0) / 15
    units, sixths = [], []
    for part in (step, least):
        unit = (part.max(axis=1, keepdims=True) / 63).astype(np.float16)
        wide = unit.astype(np.float32)
        units.append(unit)
        sixths.append(np.clip(np.rint(part / np.where(wide == 0, 1, wide)), 0, 63).astype(np.uint8))
    step, least = (s * u.astype(np.float32) for s, u in zip(sixths, units, strict=True))
    codes = np.rint((parts + least[:, :, None]) / np.where(step == 0, 1, step)[:, :, None])
    codes = np.clip(codes, 0, 15).astype(np.uint8).reshape(-1, BLOCK)
    bits = np.unpackbits(np.concatenate(sixths, axis=1)[:, :, None], axis=2)[:, :, 2:]
    packed = np.packbits(bits.reshape(len(bits), -1), axis=1)
    return np.concatenate(
        [*(unit.view(np.uint8) for unit in units), packed, codes[:, ::2] | codes[:, 1::2] << 4], axis=1
    )


def _from_q4(data: Bytes) -> Floats:
    units = np.ascontiguousarray(data[:, :4]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(np.ascontiguousarray(data[:, 4:16]), axis=1).reshape(-1, 2, _PARTS, 6)
    sixths = bits.astype(np.float32) @ np.array([32, 16, 8, 4, 2, 1], np.float32)
    step, least = np.moveaxis(sixths * units[:, :, None], 1, 0)
    codes = np.stack([data[:, 16:] & 15, data[:, 16:] >> 4], axis=2).reshape(-1, _PARTS, BLOCK // _PARTS)
    return (codes * step[:, :, None] - least[:, :, None]).reshape(-1, BLOCK)


CODECS = {"q8_k": Codec(4 + BLOCK, _to_q8, _from_q8), "q4_k": Codec(16 + BLOCK // 2, _to_q4, _from_q4)}
