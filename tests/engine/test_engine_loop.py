"""The loop's promises about memory and programs: the cache stays where it is, nothing is compiled after
warm-up; and its account of what it did."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest

from moejax.core.errors import ConfigError, StepError
from moejax.core.moe import MoeConfig
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.stats import StepRecord
from tests.engine.paged import SCARCE, assert_clean, greedy, prompt, tight, tokens
from tests.engine.tiny import FullForward, small_config

PROMPTS = [prompt(n, 3) for n in (9, 4, 16, 1, 12, 6, 15)]
SAMPLES = SamplingParams(temperature=1.0, max_tokens=9, seed=3, n=2, ignore_eos=True)
SEGMENTS = tight(max_num_batched_tokens=4, token_buckets=[4], block_buckets=[3, 10])


@pytest.fixture(scope="module")
def whole(bare_llm: LLM) -> FullForward:
    return FullForward(bare_llm.model)


@pytest.fixture(
    scope="module",
    params=["auto", *(pytest.param(d, marks=pytest.mark.slow) for d in ("int8", "float8_e5m2"))],
)
def forked(bare_llm: LLM, request: pytest.FixtureRequest) -> LLM:
    """An engine that has decoded, computed chunks and copied blocks, in each kind of cache."""
    llm = bare_llm.variant(SCARCE)
    if request.param != "auto":
        llm = LLM(
            small_config(), load_format="dummy", engine=SCARCE, quant=QuantConfig(kv_cache=request.param)
        )
    llm.generate(PROMPTS, SAMPLES)
    return llm


# -- memory --------------------------------------------------------------------------------------------


def pointers(llm: LLM) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm.runner.pool._segments)]


def arrays(llm: LLM) -> int:
    """Of a pool of one segment: keys and values of each layer, and the scales of quantized ones."""
    return (2 if llm.kv_cache_dtype == llm.config.dtype else 4) * llm.config.num_layers


@pytest.mark.optimized
def test_the_cache_stays_where_it_is(forked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step and no copy of blocks moves a page; what they were given is gone."""
    pool, before = forked.runner.pool, pointers(forked)
    events = {"launch": 0, "_copy": 0}

    def watch(name: str) -> None:
        run = getattr(forked.runner, name)

        def watched(*args: Any) -> Any:
            given = [forked.runner.last, *jax.tree.leaves(pool._segments)]
            out = run(*args)
            jax.block_until_ready(pool._segments)
            pages = given[1:]
            assert all(leaf.is_deleted() for leaf in (given if name == "launch" else pages))
            assert pointers(forked) == before
            events[name] += 1
            return out

        monkeypatch.setattr(forked.runner, name, watched)

    watch("launch")
    watch("_copy")
    forked.generate(PROMPTS, SAMPLES)
    assert len(before) == arrays(forked)
    assert events["launch"] > 20 and events["_copy"] >= 3


@pytest.mark.optimized
@pytest.mark.parametrize("function", ["step", "copy"])
def test_programs_update_the_cache_in_place(function: str, forked: LLM) -> None:
    """Every page of the output is one of the inputs, and no page is copied on the way."""
    programs = [(key, step) for (name, key), step in forked.ledger._compiled.items() if name == function]
    assert programs
    K, Dh, bs = forked.config.num_kv_heads, forked.config.head_dim, SCARCE.block_size
    pages = {(12, K, Dh, bs), (12, K, bs, Dh), (12, K, bs)}
    for key, program in programs:
        text = program.as_text()
        header = text.split("entry_computation_layout")[0]
        aliased = {int(output) for output in re.findall(r"\{(\d+)\}: \(\d+, \{\}, m\w+-alias\)", header)}
        assert set(range(arrays(forked))) <= aliased, key
        made = re.findall(r"= \w+\[([\d,]+)\]\S* (\w[\w-]*)\(", text)
        kinds = {kind for shape, kind in made if tuple(map(int, shape.split(","))) in pages}
        assert "parameter" in kinds, "else the shapes above are not the pages'"
        assert not {kind for kind in kinds if kind.startswith("copy")}, key


@pytest.mark.slow
def test_segments_are_made_when_needed(bare_llm: LLM, whole: FullForward) -> None:
    """One short request touches the first segment alone; the pool's bytes say so."""
    llm = bare_llm.variant(SEGMENTS)
    pool, block = llm.runner.pool, 2 * 2 * 8 * 4 * 4  # keys and values, heads, head_dim, tokens, float32
    assert pool.nbytes == 0
    llm.generate([prompt(3)], greedy(4))
    assert pool.nbytes == 3 * block
    out = llm.generate(PROMPTS[:3], greedy(9))
    assert pool.nbytes == 32 * block
    assert [o.outputs[0].token_ids for o in out] == [whole.greedy(ids, 9) for ids in PROMPTS[:3]]


# -- compilation ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(bare_llm: LLM) -> LLM:
    """Warm for greedy requests of up to 16 prompt tokens and 25 in all, with two samples or one."""
    llm = bare_llm.variant(dataclasses.replace(SCARCE, strict_compile=True))
    params = [greedy(9), dataclasses.replace(greedy(9), n=2)]
    llm.warmup(max_total_len=25, sampling_params=params)
    return llm


def test_warmup_runs_nothing_that_stays(strict: LLM) -> None:
    """No request, no token; all programs are there and none counts as a recompilation."""
    stats = strict.stats()
    assert stats["compiles"] == len(stats["compile_ledger"]) == 5  # decode and chunk, 1 and 2 owners; copies
    assert stats["recompiles_after_warmup"] == 0 and stats["steps"] == 0
    assert_clean(strict)


def test_nothing_is_compiled_after_warmup(strict: LLM, whole: FullForward) -> None:
    """For any workload within the warm-up's maxima, preempted and forked."""
    before = strict.stats()["compiles"]
    strict.reset_stats()
    rng = np.random.default_rng(0)
    for trial in range(12):
        prompts = [prompt(int(n), trial) for n in rng.integers(1, 17, int(rng.integers(1, 10)))]
        params = [
            dataclasses.replace(greedy(int(rng.integers(1, 10))), n=int(rng.integers(1, 3))) for _ in prompts
        ]
        for ids, p, out in zip(prompts, params, strict.generate(prompts, params), strict=True):
            assert [sample.token_ids for sample in out.outputs] == [whole.greedy(ids, p.max_tokens)] * p.n
    stats = strict.stats()
    assert stats["compiles"] == before and stats["recompiles_after_warmup"] == 0
    assert stats["preemptions"] > 0 and stats["failed_steps"] == 0
    assert_clean(strict)


def test_a_step_that_may_not_be_compiled(strict: LLM, whole: FullForward) -> None:
    """One line that names the step and the way out, for the requests in it; the engine goes on."""
    failed = strict.stats()["failed_steps"]
    with pytest.raises(StepError) as caught:
        strict.generate([PROMPTS[1]], SamplingParams(temperature=1.0, max_tokens=3))
    message = str(caught.value)
    assert "\n" not in message and "StepKey(rows=4, tokens=8, blocks=12, owners=1" in message
    assert "new mode" in message and "engine.strict_compile" in message
    (out,) = caught.value.outputs
    assert out.outputs[0].finish_reason == "error" and out.error in message and out.outputs[0].token_ids == []
    assert strict.stats()["failed_steps"] == failed + 1 and strict.stats()["recompiles_after_warmup"] == 0
    assert_clean(strict)
    outs = strict.generate(PROMPTS, greedy(8))
    assert [o.outputs[0].token_ids for o in outs] == [whole.greedy(ids, 8) for ids in PROMPTS]


def test_without_strictness_it_is_recorded(bare_llm: LLM) -> None:
    llm = bare_llm.variant(SCARCE)
    llm.warmup(max_total_len=25)
    llm.generate([PROMPTS[1]], SamplingParams(temperature=1.0, max_tokens=3))
    stats = llm.stats()
    assert stats["recompiles_after_warmup"] == 2
    late = [row for row in stats["compile_ledger"] if row["after_warmup"]]
    assert len(late) == 2 and all("mode" in row["cause"] for row in late)


# -- the account ---------------------------------------------------------------------------------------

SUMS = ("seconds", "prefill_tokens", "decode_tokens", "padded_tokens")


def record(llm: LLM) -> list[StepRecord]:
    records: list[StepRecord] = []
    llm.engine.on_step = records.append
    llm.reset_stats()
    return records


@pytest.mark.parametrize("overlap", [True, False])
def test_every_token_is_counted_once(overlap: bool, bare_llm: LLM) -> None:
    """Prompts and all outputs but each last are computed; the records' sums are the stats'."""
    llm = bare_llm.variant(dataclasses.replace(SCARCE, num_blocks=12, max_num_seqs=4, overlap=overlap))
    records = record(llm)
    small = [prompt(n, 5) for n in (3, 5, 2, 4, 7)]
    outs = llm.generate(small, [greedy(n) for n in (4, 1, 5, 3, 2)])
    stats = llm.stats()
    assert stats["preemptions"] == 0
    computed = sum(len(out.prompt_token_ids) + len(out.outputs[0].token_ids) - 1 for out in outs)
    assert sum(r.tokens for r in records) == computed
    assert sum(r.prefill_tokens for r in records) >= sum(map(len, small)) - len(small)
    for name in SUMS:
        assert stats[name] == pytest.approx(sum(getattr(r, name) for r in records), rel=1e-12)
    assert stats["steps"] == len(records) and stats["failed_steps"] == 0
    assert stats["padding_waste"] == 1 - computed / stats["padded_tokens"]
    for r in records:
        assert r.padded_tokens == (12 if r.prefill_tokens else 4) >= r.tokens > 0
        assert r.running >= r.sequences > 0 and r.seconds >= 0 and r.num_blocks == 12
        assert 0 < r.stored_tokens <= 4 * r.used_blocks
    assert all(a.time <= b.time for a, b in itertools.pairwise(records))
    assert stats["max_running"] == max(r.running for r in records) == 4
    assert stats["max_waiting"] == max(r.waiting for r in records)
    assert stats["max_used_blocks"] == max(r.used_blocks for r in records) <= 12
    assert (stats["num_blocks"], stats["block_size"]) == (12, 4)
    assert_clean(llm)


def test_preempted_tokens_are_computed_again(forked: LLM) -> None:
    records = record(forked)
    outs = forked.generate(PROMPTS, SAMPLES)
    forked.engine.on_step = None
    stats = forked.stats()
    assert stats["preemptions"] == sum(r.preempted for r in records) > 0
    once = sum(len(out.prompt_token_ids) + sum(len(s.token_ids) - 1 for s in out.outputs) for out in outs)
    assert stats["prefill_tokens"] + stats["decode_tokens"] > once
    count = len(records)
    forked.generate(PROMPTS[:1], greedy(3))
    assert len(records) == count, "nobody is told any more"


def test_stored_tokens_count_shared_ones_once(forked: LLM) -> None:
    """Two samples of a prompt of 9 tokens: two whole blocks are shared, the third is not once they part."""
    records = record(forked)
    forked.generate([PROMPTS[0]], dataclasses.replace(SAMPLES, max_tokens=4))
    forked.engine.on_step = None
    assert [r.stored_tokens for r in records] == [8, 9, 12, 14, 16]
    assert [r.used_blocks for r in records] == [3, 3, 4, 4, 4]


def test_reset_and_idle(forked: LLM) -> None:
    assert forked.stats()["steps"] > 0
    forked.reset_stats()
    stats = forked.stats()
    for name in (
        *SUMS,
        "steps",
        "preemptions",
        "max_running",
        "max_waiting",
        "max_used_blocks",
        "padding_waste",
    ):
        assert stats[name] == 0
    assert stats["compiles"] > 0
    assert forked.step() is False and forked.stats()["steps"] == 0


# -- variants ------------------------------------------------------------------------------------------


def test_variants_share_weights_alone(forked: LLM, whole: FullForward) -> None:
    """A request waiting in one engine is nothing to the other, nor are its blocks, programs and sums."""
    other = forked.variant(dataclasses.replace(SCARCE, max_model_len=24))
    exact = (
        forked.kv_cache_dtype == forked.config.dtype
    )  # else another cache's tokens are not quite `whole`'s
    ours, theirs = (llm._weights.functions[0].leaves for llm in (forked, other))
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    forked.reset_stats()
    waiting = forked.submit(PROMPTS[0], greedy(5))
    assert other.stats()["waiting"] == 0 and other.step() is False
    alone = other.generate([PROMPTS[1]], greedy(5))[0].outputs[0].token_ids
    assert alone == whole.greedy(PROMPTS[1], 5) or not exact
    assert forked.stats()["steps"] == 0 and forked.stats()["waiting"] == 1 and not waiting.finished
    assert other.stats()["compiles"] == 2 and (forked.max_model_len, other.max_model_len) == (32, 24)
    while forked.step():
        pass
    assert waiting.outputs[0].token_ids == whole.greedy(PROMPTS[0], 5) or not exact
    assert tokens([waiting]) == tokens(other.generate([PROMPTS[0]], greedy(5)))
    for llm in (forked, other):
        assert_clean(llm)


def test_a_variant_keeps_its_experts(bare_llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"engine\.moe"):
        bare_llm.variant(dataclasses.replace(SCARCE, moe=MoeConfig(execution="dense")))
