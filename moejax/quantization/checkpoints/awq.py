"""AWQ checkpoints, the GEMM layout of AutoAWQ.

    qweight  int32 [D, F / 8]     4-bit codes, packed along the outputs; the nibbles of a word, lowest first,
                                  are outputs 0 2 4 6 1 3 5 7 of its eight
    qzeros   int32 [G, F / 8]     zero points, in the same order
    scales   float [G, F]

value = (code - zero) · scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moejax.quantization.checkpoints.convention import Listed, QuantFields
from moejax.quantization.checkpoints.scheme import (
    FLOATS,
    Arrays,
    Complain,
    Need,
    Scheme,
    check_finite,
    our_codes,
    words_to_codes,
    zero_points,
)
from moejax.quantization.formats import WeightFormat

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of a word's eight, that each nibble has."""


@dataclass(frozen=True)
class AwqScheme(Scheme):
    main = "qweight"
    scale = "scales"

    def needs(self, D: int, F: int) -> dict[str, Need]:
        (G, _), words = self.format.scale_shape(D, F), -(-F // 8)
        return {
            "qweight": Need(((D, words),), ("I32",)),
            "qzeros": Need(((G, words),), ("I32",), optional=self.format.symmetric),
            "scales": Need(((G, F),), FLOATS),
        }

    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        check_finite("scales", tensors["scales"], complain)
        codes = _output_major(tensors["qweight"])[:F]
        parts = {"values": our_codes(codes, self.format), "scales": tensors["scales"]}
        if "qzeros" in tensors:
            zeros = _output_major(tensors["qzeros"])[:F].T
            parts |= zero_points("qzeros", zeros, self.format, complain, " (zero_point is false)")
        return parts


def _output_major(words: np.ndarray) -> np.ndarray:
    """Maps int32 `[n, W]` to uint8 `[8 W, n]`."""
    nibbles = words_to_codes(words, 4).reshape(*words.shape, 8)
    return nibbles[..., np.argsort(ORDER)].reshape(len(words), -1).T


def parse_awq(fields: QuantFields) -> Listed:
    """Raises `ConfigError` for what is not read here and `CheckpointError` for what is malformed."""
    fields.one_of("bits", fields.integer("bits", "w_bit"), (4,), "AWQ")
    version = str(fields.take("version", "format", default="gemm")).lower()
    fields.one_of("version", version, ("gemm",), "AWQ")
    group = fields.group()
    fmt = WeightFormat(
        "int4", "group" if group else "channel", group, symmetric=not fields.flag("zero_point", True)
    )
    return Listed("awq", AwqScheme(fmt), fields.names("modules_to_not_convert"))
