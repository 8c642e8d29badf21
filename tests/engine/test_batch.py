"""A plan becomes a buffer and the buffer becomes arrays that say what the plan said; and the shapes that
warm-up compiles are all the shapes that a workload can build."""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.cache.segments import SegmentLayout
from moejax.core.config import EngineConfig
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.plan import Chunk, StepPlan
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step.batch import Batch, BatchBuilder, layout, unpack
from moejax.engine.step.buckets import Buckets
from moejax.engine.step.limits import Limits, StepKey
from moejax.engine.step.sampler import SamplerMode, sampler_mode
from moejax.ops.paged_attention import tile_rows
from tests.engine.tiny import PROPERTY, VOCAB
from tests.examples import examples

BLOCK = 4
ENDS = (3, 8, 16, 40)
LIMITS = Limits(slots=6, block_size=BLOCK, table_width=20, segment_ends=ENDS)
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=3)
PENALTY = SamplingParams(temperature=0.0, repetition_penalty=1.5)


def builder(**buckets: Any) -> BatchBuilder:
    given: dict[str, Any] = {
        "rows": (2, 4, 6),
        "tokens": (8, 32, 80),
        "segments": SegmentLayout.of(40, ENDS),
        "segment_counts": (1, 2, 3, 4),
    }
    return BatchBuilder(Buckets(**given | buckets), LIMITS)


def sequence(
    prompt: int, outputs: int, blocks: list[int], slot: int, params: SamplingParams = GREEDY, **fields: Any
) -> Sequence:
    """Known tokens 10·slot, 10·slot + 1, …; `pending` more are on the device."""
    values: dict[str, Any] = {
        "tokens": [10 * slot + i for i in range(prompt + outputs)],
        "prompt_len": prompt,
        "params": params,
        "max_length": 80,
        "order": slot,
        "seed": 1000 + slot,
        "mode": sampler_mode([params], VOCAB),
        "blocks": blocks,
        "slot": slot,
        "computed": prompt + outputs,
    }
    return Sequence(**values | fields)


def decode(prompt: int, outputs: int, blocks: list[int], slot: int, *, known: bool = True, **fields: Any):
    """A decode as the scheduler leaves it: its newest token, known or still on the device, is being computed
    and the next is pending."""
    held = sequence(prompt, outputs if known else outputs - 1, blocks, slot, **fields)
    held.pending = 1 if known else 2
    held.computed = prompt + outputs
    return held


def plan_of(decodes: list[Sequence], chunks: list[Chunk], forks: list[list[Sequence]]) -> StepPlan:
    for chunk, mine in zip(chunks, forks, strict=True):
        for held in (chunk.sequence, *mine):
            held.computed = chunk.start + chunk.count
            held.pending = int(chunk.last and not held.score)
    return StepPlan(decodes, [s.computed - 1 for s in decodes], chunks, forks)


@functools.cache
def reader(key: StepKey) -> Any:
    return jax.jit(functools.partial(unpack, key=key, limits=LIMITS))


def build(plan: StepPlan, **buckets: Any) -> tuple[StepKey, Batch]:
    key, buffer = builder(**buckets).build(plan)
    assert buffer.dtype == np.int32 and buffer.shape == (layout(key, LIMITS)[1],)
    return key, jax.tree.map(np.asarray, reader(key)(jnp.asarray(buffer)))


def block_tables(batch: Batch) -> dict[int, dict[int, int]]:
    """Row → place in the sequence → block, from the decodes' side."""
    tables: dict[int, dict[int, int]] = defaultdict(dict)
    for block, owners in enumerate(batch.attention.decode.owner):
        mine = [int(row) for row in owners if row >= 0]
        assert len(set(mine)) == len(mine)
        for row in mine:
            tables[row][int(batch.attention.decode.logical[block])] = block
    return dict(tables)


def written(ends: np.ndarray, *columns: np.ndarray) -> list[tuple[int, ...]]:
    """The writes (global block, …) of the plan's `columns`, of which the first is the block in its
    segment."""
    found, start = [], 0
    for segment, end in enumerate(ends):
        first = ENDS[segment - 1] if segment else 0
        for i in range(start, int(end)):
            local = int(columns[0][i])
            assert 0 <= local < ENDS[segment] - first
            found.append((first + local, *(int(column[i]) for column in columns[1:])))
        start = max(start, int(end))
    return found


def check(plan: StepPlan, key: StepKey, batch: Batch) -> None:
    """Everything that the arrays say, token by token, against the plan."""
    rows, S, D = plan.sequences, key.rows, len(plan.decodes)
    n = len(rows)
    assert batch.slot.tolist() == [s.slot for s in rows] + [LIMITS.slots] * (S - n)
    assert batch.position.tolist() == plan.positions + [-1] * (S - D)
    for row, (held, position) in enumerate(zip(plan.decodes, plan.positions, strict=True)):
        known = position < len(held.tokens)
        assert batch.token[row] == (held.tokens[position] if known else -1 - held.slot)
        assert batch.rope_len[row] == max(held.prompt_len, position + 1)
    samples = {row: s for row, s in plan.sampling_rows()}
    assert [row for row in range(S) if batch.sample[row]] == list(samples)
    for row, held in samples.items():
        assert batch.step[row] == len(held.tokens) + held.pending - held.prompt_len - 1

    decodes = batch.attention.decode
    assert block_tables(batch) == {row: dict(enumerate(s.blocks)) for row, s in enumerate(plan.decodes)}
    assert decodes.owner.shape == (key.blocks, key.owners) and decodes.position.tolist() == [*batch.position]
    wanted = {
        (s.blocks[p // BLOCK], row, p % BLOCK)
        for row, (s, p) in enumerate(zip(plan.decodes, plan.positions, strict=True))
    }
    writes = written(decodes.write_ends, decodes.write_block, decodes.write_row, decodes.write_offset)
    assert set(writes) == wanted and len(writes) == D
    check_chunks(plan, key, batch)


def check_chunks(plan: StepPlan, key: StepKey, batch: Batch) -> None:
    """Each chunk token once: its value, position, base, tile and place in the cache."""
    S, row, flat = key.rows, len(plan.decodes), 0
    if not plan.chunks:
        assert key.tokens == 0 and batch.attention.chunk is None and batch.chunk_token is None
        return
    chunk = batch.attention.chunk
    tiles: dict[int, tuple[int, int]] = {}
    for t in range(int(chunk.num_tiles[0])):
        assert 1 <= chunk.tile_count[t] <= tile_rows(key.tokens)
        for i in range(int(chunk.tile_count[t])):
            place = int(chunk.tile_start[t]) + i
            assert place not in tiles
            tiles[place] = int(chunk.tile_row[t]), int(chunk.tile_position[t]) + i
    starts = chunk.tile_start[: int(chunk.num_tiles[0])].tolist()
    assert starts == sorted(set(starts))
    runs: dict[int, tuple[int, int]] = {}
    columns = (chunk.run_block, chunk.run_start, chunk.run_offset, chunk.run_count)
    for block, start, offset, count in written(chunk.run_ends, *columns):
        assert 1 <= count <= BLOCK - offset
        for i in range(count):
            assert start + i not in runs
            runs[start + i] = block, offset + i
    for part, forks in zip(plan.chunks, plan.forks, strict=True):
        held = part.sequence
        assert chunk.table[row, : len(held.blocks)].tolist() == held.blocks
        for position in range(part.start, part.start + part.count):
            assert batch.chunk_token[flat] == held.tokens[position]
            assert batch.chunk_position[flat] == position
            assert batch.rope_len[S + flat] == max(held.prompt_len, position + 1)
            assert tiles.pop(flat) == (row, position)
            assert runs.pop(flat) == (held.blocks[position // BLOCK], position % BLOCK)
            if key.prompt_logprobs >= 0 and position + 1 < len(held.tokens):
                assert batch.target[flat] == held.tokens[position + 1]
            if key.mode.penalty:
                assert batch.chunk_row[flat] == row
            flat += 1
        members = range(row, row + 1 + len(forks))
        if part.last:
            assert [batch.logit[r] for r in members] == [S + flat - 1] * len(members)
        if key.mode.penalty:
            assert [batch.seen_as[r] for r in members] == [row] * len(members)
            assert batch.fresh[row] == (part.start == 0)
        row += 1 + len(forks)
    assert not tiles and not runs
    assert (batch.chunk_position[flat:] == -1).all()
    assert [batch.logit[r] for r in range(len(plan.decodes))] == list(range(len(plan.decodes)))


def plain_plan(params: SamplingParams = GREEDY) -> StepPlan:
    """Two decodes, one of a token still on the device, blocks in all segments; three chunks: the middle of a
    prompt, a whole prompt, and the end of one with two forks."""
    decodes = [
        decode(5, 3, [30, 2], 0, params=params),
        decode(3, 6, [9, 1, 33], 4, params=params, known=False),
    ]
    middle = sequence(30, 0, [0, 4, 5, 6, 7, 10, 11, 12], 1, params)
    forks = [sequence(7, 0, [20, 3], slot, params) for slot in (5, 2)]
    end = sequence(7, 0, [20, 3], 3, params)
    chunks = [Chunk(middle, 6, 13, False), Chunk(end, 2, 5, True)]
    return plan_of(decodes, chunks, [[], forks])


# -- build and unpack ----------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, WARM, PENALTY, dataclasses.replace(GREEDY, logprobs=3)])
def test_a_mixed_plan(params: SamplingParams) -> None:
    plan = plain_plan(params)
    key, batch = build(plan)
    mode = sampler_mode([params], VOCAB)
    assert key == StepKey(rows=6, tokens=32, blocks=40, owners=1, mode=mode, record=False, prompt_logprobs=-1)
    check(plan, key, batch)
    assert (batch.sampling is None) == (mode.greedy and not mode.penalty)
    assert (batch.chunk_row is None) == (batch.fresh is None) == (not mode.penalty)
    assert batch.target is None


def test_sampling_parameters_keep_their_bits() -> None:
    plan = plain_plan(WARM)
    plan.decodes[1].params = PENALTY
    plan.decodes[1].mode = sampler_mode([PENALTY], VOCAB)
    key, batch = build(plan, rows=(8,))
    assert key.mode == SamplerMode(greedy=False, filters=True, penalty=True) and batch.sampling is not None
    held = [s.params for s in plan.sequences] + [GREEDY] * (8 - len(plan.sequences))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        want = np.array([getattr(p, name) for p in held], np.float32)
        np.testing.assert_array_equal(getattr(batch.sampling, name), want)
    assert batch.sampling.top_k.tolist() == [p.top_k for p in held]
    assert batch.sampling.seed.dtype == np.uint32
    assert batch.sampling.seed.tolist() == [s.seed for s in plan.sequences] + [0, 0]


def test_shared_blocks() -> None:
    """Three samples share two blocks: room for owners is rounded up to a power of two."""
    decodes = [decode(8, 1 + i, [6, 13, 1 + i], i) for i in range(3)]
    plan = plan_of([decode(2, 1, [0], 4), *decodes], [], [])
    key, batch = build(plan)
    assert key.owners == 4 and key.tokens == 0 and key.rows == 4 and key.blocks == 16
    check(plan, key, batch)
    assert sorted(batch.attention.decode.owner[13].tolist()) == [-1, 1, 2, 3]


def test_a_plan_of_chunks_alone() -> None:
    """No block belongs to a decode, and a prompt that fills its bucket and several tiles is whole."""
    long = sequence(78, 0, [*range(15), 17, 18, 19, 20, 21], 2)
    plan = plan_of([], [Chunk(long, 0, 77, False)], [[]])
    key, batch = build(plan)
    assert (key.rows, key.tokens, key.blocks, key.owners) == (2, 80, 40, 1)
    check(plan, key, batch)
    assert (batch.attention.decode.owner == -1).all() and (batch.attention.decode.position == -1).all()
    tiles = -(-77 // tile_rows(80))
    assert tiles > 1 and batch.attention.chunk is not None
    assert batch.attention.chunk.num_tiles.tolist() == [tiles, tiles]


def test_targets_of_a_scored_prompt() -> None:
    """One in the middle of its prompt, one at its end, beside a prompt that is not scored."""
    scored = [sequence(9, 0, [2, 5, 6], 0, prompt_logprobs=5), sequence(6, 0, [0, 1], 1, score=True)]
    scored[1].prompt_logprobs = 0
    chunks = [Chunk(scored[0], 3, 4, False), Chunk(scored[1], 2, 4, True)]
    plan = plan_of([], [*chunks, Chunk(sequence(3, 0, [7], 2), 0, 3, True)], [[], [], []])
    key, batch = build(plan)
    assert (key.prompt_logprobs, key.tokens) == (5, 32)
    assert [chunk.scored for chunk in plan.chunks] == [4, 3, 0]
    check(plan, key, batch)
    assert batch.target is not None
    assert batch.target[:8].tolist() == [4, 5, 6, 7, 13, 14, 15, 0]
    assert batch.sample.tolist() == [0, 0, 1, 0]


def test_a_part_of_a_prompt_with_a_penalty_is_seen() -> None:
    """It samples nothing, and yet its tokens must be marked, and what its slot had seen before cleared."""
    held = sequence(20, 0, [0, 1, 2, 4, 5], 2, PENALTY)
    for start in (0, 8):
        plan = plan_of([], [Chunk(held, start, 8, False, start == 0)], [[]])
        key, batch = build(plan)
        assert key.mode.penalty
        check(plan, key, batch)
        assert batch.fresh is not None and batch.fresh[0] == (start == 0)


def test_padding_has_seen_nothing() -> None:
    """Nor has static batching's padding, which is computed: its tokens are no row's."""
    plan = plain_plan(PENALTY)
    plan.min_tokens = 25
    key, buffer = builder().build(plan)
    batch = jax.tree.map(np.asarray, reader(key)(jnp.asarray(buffer)))
    assert plan.chunk_tokens == 18
    assert batch.chunk_position[18:].tolist() == [0] * 7 + [-1] * 7
    assert (batch.chunk_row[18:] >= key.rows).all()


def test_warm_modes_are_preferred() -> None:
    """A compiled mode that does all that is needed is taken, and the least one where there is none."""
    build = builder()
    wide = SamplerMode(greedy=False, filters=True, penalty=False, logprobs=5)
    build.warm_modes = [SamplerMode(), wide]
    assert build.build(plain_plan(GREEDY))[0].mode == SamplerMode()
    assert build.build(plain_plan(WARM))[0].mode == wide
    assert build.build(plain_plan(PENALTY))[0].mode == SamplerMode(penalty=True)


@settings(PROPERTY, max_examples=examples(60))
@given(seed=st.integers(0, 2**20))
def test_any_plan(seed: int) -> None:
    """Random rows over randomly placed blocks; few shapes, so that reading back compiles little."""
    rng = np.random.default_rng(seed)
    free, slots = rng.permutation(40).tolist(), rng.permutation(6).tolist()

    def take(tokens: int) -> list[int]:
        return [free.pop() for _ in range(-(-tokens // BLOCK))]

    decodes = []
    for _ in range(int(rng.integers(0, 4))):
        prompt, outputs = int(rng.integers(1, 14)), int(rng.integers(1, 8))
        known = bool(rng.random() < 0.7)
        decodes.append(decode(prompt, outputs, take(prompt + outputs), slots.pop(), known=known))
    chunks, forks, budget = [], [], 80
    for _ in range(int(rng.integers(0 if decodes else 1, 3))):
        length = int(rng.integers(1, 38))
        start = int(rng.integers(0, length))
        count = min(budget, int(rng.integers(1, length - start + 1)))
        held = sequence(length, 0, take(length), slots.pop())
        last = start + count == length
        chunks.append(Chunk(held, start, count, last, start == 0))
        twins = [sequence(length, 0, list(held.blocks), slots.pop())] if last and len(slots) > 2 else []
        forks.append(twins)
        budget -= count
    plan = plan_of(decodes, chunks, forks)
    key, batch = build(plan, rows=(6,), tokens=(80,), segments=SegmentLayout.of(40, ENDS))
    check(plan, key, batch)
    assert key.blocks >= 1 + max(max(s.blocks) for s in plan.sequences)


# -- buckets -------------------------------------------------------------------------------------------


def test_default_buckets() -> None:
    buckets = Buckets.of(EngineConfig(max_num_seqs=12, max_num_batched_tokens=100), 50)
    assert buckets.rows == (1, 2, 4, 8, 12)
    assert buckets.tokens == (16, 32, 64, 100)
    assert buckets.segments.ends == (8, 16, 32, 48, 50)
    assert [buckets.rows_for(n) for n in (1, 2, 3, 8, 9, 12)] == [1, 2, 4, 8, 12, 12]
    assert [buckets.tokens_for(n) for n in (0, 1, 16, 17, 65, 100)] == [0, 16, 16, 32, 100, 100]
    assert [buckets.segments_for(n) for n in (1, 8, 9, 33, 50)] == [1, 1, 2, 4, 5]


def test_thinned_buckets() -> None:
    """What the configuration leaves open keeps two sizes up to the workload's largest, and all above it;
    what it asks for stays. Steps with chunk tokens have the most rows, and one size of few blocks."""
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048, block_size=4)
    buckets = Buckets.of(config, 1024)
    few = buckets.thinned(config, 20)
    assert (few.rows, few.tokens) == ((16, 64), (512, 2048)) and few.segments == buckets.segments
    assert [few.segments.ends[count - 1] for count in few.segment_counts] == [128, 512, 1024]
    assert [few.segments_for(n) for n in (1, 128, 129, 512, 1000)] == [7, 7, 10, 10, 11]
    short = buckets.thinned(config, 3)
    assert short.tokens == (64, 256, 512, 1024, 2048)
    own = dataclasses.replace(config, seq_buckets=[3, 64], token_buckets=[7, 2048], block_buckets=[9, 99])
    assert Buckets.of(own, 1024).thinned(own, 20) == dataclasses.replace(Buckets.of(own, 1024), chunk_rows=64)
    small = Buckets.of(own, 1024).thinned(own, 4)
    assert (small.chunk_rows, small.chunk_segments) == (64, 2)
    assert [small.rows_for(2), small.rows_for(2, 5), small.segments_for(1), small.segments_for(1, 5)] == [
        3, 64, 1, 2
    ]  # fmt: skip
    chunks = [shape for shape in small.reachable(4, 4) if shape[1]]
    assert chunks == [(64, 2048, 2), (64, 7, 2)]


def test_given_buckets_end_at_the_limits() -> None:
    config = EngineConfig(
        max_num_seqs=5, max_num_batched_tokens=9, seq_buckets=[2, 8], token_buckets=[9], block_buckets=[3, 70]
    )
    buckets = Buckets.of(config, 10)
    assert (buckets.rows, buckets.tokens, buckets.segments.ends) == ((2, 5), (9,), (3, 10))
    assert buckets.segments.sizes == (3, 7)
    least = Buckets.of(EngineConfig(max_num_seqs=1, max_num_batched_tokens=1, block_size=1), 1)
    assert (least.rows, least.tokens, least.segments.ends) == ((1,), (1,), (1,))


def test_blocks_are_found_in_their_segments() -> None:
    segments = SegmentLayout.of(40, ENDS)
    segment, local = segments.locate(np.arange(40))
    assert list(zip(segment.tolist(), local.tolist(), strict=True)) == [
        (z, i) for z, size in enumerate((3, 5, 8, 24)) for i in range(size)
    ]


def test_a_layout_has_room_for_the_worst_plan() -> None:
    """Chunks that all start and end within a block, one token over a tile: every tile and run has a place."""
    for tokens, block in itertools.product((8, 130), (1, 4, 32)):
        limits = LIMITS._replace(block_size=block)
        fields, length = layout(StepKey(6, tokens, 40, 1, SamplerMode(), False, -1), limits)
        counts = [tokens // 6] * 5 + [tokens - 5 * (tokens // 6)]
        tiles = sum(-(-count // tile_rows(tokens)) for count in counts)
        runs = sum(-(-(count + block - 1) // block) for count in counts)
        assert fields["tile_start"][1][0] >= tiles and fields["run_start"][1][0] >= min(runs, tokens)
        ends = sorted((offset, offset + math.prod(shape)) for offset, shape in fields.values())
        assert ends[0][0] == 0 and ends[-1][1] == length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
