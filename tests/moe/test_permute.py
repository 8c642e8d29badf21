"""Sorting assignments by expert and cutting them into blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moejax.moe.permute import combine, plan_blocks
from tests.examples import examples

compiled = functools.partial(jax.jit, static_argnums=(1, 2, 3))(plan_blocks)


def plan(ids, num_experts, rows):
    """Blocks of one height."""
    return compiled(ids, num_experts, 0, (rows,))


# (tokens, experts a token, experts, rows a block)
SHAPES = [(1, 1, 1, 1), (5, 2, 4, 1), (7, 3, 8, 2), (11, 2, 3, 5), (6, 4, 4, 64), (16, 1, 32, 8)]


@pytest.mark.parametrize("N, k, E, rows", SHAPES)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_plan_covers_each_assignment_once(N, k, E, rows, data):
    # E marks an assignment that is not made.
    ids = data.draw(hnp.arrays(np.int32, (N, k), elements=st.integers(0, E)))
    flat, A = ids.reshape(-1), N * k
    result = jax.tree.map(np.asarray, plan(jnp.asarray(ids), E, rows))

    assert sorted(result.order) == list(range(A))
    np.testing.assert_array_equal(result.order[result.row_of], np.arange(A))
    np.testing.assert_array_equal(result.row_of[result.order], np.arange(A))
    by_expert = flat[result.order]
    assert (np.diff(by_expert) >= 0).all(), "sorted by expert, assignments that are not made last"
    same = np.diff(by_expert) == 0
    assert (np.diff(result.order)[same] > 0).all(), "stable: token order within an expert"
    np.testing.assert_array_equal(result.counts, np.bincount(flat, minlength=E + 1)[:E])

    (blocks,) = result.blocks
    used = int(blocks.num)
    assert used == sum(-(-c // rows) for c in result.counts) <= len(blocks.start)
    assert len(blocks.start) == min(A, A // rows + min(E, A)) and not result.single.num
    starts, experts = blocks.start[:used], blocks.expert[:used]
    assert (np.diff(starts) > 0).all()
    last = np.cumsum(result.counts)
    owner = np.full(A, -1)
    for block, (start, expert) in enumerate(zip(starts, experts, strict=True)):
        end = min(start + rows, last[expert])
        assert start < end and (by_expert[start:end] == expert).all()
        assert (owner[start:end] == -1).all()
        owner[start:end] = block
    # Every row of an assignment that is made lies in one block; the others in none.
    np.testing.assert_array_equal(owner >= 0, by_expert < E)


def test_combine_puts_rows_back_with_their_weights():
    ids = np.array([[2, 0], [1, 2], [3, 3]], np.int32)  # the last token's are not made
    plan_ = plan(jnp.asarray(ids), 3, 2)
    # The row of each assignment holds its number; garbage where none is made.
    rows = np.asarray(plan_.order, np.float32)[:, None] * np.ones((1, 4), np.float32)
    rows[4:] = np.nan
    weights = np.array([[0.5, 2.0], [1.0, 0.25], [0.0, 0.0]], np.float32)
    out = combine(jnp.asarray(rows), plan_, jnp.asarray(weights))
    np.testing.assert_array_equal(out[:, 0], [0 * 0.5 + 1 * 2.0, 2 * 1.0 + 3 * 0.25, 0.0])
