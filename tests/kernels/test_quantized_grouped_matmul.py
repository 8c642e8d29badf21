"""`quantized_grouped_matmul`, `quantized_grouped_swiglu` against their contracts: dequantize, multiply."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.group_specs import lay_out
from pallas_kernels.groups import ClampedSwiglu
from pallas_kernels.qformats import Format, QuantizedTensor, quantize_rows, random_quantized, tile_codes
from pallas_kernels.quantized_grouped_matmul import OP, quantized_grouped_matmul
from pallas_kernels.quantized_grouped_matmul.pallas_triton import Config
from pallas_kernels.quantized_grouped_swiglu import OP as SWIGLU_OP
from pallas_kernels.quantized_grouped_swiglu import quantized_grouped_swiglu
from pallas_kernels.tuned import configure
from tests.examples import slow_but
from tests.kernels.contract import Contract, limit_for, normal
from tests.kernels.test_qformats import FORMATS, draw, other_way

# Tiles so small that every shape below has several of each, and a last one that is not full.
SMALL = Config("fused", block_n=32, block_k=64, split_k=1, num_warps=1, num_stages=2)


# The others are only tested with one matrix, in test_quantized_matmul.py.
MOST_FORMATS = [f for f in FORMATS if f.name not in ("w8a16_g128", "w4a16_g128z", "fp8")]


def weight(rng, shape, fmt, scale_dtype=jnp.bfloat16) -> QuantizedTensor:
    return draw(jax.random.key(int(rng.integers(1 << 30))), shape, fmt, scale_dtype)


def table(experts, num_experts, block_m=16):
    """Arrays of the groups that `experts` (one per row of x, -1 for none) make."""
    groups = lay_out(np.asarray(experts)[:, None], num_experts, block_m)
    return {
        "rows": jnp.asarray(groups.row_assignment),
        "block_expert": jnp.asarray(groups.block_expert),
        "num_blocks": jnp.asarray(groups.num_blocks),
    }


class GroupedContract(Contract):
    def run(self, arrays, static, config=None):
        """With 0 where the contract leaves a slot undefined, as the reference has."""
        out = super().run(arrays, static, config)
        rows, blocks = arrays["rows"], len(arrays["block_expert"])
        used = jnp.repeat(jnp.arange(blocks) < arrays["num_blocks"], len(rows) // blocks)
        made = used & (rows >= 0) & (rows < len(arrays["x"]))
        return jnp.where(made[:, None], out, jnp.asarray(0, out.dtype))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


class QuantizedGroupedMatmulContract(GroupedContract):
    op, api = OP, staticmethod(quantized_grouped_matmul)
    config = SMALL

    def inputs(self, rng, fmt, *, D=192, F=70, E=3, experts=(2, 0, 2, -1, 2), dtype="bfloat16"):
        D = -(-D // fmt.block) * fmt.block
        x = normal(rng, (len(experts), D), dtype)
        return {"x": x, "w": weight(rng, (E, D, F), fmt), **table(experts, E)}

    @pytest.mark.parametrize("fmt", slow_but(MOST_FORMATS[::2], MOST_FORMATS), ids=lambda f: f.name)
    def test_formats(self, rng, fmt):
        """Reductions and outputs that are no multiples of the tiles; a group ends within a step."""
        arrays = self.inputs(rng, fmt)
        arrays["row_scale"] = normal(rng, arrays["rows"].shape, "float32")
        D = arrays["x"].shape[1]
        limit = limit_for("bfloat16", D) + (other_way(D) if fmt.kind == "w8a8" else 0)
        self.check(arrays, {"block_m": 16}, limit=limit, config=self.config)

    @pytest.mark.parametrize(
        "kind,dtype", [
            ("w4a16", "float16"), slow("fp8", "float16"), slow("w4a16", "float32"), ("w8a8", "float32"),
            ("mxfp4", "float16"), slow("mxfp4", "float32"),
        ],
    )  # fmt: skip
    def test_dtypes(self, rng, kind, dtype):
        fmt = Format(kind, {"w4a16": 64, "mxfp4": 32}.get(kind, 0))
        arrays = self.inputs(rng, fmt, D=128, F=32, dtype=dtype)
        if kind != "mxfp4":
            arrays["w"] = replace(arrays["w"], scales=arrays["w"].scales.astype(dtype))
        out = "float32" if dtype == "float16" else "bfloat16"
        limit = limit_for(out, 128) + (other_way(128) if kind == "w8a8" else 0)
        self.check(arrays, {"block_m": 16, "out_dtype": out}, limit=limit, config=self.config)

    @pytest.mark.parametrize("experts", [4, pytest.param(8, marks=pytest.mark.slow)])
    def test_all_patterns_of_empty_groups(self, rng, experts):
        """Every set of experts that get rows, one to three each: empty, one-hot, single rows, all."""
        fmt, slots = Format("w4a16", 64), 3 * experts
        arrays = self.inputs(rng, fmt, D=64, F=16, E=experts, experts=[0] * slots, dtype="float32")
        call = jax.jit(
            lambda kw: self.api(**kw, block_m=16, implementation=self.implementation, config=self.config)
        )
        reference = jax.jit(lambda kw: self.op.reference(**kw, block_m=16))
        for pattern in range(1, 1 << experts):
            counts = [rng.integers(1, 4) * (pattern >> e & 1) for e in range(experts)]
            ids = np.repeat(np.arange(experts), counts)
            ids = rng.permutation(np.concatenate([ids, np.full(slots - len(ids), -1)]))
            now = arrays | table(ids, experts)
            want, got = reference(now), np.asarray(call(now))
            made = np.asarray(now["rows"]) < slots
            assert made.sum() == sum(counts)
            np.testing.assert_allclose(got[made], np.asarray(want)[made], rtol=1e-4, atol=1e-4)

    def test_several_blocks_of_an_expert(self, rng):
        """With the default configuration."""
        fmt = Format("w8a16", 32)
        arrays = self.inputs(rng, fmt, D=64, experts=rng.integers(0, 3, 75))
        self.check(arrays, {"block_m": 16}, limit=limit_for("bfloat16", 64))

    def test_other_experts_do_not_leak(self, rng):
        """NaN in the scales of an expert without rows, and in a row of x of another expert."""
        arrays = self.inputs(rng, Format("w4a16", 64), experts=(0, 2, 0, 2))
        w = arrays["w"]
        arrays["w"] = replace(w, scales=w.scales.at[1].set(jnp.nan))
        arrays["x"] = arrays["x"].at[1].set(jnp.nan)
        out = self.run(arrays, {"block_m": 16}, self.config)
        assert jnp.isnan(out[arrays["rows"] == 1]).all()
        assert jnp.isfinite(out[arrays["rows"] != 1]).all()

    @pytest.mark.parametrize(
        "fmt,byte",
        [
            (Format("w8a16", 32), 127),
            (Format("w4a16", 64), 0x00),
            (Format("w4a16", 64, zeros=True), 0xFF),
            (Format("fp8", 128), 0xFE),
            (Format("mxfp4", 32), 0xF7),
        ],
        ids=str,
    )
    def test_extreme_weights(self, rng, fmt, byte):
        """All codes the largest or the least, with scales 1e5 times the usual, or 2^60."""
        arrays = self.inputs(rng, fmt, D=128, F=32)
        w = arrays["w"]
        values = jnp.full(w.values.shape, byte, jnp.uint8).astype(w.values.dtype)
        large = w.scales + 60 if fmt.kind == "mxfp4" else w.scales * jnp.asarray(1e5, w.scales.dtype)
        arrays["w"] = replace(w, values=values, scales=large)
        self.check(arrays, {"block_m": 16}, limit=limit_for("bfloat16", 128), config=self.config)

    def test_zero_weights(self, rng):
        for fmt, byte in ((Format("w8a8"), 0), (Format("w4a16", 64), 0x88), (Format("mxfp4", 32), 0x08)):
            arrays = self.inputs(rng, fmt, D=64, F=32)
            w = arrays["w"]
            values = jnp.full(w.values.shape, byte, jnp.uint8).astype(w.values.dtype)
            arrays["w"] = replace(w, values=values)
            assert (self.run(arrays, {"block_m": 16}, self.config) == 0).all()

    def test_int8_sums_are_exact(self, rng):
        """Integers in, integers out: up to 127² · 256 in magnitude, exact in float32."""
        fmt = Format("w8a8")
        arrays = self.inputs(rng, fmt, D=256)
        x = rng.integers(-127, 128, arrays["x"].shape).astype(np.int8)
        x[0] = 127
        values = rng.integers(-128, 128, arrays["w"].values.shape).astype(np.int8)
        values[0, 0] = -128
        ones = jnp.ones(arrays["w"].scales.shape)
        arrays |= {
            "x": jnp.asarray(x),
            "x_scale": jnp.ones(len(x)),
            "w": QuantizedTensor(jnp.asarray(values), ones, None, fmt),
        }
        out = np.asarray(self.run(arrays, {"block_m": 16}, self.config))
        expert = np.repeat(np.asarray(arrays["block_expert"]), 16)
        for p, row in enumerate(np.asarray(arrays["rows"])):
            if row < len(x):
                want = values[expert[p]].astype(np.int64) @ x[row].astype(np.int64)
                np.testing.assert_array_equal(out[p], want)

    def test_given_int8_rows(self, rng):
        """Rows quantized beforehand give what is made of the same rows on the way."""
        arrays = self.inputs(rng, Format("w8a8"), dtype="float32")
        want = self.run(arrays, {"block_m": 16}, self.config)
        values, scale = quantize_rows(arrays["x"])
        got = self.run(arrays | {"x": values, "x_scale": scale}, {"block_m": 16}, self.config)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class TestPallas(QuantizedGroupedMatmulContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize(
        "fmt,change",
        [
            (Format("w4a16", 32, True), {"block_k": 128, "split_k": 2}),
            slow(Format("w4a16", 128), {"block_k": 64, "split_k": 4, "num_warps": 2}),
            (Format("w4a16", 128), {"block_k": 256}),
            (Format("fp8", 128), {"block_k": 64, "split_k": 8}),
            slow(Format("fp8", 128), {"block_n": 128, "block_k": 128}),
            (Format("w8a8"), {"block_k": 128, "split_k": 2}),
            slow(Format("mxfp4", 32), {"block_k": 256, "split_k": 2}),
        ],
        ids=str,
    )
    def test_configurations(self, rng, fmt, change):
        """Among them more parts of the reduction than steps, so that some are empty; biases come in once."""
        arrays = self.inputs(rng, fmt, D=320, F=100, dtype="float32")
        arrays["row_scale"] = normal(rng, arrays["rows"].shape, "float32")
        arrays["bias"] = normal(rng, (3, 100), "bfloat16").at[1].set(jnp.nan)
        D = arrays["x"].shape[1]
        limit = limit_for("float32", D + 1) + (other_way(D) if fmt.kind == "w8a8" else 0)
        self.check(arrays, {"block_m": 16}, limit=limit, config=replace(SMALL, **change))

    @pytest.mark.parametrize("block_m", [64, 128])
    def test_tall_blocks(self, rng, block_m):
        """Blocks that are taken in groups, of experts with one and with several."""
        experts = np.repeat([1, 0, 2], [70, 200, 1])
        arrays = self.inputs(rng, Format("w4a16", 64), D=64, E=4, experts=experts) | table(
            experts, 4, block_m
        )
        self.check(arrays, {"block_m": block_m}, limit=limit_for("bfloat16", 64), config=SMALL)

    @pytest.mark.parametrize(
        "fmt", [Format("w4a16", 64, True), Format("fp8", 128), Format("mxfp4", 32)], ids=str
    )
    def test_dequantize_once(self, rng, fmt):
        """Weights are rounded to bfloat16 before the product."""
        arrays = self.inputs(rng, fmt)
        arrays["bias"] = normal(rng, (3, 70), "bfloat16").at[1].set(jnp.nan)
        limit = limit_for("bfloat16", arrays["x"].shape[1], products="bfloat16")
        self.check(arrays, {"block_m": 16}, limit=limit, config=replace(SMALL, mode="dequantize_once"))

    @pytest.mark.parametrize(
        "fmt,change",
        [
            slow(Format("w4a16", 32), {"block_k": 128}),
            (Format("w4a16", 64, zeros=True), {}),
            slow(Format("w4a16", 128), {"block_n": 128, "split_k": 2}),
            (Format("mxfp4", 32), {"block_k": 128}),
        ],
        ids=str,
    )
    def test_tiles_give_the_same_bits(self, rng, fmt, change):
        """Of codes in tiles and of the same in rows, over ends of D and F that fill no step and no tile."""
        arrays = self.inputs(rng, fmt)
        tiled = replace(arrays["w"], values=tile_codes(arrays["w"].values))
        plain, ours = (
            self.run(arrays | {"w": w}, {"block_m": 16}, replace(SMALL, **change))
            for w in (arrays["w"], tiled)
        )
        assert np.abs(plain).max() > 0
        np.testing.assert_array_equal(ours, plain)


SWIGLU_FORMATS = [
    Format("w8a16"),
    Format("w4a16", 32, True),
    Format("w4a16", 128),
    Format("w8a8"),
    Format("fp8", 128),
    Format("mxfp4", 32),
]


class QuantizedGroupedSwigluContract(GroupedContract):
    op, api = SWIGLU_OP, staticmethod(quantized_grouped_swiglu)
    config = SMALL

    def inputs(self, rng, fmt, *, D=192, F=70, E=3, experts=(2, 0, 2, -1, 2), dtype="bfloat16"):
        D = -(-D // fmt.block) * fmt.block
        x = normal(rng, (len(experts), D), dtype)
        gate, up = (weight(rng, (E, D, F), fmt) for _ in range(2))
        return {"x": x, "gate": gate, "up": up, **table(experts, E)}

    def limit(self, dtype, D):
        """The product of two sums: its error is that of both."""
        return limit_for(dtype, D, D)

    @pytest.mark.parametrize("fmt", slow_but(SWIGLU_FORMATS[1::2], SWIGLU_FORMATS), ids=lambda f: f.name)
    def test_formats(self, rng, fmt):
        arrays = self.inputs(rng, fmt)
        D = arrays["x"].shape[1]
        limit = self.limit("bfloat16", D) + (2 * other_way(D) if fmt.kind == "w8a8" else 0)
        self.check(arrays, {"block_m": 16}, limit=limit, config=self.config)

    @pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
    def test_activations(self, rng, activation):
        arrays = self.inputs(rng, Format("w4a16", 64), D=64, F=32, dtype="float32")
        static = {"block_m": 16, "activation": activation}
        self.check(arrays, static, limit=self.limit("float32", 64), config=self.config)

    def test_large_gates(self, rng):
        """Gates far from zero: silu neither overflows nor turns to NaN."""
        arrays = self.inputs(rng, Format("w8a16"), D=64, F=32, dtype="float32")
        arrays["x"] = arrays["x"] * 1e4
        self.check(arrays, {"block_m": 16}, limit=self.limit("float32", 64), config=self.config)


class TestSwigluPallas(QuantizedGroupedSwigluContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize(
        "change", [{"split_k": 2}, {"mode": "separate"}, {"mode": "dequantize_once"}], ids=str
    )
    def test_configurations(self, rng, change):
        arrays = self.inputs(rng, Format("w4a16", 64))
        products = "bfloat16" if change.get("mode") == "dequantize_once" else "float32"
        limit = limit_for("bfloat16", 192, 192, products=products)
        self.check(arrays, {"block_m": 16}, limit=limit, config=replace(SMALL, **change))

    @pytest.mark.parametrize(
        "change,experts",
        [
            slow({"block_k": 128}, (2,)),
            ({"split_k": 2}, (2, 0, 2, -1, 2)),
            slow({"mode": "separate"}, (0, 2)),
            ({"mode": "dequantize_once"}, (2, 0)),
        ],
        ids=str,
    )
    def test_gpt_oss(self, rng, change, experts):
        """MXFP4 with biases and a clamped SwiGLU, whose inputs and outputs fill no tile."""
        arrays = self.inputs(rng, Format("mxfp4", 32), D=192, F=45, experts=experts)
        for name in ("gate_bias", "up_bias"):
            arrays[name] = normal(rng, (3, 45), "bfloat16").at[1].set(jnp.nan)
        products = "bfloat16" if change.get("mode") == "dequantize_once" else "float32"
        limit = limit_for("bfloat16", 193, 193, products=products)
        static = {"block_m": 16, "activation": ClampedSwiglu(0.9, 1.3)}
        self.check(arrays, static, limit=limit, config=replace(SMALL, **change))


GOOD = {
    "x": jnp.zeros((4, 128)),
    "w": random_quantized(jax.random.key(0), (2, 128, 32), Format("w4a16", 64)),
    "rows": jnp.zeros(32, jnp.int32),
    "block_expert": jnp.zeros(2, jnp.int32),
    "num_blocks": jnp.ones(1, jnp.int32),
}
INT8 = random_quantized(jax.random.key(0), (2, 128, 32), Format("w8a8"))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"w": jnp.zeros((2, 128, 32))}, "quantized_grouped_matmul: w: got .*, expected a QuantizedTensor"),
        ({"x": jnp.zeros((4, 64))}, r"x: got shape \[4, 64\], expected \[R, D\] with D=128"),
        ({"x": jnp.zeros((0, 128))}, "x: got shape .* at least one element along R"),
        ({"x": jnp.zeros((4, 128), jnp.int8)}, "x: got int8, expected bfloat16 or float16 or float32"),
        ({"x_scale": jnp.zeros(4)}, "x_scale: got an array with w4a16_g64, expected None unless w8a8"),
        ({"w": INT8, "x_scale": jnp.zeros(4)}, "x: got float32, expected int8"),
        ({"w": INT8, "x": jnp.zeros((4, 128), jnp.int8), "x_scale": jnp.zeros(3)}, "x_scale: got shape"),
        ({"rows": jnp.zeros(0, jnp.int32)}, "at least one element along P"),
        ({"rows": jnp.zeros(33, jnp.int32)}, "rows: got 33 slots, expected a multiple of block_m=16"),
        ({"block_expert": jnp.zeros(3, jnp.int32)}, "block_expert: got shape"),
        ({"block_m": 24}, "block_m: got 24, expected a power of two"),
        ({"row_scale": jnp.zeros(32, jnp.bfloat16)}, "row_scale: got bfloat16, expected float32"),
        ({"bias": jnp.zeros((2, 31))}, r"bias: got shape \[2, 31\], expected \[E, F\] with F=32"),
        ({"out_dtype": jnp.int32}, "out_dtype: got int32"),
        ({"config": replace(SMALL, mode="separate")}, "config.mode: got 'separate', expected fused or deq"),
        ({"w": INT8, "config": replace(SMALL, mode="dequantize_once")}, "expected fused with w8a8"),
        (
            {"config": replace(SMALL, block_k=32)},
            "config: got .*block_k=32, expected .* at least 64, with w4a16",
        ),
        ({"config": replace(SMALL, block_n=48)}, "config: got block_n=48, .*expected powers of two"),
        ({"implementation": "mosaic"}, "got 'mosaic', expected one of reference, pallas_triton"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(KernelError, match=message):
        quantized_grouped_matmul(**({"block_m": 16} | GOOD | change))


@pytest.mark.parametrize("E,fits", [(146, True), (147, False)])
def test_codes_that_32_bits_do_not_count(E, fits):
    """By shapes alone: 146 experts of DeepSeek-V3's fp8 weights are below 2^31 codes, 147 are not."""
    w = jax.eval_shape(
        lambda key: random_quantized(key, (E, 7168, 2048), Format("fp8", 128)), jax.random.key(0)
    )
    call = functools.partial(quantized_grouped_matmul, block_m=16)
    arrays = {name: jax.ShapeDtypeStruct((n,), jnp.int32) for name, n in
              (("rows", 32), ("block_expert", 2), ("num_blocks", 1))}  # fmt: skip
    arrays |= {"x": jax.ShapeDtypeStruct((4, 7168), jnp.bfloat16), "w": w}
    if fits:
        assert jax.eval_shape(lambda kw: call(**kw), arrays).shape == (32, 2048)
        return
    with pytest.raises(KernelError, match=r"w: got 2157969408 bytes of codes, expected fewer than 2\^31"):
        jax.eval_shape(lambda kw: call(**kw), arrays)


def test_dequantizes_once_by_device():
    """A decoded copy of the weights is read and written at an A100's bandwidth: from more rows on."""
    spec = next(s for s in OP.specs if s.problem["kind"] == "w4a16" and s.problem["block_m"] == 64)
    rows = {n: {**spec.problem, "P": n * int(spec.problem["E"])} for n in (1024, 2048)}
    modes = {
        (device, n): configure(OP, "pallas_triton", problem, device=device, data=Path("nowhere")).config.mode
        for device in ("a100", "h100")
        for n, problem in rows.items()
    }
    assert {key for key, mode in modes.items() if mode == "fused"} == {("a100", 1024)}


def test_bad_swiglu_input():
    good: dict[str, Any] = {**GOOD, "gate": GOOD["w"], "up": GOOD["w"], "block_m": 16}
    del good["w"]
    with pytest.raises(KernelError, match="quantized_grouped_swiglu: up: got w8a8, expected gate's format"):
        quantized_grouped_swiglu(**(good | {"up": INT8}))
    with pytest.raises(KernelError, match="activation: got 'tanh', expected one of silu, gelu"):
        quantized_grouped_swiglu(**good, activation="tanh")
    narrow = random_quantized(jax.random.key(0), (2, 128, 16), Format("w4a16", 64))
    with pytest.raises(KernelError, match=r"up: got shape .* expected \[E D F\] with F=32"):
        quantized_grouped_swiglu(**(good | {"up": narrow}))


@pytest.mark.parametrize("op", [OP, SWIGLU_OP], ids=lambda op: op.name)
def test_specs(op):
    """Names differ, costs are of these weights' true bytes, the heuristic is in the space."""
    assert len({spec.name for spec in op.specs}) == len(op.specs)
    kind = op.implementations["pallas_triton"]
    for spec in op.specs:
        space = list(kind.space(spec.problem))
        assert kind.heuristic(spec.problem) in space and 10 <= len(space) <= 80
        w = spec.abstract.get("w", spec.abstract.get("gate"))
        assert w.shape == tuple(spec.problem[name] for name in "EDF")
        one_matrix = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(w))
        all_experts = spec.problem["matrices"] * one_matrix
        if "prefill" in spec.tags:
            assert all_experts < spec.cost.bytes < 2 * all_experts
        else:
            assert spec.cost.bytes < 1.05 * all_experts
