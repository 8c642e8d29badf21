"""`engine.kv_policy`: an engine that evicts gives what a forward pass over all keys gives under its mask."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, ParallelConfig, PrefixCacheConfig, QuantConfig, SamplingParams
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.scheduling import KvPolicyConfig, SpeculationConfig
from moejax.engine.scheduling.eviction import check_kv_policy
from moejax.engine.scheduling.sequence import Sequence
from tests.engine.mesh_models import ENGINE as MESH_ENGINE
from tests.engine.mesh_models import FAMILIES
from tests.engine.paged import assert_clean, greedy, prompt, tight, tokens
from tests.engine.tiny import VOCAB, main_config
from tests.examples import slow_but
from tests.model_shapes import LATENT, LINEAR, SINKS
from tests.numerics import tolerance
from tests.plain.evicted import Masked

MODELS = {
    "gqa": main_config(),
    "latents": main_config(**LATENT),
    "windows_with_sinks": main_config(**SINKS, sliding_windows=(5, None)),
}
SNAP = KvPolicyConfig("snapkv", sinks=2, recent=5, budget=16, observe=9)
METHODS = ("window", "h2o", "snapkv")
LENGTHS = (3, 11, 1, 22, 30)
SIZE = 4
# Of log-probabilities, which go down to about -20, after two layers.
LIMIT = 20 * tolerance(*[32, 16, 32, 32, 16, 2] * 2, 32)


def engine(method: str, **changes: Any) -> EngineConfig:
    given = {"sinks": 2, "recent": 5, "budget": 16, "observe": 6} | changes.pop("policy", {})
    sizes = {"max_model_len": 64, "num_blocks": 64, "block_buckets": [64]} | changes
    return tight(kv_policy=KvPolicyConfig(method=method, **given), **sizes)  # type: ignore[arg-type]


def watched(llm: LLM) -> list[Sequence]:
    """The sequences that will be queued, as they are."""
    sequences: list[Sequence] = []
    add = llm.engine.scheduler.add

    def noting(sequence: Sequence, group: int | None = None) -> None:
        sequences.extend((sequence, *sequence.forks))
        add(sequence, group)

    llm.engine.scheduler.add = noting  # type: ignore[method-assign]
    return sequences


@pytest.fixture(scope="module", params=slow_but(["gqa"], list(MODELS)))
def llm(request: Any) -> LLM:
    return LLM(MODELS[request.param], load_format="dummy", engine=engine("none"))


@pytest.mark.parametrize("method", slow_but(["h2o"], list(METHODS)))
def test_the_masked_twin(method: str, llm: LLM) -> None:
    """Log-probabilities of every sampled token, and of h2o and snapkv the blocks that were evicted and when;
    with several samples, chunks beside decodes, and preemptions."""
    evicting = llm.variant(engine(method, num_blocks=13, block_buckets=[13]))
    sequences, prompts = watched(evicting), [prompt(n) for n in LENGTHS]
    params = SamplingParams(n=2, seed=3, temperature=1.0, max_tokens=20, ignore_eos=True, logprobs=0)
    outs = evicting.generate(prompts, params)
    twin = Masked(llm.model, evicting.engine_config.kv_policy, SIZE, 64)
    by_tokens = {tuple(s.tokens): s for s in sequences}
    evicted = 0
    for given, out in zip(prompts, outs, strict=True):
        for sample in out.outputs:
            ids = given + sample.token_ids
            logprobs, last = twin(ids, len(given))
            want = logprobs[len(given) - 1 : -1][np.arange(20), sample.token_ids]
            assert np.abs([x.logprob for x in sample.logprobs or []] - want).max() < LIMIT
            if method != "window":
                kept = by_tokens[tuple(ids)].kept
                told = [query if query < len(ids) - 2 else 2**31 - 1 for query in kept.last_query]
                assert told == last[: len(told)]
                evicted += sum(query < len(ids) for query in last)
    assert method == "window" or evicted >= 4
    assert evicting.stats()["preemptions"] > 0 or method == "window"  # which holds little
    assert_clean(evicting)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_loop_and_the_chunks_do_not_matter(method: str, llm: LLM) -> None:
    prompts = [prompt(n) for n in LENGTHS]
    whole = llm.variant(engine(method))
    plain = llm.variant(engine(method, overlap=False, max_num_batched_tokens=64, token_buckets=[64]))
    assert tokens(whole.generate(prompts, greedy(20))) == tokens(plain.generate(prompts, greedy(20)))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_budget_for_all_evicts_nothing(method: str, llm: LLM) -> None:
    prompts, asked = [prompt(n) for n in LENGTHS], greedy(9, logprobs=0)
    both = [
        llm.variant(engine(name, policy={"recent": 50, "budget": 128})).generate(prompts, asked)
        for name in ("none", method)
    ]
    assert tokens(both[0]) == tokens(both[1])
    told = [[x.logprob for out in outs for x in out.outputs[0].logprobs or []] for outs in both]
    assert np.array_equal(*told)


@pytest.mark.slow
def test_memory_falls(llm: LLM) -> None:
    """After the prompt as many blocks are held as the policy keeps, and all are free at the end."""
    held = {}
    for method in METHODS:
        other, used = llm.variant(engine(method)), []
        other.engine.on_step = lambda record, used=used: used.append(record.used_blocks)
        other.generate([prompt(30)], greedy(20))
        assert_clean(other)
        held[method] = used[-1]
        assert used[0] == 8  # the prompt's
    assert held == {"window": 1 + 2, "h2o": 4, "snapkv": 4 + 13 - 8}


@pytest.mark.slow
def test_scores_heed_windows_alone(llm: LLM) -> None:
    """A prompt that is scored is masked by "window", and by the others not at all."""
    ids = prompt(40)
    full, window, h2o = (llm.variant(engine(m)).score([ids])[0] for m in ("none", "window", "h2o"))
    want, _ = Masked(llm.model, engine("window").kv_policy, SIZE, 64)(ids, 40)
    assert np.abs(window - want[:-1][np.arange(39), ids[1:]]).max() < LIMIT
    assert np.abs(h2o - full).max() < LIMIT < np.abs(window - full).max()


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["int8", "int4"])
@pytest.mark.parametrize("method", METHODS)
def test_codes_and_captured_routing(method: str, codes: Any) -> None:
    """A cache of codes under a budget for all; and routing is captured of every token once."""
    quant = QuantConfig(kv_cache=codes)
    one = LLM(MODELS["gqa"], load_format="dummy", engine=engine("none"), quant=quant)
    prompts = [prompt(n) for n in LENGTHS]
    roomy = one.variant(engine(method, policy={"recent": 50, "budget": 128}))
    assert tokens(roomy.generate(prompts, greedy(9))) == tokens(one.generate(prompts, greedy(9)))
    capturing = one.variant(engine(method, capture_routing=True))
    plain = one.variant(engine(method, overlap=False))
    assert tokens(capturing.generate(prompts, greedy(20))) == tokens(plain.generate(prompts, greedy(20)))
    rows = capturing.routing_capture()
    assert {(r, p) for r, p in zip(rows.request, rows.position, strict=True)} >= {
        (i, p) for i, n in enumerate(LENGTHS) for p in range(n + 19)
    }


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("window", {"pp": 2, "ep": 4}),
        ("window", {"ep": 4, "tp": 2, "attention": "data"}),
        ("snapkv", {"ep": 4, "tp": 2, "attention": "data"}),
        ("snapkv", {"tp": 2}),
    ],
    ids=str,
)
def test_on_meshes(method: Any, layout: dict[str, Any]) -> None:
    """Every data group evicts for itself; a chunk's parts are in several microbatches."""
    config = FAMILIES["gpt_oss"].replace(vocab_size=VOCAB)
    policy = KvPolicyConfig(
        method=method, sinks=2, recent=7 if method == "window" else 2, budget=16, observe=5
    )
    changes = {"max_num_batched_tokens": 8, "token_buckets": [8], "kv_policy": policy, "block_size": 4}
    given = dataclasses.replace(MESH_ENGINE, **changes)
    asked = [prompt(13), prompt(2), prompt(21), prompt(1)]
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=6, ignore_eos=True)
    one = LLM(config, load_format="dummy", engine=given)
    mesh = LLM(config, load_format="dummy", engine=given, parallel=ParallelConfig(**layout))
    got = tokens(mesh.generate(asked, params))
    assert got == tokens(one.generate(asked, params))
    whole = one.variant(dataclasses.replace(given, kv_policy=KvPolicyConfig()))
    assert got != tokens(whole.generate(asked, params))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batching": "static"}, "engine.batching=static"),
        ({"prefix_cache": PrefixCacheConfig(enabled=True)}, "engine.prefix_cache.enabled=true"),
        ({"preemption": "swap"}, "engine.preemption=swap"),
        ({"speculation": SpeculationConfig(method="ngram")}, "engine.speculation.method=ngram"),
        ({"deterministic": "tiles"}, "engine.deterministic=tiles"),
        ({"kernels": "pallas_triton", "block_size": 8}, "engine.kernels=pallas_triton"),
        ({"policy": {"budget": 12}}, "engine.kv_policy.budget=12: blocks of 4 tokens"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kv_policy.method=h2o does not go with {message}")):
        LLM(MODELS["gqa"], load_format="dummy", engine=engine("h2o", **changes))


@pytest.mark.parametrize(
    ("model", "changes", "parallel", "message"),
    [
        ("windows_with_sinks", {"window_cache": "full"}, {}, "engine.window_cache=full: layers with a"),
        ("gqa", {"kv_policy": KvPolicyConfig("h2o")}, {"ep": 2}, "a layout of several devices"),
        ("gqa", {"kv_policy": SNAP}, {"pp": 2}, "parallel.pp=2, which cuts chunks"),
        ("latents", {"kv_policy": SNAP}, {"tp": 2}, "key heads that several devices share"),
        ("gqa", {"kv_policy": SNAP}, {}, "engine.max_num_batched_tokens=8: a chunk must hold the 9"),
        (main_config(sliding_windows=(5, 5)), {}, {}, "a model whose layers all have sliding windows"),
        (main_config(**LINEAR | {"linear_layers": (True, True)}), {}, {}, "a model whose layers all have"),
    ],
)
def test_models_and_layouts_that_are_refused(
    model: str | ModelConfig, changes: dict[str, Any], parallel: dict[str, int], message: str
) -> None:
    config = MODELS[model] if isinstance(model, str) else model
    asked = dataclasses.replace(engine("window"), **changes)
    window = None if changes else 5
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_kv_policy(asked, ParallelConfig(**parallel), config, "xla", window)
