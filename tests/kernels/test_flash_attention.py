"""`flash_attention` against its contract."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.attention import attention
from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.errors import KernelError
from pallas_kernels.flash_attention import OP, flash_attention
from pallas_kernels.flash_attention.pallas_triton import Config
from tests.examples import slow_but
from tests.kernels.contract import Contract, limit_for, normal
from tests.numerics import tolerance

SMALL = Config(16, 16, 4, 2)
"""Tiny tiles, so that short sequences have whole, masked and skipped ones."""


def _arrays(rng, B, Tq, Tk, H, K, Dh, dtype="float32", scale=1.0):
    return {
        "q": normal(rng, (B, Tq, H, Dh), dtype, scale),
        "k": normal(rng, (B, Tk, K, Dh), dtype),
        "v": normal(rng, (B, Tk, K, Dh), dtype),
    }


def _limit(arrays, soft_cap=0.0):
    """The weights are rounded to the inputs' dtype before the second product."""
    dtype, Dh, Tk = arrays["q"].dtype, arrays["q"].shape[-1], arrays["k"].shape[1]
    rounded = 0.0 if dtype == jnp.float32 else tolerance(1, dtype=str(dtype))
    # The soft cap's tanh has an absolute error, which the cap multiplies.
    return limit_for(dtype, Dh, Tk) + rounded + soft_cap * 2.0**-22


SHAPES = [
    (1, 1, 1, 1, 1, 8, "float32"),
    (2, 5, 5, 4, 2, 16, "bfloat16"),
    (1, 17, 33, 6, 2, 24, "float32"),
    (2, 3, 70, 8, 1, 64, "bfloat16"),
    (1, 37, 9, 2, 2, 40, "float32"),
    (1, 20, 40, 5, 1, 200, "float16"),
    (1, 130, 130, 4, 1, 128, "bfloat16"),
    (1, 9, 65, 2, 1, 256, "bfloat16"),
]
# All combinations; an even number of options beside the mask in the fast half.
COMBINATIONS = [
    pytest.param(mask, soft_cap, sinks, lengths, marks=[pytest.mark.slow] if odd else [])
    for mask, soft_cap, sinks, lengths in itertools.product(
        ["causal", "window", "none"], [None, 2.0], [False, True], [False, True]
    )
    for odd in [((soft_cap is not None) + sinks + lengths) % 2]
]


class FlashAttentionContract(Contract):
    op, api = OP, staticmethod(flash_attention)
    small = None

    @pytest.mark.parametrize(
        "B,Tq,Tk,H,K,Dh,dtype,causal",
        slow_but(
            [(*shape, i % 2 == 0) for i, shape in enumerate(SHAPES)],
            [(*shape, causal) for shape in SHAPES for causal in (True, False)],
        ),
    )
    def test_shapes(self, rng, B, Tq, Tk, H, K, Dh, dtype, causal):
        """Lengths and head dimensions that no tile divides, groups that are no powers of two, Tq > Tk."""
        arrays = _arrays(rng, B, Tq, Tk, H, K, Dh, dtype)
        self.check(arrays, {"scale": Dh**-0.5, "causal": causal}, limit=_limit(arrays))

    @pytest.mark.parametrize("mask,soft_cap,sinks,lengths", COMBINATIONS)
    def test_masks(self, rng, mask, soft_cap, sinks, lengths):
        """Every combination, on keys that fill several tiles."""
        arrays = _arrays(rng, 2, 37, 75, 6, 2, 16, scale=3.0)
        static = {"scale": 0.25, "causal": mask != "none", "soft_cap": soft_cap}
        static |= {"window": 20} if mask == "window" else {}
        arrays |= {"sinks": normal(rng, (6,), "float32", 3.0)} if sinks else {}
        arrays |= {"lengths": jnp.asarray([75, rng.integers(1, 75)], jnp.int32)} if lengths else {}
        self.check(arrays, static, limit=3 * _limit(arrays, soft_cap or 0.0), config=self.small)

    @pytest.mark.parametrize("window", slow_but([1, 16, 17, 1000], [1, 15, 16, 17, 33, 1000]))
    def test_windows(self, rng, window):
        """Windows beside the tiles' borders, of one key, and wider than the sequence."""
        arrays = _arrays(rng, 1, 50, 50, 2, 1, 16)
        self.check(arrays, {"scale": 0.25, "window": window}, limit=_limit(arrays), config=self.small)

    @pytest.mark.parametrize("causal,window", [(True, None), (True, 18), (False, None)])
    def test_every_length(self, rng, causal, window):
        """Lengths from 0 to all keys; what lies past them is NaN and must not be read."""
        T = 35
        arrays = _arrays(rng, T + 1, T, T, 1, 1, 8)
        lengths = jnp.arange(T + 1, dtype=jnp.int32)
        past = (jnp.arange(T)[None, :] >= lengths[:, None])[:, :, None, None]
        arrays |= {n: jnp.where(past, jnp.nan, arrays[n]) for n in ("k", "v")} | {"lengths": lengths}
        static = {"scale": 0.3, "causal": causal, "window": window}
        out = self.check(arrays, static, limit=_limit(arrays), config=self.small)
        np.testing.assert_array_equal((np.asarray(out) != 0).any((2, 3)), ~np.asarray(past)[:, :, 0, 0])

    @pytest.mark.parametrize("offset", slow_but([-20, 7, 100], [-20, -1, 7, 100]))
    def test_query_offset(self, rng, offset):
        """Queries before all keys, which see none and give 0, among them and past them."""
        arrays = _arrays(rng, 1, 19, 40, 4, 2, 16)
        static = {"scale": 0.25, "q_offset": offset}
        self.check(arrays, {**static, "window": 30}, limit=_limit(arrays), config=self.small)
        out = self.check(arrays, static, limit=_limit(arrays), config=self.small)
        assert not np.asarray(out)[0, : max(0, -offset)].any()

    @pytest.mark.parametrize(
        "scale,soft_cap",
        slow_but(
            [(1e-30, 30.0), (1e-3, None), (30.0, 30.0), (1e3, None)],
            itertools.product([1e-30, 1e-3, 30.0, 1e3], [None, 30.0]),
        ),
    )
    def test_extreme_logits(self, rng, scale, soft_cap):
        """Scores up to thousands: the exponential multiplies their rounding."""
        arrays = _arrays(rng, 1, 40, 40, 2, 2, 16, scale=scale)
        largest = float(jnp.abs(jnp.einsum("bihd,bjhd->bhij", arrays["q"], arrays["k"])).max()) * 0.25
        limit = _limit(arrays, soft_cap or 0.0) + tolerance(16) * largest
        self.check(arrays, {"scale": 0.25, "soft_cap": soft_cap}, limit=limit, config=self.small)

    def test_extreme_sinks(self, rng):
        """A sink far above the scores takes all weight, one far below none; -inf is no sink."""
        arrays = _arrays(rng, 1, 20, 20, 4, 2, 16)
        arrays["sinks"] = jnp.asarray([1e4, -1e4, -jnp.inf, 0.0], jnp.float32)
        static = {"scale": 0.25, "q_offset": -2}
        out = self.check(arrays, static, limit=_limit(arrays), config=self.small)
        arrays.pop("sinks")
        plain = self.run(arrays, static, self.small)
        assert not np.asarray(out)[:, :, 0].any()
        np.testing.assert_allclose(out[:, :, 1:3], plain[:, :, 1:3], atol=1e-6)

    def test_rows_do_not_mix(self, rng):
        arrays = _arrays(rng, 2, 20, 20, 4, 2, 16)
        arrays["q"] = arrays["q"].at[1, 7, 2].set(jnp.nan)
        out = self.run(arrays, {"scale": 0.25}, self.small)
        assert np.argwhere(np.isnan(out).any(-1)).tolist() == [[1, 7, 2]]

    def test_chunk_is_the_end_of_the_whole(self, rng):
        arrays = _arrays(rng, 1, 50, 50, 4, 2, 16)
        static = {"scale": 0.25, "window": 30}
        whole = self.run(arrays, static, self.small)
        chunk = self.run(arrays | {"q": arrays["q"][:, 37:]}, static, self.small)
        np.testing.assert_allclose(chunk, whole[:, 37:], atol=2e-6)

    @pytest.mark.parametrize("window", [None, 9])
    def test_equals_the_models_attention(self, rng, window):
        """`moejax.ops.attention.attention`, whose keys are `[B, K, S, Dh]`."""
        arrays = _arrays(rng, 2, 24, 24, 4, 2, 16)
        positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32)[None], (2, 24))
        k, v = (arrays[n].transpose(0, 2, 1, 3) for n in ("k", "v"))
        theirs = attention(arrays["q"], k, v, positions, window=window, scale=0.25)
        ours = self.run(arrays, {"scale": 0.25, "window": window}, self.small)
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


class TestPallas(FlashAttentionContract):
    implementation = "pallas_triton"
    small = SMALL

    @pytest.mark.parametrize(
        "rows,keys", slow_but([(16, 64), (128, 32)], [(16, 64), (64, 16), (128, 32), (32, 128)])
    )
    def test_configurations(self, rng, rows, keys):
        arrays = _arrays(rng, 1, 45, 90, 6, 2, 24)
        for window in (None, 40):
            static = {"scale": 0.2, "window": window}
            self.check(arrays, static, limit=_limit(arrays), config=Config(rows, keys, 4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("T", [17, 33])
@pytest.mark.parametrize("offset", [None, -5, 11])
def test_every_window(rng, T, offset):
    """All windows up to the length, over tiles of 16."""
    contract = TestPallas()
    for window in range(1, T + 2):
        arrays = _arrays(rng, 1, T, T, 3, 1, 8)
        static = {"scale": 0.3, "window": window, "q_offset": offset}
        contract.check(arrays, static, limit=_limit(arrays), config=SMALL)


@pytest.mark.parametrize(
    "Tq,H,Dh,dtype,static",
    [
        (64, 4, 128, "bfloat16", {"causal": False}),
        (70, 6, 80, "float16", {"soft_cap": 30.0}),
        (5, 4, 256, "bfloat16", {"window": 20}),
        (64, 4, 64, "float32", {"q_offset": 3}),
    ],
)
@pytest.mark.parametrize("optional", [False, True])
def test_lowers(Tq, H, Dh, dtype, static, optional):
    """To Triton IR, which is stricter than interpretation: a choice between two plain numbers fails."""
    shapes = {"q": (1, Tq, H, Dh), "k": (1, 65, 2, Dh), "v": (1, 65, 2, Dh)}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    if optional:
        arrays |= {
            "sinks": jax.ShapeDtypeStruct((H,), "float32"),
            "lengths": jax.ShapeDtypeStruct((1,), "int32"),
        }
    [lowered] = lower_for_cuda(
        lambda **kw: flash_attention(**kw, scale=0.1, interpret=False, **static), arrays, 80
    )
    assert lowered.name == "flash_attention"


@pytest.mark.parametrize("spec", OP.specs, ids=lambda s: s.name)
def test_specs(spec):
    kind = OP.implementations["pallas_triton"]
    assert kind.heuristic(spec.problem) in list(kind.space(spec.problem))
    out = jax.eval_shape(
        lambda kw: flash_attention(**kw, **spec.static, implementation="reference"), spec.abstract
    )
    assert out.shape == spec.abstract["q"].shape


def test_cost_counts_visible_pairs():
    """Against the mask itself, for the causal and the windowed spec."""
    for name, window in (
        ("olmoe_1b_7b/prefill_1x512", 512),
        ("qwen3_30b_a3b/prefill_1x2048/window_128_sinks", 128),
    ):
        (spec,) = [spec for spec in OP.specs if spec.name == name]
        _, T, H, Dh = spec.abstract["q"].shape
        i, j = np.arange(T)[:, None], np.arange(T)[None]
        assert spec.cost.flops == 4 * H * Dh * ((j <= i) & (j > i - window)).sum()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": (1, 0, 4, 16)}, "flash_attention: q: got shape .*, expected at least one element along Tq"),
        ({"k": (1, 9, 2, 8)}, r"flash_attention: k: got shape \[1, 9, 2, 8\], expected .* with Dh=16"),
        ({"v": (1, 8, 2, 16)}, "flash_attention: v: got shape .*, expected .* with Tk=9"),
        ({"q": (1, 7, 3, 16)}, "q: got 3 heads, expected a multiple of the 2 KV heads"),
        ({n: (1, 7, 2, 12) for n in "qkv"}, "q: got head dimension 12, expected a multiple of 8 up to 256"),
        ({n: (1, 7, 2, 264) for n in "qkv"}, "q: got head dimension 264"),
        ({"sinks": (2,)}, r"sinks: got shape \[2\], expected \[H\] with H=4"),
        ({"lengths": (1,)}, "lengths: got float32, expected int32"),
        ({"scale": 0.0}, "scale: got 0.0, expected a positive number"),
        ({"soft_cap": -1.0}, "soft_cap: got -1.0"),
        ({"window": 0}, "window: got 0, expected at least 1, or None"),
        ({"window": 4, "causal": False}, "window: got a window with causal=False, expected causal=True"),
    ],
)
def test_bad_input(change, message):
    arguments = {"q": (1, 7, 4, 16), "k": (1, 9, 2, 16), "v": (1, 9, 2, 16), "scale": 1.0} | change
    made = {n: jnp.zeros(x) if isinstance(x, tuple) else x for n, x in arguments.items()}
    with pytest.raises(KernelError, match=message):
        flash_attention(**made)


def test_bad_dtypes(rng):
    arrays = _arrays(rng, 1, 4, 4, 2, 1, 8)
    with pytest.raises(KernelError, match="k: got bfloat16, expected float32"):
        flash_attention(**arrays | {"k": arrays["k"].astype(jnp.bfloat16)}, scale=1.0)
    with pytest.raises(KernelError, match="q: got int32"):
        flash_attention(**jax.tree.map(lambda x: x.astype(jnp.int32), arrays), scale=1.0)
    with pytest.raises(KernelError, match="got 'mosaic', expected one of reference, pallas_triton"):
        flash_attention(**arrays, scale=1.0, implementation="mosaic")
    with pytest.raises(TypeError, match="config is a dict"):
        flash_attention(**arrays, scale=1.0, config={})
