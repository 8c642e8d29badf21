"""The paged, continuously batched engine gives each request the tokens that it gets alone, whatever the
configuration: chunks, preemption, forks, static batches, the overlapped and the plain loop."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.step.sampler import SamplerMode
from tests.engine.paged import (
    GREEDY,
    REDUCTIONS,
    SCARCE,
    TIGHT,
    OneByOne,
    assert_clean,
    greedy,
    prompt,
    tight,
    tokens,
)
from tests.engine.tiny import PROPERTY, FullForward
from tests.examples import examples
from tests.numerics import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("equal_steps_once")

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24)


@pytest.fixture(scope="module")
def whole(bare_llm: LLM) -> FullForward:
    return FullForward(bare_llm.model)


@pytest.fixture(scope="module")
def alone(bare_llm: LLM) -> OneByOne:
    return OneByOne(bare_llm.model)


@pytest.fixture(scope="module")
def scarce(bare_llm: LLM) -> LLM:
    return bare_llm.variant(SCARCE)


@pytest.fixture(scope="module")
def roomy(bare_llm: LLM) -> LLM:
    return bare_llm.variant(TIGHT)


class Copies(Counter[str]):
    """Counts the copies that a runner makes."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        make = llm.runner._copy

        def copy(pool: Any, by_group: Any) -> None:
            self["copies"] += sum(map(len, by_group))
            make(pool, by_group)

        monkeypatch.setattr(llm.runner, "_copy", copy)


# -- configurations ------------------------------------------------------------------------------------

NARROW: dict[str, EngineConfig] = {
    "chunked": TIGHT,
    "chunked_plain_loop": tight(overlap=False),
    "preempting": SCARCE,
    "preempting_plain_loop": dataclasses.replace(SCARCE, overlap=False),
    "static": dataclasses.replace(SCARCE, batching="static"),
    "static_plain_loop": dataclasses.replace(SCARCE, batching="static", overlap=False),
    "static_whole_prompts": tight(batching="static", max_num_batched_tokens=64, token_buckets=[64]),
    "one_block_per_token": tight(block_size=1, num_blocks=40, block_buckets=[40]),
    "one_sequence": tight(max_num_seqs=1, seq_buckets=[1]),
    "one_token_a_step": tight(
        max_num_seqs=1, max_num_batched_tokens=1, seq_buckets=[1], token_buckets=[1], block_size=3
    ),
    "no_token_to_spare": tight(max_num_batched_tokens=4, token_buckets=[4], block_buckets=[3, 10]),
    "room_for_one": tight(num_blocks=8),
    "blocks_over_everything": tight(
        max_num_seqs=3,
        max_num_batched_tokens=64,
        block_size=64,
        num_blocks=5,
        seq_buckets=[3],
        token_buckets=[64],
    ),
}
SLOW = ("static_whole_prompts", "one_sequence", "one_token_a_step", "room_for_one")
PREEMPTS = ("preempting", "preempting_plain_loop", "room_for_one", "one_block_per_token")


def slowly(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """The names as parameters; those in `slow` compile more than they say."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.mark.parametrize("name", slowly(NARROW, SLOW))
def test_every_configuration_gives_the_same_tokens(name: str, bare_llm: LLM, whole: FullForward) -> None:
    """Prompts around every edge of blocks and buckets, one as long as may be, outputs from 1 token on."""
    llm = bare_llm.variant(NARROW[name])
    prompts = [prompt(n) for n in LENGTHS] + [prompt(31)]
    params = [greedy(12 if i % 4 else 1) for i in range(len(LENGTHS))] + [greedy(5)]
    outs = llm.generate(prompts, params)
    for ids, p, out in zip(prompts, params, outs, strict=True):
        count = min(p.max_tokens, 32 - len(ids))
        assert out.outputs[0].token_ids == whole.greedy(ids, count)
        assert out.outputs[0].finish_reason == "length"
    stats = llm.stats()
    assert (stats["preemptions"] > 0) == (name in PREEMPTS)
    if name == "static" or name == "static_plain_loop":  # which sets blocks aside for whole sequences
        assert 1 < stats["max_running"] < 4
    else:
        assert stats["max_running"] == llm.engine_config.max_num_seqs
    assert_clean(llm)


@settings(PROPERTY, max_examples=examples(25))
@given(
    st.lists(st.tuples(st.sampled_from(LENGTHS), st.integers(1, 8)), min_size=1, max_size=9),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_workload(
    scarce: LLM, roomy: LLM, whole: FullForward, rows: list[tuple[int, int]], seed: int, short: bool
) -> None:
    llm = scarce if short else roomy
    prompts = [prompt(length, seed) for length, _ in rows]
    outs = llm.generate(prompts, [greedy(count) for _, count in rows])
    for ids, (_, count), out in zip(prompts, rows, outs, strict=True):
        assert out.outputs[0].token_ids == whole.greedy(ids, count)
    assert_clean(llm)


def test_requests_that_join_at_any_time(scarce: LLM, whole: FullForward) -> None:
    """One a step, in an order of lengths that makes old and new share steps in every combination."""
    rng = np.random.default_rng(5)
    asked = [(prompt(int(rng.choice(LENGTHS)), i), int(rng.integers(1, 9))) for i in range(20)]
    outs = []
    for ids, count in asked:
        outs.append(scarce.submit(ids, greedy(count)))
        for _ in range(int(rng.integers(0, 3))):
            scarce.step()
            scarce.engine.scheduler.check_integrity()
    while scarce.step():
        scarce.engine.scheduler.check_integrity()
    for out, (ids, count) in zip(outs, asked, strict=True):
        assert out.finished and out.outputs[0].token_ids == whole.greedy(ids, count)
    assert_clean(scarce)


# -- forks ---------------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=1.0, max_tokens=7, seed=11, ignore_eos=True)


@pytest.mark.parametrize(
    "name",
    slowly(
        ["preempting", "static", "chunked", "room_for_one", "no_token_to_spare"],
        slow=["chunked", "room_for_one", "no_token_to_spare"],
    ),
)
def test_samples_of_one_prompt(
    name: str, bare_llm: LLM, alone: OneByOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n samples share the prompt's blocks, copy them when they part, and draw as n requests with seed + i."""
    llm = bare_llm.variant(NARROW[name])
    copies = Copies(llm, monkeypatch)
    prompts = [prompt(n, 1) for n in (1, 6, 8, 4, 15)]
    most = 2 if name in ("room_for_one", "static") else 4  # more need more blocks than there are
    params = [dataclasses.replace(SAMPLED, n=n) for n in (most, 2, 2, 3, most)]
    outs = llm.generate(prompts, params)
    for ids, p, out in zip(prompts, params, outs, strict=True):
        assert [sample.token_ids for sample in out.outputs] == alone.samples(ids, p)
        separate = [dataclasses.replace(SAMPLED, seed=11 + i) for i in range(p.n)]
        assert tokens(llm.generate([ids] * p.n, separate)) == [[s.token_ids] for s in out.outputs]
    assert len({tuple(s.token_ids) for s in outs[0].outputs}) > 1
    assert copies["copies"] >= 3
    assert_clean(llm)


def test_more_samples_than_rows(bare_llm: LLM, alone: OneByOne) -> None:
    """n over `max_num_seqs` runs in groups, in continuous and in static batches."""
    params = dataclasses.replace(SAMPLED, n=11)
    for config in (SCARCE, NARROW["static"]):
        llm = bare_llm.variant(config)
        (out,) = llm.generate([prompt(6, 1)], params)
        assert [sample.index for sample in out.outputs] == list(range(11))
        assert [sample.token_ids for sample in out.outputs] == alone.samples(prompt(6, 1), params)
        assert_clean(llm)


def test_greedy_samples_are_equal_and_end_apart(scarce: LLM, alone: OneByOne) -> None:
    """With max_tokens=1 no fork ever decodes; sampled forks that meet a stop token leave the others alone."""
    outs = scarce.generate([prompt(7), prompt(8)], dataclasses.replace(greedy(1), n=4))
    for ids, out in zip((prompt(7), prompt(8)), outs, strict=True):
        assert [s.token_ids for s in out.outputs] == [alone.steps(ids, greedy(1))[0]] * 4
    stop = [list(alone.steps(prompt(6, 1), SAMPLED, 11 + i)[0])[2] for i in range(2)]
    params = dataclasses.replace(SAMPLED, n=4, stop_token_ids=stop)
    (out,) = scarce.generate([prompt(6, 1)], params)
    assert [sample.token_ids for sample in out.outputs] == alone.samples(prompt(6, 1), params)
    reasons = [sample.finish_reason for sample in out.outputs]
    assert reasons[:2] == ["stop", "stop"] and len(out.outputs[0].token_ids) <= 3
    assert_clean(scarce)


def with_mode(llm: LLM, config: EngineConfig) -> LLM:
    """A variant whose steps all do what sampling with log-probabilities needs, so that few are compiled."""
    engine = llm.variant(config)
    engine.runner.builder.warm_modes = [SamplerMode(greedy=False, logprobs=2)]
    return engine


# -- the same again ------------------------------------------------------------------------------------


@pytest.mark.optimized
def test_same_seed_same_tokens(bare_llm: LLM) -> None:
    """Sampled and preempted: two engines give the same bits, log-probabilities included."""
    prompts = [prompt(n, 2) for n in (5, 17, 9, 12, 3)]
    params = SamplingParams(temperature=0.9, max_tokens=12, logprobs=2, ignore_eos=True)
    first, second = (with_mode(bare_llm, SCARCE) for _ in range(2))
    a, b = first.generate(prompts, params), second.generate(prompts, params)
    assert [out.outputs for out in a] == [out.outputs for out in b]
    assert first.stats()["preemptions"] > 0
    assert [out.outputs for out in first.generate(prompts, params)] == [out.outputs for out in a]


def test_neighbours_change_nothing(scarce: LLM, bare_llm: LLM) -> None:
    """A sampled request with a seed gets the same tokens alone, in a crowd, in another place of the call, in
    a static batch and in the plain loop."""
    params = dataclasses.replace(SAMPLED, n=2)
    ids = prompt(13, 3)
    others = [prompt(n, 4) for n in (2, 20, 7, 9)]
    (want,) = tokens(scarce.generate([ids], params))
    noise = SamplingParams(temperature=1.3, max_tokens=8, ignore_eos=True)
    for place in range(5):
        prompts = [*others[:place], ids, *others[place:]]
        mixed = [noise] * place + [params] + [noise] * (4 - place)
        assert tokens(scarce.generate(prompts, mixed))[place] == want
    for config in (NARROW["static"], NARROW["preempting_plain_loop"]):
        assert tokens(bare_llm.variant(config).generate([ids, *others], [params, *[noise] * 4]))[0] == want


def test_loops_agree_in_every_detail(bare_llm: LLM) -> None:
    """The overlapped loop learns of an end one step late; nothing of that shows."""
    prompts = [prompt(n, 6) for n in (6, 11, 3, 18)]
    engines = [with_mode(bare_llm, NARROW[name]) for name in ("preempting", "preempting_plain_loop")]
    stops = [sample[0][3] for sample in tokens(engines[0].generate(prompts, GREEDY))]
    params = [greedy(8, stop_token_ids=[stop], logprobs=2) for stop in stops]
    outs = [engine.generate(prompts, params) for engine in engines]
    for ours, theirs in zip(*outs, strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        assert a.logprobs is not None and b.logprobs is not None
        # Equal but for rounding: an end that is seen later leaves other rows beside it.
        assert_close([x.logprob for x in a.logprobs], [x.logprob for x in b.logprobs], tolerance(*REDUCTIONS))
        assert [(x.rank, list(x.top)) for x in a.logprobs] == [(x.rank, list(x.top)) for x in b.logprobs]
        a.logprobs = b.logprobs = None
        assert a == b
    assert {out.outputs[0].finish_reason for out in outs[0]} == {"stop"}
