"""The ways of running experts agree with each other and with loops, whatever the router does."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moejax.core.config import ClampedSwiglu
from moejax.core.moe import MoeConfig
from moejax.moe.experts import Experts, ExpertsOutput, slot_in_expert
from moejax.moe.permute import plan_blocks
from moejax.moe.router import Router, Routing
from moejax.nn.param import initialize
from pallas_kernels import moe_mlp
from tests.examples import examples, slow_but
from tests.model_shapes import experts_only
from tests.moe import reference
from tests.numerics import assert_close, tolerance

D, F = 8, 6
CLAMPED = ClampedSwiglu(limit=0.9, alpha=1.3)  # below many gates and ups


class Shape(NamedTuple):
    """N tokens, k experts of E a token, and blocks of `rows` rows."""

    N: int
    k: int
    E: int
    rows: int


SHAPES = [
    Shape(1, 1, 4, 1),
    Shape(1, 4, 4, 2),  # k = E, one token
    Shape(7, 2, 8, 4),  # blocks do not divide the assignments
    Shape(13, 3, 5, 3),
    Shape(9, 5, 5, 64),  # k = E, every block larger than its group
    Shape(24, 1, 6, 5),
    Shape(33, 2, 8, 16),
]
FEW, MANY, ALL = SHAPES[2:5]


@functools.cache
def experts_of(
    num_experts: int, normalize: bool = True, layout: str = "edf", biased: bool = False
) -> Experts:
    """The same weights in either layout; `biased` ones have a clamped SwiGLU, too."""
    config = experts_only(D, F, num_experts).replace(norm_topk_prob=normalize, initializer_range=0.5)
    if biased:
        config = config.replace(expert_bias=True, expert_swiglu=CLAMPED)
    experts = Experts(config, layout, jnp.float32)
    initialize(experts, seed=num_experts)
    rng = np.random.default_rng(num_experts)
    for bias in biases_of(experts) if biased else ():
        bias.set_value(jnp.asarray(rng.normal(size=bias.shape), jnp.float32))
    return experts


def biases_of(experts: Experts) -> list[nnx.Param]:
    return [bias for bias in (experts.gate_bias, experts.up_bias, experts.down_bias) if bias is not None]


@functools.cache
def compiled(
    num_experts: int, configs: MoeConfig | tuple[MoeConfig, ...], normalize: bool = True, biased: bool = False
):
    """The experts under one configuration, or a list of outputs under several, in one compilation."""

    single = isinstance(configs, MoeConfig)
    pairs = [
        (
            experts_of(num_experts, normalize, "efd" if config.expert_layout == "efd" else "edf", biased),
            config,
        )
        for config in ((configs,) if single else configs)
    ]
    router = Router(experts_only(D, F, num_experts).replace(norm_topk_prob=normalize), jnp.float32)
    run = jax.jit(lambda x, routing: [experts(x, routing, config, router) for experts, config in pairs])
    return (lambda x, routing: run(x, routing)[0]) if single else run


def route(logits: np.ndarray, k: int, valid: np.ndarray, normalize: bool = True) -> Routing:
    """As the router does it, in float32 by numpy; ties go to the lower expert."""
    E = logits.shape[1]
    probabilities = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32), axis=-1))
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :k].astype(np.int32)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    ids = np.where(valid[:, None], ids, E).astype(np.int32)
    return Routing(jnp.asarray(ids), jnp.asarray(np.where(valid[:, None], weights, 0)), jnp.asarray(logits))


@st.composite
def routings(draw, shape: Shape, normalize: bool = True) -> Routing:
    """Small integer logits, so that ties, all tokens on one expert and empty experts all come up."""
    logits = draw(
        st.one_of(
            hnp.arrays(np.int8, (shape.N, shape.E), elements=st.integers(-4, 4)),
            # The same for every token: k experts get everything.
            hnp.arrays(np.int8, (1, shape.E), elements=st.integers(-4, 4)).map(
                lambda row: np.repeat(row, shape.N, axis=0)
            ),
        )
    )
    valid = draw(st.one_of(st.just(np.ones(shape.N, bool)), hnp.arrays(bool, shape.N)))
    return route(logits.astype(np.float32), shape.k, valid, normalize)


def tokens(shape: Shape) -> np.ndarray:
    return np.random.default_rng(shape.N).normal(size=(shape.N, D)).astype(np.float32)


def weights_of(experts: Experts) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(w[...]) for w in (experts.gate_proj, experts.up_proj, experts.down_proj))


# Relative to the largest output of the largest input, so that an all-padding batch compares zero with zero.
def check_output(out: ExpertsOutput, x, expected, k: int) -> None:
    scale = max(np.abs(expected).max(), 1e-3)
    limit = tolerance(D, F, k) * scale
    np.testing.assert_allclose(np.asarray(out.out), expected, rtol=0, atol=limit)


def executions(shape: Shape) -> tuple[MoeConfig, ...]:
    roomy = float(shape.E)  # room for every token in every expert
    return (
        MoeConfig("dense"),
        MoeConfig("grouped", block_rows=shape.rows),
        MoeConfig("grouped", block_rows=shape.rows, expert_layout="efd"),
        MoeConfig("grouped", grouped_matmul="blocks_mixed"),
        MoeConfig("grouped", grouped_matmul="blocks_mixed", expert_layout="efd"),
        MoeConfig("grouped", grouped_matmul="batched", block_rows=2),
        MoeConfig("grouped", grouped_matmul="batched", expert_layout="efd"),
        MoeConfig("grouped", grouped_matmul="ragged_dot"),
        MoeConfig("capacity", capacity_factor=roomy),
        MoeConfig("capacity", capacity_factor=roomy, overflow="reroute"),
    )


@pytest.mark.parametrize(
    (*Shape._fields, "biased"),
    slow_but(
        [(*SHAPES[1], False), (*FEW, True), (*ALL, True), (*SHAPES[5], False)],
        [(*shape, biased) for shape in SHAPES for biased in (False, True)],
    ),
)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_every_execution_equals_the_loops(N, k, E, rows, biased, data):
    shape = Shape(N, k, E, rows)
    routing = data.draw(routings(shape))
    x, experts = tokens(shape), experts_of(shape.E, biased=biased)
    given = x, routing.ids, routing.weights
    if biased:
        biases = [bias[...] for bias in biases_of(experts)]
        expected = reference.biased_moe(*given, weights_of(experts), biases, CLAMPED.limit, CLAMPED.alpha)
    else:
        expected = reference.moe(*given, *weights_of(experts))
    for out in compiled(shape.E, executions(shape), biased=biased)(x, routing):
        check_output(out, x, expected, shape.k)
        np.testing.assert_array_equal(out.routing.ids, routing.ids)
        assert int(out.dropped) == int(out.rerouted) == 0


@pytest.mark.parametrize("biased", [False, True])
def test_kernels_equal_the_loops(biased):
    """Interpreted, on experts in the order that they do not read."""
    rng, shape = np.random.default_rng(0), Shape(13, 3, 5, 0)
    routing = route(
        rng.normal(size=(shape.N, shape.E)).astype(np.float32), shape.k, rng.random(shape.N) < 0.8
    )
    x, experts = tokens(shape), experts_of(shape.E, biased=biased)
    given, biases = (x, routing.ids, routing.weights), [bias[...] for bias in biases_of(experts)]
    if biased:
        expected = reference.biased_moe(*given, weights_of(experts), biases, CLAMPED.limit, CLAMPED.alpha)
    else:
        expected = reference.moe(*given, *weights_of(experts))
    config = MoeConfig("grouped", grouped_matmul="pallas_triton", expert_layout="efd")
    check_output(compiled(shape.E, config, biased=biased)(x, routing), x, expected, shape.k)


@pytest.mark.parametrize("rows", [1, 3, 8, 13, 64])
def test_blocks_of_any_height_give_the_same(rows):
    shape = Shape(33, 2, 8, rows)
    rng = np.random.default_rng(rows)
    valid = rng.random(shape.N) < 0.8
    # Logits that favour two experts: long groups, short groups and (with 8 experts) an empty one or two.
    logits = rng.normal(size=(shape.N, shape.E)) + np.array([3, 3, 0, 0, 0, -9, -9, 0])
    routing = route(logits.astype(np.float32), shape.k, valid)
    x = tokens(shape)
    expected = reference.moe(x, routing.ids, routing.weights, *weights_of(experts_of(shape.E)))
    assert np.bincount(np.asarray(routing.ids).ravel(), minlength=8)[:8].min() == 0
    out = compiled(shape.E, MoeConfig("grouped", block_rows=rows))(x, routing)
    check_output(out, x, expected, shape.k)


def test_padding_may_hold_anything():
    """A padding row of infinities and NaN changes no valid row in the executions that skip it."""
    shape = SHAPES[2]
    valid = np.array([True, False, True, True, False, True, True])
    logits = np.random.default_rng(0).normal(size=(shape.N, shape.E)).astype(np.float32)
    routing = route(logits, shape.k, valid)
    x = tokens(shape)
    clean = np.where(valid[:, None], x, 0)
    dirty = np.where(valid[:, None], x, np.array([np.nan, np.inf] * (D // 2), np.float32))
    for config in (
        MoeConfig("grouped", block_rows=4),
        MoeConfig("grouped", grouped_matmul="blocks_mixed"),
        MoeConfig("grouped", grouped_matmul="batched", block_rows=2),
        MoeConfig("grouped", grouped_matmul="ragged_dot"),
        MoeConfig("capacity", capacity_factor=8.0),
        MoeConfig("capacity", capacity_factor=8.0, overflow="reroute"),
    ):
        run = compiled(shape.E, config)
        np.testing.assert_array_equal(run(dirty, routing).out[valid], run(clean, routing).out[valid])
        assert not np.asarray(run(clean, routing).out)[~valid].any()


def made_assignments(out: ExpertsOutput, E: int) -> np.ndarray:
    return np.bincount(np.asarray(out.routing.ids).reshape(-1), minlength=E + 1)[:E]


@pytest.mark.parametrize(
    "shape, factor",
    slow_but([(FEW, 0.3), (MANY, 1.0)], [(shape, factor) for shape in (FEW, MANY) for factor in (0.3, 1.0)]),
)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_overflow_is_dropped_last_choices_first_and_counted(shape, factor, data):
    routing = data.draw(routings(shape))
    x, ids = tokens(shape), np.asarray(routing.ids)
    room = MoeConfig(capacity_factor=factor).capacity(shape.N, shape.k, shape.E)
    kept = reference.drop(ids, shape.E, room)
    out = compiled(shape.E, MoeConfig("capacity", capacity_factor=factor))(x, routing)
    np.testing.assert_array_equal(out.routing.ids, np.where(kept, ids, shape.E))
    weights = np.where(kept, routing.weights, 0)
    np.testing.assert_array_equal(out.routing.weights, weights)
    real = int((ids < shape.E).sum())
    assert int(out.dropped) == real - int(kept.sum())
    assert int(out.dropped) + made_assignments(out, shape.E).sum() == real
    assert int(out.rerouted) == 0
    check_output(
        out, x, reference.moe(x, out.routing.ids, weights, *weights_of(experts_of(shape.E))), shape.k
    )


@pytest.mark.parametrize(
    "shape, factor, normalize",
    slow_but(
        [(FEW, 0.3, True), (FEW, 0.7, False), (MANY, 1.0, True), (ALL, 0.3, True)],
        [(s, *how) for s in SHAPES[2:5] for how in ((0.3, True), (0.7, False), (1.0, True))],
    ),
)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_overflow_is_rerouted_to_the_next_best_and_counted(shape, factor, normalize, data):
    routing = data.draw(routings(shape, normalize))
    x, ids = tokens(shape), np.asarray(routing.ids)
    room = MoeConfig(capacity_factor=factor).capacity(shape.N, shape.k, shape.E)
    probabilities = np.asarray(jax.nn.softmax(routing.logits, axis=-1))
    ranking = np.argsort(-probabilities, axis=-1, kind="stable")
    made = reference.reroute(ids, ranking, shape.E, room)
    config = MoeConfig("capacity", capacity_factor=factor, overflow="reroute")
    out = compiled(shape.E, config, normalize)(x, routing)
    np.testing.assert_array_equal(out.routing.ids, made)

    real = int((ids < shape.E).sum())
    per_expert = made_assignments(out, shape.E)
    assert per_expert.max(initial=0) <= room
    assert int(out.dropped) + per_expert.sum() == real
    assert int(out.rerouted) == int(((made < shape.E) & (made != ids)).sum())
    with_room = {e for e in range(shape.E) if per_expert[e] < room}
    for n in range(shape.N):
        ran = [e for e in made[n] if e < shape.E]
        assert len(set(ran)) == len(ran), "a token visits an expert once"
        if len(ran) < int((ids[n] < shape.E).sum()):
            assert with_room <= set(ran), "dropped although an expert that it has not visited had room"

    weights = np.where(made < shape.E, np.take_along_axis(probabilities, np.minimum(made, shape.E - 1), 1), 0)
    if normalize:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(out.routing.weights, weights, rtol=tolerance(shape.k), atol=0)
    check_output(out, x, reference.moe(x, made, weights, *weights_of(experts_of(shape.E))), shape.k)


def test_reroute_drops_less_than_drop():
    """All tokens want the same two experts: dropping loses most of them, rerouting none."""
    shape = Shape(16, 2, 8, 4)
    logits = np.tile(np.array([5, 4, 3, 2, 1, 0, -1, -2], np.float32), (shape.N, 1))
    routing = route(logits, shape.k, np.ones(shape.N, bool))
    x = tokens(shape)
    drop = compiled(8, MoeConfig("capacity", capacity_factor=1.0))(x, routing)
    reroute = compiled(8, MoeConfig("capacity", capacity_factor=1.0, overflow="reroute"))(x, routing)
    # Room for 4 a expert: 8 of 32 assignments are kept; rerouted, all 8 experts fill up.
    assert (int(drop.dropped), int(drop.rerouted)) == (24, 0)
    assert (int(reroute.dropped), int(reroute.rerouted)) == (0, 24)
    np.testing.assert_array_equal(made_assignments(reroute, 8), np.full(8, 4))


def test_kernels_are_told_of_all_experts(monkeypatch):
    """How high blocks are follows from the rows an expert can expect: replicas count, other devices' do."""
    options = {}
    monkeypatch.setattr(moe_mlp, "moe_mlp", lambda x, *_, **given: options.update(given) or x)
    experts = Experts(experts_only(D, F, 6), "edf", jnp.float32, physical=8)
    initialize(experts, seed=0)
    routing = Routing(jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2)), jnp.zeros((3, 6)))
    experts(jnp.ones((3, D)), routing, MoeConfig(grouped_matmul="pallas_triton"))
    assert options["total_experts"] == 8


@pytest.mark.parametrize(
    "tokens_, top_k, num_experts, factor, expected",
    [(16, 2, 8, 1.0, 4), (16, 2, 8, 1.25, 5), (17, 2, 8, 1.0, 5), (1, 2, 8, 1.0, 1), (4, 2, 4, 9.0, 4)],
)
def test_capacity(tokens_, top_k, num_experts, factor, expected):
    """ceil(c·N·k/E), at least one row, never more rows than tokens."""
    assert MoeConfig(capacity_factor=factor).capacity(tokens_, top_k, num_experts) == expected


def test_slot_in_expert():
    ids = jnp.array([[0, 1], [0, 2], [1, 0], [3, 3]], jnp.int32)  # 3 = E: none
    np.testing.assert_array_equal(slot_in_expert(ids, 3)[:3], [[0, 1], [1, 0], [0, 2]])


@pytest.mark.parametrize(("E", "N"), [(32768, 40), (5, 300)])
def test_many_experts_and_many_rows_keep_their_order(E: int, N: int) -> None:
    """Slots count an expert's first choices, then its second; blocks cover each expert's rows."""
    ids = np.random.default_rng(E).integers(0, E, size=(N, 4)).astype(np.int32)
    seen: dict[int, int] = {}
    expected = np.zeros_like(ids)
    for place in np.ndindex(4, N):
        expert = int(ids.T[place])
        expected.T[place] = seen.get(expert, 0)
        seen[expert] = seen.get(expert, 0) + 1
    np.testing.assert_array_equal(slot_in_expert(jnp.asarray(ids), E), expected)
    blocks = plan_blocks(jnp.asarray(ids), E, 0, (8,)).blocks[0]
    used = int(blocks.num)
    assert used == sum(-(-rows // 8) for rows in seen.values())
    owners = [expert for expert in sorted(seen) for _ in range(-(-seen[expert] // 8))]
    np.testing.assert_array_equal(blocks.expert[:used], owners)


def loss(state, graph, x, logits, config, k):
    experts = nnx.merge(graph, state)
    chosen, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), k)
    routing = Routing(ids, chosen / jnp.sum(chosen, axis=-1, keepdims=True), logits)
    router = Router(experts_only(D, F, logits.shape[1]), jnp.float32)
    return jnp.sum(jnp.sin(experts(x, routing, config, router).out))


@pytest.mark.parametrize("overflow", ["drop", "reroute"])
def test_gradients_of_capacity(overflow):
    """Finite where assignments overflow, and those of `dense` where none does; also into the router."""
    shape = Shape(12, 2, 6, 4)
    rng = np.random.default_rng(0)
    graph, state = nnx.split(experts_of(shape.E))
    x = tokens(shape)
    logits = (rng.normal(size=(shape.N, shape.E)) + np.array([2, 0, 0, 0, 0, -3])).astype(np.float32)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 2, 3)), static_argnums=(1, 4, 5))

    def gradients(config):
        return jax.tree.leaves(gradient(state, graph, x, logits, config, shape.k))

    dense = gradients(MoeConfig("dense"))
    roomy = gradients(MoeConfig("capacity", capacity_factor=6.0, overflow=overflow))
    for ours, expected in zip(roomy, dense, strict=True):
        assert np.abs(expected).max() > 0
        assert_close(ours, expected, tolerance(D, F, shape.k, shape.N, D))
    tight = gradients(MoeConfig("capacity", capacity_factor=0.5, overflow=overflow))
    for leaf in tight:
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0
