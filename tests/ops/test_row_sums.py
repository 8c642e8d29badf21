"""Products in parts, whose sum is left to a kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.nn.norm import RMSNorm
from moejax.nn.param import initialize
from moejax.nn.rope import rope_tables
from moejax.ops.row_sums import RowSums, split_product
from tests.engine.tiny import main_config
from tests.numerics import assert_close, tolerance


@pytest.mark.parametrize(
    "rows, inputs, outputs, parts",
    [(8, 4096, 2048, 4), (64, 4096, 4096, 4), (8, 2048, 128, 16), (520, 2048, 128, 8), (520, 4096, 2048, 1),
     (8, 96, 64, 1), (8, 512, 64, 4)],
)  # fmt: skip
def test_number_of_parts(rows, inputs, outputs, parts):
    """Enough for an A100's 108 processors; of at least 128 inputs; none where rows suffice."""
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(rows, inputs), (inputs, outputs)])
    assert jax.eval_shape(split_product, *shapes).shape == (parts, rows, outputs)


def test_parts_and_norm():
    """The norm adds up the parts in order, and the sum is the product."""
    shapes, keys = [(6, 1024), (1024, 32), (2, 3, 32)], jax.random.split(jax.random.key(0), 3)
    x, w, residual = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    parts = split_product(x, w)
    assert parts.shape == (8, 6, 32) and parts.dtype == jnp.float32
    product = functools.reduce(jnp.add, parts)
    assert_close(np.asarray(product), np.asarray(x, np.float64) @ np.asarray(w, np.float64), tolerance(1024))
    norm = RMSNorm(32, "embed", jnp.float32, 1e-6, "pallas_triton")
    initialize(norm, 0)
    _, total = norm.add(residual, RowSums(parts))
    np.testing.assert_array_equal(total, product.reshape(residual.shape) + residual)


def test_a_stage_ends_with_sums_made():
    """Between layers the experts' sums are left to the next norm; a pipeline stage hands on an array."""
    config, at = main_config(), jnp.arange(3, dtype=jnp.int32)[None]
    x = jax.random.normal(jax.random.key(1), (1, 3, config.hidden_size))
    moe = MoeConfig(grouped_matmul="pallas_triton")
    kernels = Decoder(config, moe=moe, kernels="pallas_triton", seed=0, layers=range(1))
    plain = Decoder(config, seed=0, layers=range(1))
    ours, theirs = (nnx.jit(lambda stage: stage.run(x, at)[0])(stage) for stage in (kernels, plain))
    assert_close(np.asarray(ours), np.asarray(theirs, np.float64), tolerance(config.hidden_size, 64, 64, 64))
    rope = rope_tables(config, at, jnp.asarray([3]))
    _, left, _, _ = jax.eval_shape(lambda: kernels.in_order()[0].run(x, None, rope, at, None, None))
    assert isinstance(left, RowSums) and left.slot_of is not None
    assert left.slot_of.shape == (3, config.num_experts_per_tok)
