"""Attention over blocks equals plain attention over contiguous keys, whatever stands where in the pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.ops.attention import attention
from moejax.ops.paged_attention import (
    KEYS_PER_TURN,
    AttentionPlan,
    Slabs,
    copy_blocks,
    paged_attention,
    tile_rows,
    write_rows,
    write_runs,
)
from tests.engine.tiny import PROPERTY
from tests.numerics import assert_close, tolerance
from tests.ops.paged_case import GARBAGE, Case, Row, Spec, expected, make, slabs_with

SCALE = 0.4
SPECS = {
    "grouped": Spec(),
    "one_slab_multi_query": Spec(heads=3, kv_heads=1, slabs=(11,), block_size=3),
    "multi_head_blocks_of_1": Spec(heads=2, kv_heads=2, block_size=1, slabs=(9, 8), width=10, tokens=9),
    "window_below_a_block": Spec(block_size=8, window=3, width=5),
    "window_of_1": Spec(window=1, slabs=(4, 13)),
    "window_over_many_blocks": Spec(block_size=2, window=7, slabs=(1, 2, 17), width=12),
    "several_tiles_and_turns": Spec(block_size=32, slabs=(5, 9), width=6, tokens=150, rows=3),
    "windowed_tiles_and_turns": Spec(block_size=16, slabs=(5, 9), width=11, tokens=150, rows=3, window=70),
    "shared_blocks": Spec(owners=4, rows=6, slabs=(8, 9)),
    "shared_blocks_windowed": Spec(owners=4, rows=6, slabs=(8, 9), window=5, tokens=0),
    "decodes_only": Spec(tokens=0, slabs=(2, 14), heads=6),
    "bfloat16": Spec(dtype="bfloat16", window=9),
}


@functools.cache
def program(spec: Spec):
    """One compiled program a spec, its inputs kept."""

    def run(q, k, v, slabs: Slabs, plan: AttentionPlan):
        return paged_attention(q, k, v, slabs, plan, window=spec.window, scale=SCALE)

    return jax.jit(run)


def run(case: Case) -> tuple[np.ndarray, Slabs]:
    dtype = jnp.dtype(case.spec.dtype)
    arrays = (jnp.asarray(x, dtype) for x in (case.q, case.k, case.v))
    out, slabs = program(case.spec)(*arrays, case.before, case.plan)
    assert out.dtype == dtype
    return np.asarray(out, np.float64), slabs


def limit(spec: Spec) -> float:
    """Scores, then the softmax's sum and the sum over values."""
    longest = spec.longest if spec.window is None else min(spec.window, spec.longest)
    return tolerance(spec.head_dim, longest, longest, dtype=spec.dtype)


def assert_right(case: Case) -> None:
    out, slabs = run(case)
    assert np.isfinite(out).all()
    for place, want in zip(case.places, expected(case, SCALE), strict=True):
        assert_close(out[place], want, limit(case.spec))
    for ours, want in zip(jax.tree.leaves(slabs), jax.tree.leaves(case.after), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(want))


@pytest.mark.parametrize("name", SPECS)
@settings(PROPERTY, max_examples=20)
@given(seed=st.integers(0, 2**20))
def test_equals_plain_attention(name: str, seed: int) -> None:
    """Outputs of every real place, and the whole pool bit for bit: each key and value where it belongs and
    every other place as it was. Places that nobody has written hold 1e30."""
    assert_right(make(SPECS[name], seed))


def test_the_cases_are_what_they_claim() -> None:
    """Else the property says less than it seems to."""
    seen = dict.fromkeys(("mixed", "mid_block", "later_chunk", "padding", "two_tiles", "two_turns"), False)
    for name in ("grouped", "several_tiles_and_turns"):
        spec = SPECS[name]
        for seed in range(60):
            case = make(spec, seed)
            chunks = [row for row in case.rows if row.chunk]
            seen["mixed"] |= 0 < len(chunks) < len(case.rows)
            seen["mid_block"] |= any(row.start % spec.block_size for row in chunks)
            seen["later_chunk"] |= any(row.start for row in chunks)
            seen["padding"] |= 0 < len(case.rows) < spec.rows
            seen["two_tiles"] |= any(row.length - row.start > tile_rows(spec.tokens) for row in chunks)
            seen["two_turns"] |= any(row.length > KEYS_PER_TURN for row in chunks)
    assert all(seen.values()), seen
    sharing = [
        int((np.asarray(make(SPECS["shared_blocks"], seed).plan.decode.owner) >= 0).sum(axis=1).max())
        for seed in range(60)
    ]
    assert {2, 3, 4} <= set(sharing)


def test_the_reference_is_the_contiguous_operation() -> None:
    """`moejax.ops.attention.attention` gives what the reference here does."""
    for name in ("grouped", "window_below_a_block"):
        spec = SPECS[name]
        case = next(c for c in (make(spec, seed) for seed in range(99)) if any(r.chunk for r in c.rows))
        for row, place, want in list(zip(case.rows, case.places, expected(case, SCALE), strict=True))[-2:]:
            k, v = (jnp.asarray(x.swapaxes(0, 1)[None], jnp.float32) for x in (row.keys, row.values))
            positions = jnp.arange(row.start, row.length, dtype=jnp.int32)[None]
            q = jnp.asarray(case.q[place][None], jnp.float32)
            out = attention(q, k, v, positions, window=spec.window, scale=SCALE)
            assert_close(out[0], want, limit(spec))


def test_a_row_sees_nothing_of_the_others() -> None:
    """Its output has the same bits when every other row's keys, values and queries change."""
    spec = SPECS["grouped"]
    case = next(c for c in (make(spec, seed) for seed in range(99)) if len(c.rows) == spec.rows)
    out, _ = run(case)
    for row, mine in zip(case.rows, case.places, strict=True):
        q, k, v = (x.copy() for x in (case.q, case.k, case.v))
        others = np.setdiff1d(np.arange(len(q)), mine)
        for x in (q, k, v):
            x[others] = -x[others] + 1.0
        changed = Case(spec, case.rows, q, k, v, other_blocks(spec, row), case.after, case.plan, case.places)
        np.testing.assert_array_equal(run(changed)[0][mine], out[mine])


def other_blocks(spec: Spec, row: Row) -> Slabs:
    """The cache with this row's context alone; all else is garbage."""
    size = spec.block_size
    return slabs_with(
        spec,
        {(row.blocks[p // size], p % size): (row.keys[p], row.values[p]) for p in range(row.start)},
    )


def test_an_empty_batch_writes_nothing() -> None:
    """All padding: the pool keeps its bits and every place is finite."""
    spec = SPECS["grouped"]
    case = next(c for c in (make(spec, seed) for seed in range(2000)) if not c.rows)
    out, slabs = run(case)
    assert np.isfinite(out).all()
    assert all((np.asarray(leaf) == np.float32(GARBAGE)).all() for leaf in jax.tree.leaves(slabs))


@pytest.mark.parametrize("name", ["grouped", "bfloat16"])
def test_writes_alone(name: str) -> None:
    """`write_rows` and `write_runs` one after the other give the pool that the whole step gives."""
    spec = SPECS[name]
    S, dtype = spec.rows, jnp.dtype(spec.dtype)

    @jax.jit
    def write(slabs: Slabs, k: jax.Array, v: jax.Array, plan: AttentionPlan) -> tuple[Slabs, Slabs]:
        rows = write_rows(slabs, k[:S], v[:S], plan.decode)
        return rows, write_runs(rows, k[S:], v[S:], plan.chunk)

    for seed in range(10):
        case = make(spec, seed)
        k, v = jnp.asarray(case.k, dtype), jnp.asarray(case.v, dtype)
        rows, both = write(case.before, k, v, case.plan)
        for ours, want in zip(jax.tree.leaves(both), jax.tree.leaves(case.after), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(want))
        # The decodes alone: as many places have changed as rows decode.
        decodes = sum(not row.chunk for row in case.rows)
        before = np.concatenate([np.asarray(v, np.float32) for _, v in case.before])
        after = np.concatenate([np.asarray(v, np.float32) for _, v in rows])
        assert (before != after).any(axis=(1, 3)).sum() == decodes


@pytest.mark.parametrize("sizes", [(7,), (1, 2, 4), (3, 5, 8)])
def test_copies_follow_their_order(sizes: tuple[int, ...]) -> None:
    """One after another, within and across slabs, a destination being the source of a later one; only the
    first `count` are made."""
    n, K, Dh, bs = sum(sizes), 2, 4, 3
    rng = np.random.default_rng(sum(sizes))
    keys = rng.normal(size=(n, K, Dh, bs)).astype(np.float32)
    values = rng.normal(size=(n, K, bs, Dh)).astype(np.float32)
    ends = np.cumsum(sizes)[:-1]
    program = jax.jit(copy_blocks)
    for count in range(7):
        source, destination = rng.integers(0, n, (2, 6)).astype(np.int32)
        source[3] = destination[2]
        slabs = tuple(
            (jnp.asarray(k), jnp.asarray(v))
            for k, v in zip(np.split(keys, ends), np.split(values, ends), strict=True)
        )
        want_k, want_v = keys.copy(), values.copy()
        for a, b in zip(source[:count], destination[:count], strict=True):
            want_k[b], want_v[b] = want_k[a], want_v[a]
        done = program(slabs, jnp.asarray(source), jnp.asarray(destination), jnp.int32(count))
        np.testing.assert_array_equal(np.concatenate([np.asarray(k) for k, _ in done]), want_k)
        np.testing.assert_array_equal(np.concatenate([np.asarray(v) for _, v in done]), want_v)
