"""With speculative decoding the engine gives the tokens that it gives without, whatever is drafted."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from moejax import (
    LLM,
    EngineConfig,
    MoeConfig,
    ParallelConfig,
    QuantConfig,
    SamplingParams,
    SpeculationConfig,
)
from moejax.core.config import ModelConfig, PrefixCacheConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.api import RequestOutput
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step.sampler import common_mode
from tests.engine.mesh_models import ENGINE as MESH_ENGINE
from tests.engine.mesh_models import FAMILIES
from tests.engine.paged import SCARCE, TIGHT, assert_clean, greedy, prompt, tight, tokens
from tests.engine.tiny import (
    VOCAB,
    FullForward,
    log_softmax,
    main_config,
    small_config,
    windowed_config,
    write_model,
)
from tests.engine.traces import computed, experts, places
from tests.examples import slow_but
from tests.model_shapes import LATENT, SINKS

PROMPTS = [prompt(n) for n in (11, 3, 14, 1, 9, 6)]
STOPS = tuple(range(1, 60))
PARAMS = [
    greedy(14),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=15, temperature=0.8, seed=9, min_tokens=6, stop_token_ids=STOPS),
    greedy(16, logit_bias={5: 2.0, 7: -3.0}),
    SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=4, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=1.0, seed=11, top_k=20, ignore_eos=True),
]


def speculating(config: EngineConfig, method: Any = "ngram", **fields: Any) -> EngineConfig:
    return dataclasses.replace(config, speculation=SpeculationConfig(method=method, **{"k": 3} | fields))


class Known:
    """Drafts what plain decoding gave, each token with a probability, and some other otherwise."""

    def __init__(self, outs: list[RequestOutput], params: list[SamplingParams], right: float = 0.7) -> None:
        self.right, self.chance = right, random.Random(1)
        self.outputs = {
            (tuple(out.prompt_token_ids), (each.seed or 0) + i): out.prompt_token_ids + sample.token_ids
            for out, each in zip(outs, params, strict=True)
            for i, sample in enumerate(out.outputs)
        }

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        prompt = tuple(sequence.tokens[: sequence.prompt_len])
        seed = sequence.seed if (prompt, sequence.seed) in self.outputs else 0
        follow = self.outputs[prompt, seed][len(sequence.tokens) :][:most]
        follow += [0] * (most - len(follow))  # past an end that a stop token brought
        return [t if self.chance.random() < self.right else (t + 1) % VOCAB for t in follow]

    def ended(self, sequence: Sequence) -> None: ...


def told(llm: LLM, proposer: Any) -> LLM:
    """The same engine with another proposer in all of its groups."""
    for part in llm.engine._parts:
        assert part.speculation is not None
        part.speculation.proposer = proposer
    return llm


def one_kind(llm: LLM, params: list[SamplingParams]) -> LLM:
    """The same engine, whose steps all do what any of the requests needs: few programs."""
    modes = [llm.builder.mode(each, llm.builder.biases(each)) for each in params]
    for runner in filter(None, (llm.runner, llm.runner.drafter)):
        runner.builder.warm_modes, runner.builder.warm_owners = [common_mode(modes)], [2, 16]
    return llm


def check_equal(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    assert tokens(got) == tokens(want)
    for mine, other in zip(got, want, strict=True):
        for a, b in zip(mine.outputs, other.outputs, strict=True):
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
            for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert abs(x.logprob - y.logprob) < 1e-4 and x.rank == y.rank


PREFIXED = dataclasses.replace(SCARCE, prefix_cache=PrefixCacheConfig(enabled=True, place="device"))
STORED = dataclasses.replace(PREFIXED, prefix_cache=PrefixCacheConfig(enabled=True, place="host"))
WINDOWS = main_config(**SINKS, sliding_windows=(5, None), num_kv_heads=4, intermediate_size=16)

CASES: dict[str, tuple[ModelConfig, EngineConfig, str, dict[str, Any]]] = {
    "chunked": (small_config(), TIGHT, "auto", {}),
    "plain_loop": (small_config(), tight(overlap=False), "auto", {}),
    "preempting": (small_config(), SCARCE, "auto", {}),
    "swapping": (small_config(), dataclasses.replace(SCARCE, preemption="swap"), "auto", {}),
    "prefixes": (small_config(), PREFIXED, "auto", {}),
    "prefixes_on_host": (small_config(), STORED, "auto", {}),
    "int8_cache": (small_config(), SCARCE, "int8", {}),
    "windows_and_sinks": (WINDOWS, SCARCE, "auto", {}),
    "latent": (main_config(**LATENT, moe_layers=(False, True)), SCARCE, "auto", {}),
    "two_layers": (main_config(), SCARCE, "auto", {}),
    "kernels": (
        small_config(),
        dataclasses.replace(TIGHT, kernels="pallas_triton", block_size=8),
        "auto",
        {},
    ),
    "pipeline": (FAMILIES["qwen3_moe"], MESH_ENGINE, "auto", {"pp": 3, "microbatches": 3}),
    "groups": (FAMILIES["qwen3_moe"], MESH_ENGINE, "auto", {"ep": 2, "attention": "data"}),
    "tensor_expert": (FAMILIES["qwen3_moe"], MESH_ENGINE, "auto", {"ep": 2, "tp": 2}),
}


@pytest.fixture(scope="module")
def variants() -> Callable[[str], tuple[LLM, LLM]]:
    kept: dict[str, tuple[LLM, LLM]] = {}

    def pair(name: str) -> tuple[LLM, LLM]:
        """An engine without drafts and one with, over the same weights."""
        if name not in kept:
            model, engine, cache, layout = CASES[name]
            quant = QuantConfig(kv_cache=cache)  # type: ignore[arg-type]
            parallel = ParallelConfig(**layout)
            plain = LLM(model, load_format="dummy", engine=engine, quant=quant, parallel=parallel)
            kept[name] = plain, plain.variant(speculating(engine))
        return kept[name]

    return pair


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "name",
    slow_but(["preempting"], list(CASES)),
)
def test_tokens_are_those_without_drafts(name: str, variants: Any) -> None:
    plain, drafting = (one_kind(llm, PARAMS) for llm in variants(name))
    vocab = plain.config.vocab_size
    asked = [[token % vocab for token in ids] for ids in PROMPTS]
    want = plain.generate(asked, PARAMS)
    told(drafting, Known(want, PARAMS))
    check_equal(drafting.generate(asked, PARAMS), want)
    stats = drafting.stats()
    assert 0 < stats["accepted"] < stats["drafted"] and stats["steps"] < plain.stats()["steps"]
    assert (stats["preemptions"] > 0) == (CASES[name][1].num_blocks == SCARCE.num_blocks)
    for part in drafting.engine._parts:
        part.check_integrity()
        assert part.idle and part.allocator.num_used == 0


class Hashed:
    """Drafts tokens that seem random, and always the same after the same: some are likely, some are not."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return [hash((i, *sequence.tokens)) % 8 for i in range(most)]

    def ended(self, sequence: Sequence) -> None: ...


ENDLESS = [each for each in PARAMS if not each.stop_token_ids]
OTHERS = {VOCAB: windowed_config(), 97: FAMILIES["glm4_moe"]}
BY_MODELS = [
    (method, name, same)
    for method in ("self_experts", "self_layers", "draft")
    for name, (model, *_) in CASES.items()
    for same in (True, False)
    if name != "pipeline" and (same or (method, model.num_layers) != ("self_layers", 1))
]


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("method", "name", "same"),
    slow_but([("draft", "preempting", True)], BY_MODELS),
)
def test_a_model_that_drafts_as_it_verifies_is_always_right(
    method: Any, name: str, same: bool, variants: Any, tmp_path: Path
) -> None:
    """So that its drafts find in the cache what they should, wherever their sequence has been before; and
    what another model drafts, or a part of it, changes no token."""
    plain, _ = variants(name)
    model, engine = plain.config, CASES[name][1]
    asked = [[token % model.vocab_size for token in ids] for ids in PROMPTS[: len(ENDLESS)]]
    want = one_kind(plain, ENDLESS).generate(asked, ENDLESS)
    fields: dict[str, Any] = {"experts": model.num_experts_per_tok, "layers": model.num_layers}
    fields = {field: count if same else count - 1 or None for field, count in fields.items()}
    fields["draft"] = write_model(tmp_path, model if same else OTHERS[model.vocab_size], tokenizer=False)
    drafting = one_kind(plain.variant(speculating(engine, method, **fields)), ENDLESS)
    check_equal(drafting.generate(asked, ENDLESS), want)
    stats = drafting.stats()
    assert stats["drafted"] > 20 and (stats["accepted"] == stats["drafted"]) == same
    assert (stats["preemptions"] > 0) == (engine.num_blocks == SCARCE.num_blocks)
    for part in drafting.engine._parts:
        part.check_integrity()
        assert part.idle and part.allocator.num_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "self_experts"])
def test_by_rejection_tokens_follow_the_model(method: str) -> None:
    """Two tokens' frequencies against their probabilities, enumerated over the one before them."""
    asked, params = [3, 1, 4], SamplingParams(max_tokens=4, top_k=6, n=32, ignore_eos=True, logprobs=0)
    engine = tight(max_num_seqs=32, max_num_batched_tokens=96, num_blocks=64, seq_buckets=[96])
    engine = speculating(dataclasses.replace(engine, block_buckets=[64]), method, k=2, acceptance="rejection")
    llm = LLM(small_config(vocab_size=8, eos_token_ids=()), load_format="dummy", engine=engine)
    many = [dataclasses.replace(params, seed=1000 * i) for i in range(48)]
    one_kind(llm, many[:1]).runner.builder.warm_owners = [128]
    if method == "ngram":
        told(llm, Hashed())
    outs = llm.generate([asked] * len(many), many)
    forward, want = FullForward(llm.model, 8), np.zeros((8, 8))

    def law(*after: int) -> np.ndarray:
        logits = forward.logits([*asked, *after])[-1].astype(np.float64)
        p = np.exp(logits) * (logits >= np.sort(logits)[-6])
        return p / p.sum()

    for first, p in enumerate(law()):
        for second, q in enumerate(law(first)):
            want[second] += p * q * law(first, second)
    samples = [sample for out in outs for sample in out.outputs]
    got = np.zeros((8, 8))
    for sample in samples:
        got[sample.token_ids[1], sample.token_ids[2]] += 1
    possible = want > 0
    assert not got[~possible].any()
    assert stats.chisquare(got[possible], len(samples) * want[possible]).pvalue > 1e-3
    # What is told of tokens is what the model gives them, and a sixth of random drafts are kept.
    logits = forward.logits([*asked, *samples[0].token_ids])[2:6]
    mine = [log_softmax(row)[token] for row, token in zip(logits, samples[0].token_ids, strict=True)]
    np.testing.assert_allclose([x.logprob for x in samples[0].logprobs or []], mine, atol=1e-4)
    counts = llm.stats()
    assert (0.05 if method == "ngram" else 0.15) < counts["accepted"] / counts["drafted"] < 0.35


def test_by_rejection_no_request_can_be_moved() -> None:
    """What it samples depends on what was drafted for it here; a greedy one's tokens are as ever."""
    rejecting = speculating(TIGHT, acceptance="rejection")
    llm = LLM(small_config(), load_format="dummy", engine=rejecting)
    plain = llm.variant(TIGHT)
    want = plain.generate(PROMPTS[:2], greedy(12))
    check_equal(told(llm, Known(want, [greedy(12)] * 2)).generate(PROMPTS[:2], greedy(12)), want)
    with pytest.raises(RequestError, match="acceptance=rejection"):
        llm.interrupt("0")


def test_an_ngram_is_kept_where_text_repeats_itself(variants: Any) -> None:
    plain, _ = variants("chunked")
    drafting, params = plain.variant(speculating(TIGHT)), greedy(20, logit_bias={5: 100.0})
    check_equal(drafting.generate(PROMPTS[:2], params), plain.generate(PROMPTS[:2], params))
    # A token that is sampled on and on: once three stand there, three more are drafted, and kept.
    assert drafting.stats()["accepted"] == drafting.stats()["drafted"] > 20


def test_a_suffix_remembers_what_was_put_out(variants: Any) -> None:
    plain, _ = variants("chunked")
    drafting, params = plain.variant(speculating(tight(overlap=False), "suffix")), greedy(16)
    want = plain.generate(PROMPTS[:2], params)
    check_equal(drafting.generate(PROMPTS[:2], params), want)
    before = drafting.stats()
    check_equal(drafting.generate(PROMPTS[:2], params), want)
    assert drafting.stats()["accepted"] - before["accepted"] >= 16
    assert drafting.stats()["steps"] - before["steps"] < before["steps"] - 5


@pytest.mark.parametrize("name", slow_but([], ["chunked", "plain_loop", "swapping", "groups"]))
def test_tokens_are_the_same_however_deep_utility_drafts(name: str, variants: Any) -> None:
    """Durations at random have it begin and end to draft, and draft more and less, all the time."""
    plain, _ = variants(name)
    asked = [[token % plain.config.vocab_size for token in ids] for ids in PROMPTS] * 2
    params = [dataclasses.replace(each, max_tokens=24) for each in PARAMS] * 2
    drafting = plain.variant(speculating(CASES[name][1], depth="utility"))
    want = one_kind(plain, PARAMS).generate(asked, params)
    told(one_kind(drafting, PARAMS), Known(want, params, 0.8))
    times, pace, drafts = drafting.engine.times, random.Random(2), list[bool]()
    assert times is not None
    observe = times.observe

    def at_random(rows: int, drafting: bool, seconds: float) -> None:
        drafts.append(drafting)
        observe(rows, drafting, pace.uniform(1, 4))

    times.observe = at_random  # type: ignore[method-assign]
    check_equal(drafting.generate(asked, params), want)
    assert {True, False} <= set(drafts) and drafting.stats()["accepted"] > 0
    for part in drafting.engine._parts:
        assert part.idle and part.allocator.num_used == 0


@pytest.mark.parametrize(
    ("n", "method"),
    slow_but([(1, "ngram")], itertools.product([1, 2], ["ngram", "self_experts", "draft"])),
)
def test_a_warm_up_compiles_what_drafts_need(n: int, method: str, variants: Any, tmp_path: Path) -> None:
    plain, _ = variants("chunked")
    engine = tight(max_num_batched_tokens=16, strict_compile=True, seq_buckets=None, token_buckets=None)
    params = [greedy(12, n=n)] * 4
    want = plain.generate(PROMPTS[:4], params)
    folder = write_model(tmp_path / "draft", windowed_config(), tokenizer=False)
    drafting = plain.variant(speculating(engine, method, draft=folder))
    if method == "ngram":
        told(drafting, Known(want, params, 0.6))
    drafting.warmup(max_total_len=32, sampling_params=params)
    check_equal(drafting.generate(PROMPTS[:4], params), want)  # a step that is not compiled would fail
    assert drafting.stats()["drafted"] > 0 and (method == "draft" or drafting.stats()["accepted"] > 0)


@pytest.mark.slow
def test_words_of_several_tokens_are_not_drafted_past(llm: LLM) -> None:
    """The device compares the newest token alone with what must stand before one that is forbidden."""
    text = llm.generate([prompt(6)], greedy(16))[0].outputs[0].text
    params = greedy(16, bad_words=(text[2:5], text[6:7]), min_tokens=4, ignore_eos=False)
    drafting = llm.variant(speculating(llm.engine_config, "self_experts"))
    for each, drafts in ((params, False), (dataclasses.replace(params, bad_words=()), True)):
        check_equal(drafting.generate([prompt(6)], each), llm.generate([prompt(6)], each))
        assert (drafting.stats()["drafted"] > 0) == drafts


@pytest.mark.slow
def test_stop_strings_end_within_drafts(llm: LLM) -> None:
    """Whichever of its tokens completes a string, nothing of what was kept after that is put out."""
    engine = dataclasses.replace(llm.engine_config, max_num_seqs=8)
    drafting, asked = llm.variant(speculating(engine)), [prompt(6), prompt(9)]
    whole = llm.generate(asked, greedy(16))
    text = [out.outputs[0].text for out in whole]
    params = [greedy(16, stop=tuple(part for part in (t[3:5], t[9:12]) if part)) for t in text]
    params[1] = dataclasses.replace(params[1], min_tokens=4, n=2, temperature=0.7, seed=2)
    want = llm.generate(asked, params)
    told(
        drafting,
        Known([whole[0], llm.generate(asked, dataclasses.replace(params[1], stop=()))[1]], params, 1.0),
    )
    got = drafting.generate(asked, params)
    check_equal(got, want)
    assert [s.text for out in got for s in out.outputs] == [s.text for out in want for s in out.outputs]
    assert "stop" in [s.finish_reason for out in got for s in out.outputs]
    assert drafting.stats()["accepted"] > 0
    assert_clean(drafting)


@pytest.mark.parametrize(
    ("name", "method"),
    slow_but(
        [],
        [*itertools.product(["chunked", "prefixes"], ["ngram", "self_experts"]), ("pipeline", "ngram")],
    ),
)
def test_captured_routing_is_that_without_drafts(
    name: str, method: str, variants: Any, tmp_path: Path
) -> None:
    """A wrong draft's token is in no trace, and a replayed trace gives its tokens with drafts, too."""
    plain, _ = variants(name)
    engine = dataclasses.replace(CASES[name][1], overlap=False)
    vocab = plain.config.vocab_size
    asked = [[token % vocab for token in ids] for ids in PROMPTS]
    params = [greedy(10, n=1), *[greedy(10)] * (len(asked) - 1)]
    capturing = plain.variant(dataclasses.replace(engine, capture_routing=True))
    want = capturing.generate(asked, params)

    def drafter(**fields: Any) -> LLM:
        llm = plain.variant(speculating(dataclasses.replace(engine, **fields), method))
        return told(llm, Known(want, params, 0.6)) if method == "ngram" else llm

    drafting = drafter(capture_routing=True)
    got = drafting.generate(asked, params)
    trace, plain_trace = drafting.routing_capture(), capturing.routing_capture()
    assert tokens(got) == tokens(want) and drafting.stats()["accepted"] < drafting.stats()["drafted"]
    assert set(places(trace)) == computed(got) and experts(trace) == experts(plain_trace)
    if not drafting.stats()["preemptions"]:  # what is computed again is in a trace again
        assert len(places(trace)) == len(places(plain_trace))
    if name == "chunked":
        trace.save(path := tmp_path / "routing.npz")
        assert tokens(drafter(replay_routing=str(path)).generate(asked, params)) == tokens(want)


def test_an_abort_with_drafts_in_flight_leaves_nothing(variants: Any) -> None:
    plain, drafting = variants("chunked")
    params = [greedy(20)] * 3
    want = plain.generate(PROMPTS[:3], params)
    told(drafting, Known(want, params, 1.0))
    outs = [drafting.submit(ids, each) for ids, each in zip(PROMPTS[:3], params, strict=True)]
    while not any(plan.drafts for plan in getattr(drafting.engine._in_flight, "plan", Nothing).groups):
        drafting.step()
    drafting.abort(outs[1].request_id)
    while drafting.step():
        pass
    assert outs[1].outputs[0].finish_reason == "abort"
    for out, other in zip(outs, want, strict=True):
        ids = out.outputs[0].token_ids
        assert ids == other.outputs[0].token_ids[: len(ids) if out is outs[1] else None]
    assert_clean(drafting)


class Nothing:
    groups: tuple[Any, ...] = ()


REFUSED: dict[str, tuple[Any, str]] = {
    "static": (lambda: speculating(tight(batching="static")), "does not go with engine.batching=static"),
    "no drafts": (lambda: SpeculationConfig(method="ngram", k=0), "engine.speculation.k must be"),
    "unknown": (lambda: SpeculationConfig(method="eagle"), "engine.speculation.method"),
    "ngrams": (lambda: SpeculationConfig(max_ngram=1), "max_ngram=1 is below min_ngram=2"),
    "no draft": (
        lambda: SpeculationConfig(method="draft"),
        "needs a model; name its folder, or a shipped one",
    ),
    "draft": (
        lambda: LLM(small_config(), load_format="dummy", engine=speculating(TIGHT, "draft", draft="nowhere")),
        "engine.speculation.draft: model.path: unknown model 'nowhere'",
    ),
    "vocabulary": (
        lambda: LLM(small_config(), load_format="dummy", engine=speculating(TIGHT, "draft", draft="tiny")),
        "engine.speculation.draft=tiny has a vocabulary of 2048 tokens, and the model one of 320",
    ),
    "stages": (
        lambda: LLM(
            FAMILIES["qwen3_moe"],
            load_format="dummy",
            engine=speculating(MESH_ENGINE, "self_layers"),
            parallel=ParallelConfig(pp=2),
        ),
        "does not go with parallel.pp=2, whose stages would draft one after another",
    ),
    "experts": (
        lambda: LLM(
            small_config(), load_format="dummy", engine=speculating(TIGHT, "self_experts", experts=9)
        ),
        "engine.speculation.experts=9: a token of the model goes through 2 experts; lower it",
    ),
    "layers": (
        lambda: LLM(small_config(), load_format="dummy", engine=speculating(TIGHT, "self_layers", layers=2)),
        "engine.speculation.layers=2: a token of the model goes through 1 layers; lower it",
    ),
    "linear": (
        lambda: LLM(FAMILIES["minimax"], load_format="dummy", engine=speculating(MESH_ENGINE)),
        "engine.speculation.method=ngram does not go with linear attention",
    ),
    "capacity": (
        lambda: LLM(
            small_config(),
            load_format="dummy",
            engine=speculating(tight(moe=MoeConfig(execution="capacity"))),
        ),
        "does not go with engine.moe.execution=capacity",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_one_line(name: str) -> None:
    make, says = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value) and "\n" not in str(caught.value)
