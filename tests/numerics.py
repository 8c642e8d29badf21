"""How far two computations of the same thing may lie apart, and how to say by how much they do."""

import math
from typing import Any

import numpy as np

# Unit roundoff: half the distance from 1 to the next number.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11, "float64": 2.0**-53}


def tolerance(*reductions: int, dtype: str = "float32") -> float:
    """Relative to the largest element: what two orders of summation may differ by.

    A sum of n rounded terms errs by about sqrt(n) roundoffs of its size (Higham and Mary, 2019, for random
    rounding). `reductions` lists the length of each reduction in a chain. The factor 8 holds two computations
    (2), the largest of a few thousand elements instead of one (about 4 standard deviations, 2 of which
    cancel against the norm being the largest element), and the elementwise operations between (2).
    """
    return 8 * UNIT_ROUNDOFF[dtype] * sum(math.sqrt(n) for n in reductions)


def relative_error(ours: Any, reference: Any) -> float:
    """Largest difference over largest reference element, in float64. Infinite if the shapes differ."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    if ours.shape != reference.shape:
        raise AssertionError(f"shape {ours.shape}, expected {reference.shape}")
    if not np.isfinite(ours).all():
        raise AssertionError("not finite")
    return float(np.abs(ours - reference).max() / max(np.abs(reference).max(), 1e-30))


def relative_l2(ours: Any, reference: Any) -> float:
    """Norm of the difference over norm of the reference."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(ours - reference) / max(np.linalg.norm(reference), 1e-30))


def assert_close(ours: Any, reference: Any, limit: float) -> None:
    """`relative_error` within `limit`, with both numbers in the message."""
    error = relative_error(ours, reference)
    assert error <= limit, f"relative error {error:.3e} exceeds {limit:.3e}"
