"""Attention over blocks equals plain attention over contiguous keys, whatever stands where in the pool."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.ops import paged_attention as module
from moejax.ops.attention import attention
from moejax.ops.kv_segments import Segment, Segments, copy_blocks, write_rows, write_runs
from moejax.ops.paged_attention import KEYS_PER_TURN, AttentionPlan, paged_attention, tile_rows
from tests.engine.tiny import PROPERTY
from tests.examples import examples, slow_but
from tests.numerics import assert_close, tolerance
from tests.ops.paged_case import GARBAGE, Case, Row, Spec, draw_rows, expected, make, segments_with, sinks_of

SCALE = 0.4
SPECS = {
    "grouped": Spec(),
    "one_segment_multi_query": Spec(heads=3, kv_heads=1, segments=(11,), block_size=3),
    "multi_head_blocks_of_1": Spec(heads=2, kv_heads=2, block_size=1, segments=(9, 8), width=10, tokens=9),
    "window_below_a_block": Spec(block_size=8, window=3, width=5),
    "window_of_1": Spec(window=1, segments=(4, 13)),
    "window_over_many_blocks": Spec(block_size=2, window=7, segments=(1, 2, 17), width=12),
    "several_tiles_and_turns": Spec(block_size=32, segments=(5, 9), width=6, tokens=150, rows=3),
    "windowed_tiles_and_turns": Spec(block_size=16, segments=(5, 9), width=11, tokens=150, rows=3, window=70),
    "shared_blocks": Spec(owners=4, rows=6, segments=(8, 9)),
    "shared_blocks_windowed": Spec(owners=4, rows=6, segments=(8, 9), window=5, tokens=0),
    "decodes_only": Spec(tokens=0, segments=(2, 14), heads=6),
    "bfloat16": Spec(dtype="bfloat16", window=9, bits=True),
    "bfloat16_as_it_is": Spec(dtype="bfloat16", window=9),
    "sinks": Spec(heads=6, sinks=True),
    "sinks_shared_windowed": Spec(owners=4, rows=6, segments=(8, 9), window=5, tokens=0, sinks=True),
    "sinks_tiles_and_turns": Spec(
        block_size=16, segments=(5, 9), width=11, tokens=150, rows=3, window=70, sinks=True, codes="int8"
    ),
    "int8": Spec(codes="int8", owners=2),
    "int8_bfloat16": Spec(codes="int8", dtype="bfloat16"),
    "int4": Spec(codes="int4", owners=2),
    "e4m3_windowed_turns": Spec(
        codes="float8_e4m3fn", block_size=16, segments=(5, 9), width=11, tokens=150, rows=3, window=70
    ),
    "e5m2_float16_one_key_head": Spec(
        codes="float8_e5m2", dtype="float16", heads=3, kv_heads=1, segments=(11,)
    ),
}

# In the slow lane: other specifications have what these vary, in other company.
SLOW = ("window_of_1", "bfloat16_as_it_is", "windowed_tiles_and_turns", "shared_blocks", "int8_bfloat16")


@functools.cache
def program(spec: Spec):
    """One compiled program a spec, its inputs kept."""

    def run(q, k, v, segments: Segments, plan: AttentionPlan):
        sinks = None if (given := sinks_of(spec)) is None else jnp.asarray(given)
        return paged_attention(q, k, v, segments, plan, window=spec.window, scale=SCALE, sinks=sinks)[:2]

    return jax.jit(run)


def run(case: Case) -> tuple[np.ndarray, Segments]:
    dtype = jnp.dtype(case.spec.dtype)
    arrays = (jnp.asarray(x, dtype) for x in (case.q, case.k, case.v))
    out, segments = program(case.spec)(*arrays, case.before, case.plan)
    assert out.dtype == dtype
    return np.asarray(out, np.float64), segments


def limit(spec: Spec) -> float:
    """Scores, then the softmax's sum and the sum over values."""
    longest = spec.longest if spec.window is None else min(spec.window, spec.longest)
    return tolerance(spec.head_dim, longest, longest, dtype=spec.dtype)


def assert_right(case: Case) -> None:
    out, segments = run(case)
    assert np.isfinite(out).all()
    for place, want in zip(case.places, expected(case, SCALE), strict=True):
        assert_close(out[place], want, limit(case.spec))
    for ours, want in zip(jax.tree.leaves(segments), jax.tree.leaves(case.after), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(want))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SPECS]
)
@settings(PROPERTY, max_examples=examples(20))
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
    for name in ("grouped", "window_below_a_block", "sinks"):
        spec = SPECS[name]
        sinks = None if (given := sinks_of(spec)) is None else jnp.asarray(given)
        case = next(c for c in (make(spec, seed) for seed in range(99)) if any(r.chunk for r in c.rows))
        for row, place, want in list(zip(case.rows, case.places, expected(case, SCALE), strict=True))[-2:]:
            k, v = (jnp.asarray(x.swapaxes(0, 1)[None], jnp.float32) for x in (row.keys, row.values))
            positions = jnp.arange(row.start, row.length, dtype=jnp.int32)[None]
            q = jnp.asarray(case.q[place][None], jnp.float32)
            out = attention(q, k, v, positions, window=spec.window, scale=SCALE, sinks=sinks)[:2]
            assert_close(out[0], want, limit(spec))


@pytest.mark.optimized
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


def other_blocks(spec: Spec, row: Row) -> Segments:
    """The cache with this row's context alone; all else is garbage."""
    size = spec.block_size
    return segments_with(
        spec,
        {(row.blocks[p // size], p % size): (row.keys[p], row.values[p]) for p in range(row.start)},
    )


def test_an_empty_batch_writes_nothing() -> None:
    """All padding: the pool keeps its bits and every place is finite."""
    spec = SPECS["grouped"]
    empty = (seed for seed in range(2000) if not any(draw_rows(spec, np.random.default_rng(seed))))
    case = make(spec, next(empty))
    assert not case.rows
    out, segments = run(case)
    assert np.isfinite(out).all()
    assert all((np.asarray(leaf) == np.float32(GARBAGE)).all() for leaf in jax.tree.leaves(segments))


@pytest.mark.parametrize("name", ["grouped", "bfloat16", "e4m3_windowed_turns"])
def test_writes_alone(name: str) -> None:
    """`write_rows` and `write_runs` one after the other give the pool that the whole step gives."""
    spec = SPECS[name]
    S, dtype = spec.rows, jnp.dtype(spec.dtype)

    @jax.jit
    def write(
        segments: Segments, k: jax.Array, v: jax.Array, plan: AttentionPlan
    ) -> tuple[Segments, Segments]:
        rows = write_rows(segments, k[:S], v[:S], plan.decode)
        return rows, write_runs(rows, k[S:], v[S:], plan.chunk)

    for seed in range(10):
        case = make(spec, seed)
        k, v = jnp.asarray(case.k, dtype), jnp.asarray(case.v, dtype)
        rows, both = write(case.before, k, v, case.plan)
        for ours, want in zip(jax.tree.leaves(both), jax.tree.leaves(case.after), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(want))
        # The decodes alone: as many places have changed as rows decode.
        decodes = sum(not row.chunk for row in case.rows)
        before = np.concatenate([np.asarray(segment.values, np.float32) for segment in case.before])
        after = np.concatenate([np.asarray(segment.values, np.float32) for segment in rows])
        assert (before != after).any(axis=(1, 3)).sum() == decodes


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("sizes", [(7,), (1, 2, 4), (3, 5, 8)])
def test_copies_follow_their_order(sizes: tuple[int, ...], quantized: bool) -> None:
    """One after another, within and across segments, a destination being the source of a later one; only the
    first `count` are made. Scales go with their codes."""
    n, K, Dh, bs = sum(sizes), 2, 4, 3
    rng = np.random.default_rng(sum(sizes))
    shapes = [(n, K, Dh, bs), (n, K, bs, Dh), *[(n, K, bs)] * 2 * quantized]
    held = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    if quantized:
        held[:2] = [rng.integers(-127, 128, shape, np.int8) for shape in shapes[:2]]
    ends = np.cumsum(sizes)[:-1]
    program = jax.jit(copy_blocks)
    for count in range(7):
        source, destination = rng.integers(0, n, (2, 6)).astype(np.int32)
        source[3] = destination[2]
        segments = tuple(
            Segment(*map(jnp.asarray, parts), codes="int8" if quantized else None)
            for parts in zip(*(np.split(x, ends) for x in held), strict=True)
        )
        want = [x.copy() for x in held]
        for a, b in zip(source[:count], destination[:count], strict=True):
            for x in want:
                x[b] = x[a]
        done = program(segments, jnp.asarray(source), jnp.asarray(destination), jnp.int32(count))
        for i, x in enumerate(want):
            np.testing.assert_array_equal(
                np.concatenate([jax.tree.leaves(segment)[i] for segment in done]), x
            )


@pytest.mark.optimized
@pytest.mark.parametrize("codes", slow_but(["int8"], ["int8", "float8_e4m3fn", "float8_e5m2", "int4"]))
def test_codes_are_widened_a_few_blocks_at_a_time(codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same output, whatever number of blocks that is, and no floats of a segment's size in the
    program."""
    spec = Spec(codes=codes, segments=(3, 16), tokens=0, head_dim=32)
    case = make(spec, 1)
    whole, _ = run(case)
    block = spec.kv_heads * spec.head_dim * spec.block_size
    monkeypatch.setattr(module, "CODES_AT_A_TIME", 5 * block)
    lowered = jax.jit(
        lambda q, k, v, segments, plan: paged_attention(q, k, v, segments, plan, window=None, scale=SCALE)[:2]
    ).lower(*(jnp.asarray(x, jnp.float32) for x in (case.q, case.k, case.v)), case.before, case.plan)
    program = lowered.compile()
    out, _ = program(*(jnp.asarray(x, jnp.float32) for x in (case.q, case.k, case.v)), case.before, case.plan)
    assert_close(out, whole, limit(spec))
    K, Dh, bs = spec.kv_heads, spec.head_dim, spec.block_size
    text = program.as_text()
    assert re.search(rf"(s8|u8)\[16,{K},{Dh},{bs}\]", text)
    assert not re.search(rf"(f32|f16|f8\w*)\[16,{K},({Dh},{bs}|{bs},{Dh})\]", text)


@pytest.mark.parametrize("bits", [True, False])
def test_bits_of_bfloat16_are_not_converted(bits: bool) -> None:
    """A loop that writes tokens converts all of a segment to float32 and back, unless it lies as uint16."""
    case = make(Spec(dtype="bfloat16", bits=bits, segments=(16,)), 0)
    k = jnp.asarray(case.k[: case.spec.rows], jnp.bfloat16)
    lowered = jax.jit(lambda segments, k, plan: write_rows(segments, k, k, plan)).lower(
        case.before, k, case.plan.decode
    )
    assert bool(re.search(r"f32\[16,", lowered.compile().as_text())) != bits
