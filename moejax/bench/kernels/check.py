"""Whether a kernel's result is right: its distance from the reference's, and the most that rounding explains.

A time is worth nothing without it. Distances are computed on the device: outputs may be gigabytes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.op import Op, Spec

# Half the distance from 1 to the next number.
_ROUNDOFF = {"bfloat16": 2.0**-9, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}

# Eight-bit codes: a number computed with 16 float32 roundings is off by 2^-20 of itself, so by 2^-13 of a
# code at code 127, and gets another code if it lies that near to the middle of two, on either side.
_OTHER_CODES = 2.0**-12

# Scores that differ by float32 roundings alone may change places: of 256 scores in (0, 1) one has a
# neighbour within 2^-20 with probability 2^-12; groups and experts are chosen, with neighbours on both sides.
_OTHER_CHOICES = {"topk_router": 2.0**-10}


class Checked(NamedTuple):
    """`error`: relative, infinite where a result is not finite; `fault`: what is wrong with it, or None."""

    error: float
    fault: str | None


def first_inputs(spec: Spec) -> dict[str, Any]:
    """The inputs that results are compared on: those of a chain's first call."""
    return jax.jit(spec.make)(jax.random.PRNGKey(0))


def reference_result(op: Op, spec: Spec, restrict: Callable[[Any, Any], Any]) -> Any:
    """Returns what the contract defines of the reference's result for `first_inputs`, in full precision.

    Compute it before the other inputs are made: references may take tens of gigabytes.
    """
    with jax.default_matmul_precision("highest"):
        compute = jax.jit(lambda kw: restrict(op.reference(**kw, **spec.static), kw))
        return jax.block_until_ready(compute(first_inputs(spec)))


def check(got: Any, want: Any, spec: Spec, op: str = "") -> Checked:
    """Compares all outputs; the fault is of the one furthest past its limit.

    The error is the norm of the difference over the reference's norm, or of integers and eight-bit codes the
    share that differs.
    """
    ours, theirs = jax.tree.leaves(got), jax.tree.leaves(want)
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        shapes = f"{[list(x.shape) for x in ours]}, expected {[list(x.shape) for x in theirs]}"
        return Checked(math.inf, f"wrong result: shapes {shapes}")
    longest = max((max(x.shape, default=1) for x in jax.tree.leaves(spec.abstract)), default=1)
    worst, fault, excess = 0.0, None, 1.0
    for distance, reference in zip(jax.device_get(_distances(ours, theirs)), theirs, strict=True):
        error = float(distance) if math.isfinite(distance) else math.inf
        limit = largest_error(reference.dtype, longest, op)
        worst = max(worst, error)
        # An exact output has limit 0: any error is past it.
        past = error / limit if limit else (math.inf if error else 0.0)
        if past > excess:
            excess = past
            fault = f"wrong result: relative error {error:.1e}, at most {limit:.1e} by rounding"
            if math.isinf(error):
                fault = "wrong result: not finite"
    return Checked(worst, fault)


def largest_error(dtype: Any, longest: int, op: str = "") -> float:
    """The most that two right computations of an output in `dtype` may differ by.

    Floating point: each rounds the result and at most one intermediate (attention's weights, a decoded
    weight, a normalised row) to `dtype`, which makes four roundings, and sums in float32 with an error of √n
    roundoffs (Higham and Mary, 2019; the factor 8 is that of `tests/numerics.py`).

    Args:
        longest: bounds the length of a sum: the longest axis of any input. Attention over pages sums further,
            but rounds to 16 bits, beside which the sum's error does not count.
        op: the operation's name, for choices among nearly equal numbers.
    """
    kind = jnp.dtype(dtype)
    if kind.itemsize == 1:
        return _OTHER_CODES
    if not jnp.issubdtype(kind, jnp.floating):
        return _OTHER_CHOICES.get(op, 0.0)
    sums = 8 * _ROUNDOFF["float64" if kind == jnp.float64 else "float32"] * math.sqrt(longest)
    return 4 * _ROUNDOFF[str(kind)] + sums


@jax.jit
def _distances(got: list[jax.Array], want: list[jax.Array]) -> list[jax.Array]:
    return [_distance(a, b) for a, b in zip(got, want, strict=True)]


def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    floating = jnp.issubdtype(b.dtype, jnp.floating)
    if not floating or b.dtype.itemsize == 1:
        wide = jnp.float32 if floating else jnp.int32
        different = jnp.mean(a.astype(wide) != b.astype(wide), dtype=jnp.float32)
        finite = jnp.isfinite(a.astype(jnp.float32)).all()
        return jnp.where(finite, different, jnp.inf)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    distance, size = jnp.sqrt(jnp.sum(jnp.square(a - b))), jnp.sqrt(jnp.sum(jnp.square(b)))
    # Not max(): it may drop a NaN.
    return jnp.where(jnp.isfinite(distance), distance / jnp.maximum(size, 1e-30), jnp.inf)
