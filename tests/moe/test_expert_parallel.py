"""Expert-parallel execution on eight virtual devices equals one device, whatever the routing."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.errors import ConfigError
from moejax.moe.expert_parallel import dispatch_experts
from moejax.moe.permute import combine, plan_blocks
from moejax.ops.dispatch import mixed_block_heights
from moejax.ops.expert_stack import Stack
from moejax.ops.grouped_matmul import grouped_swiglu_blocks
from moejax.sharding.axes import SINGLE
from tests.examples import examples, slow_but
from tests.moe.expert_parallel import (
    CASES,
    FLAT,
    HIDDEN,
    PER_RANK,
    expert_weights,
    groups,
    inputs,
    limit,
    num_experts,
    outputs,
    reference,
    routing,
    sharded,
)
from tests.numerics import assert_close, tolerance

pytestmark = pytest.mark.multidevice

KINDS = ("balanced", "random", "one_expert", "one_rank", "empty", "some_empty", "one_token", "one_sender")
# Several sizes of buffer to choose from at 72 tokens, one at 5.
MANY = [
    *(("ep8", method) for method in FLAT),
    *((layout, "all_to_all") for layout in ("ep4_tp2", "dp2_ep4")),
    *((layout, "hierarchical") for layout in ("nodes2", "nodes2_tp2")),
]
# Every method on the layout that it is for.
ALLGATHER, ALL_TO_ALL, RAGGED, HIERARCHICAL = METHODS = [
    *(("ep8", method) for method in FLAT),
    ("nodes2", "hierarchical"),
]


def over(cases, *more):
    """Every (layout, method) with every one of `more`, as flat tuples."""
    return [(*case, *values) for case, *values in itertools.product(cases, *more)]


def check(layout, method, ids, **options):
    data = inputs(layout, ids)
    out, dropped = outputs(layout, method, data, **options)
    expected = reference(data, expert_weights(num_experts(layout)))
    assert not dropped.any()
    assert_close(out, expected, limit(ids.shape[1]))
    padding = (ids == num_experts(layout)).all(axis=1)
    assert not out[padding].any()
    return out


@pytest.mark.parametrize(
    ("layout", "method", "tokens"),
    slow_but(
        # Every method, every layout, both sizes.
        [
            *over([*METHODS, ("nodes4", "hierarchical"), ("nodes2", "allgather")], [5]),
            *over([("ep4_tp2", "ragged_emulated"), ("dp2_ep4", "all_to_all"), ("ep2", "allgather")], [5]),
            *over([ALL_TO_ALL, HIERARCHICAL, ("nodes2_tp2", "hierarchical")], [72]),
        ],
        [*over(CASES, [5]), *over(MANY, [72])],
    ),
)
def test_equals_one_device(layout, method, tokens):
    """Lossless under every routing, the worst skews included."""
    for kind in KINDS:
        check(layout, method, routing(kind, layout, tokens, 2))


@pytest.mark.parametrize(
    ("layout", "method", "tokens", "top_k"),
    slow_but(
        [
            (*HIERARCHICAL, 1, 1),
            (*RAGGED, 1, 2),
            (*ALL_TO_ALL, 6, 1),
            (*ALLGATHER, 3, 16),
            (*ALL_TO_ALL, 1, 1),
        ],
        [(*case, *shape) for shape in [(1, 1), (1, 2), (6, 1), (3, PER_RANK * 8)] for case in METHODS],
    ),
)
def test_extremes_of_shape(layout, method, tokens, top_k):
    """One token a device, one expert a token, all experts a token."""
    for kind in ("random", "one_token", "empty"):
        check(layout, method, routing(kind, layout, tokens, top_k))


@pytest.mark.parametrize(("layout", "method"), [("ep8", "all_to_all"), ("nodes2", "hierarchical")])
def test_every_bucket(layout, method):
    """Skews from none to full, so that each size of buffer is chosen, and its borders are met."""
    tokens, top_k = 72, 2
    P = num_experts(layout)
    for hot in range(0, tokens + 1, 8):
        ids = routing("balanced", layout, tokens, top_k).reshape(groups(layout), tokens, top_k)
        ids[:, :hot] = [0, P]
        check(layout, method, ids.reshape(-1, top_k))


def test_replicas_choose_their_own_bucket():
    """One model replica is skewed, the other is not: collectives of different branches do not meet."""
    ids = routing("balanced", "dp2_ep4", 72, 2)
    ids[: ids.shape[0] // 2] = [0, num_experts("dp2_ep4")]
    for method in FLAT:
        check("dp2_ep4", method, ids)


@pytest.mark.parametrize(
    ("layout", "method", "tokens"),
    slow_but([(*ALLGATHER, 1), *over([ALL_TO_ALL, RAGGED, HIERARCHICAL], [5])], over(METHODS, [1, 5])),
)
def test_microbatches(layout, method, tokens):
    """Two parts whose exchanges may overlap give what one does."""
    for kind in ("random", "one_rank", "some_empty", "empty"):
        ids = routing(kind, layout, tokens, 2)
        whole = check(layout, method, ids)
        assert_close(check(layout, method, ids, microbatches=2), whole, limit(2))


@pytest.mark.parametrize(("layout", "method"), slow_but([ALL_TO_ALL], [ALL_TO_ALL, HIERARCHICAL]))
def test_microbatches_share_a_bucket(layout, method):
    """Room is made for the fuller of two unequal parts; the shared expert stands in the same branch."""
    tokens = 144
    ids = routing("balanced", layout, tokens, 2).reshape(groups(layout), tokens, 2)
    ids[:, 80:] = [0, num_experts(layout)]
    data, weights = inputs(layout, ids.reshape(-1, 2)), expert_weights(num_experts(layout))
    out, dropped = sharded(layout, method, microbatches=2, shared=jnp.sin)(*data, *weights)
    assert_close(out, reference(data, weights) + np.sin(data.x.astype(np.float64)), limit(2))
    assert not np.asarray(dropped).any()


def test_no_exchange():
    """All expert ranks see all tokens, or there is one: each does its part, whatever the method's name."""
    for layout in ("tensor", "single"):
        for kind in KINDS:
            check(layout, "none", routing(kind, layout, 5, 2))


def test_without_nodes_hierarchical_is_all_to_all():
    data = inputs("ep8", routing("random", "ep8", 72, 2))
    one, two = (outputs("ep8", method, data)[0] for method in ("all_to_all", "hierarchical"))
    np.testing.assert_array_equal(one, two)


def test_methods_agree():
    """Each adds a token's rows in rank order; products may differ in shape."""
    data = inputs("nodes2", routing("random", "nodes2", 5, 2))
    first, *others = (outputs("nodes2", method, data)[0] for method in (*FLAT, "hierarchical"))
    for other in others:
        assert_close(other, first, limit(2))


@pytest.mark.parametrize(("layout", "method"), METHODS)
def test_same_bits_every_time(layout, method):
    data = inputs(layout, routing("random", layout, 5, 2))
    runs = [outputs(layout, method, data, microbatches=2)[0] for _ in range(5)]
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0], other)


@settings(max_examples=examples(15))
@given(st.data())
def test_any_routing_of_few_tokens(data):
    """Also one that names an expert twice, and any pattern of padding."""
    size = groups("nodes2") * 3 * 2
    drawn = data.draw(st.lists(st.integers(0, num_experts("nodes2")), min_size=size, max_size=size))
    for method in (*FLAT, "hierarchical"):
        check("nodes2", method, np.array(drawn).reshape(-1, 2))


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(0, 7), st.floats(0, 1), st.floats(0, 1))
def test_any_skew_of_many_tokens(seed, rank, hot, padding):
    """A share of the tokens goes to one rank, another is padding."""
    ids = routing("random", "nodes2", 72, 2, seed)
    rng = np.random.default_rng(seed)
    ids[rng.random(len(ids)) < hot] = [rank * PER_RANK, rank * PER_RANK + 1]
    ids[rng.random(len(ids)) < padding] = num_experts("nodes2")
    for method in ("all_to_all", "hierarchical"):
        check("nodes2", method, ids)


@pytest.mark.parametrize(("layout", "method"), slow_but([ALL_TO_ALL, HIERARCHICAL], METHODS))
def test_shared_expert_beside(layout, method):
    """What stands beside the exchange is added once to each token."""
    data = inputs(layout, routing("random", layout, 5, 2))
    weights = expert_weights(num_experts(layout))
    expected = reference(data, weights) + np.sin(data.x.astype(np.float64))
    for microbatches in (1, 2):
        program = sharded(layout, method, shared=jnp.sin, microbatches=microbatches)
        assert_close(program(*data, *weights)[0], expected, limit(2))


@pytest.mark.parametrize(
    ("layout", "method", "transposed"),
    slow_but(
        [*over([ALLGATHER, RAGGED], [False]), *over([ALL_TO_ALL, HIERARCHICAL], [True])],
        over(METHODS, [False, True]),
    ),
)
def test_with_the_engines_loop(layout, method, transposed):
    """The mixed-block loop on received rows: those without a local expert get none of its time, and 0."""

    def run(rows, ids, weights, up, down):
        singles, heights = mixed_block_heights(rows.shape[0], transposed)
        plan = plan_blocks(ids, up.shape[0], singles, heights)
        sorted_rows = rows[plan.order // ids.shape[1]]
        how = {"heights": heights, "act": lambda gate, up: jnp.tanh(gate) * up}
        stacks = (up, jnp.ones_like(up), down)
        if transposed:
            stacks = tuple(jnp.swapaxes(stack, 1, 2) for stack in stacks)
        stacks = tuple(Stack(stack, transposed=transposed) for stack in stacks)
        done = grouped_swiglu_blocks(sorted_rows, *stacks, plan.single, plan.blocks, **how)
        return combine(done, plan, weights)

    program = sharded(layout, method, run=run)
    for kind in ("random", "one_rank", "some_empty"):
        data = inputs(layout, routing(kind, layout, 5, 2))
        up, down = (w.astype(np.float64) for w in expert_weights(num_experts(layout)))
        expected = np.zeros(data.x.shape)
        for token, (x, ids, row) in enumerate(
            zip(data.x.astype(np.float64), data.ids, data.weights, strict=True)
        ):
            for expert, weight in zip(ids, row, strict=True):
                if weight:
                    expected[token] += weight * (np.tanh(x @ up[expert]) * x.sum()) @ down[expert]
        out, _ = program(*data, *expert_weights(num_experts(layout)))
        assert_close(out, expected, tolerance(HIDDEN, HIDDEN, 8, 2))


@pytest.mark.parametrize(
    ("layout", "method", "dtype"),
    slow_but(
        [*over([RAGGED, HIERARCHICAL], [jnp.bfloat16]), *over([ALLGATHER, ALL_TO_ALL], [jnp.float16])],
        over(METHODS, [jnp.bfloat16, jnp.float16]),
    ),
)
def test_narrow_elements(layout, method, dtype):
    """Each expert's row goes through unchanged: with one expert a token the result is that of one device."""
    data = inputs(layout, routing("random", layout, 5, 1))
    weights = [jnp.asarray(w, dtype) for w in expert_weights(num_experts(layout))]
    x = jnp.asarray(data.x, dtype)

    def run(rows, ids, made, up, down):
        hit = jnp.any(ids < up.shape[0], axis=1)
        return jnp.where(hit[:, None], rows * jnp.asarray(3, dtype), 0).astype(dtype)

    out, _ = sharded(layout, method, run=run)(x, data.ids, data.weights, *weights)
    assert out.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(out, np.float32), np.asarray(x * jnp.asarray(3, dtype), np.float32)
    )


def test_unknown_method():
    x, ids = jnp.zeros((1, 4)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ConfigError, match=r"parallel\.exchange: unknown exchange 'all2all'; did you mean"):
        dispatch_experts(x, ids, jnp.ones((1, 1)), lambda *a: x, num_local=1, axes=SINGLE, method="all2all")
