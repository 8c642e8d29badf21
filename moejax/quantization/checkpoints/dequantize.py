"""The values of a quantized matrix in numpy, the same bits as `moejax.quantization.arithmetic`'s.

For reading a checkpoint into a model in full precision, one matrix at a time on the host.
"""

from collections.abc import Mapping

import numpy as np

from moejax.quantization.checkpoints.scheme import plain_codes
from moejax.quantization.formats import WeightFormat

E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def dequantized(parts: Mapping[str, np.ndarray], fmt: WeightFormat, D: int, F: int) -> np.ndarray:
    """Parts of a `QTensor` `[D, F]` → float32 `[F, D]`: `(code - zero) · step`."""
    codes = plain_codes(parts["values"], fmt, D)
    step = _spread(_steps(parts, fmt), parts, fmt, D, F)
    if fmt.numbers == "float4_e2m1fn":
        values = np.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])
    else:
        values = codes.astype(np.float32)
    if "zeros" in parts:
        values -= _spread(parts["zeros"].astype(np.float32), parts, fmt, D, F)
    elif fmt.numbers == "int4":
        values -= np.float32(8)
    return values * step


def _steps(parts: Mapping[str, np.ndarray], fmt: WeightFormat) -> np.ndarray:
    """Returns float32 `[G, O]`."""
    scales = parts["scales"]
    if fmt.scale_dtype == "e8m0":
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    steps = scales.astype(np.float32)
    return steps * parts["tensor_scale"].reshape(1, 1) if fmt.has_tensor_scale else steps


def _spread(
    grid: np.ndarray, parts: Mapping[str, np.ndarray], fmt: WeightFormat, D: int, F: int
) -> np.ndarray:
    """Spreads `[G, O]` to one for each weight, `[F, D]` or what broadcasts to it."""
    if fmt.indexed:
        return grid[parts["group_index"]].T
    if fmt.granularity == "group":
        return np.repeat(grid.T, fmt.group, axis=1)
    if fmt.granularity == "block":
        wide = np.repeat(np.repeat(grid.T, fmt.group, axis=0), fmt.group, axis=1)
        return wide[:F, :D]
    return grid.T
