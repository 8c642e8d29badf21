"""`quantized_matmul` against its contract: dequantize, then multiply."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.qformats import Format, QuantizedTensor, random_quantized
from pallas_kernels.quantized_matmul import OP, quantized_matmul
from pallas_kernels.quantized_matmul.pallas_triton import Config
from tests.examples import in_turns, slow_but
from tests.kernels.contract import Contract, limit_for, normal
from tests.kernels.test_qformats import FORMATS, draw, other_way

SMALL = Config("fused", block_m=16, block_n=32, block_k=64, split_k=1, num_warps=1, num_stages=2)


class QuantizedMatmulContract(Contract):
    op, api = OP, staticmethod(quantized_matmul)
    config = None

    def inputs(self, rng, fmt, T, D, F, dtype="bfloat16"):
        D = -(-D // fmt.block) * fmt.block
        key = jax.random.key(int(rng.integers(1 << 30)))
        return {"x": normal(rng, (T, D), dtype), "w": draw(key, (D, F), fmt)}

    @pytest.mark.parametrize(
        "fmt", slow_but([FORMATS[i] for i in (1, 3, 6, 7, 9, 10)], FORMATS), ids=[f.name for f in FORMATS]
    )
    def test_formats(self, rng, fmt):
        """With the default configuration."""
        arrays = self.inputs(rng, fmt, 5, 192, 50)
        D = arrays["x"].shape[1]
        limit = limit_for("bfloat16", D) + (other_way(D) if fmt.kind == "w8a8" else 0)
        self.check(arrays, {}, limit=limit, config=self.config)

    @pytest.mark.parametrize(
        "T,D,F,fmt",
        in_turns(
            [(33, 100, 97), (1, 64, 1), (16, 128, 32)], [Format("w4a16", 32), Format("fp8"), Format("w8a8")]
        ),
    )
    def test_shapes(self, rng, fmt, T, D, F):
        arrays = self.inputs(rng, fmt, T, D, F, "float32")
        D = arrays["x"].shape[1]
        limit = limit_for("float32", D) + (other_way(D) if fmt.kind == "w8a8" else 0)
        self.check(arrays, {}, limit=limit, config=self.config)

    def test_rows_do_not_mix(self, rng):
        for kind in ("w8a16", "w8a8"):
            arrays = self.inputs(rng, Format(kind), 4, 64, 32)
            arrays["x"] = arrays["x"].at[2].set(jnp.nan)
            out = self.run(arrays, {}, self.config)
            assert jnp.isnan(out).any(axis=1).tolist() == [False, False, True, False]

    def test_zero_rows(self, rng):
        """A row of zeros has no scale to divide by."""
        arrays = self.inputs(rng, Format("w8a8"), 2, 64, 32)
        arrays["x"] = arrays["x"].at[0].set(0)
        assert (self.run(arrays, {}, self.config)[0] == 0).all()

    def test_int8_sums_are_exact(self, rng):
        x, w = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((3, 320), (40, 320)))
        tensor = QuantizedTensor(jnp.asarray(w), jnp.ones((1, 40)), None, Format("w8a8"))
        arrays = {"x": jnp.asarray(x), "x_scale": jnp.ones(3), "w": tensor}
        out = self.run(arrays, {}, self.config)
        np.testing.assert_array_equal(out, x.astype(np.int64) @ w.T.astype(np.int64))


class TestPallas(QuantizedMatmulContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize(
        "change",
        [{"split_k": 2}, {"split_k": 8, "block_k": 128}, {"block_m": 64}, {"mode": "dequantize_once"}],
        ids=str,
    )
    def test_configurations(self, rng, change):
        arrays = self.inputs(rng, Format("w4a16", 64, True), 40, 192, 70, "float32")
        # Decoded weights are float32 here, so that the other mode is as exact.
        self.check(arrays, {}, limit=limit_for("float32", 192), config=replace(SMALL, **change))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"w": jnp.zeros((128, 32))}, "quantized_matmul: w: got .*, expected a QuantizedTensor"),
        ({"x": jnp.zeros((0, 128))}, "x: got shape .* at least one element along T"),
        ({"x": jnp.zeros((4, 64))}, r"x: got shape \[4, 64\], expected \[T, D\] with D=128"),
        ({"x": jnp.zeros((4, 128), jnp.int32)}, "x: got int32"),
        (
            {"config": replace(SMALL, mode="twice")},
            "config.mode: got 'twice', expected fused or dequantize_once",
        ),
        ({"out_dtype": jnp.int8}, "out_dtype: got int8"),
    ],
)
def test_bad_input(change, message):
    good = {
        "x": jnp.zeros((4, 128)),
        "w": random_quantized(jax.random.key(0), (128, 32), Format("w4a16", 64)),
    }
    with pytest.raises(KernelError, match=message):
        quantized_matmul(**(good | change))


def test_choices_follow_the_rows():
    """Few rows decode on the way; many multiply by a decoded copy; int8 products need none."""
    kind = OP.implementations["pallas_triton"]
    for spec in OP.specs:
        config = kind.heuristic(spec.problem)
        many = "prefill" in spec.tags and "w8a8" not in spec.tags
        assert config.mode == ("dequantize_once" if many else "fused")
        assert config in kind.space(spec.problem)
