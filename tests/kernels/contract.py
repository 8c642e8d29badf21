"""What every kernel's contract test shares: run one implementation, compare with the reference in float64.

An operation's tests are a class of methods that call `self.check`; each implementation inherits the class
whole and names itself:

    class RmsNormContract(Contract):
        op, api = OP, staticmethod(rms_norm)
        def test_...(self, rng): self.check(arrays, static, tolerance=...)

    class TestPallas(RmsNormContract):
        implementation = "pallas_triton"
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.op import Op
from tests.numerics import assert_close, tolerance

ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-23}


@pytest.mark.contract
class Contract:
    """Inherit it; not collected itself."""

    op: Op
    api: Callable[..., Any]
    implementation: str

    def run(self, arrays: Mapping[str, Any], static: Mapping[str, Any], config: Any = None) -> Any:
        """The implementation's results: interpreted on CPU, compiled on a GPU."""
        static = {**static, "implementation": self.implementation, "config": config}
        return _program(self.api, **static)(dict(arrays))

    def expect(self, arrays: Mapping[str, Any], static: Mapping[str, Any]) -> Any:
        """The reference's results, floating-point inputs widened to float64 first."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            wide = jax.tree.map(_widen, dict(arrays))
            return jax.tree.map(np.asarray, _program(self.op.reference, **static)(wide))

    def check(
        self,
        arrays: Mapping[str, Any],
        static: Mapping[str, Any],
        *,
        limit: float,
        config: Any = None,
    ) -> Any:
        """Compares all outputs: floats within `limit` of the largest element, integers exactly.

        Outputs are poisoned where interpreted (see `_compat.pallas_call`), so an unwritten element is NaN and
        fails. Returns the implementation's results.
        """
        ours, theirs = self.run(arrays, static, config), self.expect(arrays, static)
        ours_flat, tree = jax.tree.flatten(ours)
        theirs_flat, other = jax.tree.flatten(theirs)
        assert tree == other
        for a, b in zip(ours_flat, theirs_flat, strict=True):
            if jnp.issubdtype(b.dtype, jnp.floating):
                assert_close(np.asarray(a, np.float64), b, limit)
            else:
                np.testing.assert_array_equal(np.asarray(a), b)
        return ours


@functools.lru_cache(maxsize=256)
def _program(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`function` of a dictionary of arrays, compiled once for all cases that differ in values only."""
    return jax.jit(lambda arrays: function(**arrays, **static))


def limit_for(dtype: Any, *reductions: int, products: Any = "float32") -> float:
    """Tolerance of an output in `dtype` whose sums of the given lengths are kept in `products`' precision.

    One rounding to the output's dtype, and the accumulated error of the sums (tests/numerics.py). An
    intermediate that is rounded to bfloat16 between two products counts as a reduction in that dtype.
    """
    return ULP[str(jnp.dtype(dtype))] + tolerance(*reductions, dtype=str(jnp.dtype(products)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Normal numbers, rounded to `dtype`."""
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


def _widen(array: Any) -> Any:
    array = jnp.asarray(array)
    return array.astype(jnp.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array
