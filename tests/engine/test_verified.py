"""`engine.deterministic=verified`: what a request gets is of tiles alone, whatever was guessed before."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from moejax import LLM, ParallelConfig, PrefixCacheConfig, QuantConfig, SamplingParams
from moejax.core.errors import ConfigError, RequestError
from moejax.core.moe import MoeConfig
from moejax.core.scheduling import SpeculationConfig
from moejax.engine.pipeline.microbatches import tiles_of
from moejax.engine.scheduling.plan import UNKNOWN, StepPlan
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence, State
from moejax.engine.scheduling.verification import Verification
from tests.engine.asks import VOCAB_SIZE, Ask, Group
from tests.engine.host_engine import HostEngine, Limits, alone
from tests.engine.test_deterministic import ENGINE, EVERY, FAMILIES, OF_KINDS, PARAMS, PROMPTS, engine, run
from tests.model_shapes import EIGHT_WAY, LINEAR, ONE_LAYER, TWO_LAYERS
from tests.plain.fake_runner import FakeDevice

TILE = 4


class TilingDevice(FakeDevice):
    """Stores something else for verified sequences in steps that are no tiles."""

    tiled = False

    def _store(self, sequence: Sequence, position: int, draft: int | None = None) -> None:
        super()._store(sequence, position, None if draft == UNKNOWN else draft)
        if sequence.verified and not self.tiled:
            index, offset = divmod(position, self.block_size)
            for pool, table in ((self._cache, sequence.blocks), (self._windows, sequence.window_blocks)):
                if table:
                    pool[table[index]][offset] = hash(("guessed", pool[table[index]][offset]))


class Verifying(HostEngine):
    """Every other request is verified; its tentative tokens are right as often as is said."""

    def __init__(self, limits: Limits, right: float) -> None:
        super().__init__(limits)
        self.scheduler.speculation = Verification(limits.k + 1)
        self.runner, self.right = self, right
        sizes = limits.num_blocks, limits.block_size, VOCAB_SIZE, limits.window
        self.device = TilingDevice(*sizes)

    def verify(self, ask: Ask) -> Group:
        """Queues a request that is verified; its salt is not the others'."""
        group = self.submit(ask)
        for sample in group.samples:
            sample.verified = True
        return group

    def launch(self, plan: StepPlan) -> list[int]:
        """Computes the parts, as a runner does; and guesses."""
        tokens = [0] * len(plan.sequences)
        for number, part in enumerate(tiles_of(plan, TILE, verified=True)):
            (mine,) = part.plan.groups
            self.device.tiled = mine.tiled
            assert number == 0 or mine.tiled
            assert not mine.tiled or max(mine.num_tokens, len(part.rows)) <= TILE
            for row, token in zip(part.rows, self.device.step(mine), strict=True):
                tokens[row] = token
        for row, sequence in enumerate(plan.decodes):
            if not plan.tells(row):
                self.events["tentative"] += 1
                (group,) = (group for group in self.groups if sequence in group.samples)
                expected = alone(group.ask)[group.samples.index(sequence)]
                known = plan.positions[row] + 1
                right = self.chance.random() < self.right and known < len(expected)
                tokens[row] = expected[known] if right else tokens[row]
                self.device._last[sequence.slot] = tokens[row]
                self.events["guessed wrong"] += not right
        self.events["beside prompts"] += bool(plan.chunks) and any(map(plan.tells, plan.drafts))
        return tokens

    def save(self, plan: StepPlan) -> None:
        self.device.transport(plan)

    def _postprocess(self, plan: StepPlan, handle: Any) -> None:
        before = {s: len(s.tokens) for s in plan.sequences}
        self.scheduler.postprocess(plan, handle)
        told = {s for row, s in plan.sampling_rows() if plan.tells(row)}
        assert all(len(s.tokens) == count for s, count in before.items() if s not in told)
        verified = [draft for row, draft in plan.drafts.items() if plan.tells(row)]
        self.events["right"] += sum(draft.accepted for draft in verified)
        self.events["wrong"] += sum(not draft.accepted for draft in verified)
        self.alone.clear()

    def _check_plan(self, plan: StepPlan, before: list[Sequence], queued: list[Sequence]) -> None:
        """Rows of one sequence are guessed one at a time, or all verified at once."""
        for chunk in plan.chunks:
            if chunk.first and self.limits.prefixes is not None:
                self._found(chunk)
        rows = Counter(plan.decodes)
        for row, sequence in enumerate(plan.decodes):
            assert sequence.verified or row not in plan.drafts
            if not plan.tells(row):
                assert rows[sequence] == 1
                known = len(sequence.tokens) + len(sequence.tentative)
                assert plan.positions[row] == known - 1 + sequence.guessed - 1
                self.events["unread"] += sequence.guessed > 1
                self.events["goes on"] += bool(sequence.tentative)
            else:
                self.events["ends within"] += bool(set(sequence.tentative) & set(sequence.stop_ids))
        assert max(rows.values(), default=0) <= self.limits.k + 1
        assert len(plan.decodes) + plan.chunk_tokens <= self.limits.max_num_batched_tokens

    def _swapped_out(self, sequence: Sequence) -> None:
        self.events["preempted"] += sequence.verified
        assert not sequence.tentative


LIMITS = {
    "roomy": Limits(k=5, num_blocks=128, max_num_batched_tokens=64),
    "overlapped": Limits(k=3, num_blocks=128, overlap=True),
    "scarce": Limits(k=4, num_blocks=16, max_num_seqs=5, max_num_batched_tokens=12),
    "scarce_prefixes": Limits(
        k=6,
        num_blocks=14,
        max_num_seqs=6,
        max_num_batched_tokens=14,
        prefixes=PrefixCacheConfig(enabled=True),
    ),
    "swapping": Limits(
        k=4, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=14, preemption="swap", swap_slots=64
    ),
    "scarce_overlapped": Limits(k=4, num_blocks=11, max_num_seqs=5, max_num_batched_tokens=12, overlap=True),
    "swapping_overlapped": Limits(
        k=4,
        num_blocks=14,
        max_num_seqs=6,
        max_num_batched_tokens=14,
        preemption="swap",
        swap_slots=64,
        overlap=True,
        prefixes=PrefixCacheConfig(enabled=True),
    ),
    "windows": Limits(k=3, num_blocks=48, window=6, overlap=True),
    "at_once": Limits(k=0, num_blocks=64, overlap=True),
}


@pytest.mark.each_value
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("limits", LIMITS)
def test_guesses_change_nothing(limits: str, right: float) -> None:
    """Tokens are hashes of all that lies in the cache: a guess that stays there gives others."""
    engine, chance = Verifying(LIMITS[limits], right), random.Random(limits)
    for number in range(60):
        ask = Ask(
            prompt_len=chance.randint(1, 14), max_tokens=chance.randint(1, 16), n=chance.choice((1, 1, 1, 3)),
            stop_below=chance.choice((0, 60)), first=chance.choice((0, 0, 50)), seed=number, salt=number % 2,
        )  # fmt: skip
        group = engine.verify(ask) if number % 2 else engine.submit(ask)
        for _ in range(chance.randint(0, 4)):
            engine.step()
        if chance.random() < 0.1 and group.live:
            engine.abort(group)
    engine.drain()
    events, k = engine.events, LIMITS[limits].k
    wanted = {"tentative", "goes on", "right" if right else "wrong", "beside prompts"} if k else set()
    wanted |= {"guessed wrong", "wrong"} if k and right == 0.8 else set()
    wanted |= {"unread"} if LIMITS[limits].overlap and k else set()
    wanted |= {"preempted"} if LIMITS[limits].num_blocks < 32 else set()
    assert not [event for event in wanted if not events[event]], events
    assert k or not events["tentative"]


def test_a_guess_that_may_end_is_verified_at_once() -> None:
    engine = Verifying(Limits(k=12, num_blocks=64), 1.0)
    ask = next(a for seed in range(99) if 4 < len(alone(a := Ask(3, 16, 1, 120, seed=seed, salt=1))[0]) < 14)
    group, steps = engine.verify(ask), 0
    while group.live:
        engine.step()
        steps += 1
    # A prompt, a guess for each token after its first but none after the last, and a verification.
    assert steps == 1 + (len(group.tokens[0]) - 3 - 1) + 1


class Keeping(Scheduler):
    """Counts what was guessed as computed."""

    def postprocess(self, plan: StepPlan, tokens: Any) -> Any:
        for row, sequence in enumerate(plan.decodes):
            if not plan.tells(row) and sequence.state is State.RUNNING:
                sequence.tokens.append(tokens[row])
                sequence.computed += 1
        return super().postprocess(plan, tokens)


def test_that_a_guess_which_is_kept_is_found() -> None:
    engine = Verifying(LIMITS["roomy"], 0.8)
    engine.scheduler.__class__ = Keeping
    with pytest.raises(AssertionError):
        for number in range(8):
            engine.verify(Ask(5, 12, seed=number, salt=1))
        engine.drain()


# -- on the model -------------------------------------------------------------------------------------------

ASKED = [i for i in EVERY if i % 3 != 1]
VERIFIED: dict[str, Any] = {"deterministic": "verified", "verify_every": 4}
FEW: dict[str, Any] = {"seq_buckets": [12], "token_buckets": [96], "block_buckets": [192], "num_blocks": 192}
"""Programs, of which each takes seconds to compile as shipped."""


def asking(params: list[SamplingParams]) -> list[SamplingParams]:
    return [dataclasses.replace(each, deterministic=i in ASKED) for i, each in enumerate(params)]


def asked(numbers: dict[int, Any]) -> dict[int, Any]:
    return {i: numbers[i] for i in ASKED if i in numbers}


def test_same_bits_on_the_smallest_model() -> None:
    """With guesses that another model would make: a part of them is wrong."""
    llm = engine(ONE_LAYER, **VERIFIED, max_num_seqs=4, seq_buckets=[4], token_buckets=[96])
    params = [SamplingParams(max_tokens=7, ignore_eos=True, seed=i, logprobs=0) for i in EVERY]
    params = [dataclasses.replace(each, deterministic=True) for each in params]
    expected, wrong = run(llm, EVERY[:6], params), 0
    postprocess = llm.engine.scheduler.postprocess

    def guess(plan: StepPlan, tokens: list[int]) -> Any:
        nonlocal wrong
        tokens = list(tokens)
        for row, sequence in enumerate(plan.decodes):
            if not plan.tells(row) and sequence.order % 2:
                tokens[row], wrong = (tokens[row] + 1) % 80, wrong + 1
        return postprocess(plan, tokens)

    llm.engine.scheduler.postprocess = guess  # type: ignore[method-assign]
    assert run(llm, EVERY[:6][::-1], params) == {i: expected[i] for i in EVERY[:6]} and wrong
    stats = llm.stats()
    assert 0 < stats["accepted"] < stats["drafted"]


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gqa", "latents", "windows_with_sinks"])
def test_same_bits_as_tiles_give(family: str) -> None:
    """Whatever the others get, and however steps are made."""
    llm = engine(FAMILIES[family], **VERIFIED | FEW)
    expected = run(llm, EVERY, asking(PARAMS))
    assert asked(expected) == asked(run(engine(FAMILIES[family]), EVERY))
    assert {i: run(llm, [i], asking(PARAMS))[i] for i in (0, 3, 8)} == {i: expected[i] for i in (0, 3, 8)}
    options = {
        "max_num_seqs": 5, "max_num_batched_tokens": 12, "num_blocks": 24, "verify_every": 6,
        "seq_buckets": [5], "token_buckets": [12], "block_buckets": [24],
    }  # fmt: skip
    other = engine(
        FAMILIES[family], **VERIFIED | options, prefix_cache=PrefixCacheConfig(enabled=True), overlap=False
    )
    for order in (EVERY[::-1], EVERY):
        assert asked(run(other, order, asking(PARAMS))) == asked(expected)
    other.engine.scheduler.check_integrity()
    stats = other.stats()
    assert stats["preemptions"] and stats["prefix_hit_rate"] and stats["drafted"]


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 16, "preemption": "swap", "block_buckets": [16]},
        {"verify_every": 1},
        {"capture_routing": True, "tile_tokens": 16},
    ],
    ids=str,
)
def test_same_bits_of_all_kinds_of_requests(options: dict[str, Any]) -> None:
    sizes = {name: value for name, value in options.items() if name == "tile_tokens"}
    expected = run(engine(TWO_LAYERS, **sizes), EVERY, OF_KINDS)
    other = engine(TWO_LAYERS, **VERIFIED | FEW | options)
    for order in (EVERY[::-1], EVERY):
        assert asked(run(other, order, asking(OF_KINDS))) == asked(expected)


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("quant", ["w8a8", "bfloat16"])
def test_shipped_model(quant: str) -> None:
    params = [dataclasses.replace(each, max_tokens=20, prompt_logprobs=None) for each in asking(PARAMS)]
    outputs = []
    for kind in ({}, VERIFIED | FEW):
        if quant == "w8a8":
            llm = engine("tiny", quant=QuantConfig(method="rtn", format="w8a8"), **kind)
        else:
            llm = LLM("tiny", dtype="bfloat16", engine=dataclasses.replace(ENGINE, **kind))
        outputs.append(asked(run(llm, EVERY, params)))
    assert outputs[0] == outputs[1]
    assert llm.stats()["drafted"]


@pytest.mark.slow
def test_routing_is_of_what_was_told() -> None:
    """The trace has each token once, and replaying it gives the same."""
    params = [dataclasses.replace(each, prompt_logprobs=None, deterministic=True) for each in PARAMS]
    llm = engine(TWO_LAYERS, **VERIFIED, capture_routing=True)
    expected = run(llm, EVERY, params)
    trace = llm.routing_capture()
    places = set(zip(trace.request.tolist(), trace.position.tolist(), strict=True))
    assert (
        len(places)
        == len(trace.position)
        == sum(len(prompt) + each.max_tokens - 1 for prompt, each in zip(PROMPTS, params, strict=True))
    )
    llm.replay_routing(trace)
    assert run(llm, EVERY, params) == expected


@pytest.mark.slow
def test_gpu_kernels() -> None:
    params = [dataclasses.replace(each, max_tokens=5, deterministic=True) for each in PARAMS]
    options: dict[str, Any] = {"kernels": "pallas_triton", "moe": MoeConfig(), "block_size": 8}
    expected = run(engine(TWO_LAYERS, **options), EVERY[:4], params)
    assert run(engine(TWO_LAYERS, **options, **VERIFIED, max_num_seqs=3), EVERY[:4], params) == expected


@pytest.mark.multidevice
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "ep": 2, "attention": "data"}], ids=str)
@pytest.mark.slow
def test_on_meshes(layout: dict[str, Any]) -> None:
    parallel = ParallelConfig(**layout)
    expected = asked(run(engine(EIGHT_WAY, parallel=parallel), EVERY))
    other = engine(EIGHT_WAY, parallel=parallel, **VERIFIED, max_num_batched_tokens=12)
    assert asked(run(other, EVERY[::-1], asking(PARAMS))) == expected


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up() -> None:
    llm = engine(TWO_LAYERS, **VERIFIED, strict_compile=True, verified_share=0.5)
    llm.warmup(max_total_len=48, sampling_params=PARAMS)
    run(llm, EVERY)
    assert llm.stats()["recompiles_after_warmup"] == 0 and llm.stats()["drafted"]


def test_who_asks() -> None:
    builder = engine(ONE_LAYER, **VERIFIED, verified_share=0.25).builder
    open_ones = [SamplingParams() for _ in range(8)]
    named = [SamplingParams(deterministic=False), SamplingParams(deterministic=True)]
    requests = builder.to_generate([[1, 2]] * 10, [*named, *open_ones])
    assert [r.sequences[0].verified for r in requests] == [False, True, *[False, False, False, True] * 2]
    plain = engine(ONE_LAYER, deterministic="none").builder
    with pytest.raises(RequestError, match=r"engine\.deterministic=none does not promise") as told:
        plain.to_generate([[1, 2]], named[1])
    assert "\n" not in str(told.value)
    assert not plain.to_generate([[1, 2]], named[0])[0].sequences[0].verified


@pytest.mark.parametrize(
    ("options", "parallel", "model", "words"),
    [
        ({"batching": "static"}, None, TWO_LAYERS, "engine.batching=static"),
        ({}, None, TWO_LAYERS.replace(**LINEAR), "linear attention"),
        (
            {"speculation": SpeculationConfig(method="ngram", k=2)},
            None,
            TWO_LAYERS,
            "method=ngram: it drafts",
        ),
        ({}, ParallelConfig(pp=2), TWO_LAYERS, "parallel.pp=2"),
    ],
)
def test_refusals(options: dict[str, Any], parallel: Any, model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="deterministic=verified does not go with") as told:
        engine(model, parallel=parallel, **VERIFIED | options)
    assert words in str(told.value) and "\n" not in str(told.value)
