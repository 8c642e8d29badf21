"""Blocks of mixed heights: the plan covers every row once, and the result is the plain loop's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moejax.core.moe import MoeConfig
from moejax.moe.experts import Experts
from moejax.moe.permute import plan_blocks
from moejax.moe.router import Routing
from moejax.nn.activation import gated
from moejax.nn.param import initialize
from moejax.ops.dispatch import mixed_block_heights
from moejax.ops.expert_stack import Stack
from moejax.ops.grouped_matmul import grouped_swiglu_blocks, rows_together
from tests.examples import examples, slow_but
from tests.model_shapes import experts_only
from tests.moe import reference
from tests.numerics import assert_close, tolerance

D, F, E = 16, 12, 8
plan = functools.partial(jax.jit, static_argnums=(1, 2, 3))(plan_blocks)

# (tokens, experts a token, experts, single rows, heights)
PLANS = [
    (1, 1, 1, 1, ()),
    (6, 2, 4, 6, ()),
    (9, 2, 4, 1, (4,)),
    (13, 3, 3, 0, (2, 5)),
    (40, 2, 3, 2, (4, 8, 16)),
]


@pytest.mark.parametrize("N, k, experts, singles, heights", PLANS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_plan_covers_each_row_once_in_the_lowest_block(N, k, experts, singles, heights, data):
    # Any assignments at all, several of a token to one expert included; `experts` marks one not made.
    ids = data.draw(hnp.arrays(np.int32, (N, k), elements=st.integers(0, experts)))
    result = jax.tree.map(np.asarray, plan(jnp.asarray(ids), experts, singles, heights))
    by_expert = ids.reshape(-1)[result.order]
    counts = np.bincount(ids.reshape(-1), minlength=experts + 1)[:experts]
    np.testing.assert_array_equal(result.counts, counts)

    covered = np.zeros(N * k, int)
    used: dict[int, list[int]] = {e: [] for e in range(experts)}
    for height, blocks in [(1, result.single), *zip(heights, result.blocks, strict=True)]:
        assert blocks.num <= len(blocks.start)
        for expert, start, end in zip(*(a[: blocks.num] for a in blocks[:3]), strict=True):
            assert end == np.cumsum(counts)[expert]
            own = slice(start, min(start + height, end))
            assert start < end and (by_expert[own] == expert).all()
            covered[own] += 1
            used[int(expert)].append(height)
    np.testing.assert_array_equal(covered, by_expert < experts)
    for expert, count in enumerate(counts):
        top = max(heights, default=0)
        whole, rest = divmod(int(count), top) if top else (0, int(count))
        last = [h for h in heights if h >= rest][:1] if rest > singles and heights else [1] * rest
        assert sorted(used[expert]) == sorted([top] * whole + last)


@functools.cache
def stacks(layout: str) -> Experts:
    """The same weights in either layout."""
    config = experts_only(D, F, E).replace(initializer_range=0.5)
    experts = Experts(config, layout, jnp.float32)
    initialize(experts, seed=0)
    return experts


@functools.cache
def compiled(layout: str, name: str):
    graph, state = nnx.split(stacks(layout))

    @jax.jit
    def run(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        routing = Routing(ids, weights, jnp.zeros((x.shape[0], E)))
        return nnx.merge(graph, state)(x, routing, MoeConfig(grouped_matmul=name)).out

    return run


def weights_for(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(ids < E, rng.random(ids.shape) + 0.1, 0).astype(np.float32)


def check(x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> None:
    """Both layouts against float64 loops over tokens, and against the plain loop over blocks."""
    k = ids.shape[1]
    expected = reference.moe(x, ids, weights, *(np.asarray(w.matrix()) for w in stacks("edf").stacks()))
    for layout in ("edf", "efd"):
        mixed = compiled(layout, "blocks_mixed")(x, ids, weights)
        if not expected.any():
            np.testing.assert_array_equal(mixed, expected)
            continue
        assert_close(mixed, expected, tolerance(D, F, k))
        assert_close(mixed, compiled(layout, "blocks_uniform")(x, ids, weights), tolerance(D, F, k))


def balanced(N: int, k: int, rng: np.random.Generator) -> np.ndarray:
    return (np.arange(N)[:, None] + np.arange(k)) % E


def skewed(N: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Expert e is twice as likely as e + 1."""
    keys = rng.gumbel(size=(N, E)) - np.arange(E) * np.log(2)
    return np.argsort(-keys, axis=1)[:, :k]


def same(N: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """All tokens on the same experts: the most that one can get, every other empty."""
    return np.tile(np.arange(k) + E - k, (N, 1))


def nobody(N: int, k: int, rng: np.random.Generator) -> np.ndarray:
    return np.full((N, k), E)


def padded(N: int, k: int, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random((N, 1)) < 0.7, skewed(N, k, rng), E)


@pytest.mark.parametrize("routing", [balanced, skewed, same, nobody, padded], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "N, k",
    slow_but(
        [(1, 2), (5, 8), (17, 3), (600, 2)], [(1, 2), (5, 8), (7, 2), (16, 2), (17, 3), (129, 2), (600, 2)]
    ),
)
def test_any_routing(N, k, routing):
    rng = np.random.default_rng(N)
    ids = routing(N, k, rng).astype(np.int32)
    check(rng.normal(size=(N, D)).astype(np.float32), ids, weights_for(ids, rng))


# Around every step of the heights, and more rows than the greatest.
COUNTS = [0, 1, 2, 4, 5, 6, 7, 12, 13, 16, 17, 32, 33, 64, 65, 127, 128, 129, 134, 135, 141, 257]


@pytest.mark.parametrize("first", range(0, len(COUNTS), 4))
def test_every_count_of_rows(first):
    """Experts with these many rows, side by side, in a batch whose size allows every height."""
    rng = np.random.default_rng(first)
    counts = [COUNTS[(first + i) % len(COUNTS)] for i in range(6)]
    ids = np.repeat(np.arange(6), counts)
    ids = rng.permutation(np.concatenate([ids, np.full(960 - len(ids), E)]))[:, None].astype(np.int32)
    check(rng.normal(size=(960, D)).astype(np.float32), ids, weights_for(ids, rng))


@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_ids_at_all(data):
    """Several assignments of a token may go to one expert: then it gets more rows than there are tokens."""
    N, k = 19, 3
    ids = data.draw(hnp.arrays(np.int32, (N, k), elements=st.integers(0, E)))
    rng = np.random.default_rng(0)
    check(rng.normal(size=(N, D)).astype(np.float32), ids, weights_for(ids, rng))


@pytest.mark.parametrize("layout", ["edf", "efd"])
def test_what_is_not_finite_stays_in_its_row(layout):
    """In padding, which no expert sees, and in a token that shares its experts' blocks with others."""
    rng = np.random.default_rng(0)
    ids = same(40, 2, rng).astype(np.int32)
    ids[3] = E
    weights = weights_for(ids, rng)
    clean = rng.normal(size=(40, D)).astype(np.float32)
    dirty = clean.copy()
    dirty[3], dirty[5, 0] = np.inf, np.nan
    run = compiled(layout, "blocks_mixed")
    good, bad = np.asarray(run(clean, ids, weights)), np.asarray(run(dirty, ids, weights))
    others = np.arange(40) != 5
    np.testing.assert_array_equal(bad[others], good[others])
    assert not bad[3].any() and np.isnan(bad[5]).all()


@functools.partial(jax.jit, static_argnums=3)
def single_rows(x: jax.Array, ids: jax.Array, stored: list[jax.Array], transposed: bool):
    """All rows singly: several a turn, and by the plain loop, one block after another; both `[>= A, D]`."""
    operands = [Stack(w, transposed=transposed) for w in stored]
    mixed, plain = plan_blocks(ids, E, x.shape[0], ()), plan_blocks(ids, E, 0, (1,))
    rows = x[mixed.order // ids.shape[1]]
    together = grouped_swiglu_blocks(
        rows, *operands, mixed.single, mixed.blocks, heights=(), act=gated("silu")
    )
    return together, grouped_swiglu_blocks(
        rows, *operands, plain.single, plain.blocks, heights=(1,), act=gated("silu")
    )


@pytest.mark.parametrize(
    "N, k, transposed",
    slow_but(
        [(1, 1, False), (2, 4, True), (8, 4, False), (13, 5, True)],
        [
            (*shape, way)
            for shape in [(1, 1), (1, 4), (2, 4), (5, 3), (8, 4), (13, 5)]
            for way in (False, True)
        ],
    ),
)
def test_rows_of_a_turn_are_those_of_the_plain_loop(N, k, transposed):
    """Full turns, what is left, one expert for all, none for some; rows that nobody runs are 0."""
    rng = np.random.default_rng(N)
    x = rng.normal(size=(N, D)).astype(np.float32)
    experts = stacks("efd" if transposed else "edf")
    stored = [experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...]]
    for routing in (balanced, skewed, same, nobody, padded):
        ids = routing(N, k, rng).astype(np.int32)
        dirty = np.where((ids == E).all(1, keepdims=True), np.inf, x).astype(np.float32)
        together, plain = single_rows(dirty, ids, stored, transposed)
        made = int((ids < E).sum())
        if made:
            assert_close(together[:made], np.asarray(plain[:made], np.float64), tolerance(D, F))
        assert not np.asarray(together[made : N * k]).any()


def test_rows_together():
    assert rows_together(64, 512 * 256) == rows_together(16, 512 * 256) == (16, 2)
    assert rows_together(15, 512 * 256) == (8, 2)
    assert rows_together(4, 512 * 256) == (2,)
    assert rows_together(64, 2048 * 768) == (2,), "the product is long against the cores' meeting"


@pytest.mark.parametrize("transposed", [False, True])
def test_heights_rise_and_are_no_more_than_needed(transposed):
    before = 0
    for tokens in range(1, 700):
        singles, heights = mixed_block_heights(tokens, transposed)
        assert list(heights) == sorted(set(heights)) and all(singles < h <= tokens for h in heights)
        assert len(heights) >= before, "more tokens need no fewer heights"
        assert heights or tokens <= singles
        before = len(heights)
