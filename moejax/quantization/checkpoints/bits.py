"""Codes in words and bytes, as checkpoints pack them. numpy only, along the last axis."""

import numpy as np


def words_to_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Maps int32 `[..., W]` to uint8 `[..., W * 32 / bits]`, a word's lowest bits first; bits 4 or 8."""
    octets = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    return octets if bits == 8 else octets_to_nibbles(octets)


def codes_to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Inverts `words_to_codes`; the last word is filled up with zeros."""
    short = -codes.shape[-1] % (32 // bits)
    filled = np.pad(codes.astype(np.uint8), [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    octets = filled if bits == 8 else nibbles_to_octets(filled)
    return np.ascontiguousarray(octets).view("<i4").astype(np.int32, copy=False)


def octets_to_nibbles(octets: np.ndarray) -> np.ndarray:
    """Maps uint8 `[..., n]` to codes `[..., 2n]`, the low nibble first."""
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def nibbles_to_octets(codes: np.ndarray) -> np.ndarray:
    """Inverts `octets_to_nibbles`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def signed(codes: np.ndarray) -> np.ndarray:
    """Turns uint8 that count from -128 into int8."""
    return (codes ^ np.uint8(128)).view(np.int8)


def unsigned(codes: np.ndarray) -> np.ndarray:
    """Inverts `signed`."""
    return codes.view(np.uint8) ^ np.uint8(128)
