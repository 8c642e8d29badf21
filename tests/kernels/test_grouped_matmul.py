"""`grouped_matmul` against its contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_triton
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul import OP, grouped_matmul
from pallas_kernels.grouped_matmul.pallas_triton import Config, heuristic, space
from tests.examples import in_turns
from tests.kernels.contract import Contract, limit_for, normal
from tests.kernels.groups import lay_out, one_hot, only_defined, patterns, table
from tests.kernels.triton_interpreter import run_twins
from tests.numerics import assert_close


class GroupedMatmulContract(Contract):
    op, api = OP, staticmethod(only_defined(grouped_matmul))

    def inputs(self, rng, ids, E, D, F, block_m, dtype, scaled=True):
        """Slots read tokens' rows; weights of experts without rows are NaN."""
        groups = lay_out(ids, E, block_m)
        w = np.where((groups.counts > 0)[:, None, None], rng.normal(size=(E, D, F)) / D**0.5, np.nan)
        arrays = {"x": normal(rng, (len(ids), D), dtype), "w": jnp.asarray(w, dtype)}
        arrays |= {name: jnp.asarray(array) for name, array in table(groups, ids.shape[1]).items()}
        if scaled:
            arrays["row_scale"] = normal(rng, (len(groups.row_assignment),), "float32")
        return arrays

    @pytest.mark.parametrize(
        "T,k,E,D,F,block_m,dtype",
        in_turns(
            [(1, 1, 1, 16, 16, 16), (1, 8, 16, 48, 40, 16), (20, 2, 4, 70, 100, 32), (90, 2, 3, 33, 17, 64)],
            ["bfloat16", "float16", "float32"],
        ),
    )
    def test_shapes(self, rng, T, k, E, D, F, block_m, dtype):
        ids = rng.integers(-1, E + 1, (T, k)).astype(np.int32)
        ids[0, 0] = E - 1
        arrays = self.inputs(rng, ids, E, D, F, block_m, dtype, scaled=T % 2 == 0)
        self.check(arrays, {"block_m": block_m}, limit=limit_for(dtype, D))

    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
    def test_out_dtype(self, rng, out_dtype):
        arrays = self.inputs(rng, one_hot(5, 1, 1), 2, 40, 24, 16, "bfloat16")
        static = {"block_m": 16, "out_dtype": jnp.dtype(out_dtype)}
        out = self.check(arrays, static, limit=limit_for(out_dtype, 40))
        assert out.dtype == out_dtype

    @pytest.mark.parametrize("T,expert", [(1, 0), (1, 7), (40, 3), (3, 8)])
    def test_one_group(self, rng, T, expert):
        """One expert has all rows, or a single row, or (8 is not here) no expert has any."""
        arrays = self.inputs(rng, one_hot(T, 1, expert), 8, 32, 32, 16, "float32")
        if expert == 8:
            assert int(arrays["num_blocks"][0]) == 0
            assert (np.asarray(self.run(arrays, {"block_m": 16})) == 0).all()
        else:
            self.check(arrays, {"block_m": 16}, limit=limit_for("float32", 32))

    @pytest.mark.parametrize("block_m", [16, 32])
    def test_patterns(self, rng, block_m):
        """Every subset of 8 experts non-empty, as a down projection: slot p reads row p of x, or none.

        What is not to be read is NaN: padding rows of x, experts without rows, scales of padding.
        """
        T, D, F = 12, 24, 20
        w = rng.normal(size=(8, D, F)).astype(np.float32)
        fn = jax.jit(
            lambda kw: self.api(**kw, block_m=block_m, implementation=self.implementation, config=None)
        )
        for ids in patterns(rng, T, 2):
            groups = lay_out(ids, 8, block_m)
            P = len(groups.row_assignment)
            made = groups.row_assignment < 2 * T
            expert = np.repeat(groups.block_expert, block_m)
            x = np.where(made[:, None], rng.normal(size=(P, D)), np.nan).astype(np.float32)
            scale = np.where(made, rng.normal(size=P), np.nan).astype(np.float32)
            arrays = {
                "x": x,
                "w": np.where((groups.counts > 0)[:, None, None], w, np.float32(np.nan)),
                "rows": np.where(made, np.arange(P), P).astype(np.int32),
                "block_expert": groups.block_expert,
                "num_blocks": groups.num_blocks,
                "row_scale": scale,
            }
            want = np.zeros((P, F))
            for p in np.flatnonzero(made):
                want[p] = scale[p].astype(np.float64) * (x[p].astype(np.float64) @ w[expert[p]])
            assert_close(np.asarray(fn(arrays)), want, limit_for("float32", D))

    def test_blocks_past_the_count_are_skipped(self, rng):
        """An expert out of range there is not looked up."""
        arrays = self.inputs(rng, rng.integers(0, 3, (6, 1)).astype(np.int32), 3, 16, 16, 16, "float32")
        used = int(arrays["num_blocks"][0])
        assert used < len(arrays["block_expert"]) or used == 3
        clean = self.run(arrays, {"block_m": 16})
        arrays["block_expert"] = arrays["block_expert"].at[used:].set(1 << 20)
        np.testing.assert_array_equal(np.asarray(self.run(arrays, {"block_m": 16})), np.asarray(clean))

    @pytest.mark.parametrize("magnitude", [1e-30, 1e15])
    def test_magnitudes(self, rng, magnitude):
        arrays = self.inputs(rng, one_hot(4, 2, 0), 1, 64, 32, 16, "float32")
        arrays["x"] = arrays["x"] * magnitude
        self.check(arrays, {"block_m": 16}, limit=limit_for("float32", 64))


CONFIGS = [
    Config(16, 16, 1, 4, 2),
    Config(32, 64, 2, 4, 3),
    Config(64, 32, 3, 4, 2),
    Config(128, 128, 16, 8, 3),
]


class TestPallas(GroupedMatmulContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("config", CONFIGS)
    def test_configurations(self, rng, config):
        """Tiles wider and narrower than the shapes; groups of blocks that do not divide their number."""
        ids = rng.integers(0, 5, (40, 2)).astype(np.int32)
        arrays = self.inputs(rng, ids, 5, 72, 84, 16, "float32")
        self.check(arrays, {"block_m": 16}, limit=limit_for("float32", 72), config=config)

    @pytest.mark.parametrize(
        "T,E,D,F,dtype,bias_dtype,scaled",
        [
            (1, 1, 16, 16, "bfloat16", "bfloat16", True),
            (1, 8, 33, 17, "float32", "float32", True),
            (20, 4, 70, 101, "float32", "bfloat16", False),
            (20, 4, 64, 96, "float16", "float32", True),
        ],
    )
    def test_biases(self, rng, T, E, D, F, dtype, bias_dtype, scaled):
        """Within the weight of the row; those of experts without rows are NaN."""
        ids = rng.integers(-1, E + 1, (T, 2)).astype(np.int32)
        ids[0, 0] = E - 1
        arrays = self.inputs(rng, ids, E, D, F, 16, dtype, scaled)
        hit = np.isin(np.arange(E), ids)[:, None]
        arrays["bias"] = jnp.where(hit, normal(rng, (E, F), bias_dtype), jnp.nan)
        self.check(arrays, {"block_m": 16}, limit=limit_for(dtype, D + 1), config=CONFIGS[T % 3])


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax-triton needs a CUDA device")
class TestTritonJit(GroupedMatmulContract):
    implementation = "triton_jit"


@pytest.mark.parametrize(
    "dtype,out_dtype",
    [("float16", "float32"), pytest.param("float32", None, marks=pytest.mark.slow)],
)
def test_triton_jit_interpreted(rng, dtype, out_dtype):
    """The twin's arithmetic without a GPU: ragged shapes, skewed groups, with scales and without."""
    pytest.importorskip("triton")
    contract, cases = TestTritonJit(), []
    for T, k, E, D, F, block_m in [(1, 1, 1, 16, 16, 16), (7, 2, 4, 72, 84, 16), (20, 2, 3, 33, 17, 32)]:
        ids = rng.integers(-1, E + 1, (T, k)).astype(np.int32)
        ids[: T // 2 + 1] = E - 1
        arrays = contract.inputs(rng, ids, E, D, F, block_m, dtype, scaled=T % 2 == 0)
        cases.append((arrays, {"block_m": block_m, "out_dtype": out_dtype}, CONFIGS[T % 3]))
    calls = [
        functools.partial(grouped_matmul, **arrays, **static, config=config, implementation="triton_jit")
        for arrays, static, config in cases
    ]
    for (arrays, static, _), done in zip(cases, run_twins(grouped_triton, calls), strict=True):
        made = np.asarray(arrays["rows"]) < len(arrays["x"])
        assert np.isnan(done[~made]).all() and done.dtype == (static["out_dtype"] or arrays["x"].dtype)
        want = contract.expect(arrays, {"block_m": static["block_m"]})
        assert_close(done[made], want[made], limit_for(done.dtype, arrays["x"].shape[1]))


@pytest.mark.parametrize("spec", OP.specs, ids=[spec.name for spec in OP.specs])
def test_spaces(spec):
    """The heuristic's choice is in the space, which a tuner can search."""
    found = list(space(spec.problem))
    assert heuristic(spec.problem) in found and 3 <= len(found) <= 60


BAD = [
    (
        {"w": jnp.zeros((2, 9, 8))},
        r"grouped_matmul: w: got shape \[2, 9, 8\], expected \[E, D, F\] with D=16",
    ),
    ({"w": jnp.zeros((2, 16, 8), jnp.bfloat16)}, "w: got bfloat16, expected float32"),
    ({"x": jnp.zeros((0, 16))}, "x: .*at least one element along R"),
    ({"x": jnp.zeros((4, 16), jnp.int8)}, "x: got int8, expected bfloat16 or float16 or float32"),
    ({"rows": jnp.zeros(30, jnp.int32)}, "rows: got 30 slots, expected a multiple of block_m=16"),
    ({"rows": jnp.zeros(32)}, "rows: got float32, expected int32"),
    ({"block_expert": jnp.zeros(3, jnp.int32)}, r"block_expert: got shape \[3\], expected \[2\]"),
    ({"num_blocks": jnp.zeros((), jnp.int32)}, r"num_blocks: got shape \[\], expected 1 dimensions"),
    ({"block_m": 8}, "block_m: got 8, expected a power of two"),
    ({"row_scale": jnp.zeros(31)}, r"row_scale: got shape \[31\], expected \[P\] with P=32"),
    ({"row_scale": jnp.zeros(32, jnp.bfloat16)}, "row_scale: got bfloat16, expected float32"),
    ({"bias": jnp.zeros((3, 8))}, r"bias: got shape \[3, 8\], expected \[E, F\] with E=2"),
    (
        {"bias": jnp.zeros((2, 8)), "implementation": "triton_jit"},
        "implementation triton_jit: got .*'bias': 1.* expected no biases",
    ),
    ({"out_dtype": jnp.int8}, "out_dtype: got int8"),
    ({"implementation": "cutlass"}, "got 'cutlass', expected one of reference, pallas_triton, triton_jit"),
]


@pytest.mark.parametrize("change,message", BAD)
def test_bad_input(change, message):
    arguments = {
        "x": jnp.zeros((4, 16)),
        "w": jnp.zeros((2, 16, 8)),
        "rows": jnp.zeros(32, jnp.int32),
        "block_expert": jnp.zeros(2, jnp.int32),
        "num_blocks": jnp.zeros(1, jnp.int32),
        "block_m": 16,
    }
    with pytest.raises(KernelError, match=message):
        grouped_matmul(**(arguments | change))
