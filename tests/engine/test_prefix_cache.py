"""An engine that remembers prefixes gives the tokens of one that computes every prompt whole."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, ModelConfig, ParallelConfig, QuantConfig, RequestOptions, SamplingParams
from moejax.cache.pool import block_bytes
from moejax.core.config import PrefixCacheConfig, RopeConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.scheduling import SchedulingConfig, Tenant
from tests.engine.mesh_models import FAMILIES
from tests.engine.tiny import small_config
from tests.examples import slow_but

# Memory for some of the requests at a time, so that they are preempted, and prompts in chunks.
ENGINE = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=24,
    num_blocks=24,
    block_size=4,
    max_model_len=64,
    seq_buckets=[4],
    block_buckets=[24],
)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=7, temperature=1.0, seed=3, n=2, ignore_eos=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "dp2": {"dp": 2},
    "ep2_data": {"ep": 2, "attention": "data"},
    "pp2_tp2": {"pp": 2, "tp": 2},
    "dp2_ep2_tp2": {"dp": 2, "ep": 2, "tp": 2},
}


def remembering(engine: EngineConfig = ENGINE, **options: Any) -> EngineConfig:
    return dataclasses.replace(engine, prefix_cache=PrefixCacheConfig(enabled=True, **options))


def workload(vocab: int) -> list[list[list[int]]]:
    """Rounds of prompts: a system prompt with users', one of which ends within a block; the same again, some
    longer; and what has nothing in common."""
    rng = np.random.default_rng(7)
    draw = lambda count: rng.integers(2, vocab - 2, count).tolist()  # noqa: E731
    system, users = draw(21), [draw(n) for n in (5, 9, 1, 14)]
    first = [system + user for user in users]
    return [first, [first[3], first[1] + draw(6), system[:10], draw(13), system + draw(4), *first[:2]]]


def outcome(llm: LLM, rounds: list[list[list[int]]], sampled: bool = True) -> list[list[list[int]]]:
    """Tokens of every sample of every round. In between one prompt alone is sampled several times."""
    got = []
    for prompts in rounds:
        params = [SAMPLED if sampled and i % 3 == 1 else GREEDY for i in range(len(prompts))]
        got += [[sample.token_ids for sample in out.outputs] for out in llm.generate(prompts, params)]
        again = llm.generate(prompts[:1], SAMPLED) if sampled else []
        got += [[sample.token_ids for sample in out.outputs] for out in again]
        llm.engine.scheduler.check_integrity()
        assert llm.stats()["used_blocks"] == 0
    return got


def dummy(
    config: ModelConfig, quant: QuantConfig | None = None, **parallel: Any
) -> Callable[[EngineConfig], LLM]:
    return lambda engine: LLM(
        config, load_format="dummy", engine=engine, quant=quant, parallel=ParallelConfig(**parallel)
    )


@pytest.fixture(scope="module")
def computed_whole() -> list[list[list[int]]]:
    """What an engine of one layer without a memory gives."""
    plain = dummy(small_config())(ENGINE)
    found = outcome(plain, workload(plain.config.vocab_size))
    assert "prefix_hit_rate" not in plain.stats()
    return found


@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"place": "device"}],
        [
            {"place": place, "match": match, "policy": policy}
            for place in ("host", "device")
            for match in ("tokens", "blocks")
            for policy in ("lru", "lfu", "slru", "fifo", "size")
        ]
        + [{"place": "host"}, {"place": "device"}],
    ),
)
def test_same_tokens(options: dict[str, Any], computed_whole: list[list[list[int]]]):
    llm = dummy(small_config())(remembering(**options))
    assert outcome(llm, workload(llm.config.vocab_size)) == computed_whole
    assert llm.stats()["prefix_hit_rate"] > 0.3
    tokens = llm.stats()["prefix_tokens"]
    place = options["place"]
    assert tokens[f"hit_tokens_{place}"] > 0
    assert ("hit_tokens_partial" in tokens) == (options.get("match", "tokens") == "tokens")


@pytest.mark.parametrize(
    ("family", "kv_cache", "place"),
    slow_but(
        [],
        [
            (f, kv, place)
            for f in FAMILIES
            for kv in ("auto", "int8", *["int4"] * (f == "qwen3_moe"))
            for place in ("host", "device")
            if f != "minimax"  # refused: linear attention
        ],
    ),
)
def test_every_kind_of_cache(family: str, kv_cache: Any, place: str):
    """Codes are kept bit for bit; where a prompt is cut into other chunks, a code may round otherwise."""
    quant = QuantConfig(kv_cache=kv_cache)
    plain, remembers = (
        dummy(FAMILIES[family], quant)(engine) for engine in (ENGINE, remembering(place=place))
    )
    rounds = workload(plain.config.vocab_size)
    a, b = (outcome(llm, rounds, sampled=False) for llm in (remembers, plain))
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert all(same) if kv_cache == "auto" else np.mean(same) > 0.8
    assert remembers.stats()["prefix_hit_rate"] > 0.3


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("layout", "family", "place"),
    slow_but(
        [],
        [
            (layout, family, place)
            for layout in LAYOUTS
            for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")
            for place in ("host", "device")
        ],
    ),
)
def test_same_tokens_on_meshes(layout: str, family: str, place: str):
    make = dummy(FAMILIES[family], **LAYOUTS[layout])
    plain, remembers = dummy(FAMILIES[family])(ENGINE), make(remembering(place=place))
    rounds = workload(plain.config.vocab_size)
    assert outcome(remembers, rounds) == outcome(plain, rounds)
    assert remembers.stats()["prefix_hit_rate"] > 0.3


@pytest.mark.slow
def test_gpu_kernels_find_prefixes_in_their_pages():
    engine = dataclasses.replace(ENGINE, kernels="pallas_triton", block_size=8, num_blocks=12)
    make = dummy(small_config(head_dim=8))
    plain, remembers = make(engine), make(remembering(engine))
    assert remembers.engine.scheduler.prefix_caches[0].config.place == "device"
    rounds = [prompts[:3] for prompts in workload(plain.config.vocab_size)[:2]]
    assert outcome(remembers, rounds) == outcome(plain, rounds)
    assert remembers.stats()["prefix_tokens"]["hit_tokens_device"] > 0


def test_metrics_and_reasons():
    llm = dummy(small_config())(remembering(place="host"))
    prompt = list(range(2, 32))
    outs = [llm.generate(prompt, GREEDY)[0].metrics.cached_tokens for _ in range(2)]
    assert outs == [0, 29]  # one token is left to be sampled from
    asked = [
        dataclasses.replace(GREEDY, repetition_penalty=1.2), dataclasses.replace(GREEDY, prompt_logprobs=1)
    ]  # fmt: skip
    assert [out.metrics.cached_tokens for out in llm.generate([prompt] * 2, asked)] == [0, 0]
    llm.score([prompt])
    assert llm.stats()["prefix_tokens"] == {
        "hit_tokens_host": 28, "hit_tokens_partial": 1, "misses: nothing stored": 1, "misses: penalties": 1,
        "misses: scores": 1, "misses: prompt_logprobs": 1, "prompt_tokens": 150,
    }  # fmt: skip
    assert llm.stats()["prefix_hit_rate"] == pytest.approx(29 / 150)
    llm.clear_prefix_cache()
    assert llm.stats()["prefix_blocks_kept"] == 0
    assert llm.generate(prompt, GREEDY)[0].metrics.cached_tokens == 0


@pytest.mark.parametrize("place", slow_but([], ["host", "device"]))
def test_a_warmed_up_engine_compiles_nothing_for_a_hit(place: str):
    """Nor where kept prefixes fill a cache that is larger than the requests at a time need."""
    engine = dataclasses.replace(remembering(place=place), strict_compile=True, num_blocks=90)
    llm = dummy(small_config())(
        dataclasses.replace(engine, max_num_seqs=1, seq_buckets=None, block_buckets=None)
    )
    llm.warmup(max_total_len=50, sampling_params=[GREEDY])
    rng = np.random.default_rng(2)
    for _ in range(12):
        llm.generate([list(range(2, 40)), rng.integers(2, 60, 30).tolist(), list(range(2, 30))], GREEDY)
    assert llm.stats()["recompiles_after_warmup"] == 0
    assert llm.stats()["prefix_hit_rate"] > 0.5


@pytest.mark.parametrize("place", slow_but(["host"], ["host", "device"]))
def test_a_pinned_prefix_outlives_the_others(place: str):
    size = block_bytes(small_config(), ENGINE.block_size, "float32")
    options: dict[str, Any] = {"place": place}
    if place == "host":
        options["host_memory_gb"] = 20 * size / 1e9
    llm = dummy(small_config())(remembering(**options))
    pinned = list(range(5, 25))
    assert llm.cache_prefix(pinned) == 20
    rng = np.random.default_rng(1)
    for _ in range(8):
        llm.generate(rng.integers(30, 60, 50).tolist(), GREEDY)
    assert llm.generate([*pinned, 3, 4], GREEDY)[0].metrics.cached_tokens == 20
    llm.engine.scheduler.check_integrity()
    with pytest.raises(ConfigError, match=r"prefix_cache\.enabled"):
        dummy(small_config())(ENGINE).cache_prefix(pinned)


@pytest.mark.parametrize("isolated", [False, True])
def test_tenants_find_their_own_alone(isolated: bool):
    """Where all do, or the one that asks for it; the others then share what is theirs."""
    engine = remembering(share="all" if isolated else "tenant")
    tenants = {"one": Tenant(isolated=isolated)}
    engine = dataclasses.replace(engine, scheduling=SchedulingConfig(tenants=tenants))
    llm, prompt = dummy(small_config())(engine), list(range(2, 32))
    one, other = RequestOptions(tenant="one"), RequestOptions(tenant="other")
    assert llm.cache_prefix(prompt[:20], one) == 20
    found = [llm.generate(prompt, GREEDY, options=who)[0].metrics.cached_tokens for who in (one, other, None)]
    assert found == [20, 0, 29 if isolated else 0]
    found = [llm.generate(prompt, GREEDY, options=who)[0].metrics.cached_tokens for who in (other, None)]
    assert found == [29, 29]


def test_what_was_not_used_for_long_is_not_found(monkeypatch: pytest.MonkeyPatch):
    llm = dummy(small_config())(remembering(place="host", max_age_s=60))
    prompt = list(range(2, 32))
    clock = [0.0]
    monkeypatch.setattr("moejax.cache.prefix.time.monotonic", lambda: clock[0])
    llm.generate(prompt, GREEDY)
    found = []
    for at in (50.0, 100.0, 161.0):
        clock[0] = at
        found.append(llm.generate(prompt, GREEDY)[0].metrics.cached_tokens)
    assert found == [29, 29, 0]


@pytest.mark.slow
def test_a_replayed_trace_finds_nothing(tmp_path: Path):
    engine = dataclasses.replace(remembering(place="host"), capture_routing=True)
    llm = dummy(small_config())(engine)
    prompt = list(range(2, 32))
    llm.generate(prompt, GREEDY)
    trace = llm.routing_capture()
    llm.replay_routing(trace)
    assert [llm.generate(prompt, GREEDY)[0].metrics.cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("engine", "model", "message"),
    [
        ({"batching": "static"}, {}, "batching=static"),
        ({"moe": MoeConfig(execution="capacity")}, {}, "execution=capacity"),
        ({}, {"rope": RopeConfig(kind="dynamic", factor=2.0)}, "dynamic rotary scaling"),
        ({"prefix_cache": PrefixCacheConfig(True, host_memory_gb=1e-7)}, {}, "does not hold one block"),
    ],
)
def test_mistakes(engine: dict[str, Any], model: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        dummy(small_config(**model))(dataclasses.replace(remembering(), **engine))
    assert "\n" not in str(error.value) and "engine.prefix_cache" in str(error.value)


def test_a_failed_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    llm = dummy(small_config())(remembering(place="host"))
    prompt = list(range(2, 32))
    want = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    run, calls = llm.runner._run, iter([False, True, *[False] * 99])

    def fails(*arguments: Any) -> Any:
        if next(calls):
            raise RuntimeError("on purpose")
        return run(*arguments)

    monkeypatch.setattr(llm.runner, "_run", fails)
    with pytest.raises(Exception, match="on purpose"):
        llm.generate(prompt, GREEDY)
    assert llm.stats()["prefix_blocks_kept"] == 0
    assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == want


@pytest.mark.parametrize("overlap", slow_but([True], [True, False]))
def test_the_host_reads_what_no_step_under_way_writes(overlap: bool, monkeypatch: pytest.MonkeyPatch):
    """By a program is copied what a step under way writes: the last block of what ends by a stop token."""
    prompts = [np.random.default_rng(i).integers(2, 95, 17).tolist() for i in range(6)]
    llm = dummy(small_config())(dataclasses.replace(remembering(place="host"), overlap=overlap))
    copied: list[bool] = []
    put, copy = llm.runner.store.put, llm.runner.store.copy
    monkeypatch.setattr(llm.runner.store, "put", lambda *a: (copied.append(False), put(*a)))
    monkeypatch.setattr(llm.runner.store, "copy", lambda *a: (copied.append(True), copy(*a)))
    want = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
    assert all(copied)
    llm.clear_prefix_cache()
    stops = [dataclasses.replace(GREEDY, stop_token_ids=[tokens[2]]) for tokens in want]
    llm.generate(prompts, stops)
    assert overlap == (not all(copied))
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)] == want
    assert llm.stats()["prefix_tokens"]["hit_tokens_host"] > 0
    monkeypatch.setattr(llm.runner.pool, "memory", lambda z: None)
    copied.clear()
    llm.clear_prefix_cache()
    for _ in range(2):
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)] == want
    assert not any(copied)
