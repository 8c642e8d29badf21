"""`moe_mlp`: the four expert kernels as one layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dtypes import wide_type
from pallas_kernels.errors import KernelError
from pallas_kernels.groups import ACTIVATIONS, ClampedSwiglu
from pallas_kernels.moe_mlp import moe_mlp
from tests.kernels.contract import limit_for, normal
from tests.kernels.groups import one_hot, patterns
from tests.numerics import assert_close


def moe_mlp_dense(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: str = "silu",
) -> jax.Array:
    """`moe_mlp` by computing every expert on every token."""
    wide = wide_type(x.dtype)
    total = jnp.zeros(x.shape, wide)
    for expert in range(gate.shape[0]):
        g, u, d = (w[expert].astype(wide) for w in (gate, up, down))
        y = (ACTIVATIONS[activation](x.astype(wide) @ g) * (x.astype(wide) @ u)) @ d
        weight = jnp.sum(jnp.where(ids == expert, weights.astype(wide), 0), axis=1)
        total = total + jnp.where((ids == expert).any(axis=1)[:, None], weight[:, None] * y, 0)
    return total.astype(x.dtype)


@pytest.mark.contract
class TestMoeMlp:
    """Permute, both products and combine together, against every expert on every token."""

    def arrays(self, rng, ids, E, D, F, dtype):
        weights = rng.dirichlet(np.ones(ids.shape[1]), len(ids))
        return {
            "x": normal(rng, (len(ids), D), dtype),
            "ids": jnp.asarray(ids),
            "weights": jnp.asarray(weights, jnp.float32),
            "gate": normal(rng, (E, D, F), dtype, D**-0.5),
            "up": normal(rng, (E, D, F), dtype, D**-0.5),
            "down": normal(rng, (E, F, D), dtype, F**-0.5),
        }

    def dense(self, arrays, **static):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            wide = {
                name: array.astype(jnp.float64) if name != "ids" else array for name, array in arrays.items()
            }
            return np.asarray(jax.jit(lambda kw: moe_mlp_dense(**kw, **static))(wide))

    @pytest.mark.parametrize(
        "T,k,E,block_m,dtype",
        [
            (1, 2, 8, None, "bfloat16"),
            pytest.param(9, 8, 16, None, "float16", marks=pytest.mark.slow),
            (40, 2, 4, 32, "float32"),
            pytest.param(70, 2, 3, None, "bfloat16", marks=pytest.mark.slow),
        ],
    )
    def test_dense(self, rng, T, k, E, block_m, dtype):
        ids = np.argsort(rng.random((T, E)), axis=1)[:, :k].astype(np.int32)
        arrays = self.arrays(rng, ids, E, 40, 24, dtype)
        out = jax.jit(lambda kw: moe_mlp(**kw, block_m=block_m))(arrays)
        assert out.dtype == dtype
        # The hidden activations and each expert's output are rounded to the dtype.
        limit = limit_for(dtype, 40, 40, 24, k) + limit_for(dtype, 1, 1, products=dtype)
        assert_close(np.asarray(out, np.float64), self.dense(arrays), limit)

    def test_patterns(self, rng):
        """Every subset of 8 experts; the others on other devices: undefined slots never reach the sum."""
        fn = jax.jit(lambda kw: moe_mlp(**kw, block_m=16, total_experts=16))
        dense = jax.jit(lambda kw: moe_mlp_dense(**kw))
        for i, ids in enumerate(patterns(rng, 10, 2)):
            arrays = self.arrays(rng, ids, 8, 16, 24, "float32")
            hit = np.isin(np.arange(8), ids)[:, None, None]
            for name in ("gate", "up", "down"):
                arrays[name] = jnp.where(hit, arrays[name], jnp.nan)
            out = np.asarray(fn(arrays))
            if i == 0:
                assert (out == 0).all()
                continue
            clean = {
                name: jnp.nan_to_num(array) if name != "ids" else array for name, array in arrays.items()
            }
            # Both sides are float32: two computations, hence twice the limit.
            assert_close(out, np.asarray(dense(clean)), 2 * limit_for("float32", 16, 16, 24, 2))

    @pytest.mark.parametrize("activation", ["gelu_tanh"])
    def test_reference_and_activation(self, rng, activation):
        ids = rng.integers(0, 4, (6, 2)).astype(np.int32)
        arrays = self.arrays(rng, ids, 4, 24, 16, "float32")
        want = self.dense(arrays, activation=activation)
        for implementation in ("reference", "pallas_triton"):
            how = {"activation": activation, "implementation": implementation}
            out = jax.jit(lambda kw, how=how: moe_mlp(**kw, **how))(arrays)
            assert_close(np.asarray(out), want, limit_for("float32", 24, 24, 16, 2))

    @pytest.mark.parametrize("apart", [False, True])
    def test_biases(self, rng, apart):
        """Gate and up in one kernel, or apart, where rows are rounded between."""
        ids = rng.integers(0, 4, (6, 2)).astype(np.int32)
        arrays, clamped = self.arrays(rng, ids, 4, 24, 17, "float32"), ClampedSwiglu(0.9, 1.3)
        b = {name: rng.normal(size=(4, size)) for name, size in (("gate", 17), ("up", 17), ("down", 24))}
        biases = {name: jnp.asarray(bias, "float32") for name, bias in b.items()}
        options = {"rounding": {"up": lambda rows, expert: (rows, None)} if apart else None}
        out = jax.jit(lambda kw: moe_mlp(**kw, biases=biases, activation=clamped, **options))(arrays)
        w = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        x, want = w["x"], np.zeros(w["x"].shape)
        for t, j in np.ndindex(*ids.shape):
            e = ids[t, j]
            g, u = (x[t] @ w[n][e] + b[n][e] for n in ("gate", "up"))
            g, u = np.minimum(g, 0.9), np.clip(u, -0.9, 0.9)
            hidden = (u + 1) * g / (1 + np.exp(-1.3 * g))
            want[t] += w["weights"][t, j] * (hidden @ w["down"][e] + b["down"][e])
        assert_close(np.asarray(out), want, limit_for("float32", 24, 24, 17, 2))

    def test_same_bits(self, rng):
        """A token's result does not depend on the tokens beside it."""
        ids = rng.integers(0, 4, (20, 2)).astype(np.int32)
        arrays = self.arrays(rng, ids, 4, 24, 16, "float32")
        fn = jax.jit(lambda kw: moe_mlp(**kw, block_m=16))
        whole = np.asarray(fn(arrays))
        part = {
            name: array[3:9] if name in ("x", "ids", "weights") else array for name, array in arrays.items()
        }
        np.testing.assert_array_equal(np.asarray(fn(part)), whole[3:9])

    def test_unknown_implementation(self, rng):
        arrays = self.arrays(rng, one_hot(2, 2, 0), 2, 16, 16, "float32")
        with pytest.raises(KernelError, match="moe_permute: implementation: got 'ragged'"):
            moe_mlp(**arrays, implementation="ragged")
        with pytest.raises(KernelError, match="moe_permute: implementation: got 'triton_jit'"):
            moe_mlp(**arrays, implementation="triton_jit")
