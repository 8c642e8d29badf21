"""`grouped_swiglu` against its contract; the `@triton.jit` twin in Triton's interpreter."""

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import partial_eval

from pallas_kernels import _compat, grouped_triton
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_swiglu import OP, grouped_swiglu
from pallas_kernels.grouped_swiglu.pallas_triton import Config, heuristic, space
from pallas_kernels.groups import ACTIVATIONS, ClampedSwiglu
from tests.examples import in_turns, slow_but
from tests.kernels.contract import Contract, limit_for, normal
from tests.kernels.groups import lay_out, one_hot, only_defined, patterns, table
from tests.kernels.triton_interpreter import run_twins
from tests.numerics import assert_close

CLAMPED = ClampedSwiglu(limit=0.9, alpha=1.3)


def inputs(rng, ids, E, D, F, block_m, dtype):
    """Weights of experts without rows, and rows of x that no slot reads, are NaN."""
    groups = lay_out(ids, E, block_m)
    hit = (groups.counts > 0)[:, None, None]
    read = ((ids >= 0) & (ids < E)).any(axis=1)[:, None]
    gate, up = (np.where(hit, rng.normal(size=(E, D, F)) / D**0.5, np.nan) for _ in range(2))
    x = np.where(read, rng.normal(size=(len(ids), D)), np.nan)
    arrays = {"x": jnp.asarray(x, dtype), "gate": jnp.asarray(gate, dtype), "up": jnp.asarray(up, dtype)}
    return arrays | {name: jnp.asarray(array) for name, array in table(groups, ids.shape[1]).items()}


def expected(arrays, block_m, activation="silu"):
    """In float64, slot by slot; 0 where undefined."""
    x, gate, up = (np.asarray(arrays[name], np.float64) for name in ("x", "gate", "up"))
    rows, experts = np.asarray(arrays["rows"]), np.repeat(np.asarray(arrays["block_expert"]), block_m)
    out = np.zeros((len(rows), gate.shape[2]))
    used = int(arrays["num_blocks"][0]) * block_m
    for p in range(used):
        if 0 <= rows[p] < len(x):
            g, u = x[rows[p]] @ gate[experts[p]], x[rows[p]] @ up[experts[p]]
            out[p] = np.asarray(ACTIVATIONS[activation](jnp.asarray(g, jnp.float32)), np.float64) * u
    return out


class GroupedSwigluContract(Contract):
    op, api = OP, staticmethod(only_defined(grouped_swiglu))

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
        arrays = inputs(rng, ids, E, D, F, block_m, dtype)
        self.check(arrays, {"block_m": block_m}, limit=limit_for(dtype, D, D))

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, rng, activation):
        arrays = inputs(rng, rng.integers(0, 3, (6, 2)).astype(np.int32), 3, 40, 24, 16, "float32")
        arrays["x"] = arrays["x"] * 4
        static = {"block_m": 16, "activation": activation}
        self.check(arrays, static, limit=limit_for("float32", 40, 40))

    @pytest.mark.parametrize("T,expert", [(1, 0), (1, 7), (40, 3), (3, 8)])
    def test_one_group(self, rng, T, expert):
        """One expert has all rows, or a single row, or (8 is not here) no expert has any."""
        arrays = inputs(rng, one_hot(T, 1, expert), 8, 32, 32, 16, "float32")
        if expert == 8:
            assert int(arrays["num_blocks"][0]) == 0
            assert (np.asarray(self.run(arrays, {"block_m": 16})) == 0).all()
        else:
            self.check(arrays, {"block_m": 16}, limit=limit_for("float32", 32, 32))

    @pytest.mark.parametrize("block_m", [16, 32])
    def test_patterns(self, rng, block_m):
        """Every subset of 8 experts non-empty."""
        fn = jax.jit(
            lambda kw: self.api(**kw, block_m=block_m, implementation=self.implementation, config=None)
        )
        for ids in patterns(rng, 12, 2):
            arrays = inputs(rng, ids, 8, 24, 20, block_m, "float32")
            assert_close(np.asarray(fn(arrays)), expected(arrays, block_m), limit_for("float32", 24, 24))

    @pytest.mark.parametrize("magnitude", [1e-12, 1e12])
    def test_magnitudes(self, rng, magnitude):
        """Gates of ±1e12: silu is 0 or its argument, and nothing overflows on the way."""
        arrays = inputs(rng, one_hot(4, 2, 0), 1, 64, 32, 16, "float32")
        arrays["x"] = arrays["x"] * magnitude
        self.check(arrays, {"block_m": 16}, limit=limit_for("float32", 64, 64))


CONFIGS = [
    Config(16, 16, 1, 4, 2),
    Config(32, 64, 2, 4, 3),
    Config(64, 32, 3, 4, 2),
    Config(128, 128, 16, 8, 3),
]


class TestPallas(GroupedSwigluContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("config", CONFIGS)
    def test_configurations(self, rng, config):
        """Tiles wider and narrower than the shapes; groups of blocks that do not divide their number."""
        arrays = inputs(rng, rng.integers(0, 5, (40, 2)).astype(np.int32), 5, 72, 84, 16, "float32")
        self.check(arrays, {"block_m": 16}, limit=limit_for("float32", 72, 72), config=config)

    @pytest.mark.parametrize(
        "T,E,D,F,dtype,bias_dtype,activation",
        [
            (1, 1, 16, 16, "bfloat16", "bfloat16", CLAMPED),
            (1, 8, 33, 17, "float32", "float32", CLAMPED),
            (20, 4, 70, 101, "float32", "bfloat16", "silu"),
            (20, 4, 64, 96, "float16", "float32", "gelu"),
        ],
    )
    def test_biases(self, rng, T, E, D, F, dtype, bias_dtype, activation):
        """Those of experts without rows are NaN."""
        ids = rng.integers(-1, E + 1, (T, 2)).astype(np.int32)
        ids[0, 0] = E - 1
        arrays = inputs(rng, ids, E, D, F, 16, dtype)
        hit = np.isin(np.arange(E), ids)[:, None]
        for name in ("gate_bias", "up_bias"):
            arrays[name] = jnp.where(hit, normal(rng, (E, F), bias_dtype), jnp.nan)
        static = {"block_m": 16, "activation": activation}
        self.check(arrays, static, limit=limit_for(dtype, D + 1, D + 1), config=CONFIGS[T % 3])

    def test_clamped(self, rng):
        """Gates and ups on both sides of the limit, which only the gate has above alone; by its formula."""
        arrays = inputs(rng, one_hot(9, 1, 0), 1, 32, 24, 16, "float32")
        x, gate, up = (np.asarray(arrays[name], np.float64) for name in ("x", "gate", "up"))
        g, u = x @ gate[0], x @ up[0]
        assert g.max() > 0.9 and g.min() < -0.9 and u.max() > 0.9 and u.min() < -0.9
        g, u = np.minimum(g, 0.9), np.clip(u, -0.9, 0.9)
        out = self.run(arrays, {"block_m": 16, "activation": CLAMPED})
        assert_close(np.asarray(out)[:9], (u + 1) * g / (1 + np.exp(-1.3 * g)), limit_for("float32", 32, 32))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax-triton needs a CUDA device")
class TestTritonJit(GroupedSwigluContract):
    implementation = "triton_jit"


class TestTritonJitInterpreted:
    """The twin's arithmetic without a GPU, many launches in one subprocess of Triton's interpreter."""

    def check(self, cases):
        """cases: (arrays, block_m, activation, config)."""
        pytest.importorskip("triton")
        names, twin = ("block_m", "activation", "config"), {"implementation": "triton_jit"}
        calls = [
            functools.partial(grouped_swiglu, **arrays, **dict(zip(names, static, strict=True)), **twin)
            for arrays, *static in cases
        ]
        for (arrays, block_m, activation, _), done in zip(
            cases, run_twins(grouped_triton, calls), strict=True
        ):
            made = np.asarray(arrays["rows"]) < len(arrays["x"])
            assert np.isnan(done[~made]).all()  # padding is not written
            want, D = expected(arrays, block_m, activation), arrays["x"].shape[1]
            if made.any():
                limit = limit_for(arrays["x"].dtype, D, D)
                assert_close(done[made], want[made], limit)

    def test_shapes_and_activations(self, rng):
        cases = []
        for i, dtype in enumerate(["float32", "float16"]):
            for T, k, E, D, F, block_m in [
                (1, 1, 1, 16, 16, 16),
                (7, 2, 4, 72, 84, 16),
                (40, 2, 3, 33, 17, 32),
            ]:
                ids = rng.integers(-1, E + 1, (T, k)).astype(np.int32)
                ids[0, 0] = 0
                arrays = inputs(rng, ids, E, D, F, block_m, dtype)
                config = CONFIGS[(i + T) % 3]
                cases.append((arrays, block_m, "silu", config))
        arrays = inputs(rng, rng.integers(0, 3, (6, 2)).astype(np.int32), 3, 32, 32, 16, "float32")
        cases += [(arrays, 16, activation, CONFIGS[1]) for activation in ACTIVATIONS]
        self.check(cases)

    @pytest.mark.parametrize("group", slow_but([3], [1, 3]))
    def test_patterns(self, rng, group):
        """Every subset of 8 experts non-empty."""
        config = Config(16, 32, group, 4, 2)
        found = [inputs(rng, ids, 8, 24, 20, 16, "float32") for ids in patterns(rng, 6, 2)]
        self.check([(arrays, 16, "silu", config) for arrays in found[group - 1 :: 8]])

    @pytest.mark.slow
    def test_all_patterns(self, rng):
        config = Config(16, 32, 2, 4, 2)
        found = [inputs(rng, ids, 8, 24, 20, 16, "float32") for ids in patterns(rng, 12, 2)]
        self.check([(arrays, 16, "silu", config) for arrays in found])


@pytest.mark.parametrize("capability", [80, 90])
def test_everything_lowers(capability):
    """What interpretation does not show: each dtype and activation is made of operations Triton has."""
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in BARE_ARRAYS.items()}
    for dtype in ("bfloat16", "float16", "float32"):
        cast = {name: jax.ShapeDtypeStruct(shapes[name].shape, dtype) for name in ("x", "gate", "up")}
        for activation in (*ACTIVATIONS, CLAMPED):
            fn = functools.partial(grouped_swiglu, block_m=16, activation=activation, interpret=False)
            bias = jax.ShapeDtypeStruct((2, 8), "bfloat16")
            biases = {"gate_bias": bias, "up_bias": bias} if activation == CLAMPED else {}
            (kernel,) = _compat.lower_for_cuda(fn, shapes | cast | biases, capability)
            assert kernel.name == "grouped_swiglu" and kernel.ttir.count("tt.dot") == 2


@pytest.mark.parametrize("spec", OP.specs, ids=[spec.name for spec in OP.specs])
def test_spaces(spec):
    """The heuristic's choice is in the space, which a tuner can search."""
    found = list(space(spec.problem))
    assert heuristic(spec.problem) in found and 3 <= len(found) <= 60


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"up": jnp.zeros((2, 16, 9))},
            r"grouped_swiglu: up: .*expected \[E, D, F\] with F=8 \(F is 8 in gate\)",
        ),
        ({"gate": jnp.zeros((3, 16, 8))}, r"up: got shape \[2, 16, 8\], expected \[E, D, F\] with E=3"),
        ({"up": jnp.zeros((2, 16, 8), jnp.float16)}, "up: got float16, expected float32"),
        ({"x": jnp.zeros((0, 16))}, "x: .*at least one element along R"),
        ({"x": jnp.zeros((4, 16), jnp.int32)}, "x: got int32"),
        ({"rows": jnp.zeros(30, jnp.int32)}, "rows: got 30 slots, expected a multiple of block_m=16"),
        ({"block_expert": jnp.zeros(2)}, "block_expert: got float32, expected int32"),
        ({"num_blocks": jnp.zeros(2, jnp.int32)}, r"num_blocks: got shape \[2\], expected \[1\]"),
        ({"block_m": 48}, "block_m: got 48"),
        ({"activation": "swish"}, "activation: got 'swish', expected one of silu, gelu, gelu_tanh, relu"),
        ({"gate_bias": jnp.zeros((2, 8))}, "up_bias: got None, expected both biases or neither"),
        ({"up_bias": jnp.zeros((2, 9))}, r"up_bias: got shape \[2, 9\], expected \[E, F\] with F=8"),
        (
            {"implementation": "triton_jit", "activation": CLAMPED},
            "implementation triton_jit: got .*swiglu_clamped.*expected no biases and a named activation",
        ),
        ({"implementation": "mosaic"}, "got 'mosaic', expected one of reference, pallas_triton, triton_jit"),
        (
            {"implementation": "triton_jit", "interpret": True},
            "implementation triton_jit: got interpret=True",
        ),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(KernelError, match=message):
        grouped_swiglu(**(BARE | change))


BARE_ARRAYS = {
    "x": jnp.zeros((4, 16)),
    "gate": jnp.zeros((2, 16, 8)),
    "up": jnp.zeros((2, 16, 8)),
    "rows": jnp.zeros(32, jnp.int32),
    "block_expert": jnp.zeros(2, jnp.int32),
    "num_blocks": jnp.zeros(1, jnp.int32),
}
BARE = BARE_ARRAYS | {"block_m": 16}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="jax-triton works here")
def test_triton_jit_without_cuda():
    """It was asked for by name, so it raises, and says what to install."""
    with pytest.raises(KernelError, match=r"grouped_swiglu: implementation triton_jit: .*moejax\[cuda12\]"):
        grouped_swiglu(**BARE, implementation="triton_jit")


@pytest.mark.parametrize("renamed", [False, True])
def test_versions_of_jax_triton(monkeypatch, renamed):
    """From 0.4 on `out_shape` is `out_type`, and options of the compiler are apart."""
    pytest.importorskip("triton")

    def before(*arrays, kernel, out_shape, grid, **options):
        return out_shape, options

    def since(*arrays, kernel, out_type, grid, **options):
        return out_type, options

    rules, primitive = {}, object()
    rules[primitive] = lambda used, equation: (used, equation)
    monkeypatch.setattr(partial_eval, "dce_rules", rules)
    library = SimpleNamespace(triton_kernel_call_p=primitive)
    module = SimpleNamespace(triton_call=since if renamed else before, triton_lib=library)
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    out, options = grouped_swiglu(**BARE, implementation="triton_jit", interpret=False)
    assert out.shape == (32, 8) and options["BLOCK_M"] == 16 and options["ACT"] == "silu"
    assert options.get("backend_options") == ({"enable_fp_fusion": True} if renamed else None)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    grouped_swiglu(**BARE, implementation="triton_jit", interpret=False)
    arguments = ("used", "alive", "equation") if renamed else ("used", "equation")
    assert rules[primitive](*arguments) == ("used", "equation")
