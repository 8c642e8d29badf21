"""`engine.compact_cache`: blocks in use move down, and nobody can tell but by the time that a step takes."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import LLM, EngineConfig, ParallelConfig, PrefixCacheConfig, SamplingParams
from moejax.cache.allocator import GONE, BlockAllocator
from moejax.core.errors import ConfigError
from tests.engine.asks import Ask
from tests.engine.host_engine import LOOPS, HostEngine, Limits
from tests.examples import examples, slow_but
from tests.model_shapes import ONE_LAYER

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[16], block_buckets=[8, 16, 64], max_model_len=40,
    max_num_seqs=4, block_size=4, num_blocks=64, max_num_batched_tokens=16, autotune="rules",
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_blocks_are_conserved_and_only_fall(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 40))
    allocator, tables = BlockAllocator(number, 2), list[list[int]]()
    for _ in range(data.draw(st.integers(1, 20))):
        kind = data.draw(st.sampled_from(["grow", "fork", "release", "give up"]))
        if kind == "grow" and allocator.num_free:
            tables.append([])
            allocator.grow(tables[-1], 2 * data.draw(st.integers(1, allocator.num_free)))
        elif kind == "fork" and tables:
            tables.append(allocator.fork(data.draw(st.sampled_from(tables))))
        elif kind == "release" and tables:
            allocator.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        elif kind == "give up" and tables and (table := data.draw(st.sampled_from(tables))):
            allocator.give_up(table, data.draw(st.integers(0, len(table) - 1)))
    before, most = [list(table) for table in tables], data.draw(st.integers(1, 5))
    used = allocator.num_used
    highest = max((max(table, default=0) for table in tables), default=0)
    moves = allocator.move_down(tables, most)
    allocator.check_integrity(tables)
    assert len(moves) <= most and all(new < used <= old for old, new in moves)
    assert not moves or highest >= 2 * used
    moved = dict(moves)
    assert tables == [[moved.get(block, block) for block in table] for table in before]
    alone = [b for t in before for b in t if b != GONE and b >= used and sum(b in u for u in before) == 1]
    if highest >= 2 * used:  # the highest go first
        assert [old for old, _ in moves] == sorted(alone, reverse=True)[:most]


@LOOPS
@pytest.mark.parametrize("compacts", [False, True])
def test_one_that_stays_comes_down(overlap: bool, compacts: bool) -> None:
    """The engine's own checks hold at every step; contents are compared with each request's alone."""
    engine = HostEngine(Limits(64, 4, 8, 128, overlap=overlap, compacts=compacts))
    for _ in range(6):
        engine.submit(Ask(16, 2))
    engine.submit(Ask(5, 40))
    engine.step()
    stays = engine.groups[-1].samples[0]
    assert max(stays.blocks) >= 24
    for _ in range(8):
        engine.step()
    assert engine.scheduler.running == [stays]
    assert (max(stays.blocks) < len(stays.blocks) + 1) == compacts == bool(engine.events["blocks moved down"])
    engine.drain()


@pytest.mark.parametrize("overlap", slow_but([True], [False, True]))
def test_tokens_and_the_segments_that_steps_read(overlap: bool) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.7, seed=n, ignore_eos=True) for n in (8, 7, 8, 30)]
    prompts = [[7, 11, 13, 17 + i] * (2 if i == 3 else 8) for i in range(4)]
    told: dict[bool, tuple[Any, list[int]]] = {}
    for compacts in (False, True):
        engine = dataclasses.replace(ENGINE, compact_cache=compacts, overlap=overlap)
        with LLM(ONE_LAYER, load_format="dummy", engine=engine) as llm:
            runner: Any = llm.runner
            blocks, run = list[int](), runner._run

            def noted(key: Any, buffer: Any, blocks: list[int] = blocks, run: Any = run) -> Any:
                blocks.append(key.blocks)
                return run(key, buffer)

            runner._run = noted
            outputs = llm.generate(prompts, params)
            llm.engine.scheduler.check_integrity()
            told[compacts] = [x.outputs[0].token_ids for x in outputs], blocks
    assert told[True][0] == told[False][0]
    # Of the one that stays: at its end 37 tokens, in ten blocks.
    assert told[False][1][-1] == 64 and told[True][1][-1] == 16


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up() -> None:
    engine = dataclasses.replace(ENGINE, compact_cache=True, strict_compile=True)
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (8, 7, 8, 30)]
    prompts = [[7, 11, 13, 17 + i] * (2 if i == 3 else 8) for i in range(4)]
    with LLM(ONE_LAYER, load_format="dummy", engine=engine) as llm:
        llm.warmup(max_total_len=40, sampling_params=params[:1])
        llm.generate(prompts, params)
        assert llm.stats()["recompiles_after_warmup"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": PrefixCacheConfig(enabled=True)}, "knows prefixes by their blocks"),
        ({"batching": "static"}, "ends a batch whole"),
        ({"kernels": "pallas_triton", "block_size": 8}, "read blocks wherever they lie"),
        ({"parallel": ParallelConfig(tp=2)}, "several devices"),
    ],
)
def test_what_it_does_not_go_with(options: dict[str, Any], message: str) -> None:
    outside = {"parallel": options.pop("parallel")} if "parallel" in options else {}
    engine = dataclasses.replace(ENGINE, compact_cache=True, **options)
    with pytest.raises(ConfigError, match=f"^engine.compact_cache=true does not go with .*{message}"):
        LLM(ONE_LAYER, load_format="dummy", engine=engine, **outside)
