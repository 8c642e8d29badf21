"""`topk_router` against its contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.errors import KernelError
from pallas_kernels.topk_router import OP, topk_router
from pallas_kernels.topk_router.pallas_triton import Config
from tests.examples import in_turns, slow_but
from tests.kernels.contract import Contract, limit_for, normal

SHAPES = [
    (1, 1, 1, "float32", True),
    (3, 8, 2, "bfloat16", True),
    (17, 64, 8, "float32", False),
    (5, 128, 8, "float16", True),
    (9, 60, 4, "bfloat16", False),
    (2, 512, 16, "float32", True),
    (4, 5, 5, "float32", False),
    (2, 4096, 16, "bfloat16", False),
]
BIASED = [(3, 8, 2, "float32"), (5, 100, 6, "bfloat16"), (4, 256, 8, "float32")]
GROUPED = [
    (256, 8, 4, 8),
    (64, 4, 1, 8),
    (30, 5, 2, 6),
    (24, 3, 3, 8),
    (12, 6, 4, 8),
    (16, 1, 1, 4),
    (96, 8, 3, 16),
    (1089, 33, 5, 8),
]


DEEPSEEK = {"scoring": "sigmoid", "renormalize": True, "scale": 2.5}


def _separated(values: np.ndarray) -> np.ndarray:
    """Rows in which no two numbers are so close that float32 could order them otherwise than float64."""
    return np.diff(np.sort(values, axis=-1), axis=-1).min(axis=-1, initial=1.0) > 2e-6


def _with_bias(rng, T, E, scoring, groups=1, dtype="float32"):
    """Logits and a bias whose biased scores, and groups, stay apart in float32."""
    bias = jnp.asarray(rng.normal(size=E) * 0.3, jnp.float32)
    logits = normal(rng, (40 * T, E), dtype)
    x = np.asarray(logits, np.float64)
    scores = 1 / (1 + np.exp(-x)) if scoring == "sigmoid" else np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    keys = scores + np.asarray(bias, np.float64)
    pairs = np.sort(keys.reshape(len(x), groups, -1), axis=-1)[..., -2:]
    good = _separated(keys) & _separated(pairs.sum(-1)) & _separated(pairs[..., -1])
    assert good.sum() >= T
    return {"logits": logits[np.flatnonzero(good)[:T]], "bias": bias}


class TopkRouterContract(Contract):
    op, api = OP, staticmethod(topk_router)

    @pytest.mark.parametrize("T,E,k,dtype,renormalize,scoring", in_turns(SHAPES, ["softmax", "sigmoid"]))
    def test_shapes(self, rng, T, E, k, dtype, renormalize, scoring):
        """16-bit logits of many experts are full of ties: the lower id comes first."""
        arrays = {"logits": normal(rng, (T, E), dtype, 2.0)}
        static = {"k": k, "scoring": scoring, "renormalize": renormalize, "scale": 1.5}
        self.check(arrays, static, limit=limit_for("float32", E))

    @pytest.mark.parametrize("S,T,E", [(1, 3, 8), (4, 5, 60), (16, 1, 128)])
    def test_parts(self, rng, S, T, E):
        """Parts are added up in order: what the sum alone gives, to the bit, ties and invalid rows too."""
        parts = jnp.round(4 * normal(rng, (S, T, E), "float32")) / 4
        static = {"k": 4, "renormalize": True}
        arrays = {"logits": parts, "valid": jnp.arange(T) != 1}
        ours = self.check(arrays, static, limit=limit_for("float32", E))
        whole = self.run(arrays | {"logits": functools.reduce(jnp.add, parts)}, static)
        for a, b in zip(ours, whole, strict=True):
            np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("T,E,k,dtype,scoring", in_turns(BIASED, ["softmax", "sigmoid"]))
    def test_bias(self, rng, T, E, k, dtype, scoring):
        """The choice is by score plus bias; the weights are the scores."""
        arrays = _with_bias(rng, T, E, scoring, dtype=dtype)
        ids, weights = self.check(arrays, {"k": k, "scoring": scoring}, limit=limit_for("float32", E))
        plain = jax.nn.softmax if scoring == "softmax" else jax.nn.sigmoid
        scores = plain(arrays["logits"].astype(jnp.float32))
        np.testing.assert_allclose(
            weights, np.take_along_axis(np.asarray(scores), np.asarray(ids), 1), rtol=2e-5
        )

    @pytest.mark.parametrize(
        "E,groups,top,k,bias,score",
        in_turns(GROUPED, [(True, "top2"), (False, "max"), (True, "max"), (False, "top2")]),
    )
    def test_groups(self, rng, E, groups, top, k, bias, score):
        """Numbers of groups and sizes that are no powers of two; k as large as the chosen groups."""
        arrays = _with_bias(rng, 6, E, "sigmoid", groups)
        if not bias:
            arrays.pop("bias")
        static = {"k": k, "num_groups": groups, "top_groups": top, "group_score": score, **DEEPSEEK}
        ids, _ = self.check(arrays, static, limit=limit_for("float32", E))
        used = [len(set(row)) for row in (np.asarray(ids) // (E // groups)).tolist()]
        assert max(used) <= top

    def test_groups_of_one(self, rng):
        """Without a bias, groups of one expert are the experts."""
        arrays = {"logits": normal(rng, (4, 6), "float32")}
        grouped = self.check(
            arrays, {"k": 3, "num_groups": 6, "top_groups": 4}, limit=limit_for("float32", 6)
        )
        plain = self.run(arrays, {"k": 3})
        np.testing.assert_array_equal(grouped[0], plain[0])

    @pytest.mark.parametrize("T,E,k,bias", [(17, 64, 8, True), (5, 60, 4, False)])
    def test_padding(self, rng, T, E, k, bias):
        """Rows that are not valid choose no expert, whatever their logits are."""
        valid = rng.random(T) < 0.6
        logits = np.where(valid[:, None], rng.normal(size=(T, E)), np.nan)
        arrays = {"logits": jnp.asarray(logits, jnp.float32), "valid": jnp.asarray(valid)}
        arrays |= {"bias": jnp.zeros(E, jnp.float32)} if bias else {}
        ids, weights = self.check(arrays, {"k": k, "renormalize": True}, limit=limit_for("float32", E))
        assert (np.asarray(ids)[~valid] == E).all() and (np.asarray(weights)[~valid] == 0).all()

    def test_skewed(self, rng):
        """One expert above all others, which are equal or as good as impossible: still distinct, in order."""
        logits = np.zeros((9, 128), np.float32)
        logits[:, 64:] = -1e30
        logits[np.arange(9), rng.integers(0, 128, 9)] = 1e4
        ids, _ = self.check({"logits": jnp.asarray(logits)}, {"k": 8}, limit=limit_for("float32", 128))
        assert all(len(set(row)) == 8 for row in np.asarray(ids).tolist())

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
    def test_ties(self, rng, scoring):
        """Equal logits, zeros of both signs and -inf: the lower id first."""
        values = jnp.asarray([0.0, -0.0, 1.0, -1.0, -jnp.inf], jnp.float32)
        logits = values[rng.integers(0, 5, size=(32, 24))].at[:, 7].set(0.5)
        arrays = {"logits": logits.at[0].set(0.0).at[1, 1:].set(-jnp.inf).at[1, 0].set(3.0)}
        self.check(arrays, {"k": 16, "scoring": scoring}, limit=limit_for("float32", 24))

    def test_group_ties(self, rng):
        """Equal groups: the lower one first."""
        logits = jnp.asarray(rng.integers(0, 2, size=(32, 32)), jnp.float32)
        static = {"k": 4, "num_groups": 8, "top_groups": 3}
        self.check({"logits": logits}, static, limit=limit_for("float32", 32))
        for arrays in ({"logits": logits, "bias": jnp.zeros(32, jnp.float32)}, {"logits": logits}):
            self.check(arrays, static | {"group_score": "top2"}, limit=limit_for("float32", 32))

    @pytest.mark.parametrize(
        "scale,renormalize", in_turns([(1e-30,), (1e-3,), (30.0,), (1e4,), (1e30,)], [True, False])
    )
    def test_magnitudes(self, rng, scale, renormalize):
        """Scores that underflow or round to one number still choose the larger logit."""
        arrays = {"logits": normal(rng, (8, 40), "float32", scale)}
        self.check(arrays, {"k": 8, "renormalize": renormalize}, limit=limit_for("float32", 40))

    def test_all_scores_underflow(self):
        """Sigmoids that are all zero have weights of zero, not NaN."""
        arrays = {"logits": jnp.full((2, 8), -200.0)}
        ids, weights = self.run(arrays, {"k": 2, "scoring": "sigmoid", "renormalize": True})
        assert ids.tolist() == [[0, 1]] * 2 and (weights == 0).all()

    def test_least_sum(self, rng):
        """Weights are divided by no less than `norm_min`, and by a larger sum as it is."""
        arrays = {"logits": normal(rng, (9, 40), "float32", 2.0)}
        static = {"k": 4, "renormalize": True}
        _, weights = self.check(arrays, static | {"norm_min": 0.6}, limit=limit_for("float32", 40))
        whole = np.isclose(np.asarray(weights).sum(1), 1.0)
        assert 0 < whole.sum() < 9

    @pytest.mark.parametrize(
        "scoring,bias,groups",
        slow_but(
            [("softmax", False, None), ("softmax", True, 4), ("sigmoid", False, 4), ("sigmoid", True, None)],
            [
                (s, bias, groups)
                for s in ("softmax", "sigmoid")
                for bias in (False, True)
                for groups in (None, 4)
            ],
        ),
    )
    def test_nan(self, rng, scoring, bias, groups):
        """Ids stay in range and distinct, the weights show the NaN, other rows do not."""
        arrays = _with_bias(rng, 4, 16, scoring, groups or 1)
        logits = arrays["logits"].at[1, 3].set(jnp.nan).at[2].set(jnp.nan).at[3, 5].set(jnp.inf)
        arrays = {"logits": logits} | ({"bias": arrays["bias"]} if bias else {})
        static = {"k": 4, "scoring": scoring, "num_groups": groups, "top_groups": groups and 2}
        static["group_score"] = "top2" if bias else "max"
        ids, weights = self.run(arrays, static)
        theirs = self.expect(arrays, static)
        np.testing.assert_array_equal(ids, theirs[0])
        np.testing.assert_array_equal(np.isnan(weights), np.isnan(theirs[1]))
        assert all(len(set(row)) == 4 and 0 <= min(row) and max(row) < 16 for row in ids.tolist())
        assert np.isnan(weights).any(axis=1).tolist() == [
            False,
            scoring == "softmax",
            True,
            scoring == "softmax",
        ]


class TestPallas(TopkRouterContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("rows,warps", [(1, 1), (4, 2), (32, 4)])
    def test_configurations(self, rng, rows, warps):
        arrays = {"logits": normal(rng, (11, 40), "float32")}
        self.check(arrays, {"k": 5}, limit=limit_for("float32", 40), config=Config(rows, warps))


def test_equals_the_models_router(rng):
    """`moejax.moe.router.Router`: `jax.lax.top_k` of the softmax, renormalised or not."""
    logits = normal(rng, (64, 32), "float32")
    for renormalize in (False, True):
        theirs, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), 8)
        if renormalize:
            theirs = theirs / jnp.sum(theirs, axis=-1, keepdims=True)
        ours = topk_router(logits, k=8, renormalize=renormalize)
        np.testing.assert_array_equal(ours[0], ids)
        np.testing.assert_allclose(ours[1], theirs, rtol=1e-5)


def test_softmax_of_the_chosen(rng):
    """Renormalised, the weights are the softmax of the chosen logits (Mixtral)."""
    logits = normal(rng, (16, 8), "float32")
    ids, weights = topk_router(logits, k=2, renormalize=True)
    chosen = jnp.take_along_axis(logits, ids, axis=1)
    np.testing.assert_allclose(weights, jax.nn.softmax(chosen, axis=-1), rtol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [(None, None, "max"), (5, 2, "top2"), (5, 2, "max"), (4, 4, "max")])
def test_lowers(scoring, bias, groups):
    """To Triton IR, which is stricter than interpretation."""
    arrays = {"logits": jax.ShapeDtypeStruct((100, 60), "bfloat16")}
    arrays |= {"bias": jax.ShapeDtypeStruct((60,), "float32")} if bias else {}
    static = {
        "k": 6,
        "scoring": scoring,
        "num_groups": groups[0],
        "top_groups": groups[1],
        "group_score": groups[2],
        "renormalize": bias,
        "norm_min": 1e-12,
    }
    [lowered] = lower_for_cuda(lambda **kw: topk_router(**kw, **static, interpret=False), arrays, 80)
    assert lowered.name == "topk_router"


@pytest.mark.parametrize("spec", OP.specs, ids=lambda s: s.name)
def test_specs(spec):
    assert OP.implementations["pallas_triton"].heuristic(spec.problem) in list(
        OP.implementations["pallas_triton"].space(spec.problem)
    )
    made = jax.eval_shape(
        lambda kw: topk_router(**kw, **spec.static, implementation="reference"), spec.abstract
    )
    assert made[0].shape == made[1].shape == (spec.problem["T"], spec.static["k"])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"logits": (0, 64)}, "topk_router: logits: got shape .*, expected at least one element along T"),
        ({"logits": (64,)}, "topk_router: logits: got shape .*, expected 2 dimensions"),
        ({"logits": (4, 4097)}, "logits: got 4097 experts, expected at most 4096"),
        ({"bias": (63,)}, r"topk_router: bias: got shape \[63\], expected \[E\] with E=64"),
        ({"k": 0}, "topk_router: k: got 0, expected 1 to 16 of 64 experts"),
        ({"k": 17}, "topk_router: k: got 17"),
        ({"logits": (4, 2), "k": 3}, "k: got 3, expected 1 to 2"),
        ({"scoring": "tanh"}, "scoring: got 'tanh', expected softmax or sigmoid"),
        ({"group_score": "sum"}, "group_score: got 'sum', expected max or top2"),
        ({"norm_min": -1.0}, "norm_min: got -1.0, expected a number from 0 on"),
        ({"num_groups": 8}, "top_groups: got None, expected num_groups and top_groups, or neither"),
        ({"num_groups": 7, "top_groups": 2}, "num_groups: got 7, expected a divisor of 64 experts"),
        ({"num_groups": 8, "top_groups": 9}, "top_groups: got 9, expected 1 to 8"),
        ({"num_groups": 32, "top_groups": 1, "k": 3}, "k: got 3, expected at most the 2 experts of 1 groups"),
        (
            {"num_groups": 64, "top_groups": 8, "group_score": "top2"},
            "num_groups: got 64, expected two experts a group",
        ),
    ],
)
def test_bad_input(change, message):
    arguments = {"logits": (4, 64), "k": 2} | change
    made = {n: jnp.zeros(v) if isinstance(v, tuple) else v for n, v in arguments.items()}
    with pytest.raises(KernelError, match=message):
        topk_router(**made)


def test_bad_dtypes():
    with pytest.raises(KernelError, match="logits: got int32"):
        topk_router(jnp.zeros((4, 8), jnp.int32), k=2)
    with pytest.raises(KernelError, match="bias: got bfloat16, expected float32"):
        topk_router(jnp.zeros((4, 8)), k=2, bias=jnp.zeros(8, jnp.bfloat16))
    with pytest.raises(KernelError, match="got 'mosaic', expected one of reference, pallas_triton"):
        topk_router(jnp.zeros((4, 8)), k=2, implementation="mosaic")
    with pytest.raises(TypeError, match="config is a dict"):
        topk_router(jnp.zeros((4, 8)), k=2, config={})
