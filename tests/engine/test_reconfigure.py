"""Another layout under a running engine: every token as if there had been none, and nothing lost."""

import dataclasses
import gc
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from moejax import (
    LLM,
    EngineConfig,
    ParallelConfig,
    PrefixCacheConfig,
    QuantConfig,
    RequestOptions,
    SamplingParams,
)
from moejax.cache.pool import block_bytes
from moejax.core.adapters import AdaptersConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.core.scheduling import AdaptiveBatchingConfig, KvPolicyConfig, SpeculationConfig
from moejax.engine import reconfigure as changing
from moejax.engine.reconfigure import Laid, Reconfigured, bytes_moved
from moejax.engine.requests.api import RequestOutput
from tests.adapters import write_adapter
from tests.engine.mesh_models import ENGINE as WIDE
from tests.engine.mesh_models import FAMILIES as EVERY
from tests.engine.mesh_models import prompts
from tests.examples import slow_but
from tests.model_shapes import EIGHT_WAY

pytestmark = pytest.mark.multidevice

# Prompts in parts, and a cache that does not hold all that runs.
ENGINE = dataclasses.replace(
    WIDE, max_num_batched_tokens=8, block_size=4, num_blocks=20, token_buckets=[8], block_buckets=[20],
    autotune="rules",
)  # fmt: skip
FAMILIES = {
    "gqa": EVERY["qwen3_moe"],
    "latents": EVERY["deepseek_v3"],
    "windows_with_sinks": EVERY["gpt_oss"],
}
NARROW: dict[str, dict[str, Any]] = {"ep2": {"ep": 2}, "dp_attention_ep2": {"ep": 2, "attention": "data"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tp2": {"tp": 2},
    "ep4_tp2": {"ep": 4, "tp": 2},
    "dp_attention_ep4": {"ep": 4, "attention": "data", "redundant_experts": 4},
    "dp2_tp2": {"dp": 2, "tp": 2},
    "pp2_ep2": {"pp": 2, "ep": 2},
}
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=0.9, seed=5, n=2, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=2, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=10, temperature=0.7, seed=1, repetition_penalty=1.3, ignore_eos=True),
]


def opened(config: Any, layout: str = "single", engine: EngineConfig = ENGINE, **options: Any) -> LLM:
    parallel = ParallelConfig(**(NARROW | LAYOUTS)[layout])
    return LLM(config, load_format="dummy", engine=engine, parallel=parallel, **options)


def warm(config: Any, layout: str = "single", engine: EngineConfig = ENGINE, **options: Any) -> LLM:
    """One whose steps have one mode, and so few programs in each layout."""
    llm = opened(config, layout, engine, **options)
    llm.warmup(max_total_len=40, sampling_params=PARAMS)
    return llm


def asked(count: int) -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, PARAMS[i % len(PARAMS)]) for i, prompt in enumerate(prompts(count))]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def change(llm: LLM, layout: str, **options: Any) -> Reconfigured:
    done = llm.reconfigure(ParallelConfig(**(NARROW | LAYOUTS)[layout]), **options)
    llm.engine.scheduler.check_integrity()
    assert llm.parallel_config == ParallelConfig(**(NARROW | LAYOUTS)[layout])
    return done


def finish(llm: LLM) -> None:
    while llm.step():
        llm.engine.scheduler.check_integrity()
    assert llm.stats()["used_blocks"] == 0 and llm.engine.scheduler.idle


def served(llm: LLM, changes: dict[int, str]) -> tuple[Any, list[Reconfigured]]:
    """Tokens of requests during which the layout changes after so many steps."""
    outputs, done = [llm.submit(*each) for each in asked(7)], []
    for step in range(max(changes, default=0) + 1):
        if step in changes:
            done.append(change(llm, changes[step]))
        llm.step()
        llm.engine.scheduler.check_integrity()
    finish(llm)
    return tokens(outputs), done


def wanted(config: Any, count: int = 7, engine: EngineConfig = ENGINE, **options: Any) -> Any:
    llm = warm(config, engine=engine, **options)
    return tokens(llm.generate(*map(list, zip(*asked(count), strict=True))))


def test_there_and_back_while_requests_run_and_wait() -> None:
    """A stream is read meanwhile; nothing is compiled but beside the old engine, whose arrays are gone."""
    engine = dataclasses.replace(ENGINE, strict_compile=True)
    asks = [(prompt, PARAMS[0]) for prompt in prompts(6)]
    want = tokens(opened(EIGHT_WAY, engine=engine).generate(*map(list, zip(*asks, strict=True))))
    llm = opened(EIGHT_WAY, engine=engine)
    llm.warmup(max_total_len=40, sampling_params=PARAMS[:1])
    stream = llm.generate_stream(*asks[0])
    first = next(stream)
    outputs = [llm.submit(*each) for each in asks[1:]]
    for layout in ("dp_attention_ep2", "single"):
        llm.step()
        steps, held = llm.stats()["steps"], [x for each in llm._weights.functions for x in each.leaves]
        done = change(llm, layout)
        assert all(x.is_deleted() for x in held) and llm.stats()["steps"] > steps
        assert done.moved and done.moved_cache_bytes and 0 < done.pause_s < done.warmup_s
    streamed = [token for chunk in (first, *stream) for token in chunk.token_ids]
    finish(llm)
    assert [[streamed], *tokens(outputs)] == want
    assert llm.stats()["recompiles_after_warmup"] == 0


@pytest.mark.parametrize("layouts", slow_but([], map(list, itertools.combinations(LAYOUTS, 2))), ids=str)
def test_bytes_by_formula_are_those_that_devices_lack(layouts: Any) -> None:
    """Of tables that are padded, experts that have replicas, dimensions that are split and copied."""
    config = EVERY["qwen3_moe"].replace(num_layers=2, moe_layers=(True, False), sliding_windows=(None,) * 2)
    every = {layout: changing._tensors(opened(config, layout)._weights) for layout in layouts}
    for was, now in itertools.permutations(layouts, 2):
        for name, targets in every[now].items():
            laid = [each for _, each in every[was][name]]
            for _, target in targets:
                assert bytes_moved(laid, target) == lacking(laid, target), (was, now, name)


def lacking(was: list[Laid], now: Laid) -> int:
    """The same by numbers on the devices: each place of a tensor has one of its own, padding 0."""

    def parts(laid: Laid) -> dict[Any, set[int]]:
        shape = laid.spec.true_shape
        if laid.slots:
            shape = max(laid.slots) + 1, *shape[1:]
        numbers = 1 + np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        numbers = numbers[list(laid.slots)] if laid.slots else numbers
        whole = np.zeros(laid.spec.shape, np.int32)
        whole[tuple(map(slice, numbers.shape))] = numbers
        shards = jax.device_put(whole, laid.sharding).addressable_shards
        return {shard.device: set(np.asarray(shard.data).ravel().tolist()) - {0} for shard in shards}

    had = list(map(parts, was))
    lack = (mine.difference(*(each.get(device, ()) for each in had)) for device, mine in parts(now).items())
    return sum(map(len, lack)) * np.dtype(now.spec.dtype).itemsize


def test_what_cannot_be_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what fails in the middle: requests go on in the old layout."""
    llm, asks = opened(EIGHT_WAY), [(prompt, PARAMS[0]) for prompt in prompts(6)]
    want = tokens(llm.generate(*map(list, zip(*asks, strict=True))))
    outputs = [llm.submit(*each) for each in asks]

    def refused(kind: type[Exception], words: str, parallel: Any, **options: Any) -> None:
        llm.step()
        before = llm.runner, llm.engine.scheduler, llm._weights, llm.resolutions
        with pytest.raises(kind, match=words):
            llm.reconfigure(parallel, **options)
        assert before == (llm.runner, llm.engine.scheduler, llm._weights, llm.resolutions)
        llm.engine.scheduler.check_integrity()

    mesh: Any = ParallelConfig(ep=2, attention="data")
    unknown: Any = {"kv": "mov"}
    refused(ConfigError, "num_attention_heads 8 % tp=3", ParallelConfig(tp=3))
    refused(ConfigError, "parallel must be a ParallelConfig", {"tp": 2})
    refused(ConfigError, "reconfigure: unknown kv 'mov'; did you mean 'move'", mesh, **unknown)
    with monkeypatch.context() as patch:
        patch.setattr(changing, "device_limit", lambda **_: 1e4)
        refused(ConfigError, "do not fit", mesh)
    with monkeypatch.context() as patch:
        patch.setattr(changing, "_write", lambda *_: 1 / 0)
        refused(ZeroDivisionError, "division", mesh)
    with monkeypatch.context() as patch:

        def another(*_: Any) -> None:
            llm.runner = None  # type: ignore[assignment]

        runner = llm.runner
        patch.setattr(changing, "_warm", another)
        with pytest.raises(RequestError, match="another call has changed this engine meanwhile"):
            llm.reconfigure(mesh)
        llm.runner = runner
    within: Any = lambda record: llm.reconfigure(mesh)  # noqa: E731
    llm.engine.on_step = within
    with pytest.raises(RequestError, match="not from within a step"):
        finish(llm)
    llm.engine.on_step = None
    finish(llm)
    assert tokens(outputs) == want


STATIC = dataclasses.replace(ENGINE, batching="static")
REFUSED: dict[str, Callable[[], LLM]] = {
    "engine.batching=static": lambda: opened(EIGHT_WAY, engine=STATIC),
    "fill=False": lambda: opened(EIGHT_WAY, fill=False),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_engines_that_stay_as_they_are(reason: str) -> None:
    with pytest.raises(ConfigError, match=f"reconfigure does not go with .*{reason}.*open another LLM"):
        REFUSED[reason]().reconfigure(ParallelConfig(tp=2))


def test_a_closed_engine_says_so() -> None:
    llm = opened(EIGHT_WAY)
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.reconfigure(ParallelConfig(tp=2))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["move", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_layouts(family: str, kv: Any) -> None:
    """Requests come before each change: samples with penalties, of several, in the middle of prompts."""
    want = wanted(FAMILIES[family])
    llm, pairs = warm(FAMILIES[family]), list(itertools.permutations(LAYOUTS, 2))
    at, outputs, seen = "single", [], set[tuple[str, str]]()
    for number in range(len(pairs)):
        ahead = [pair for pair in pairs if pair[0] == at and pair not in seen]
        ahead = ahead or [pair for pair in pairs if pair[0] == at]
        seen.add(pair := ahead[number % len(ahead)])
        outputs.append([llm.submit(*each) for each in asked(7)])
        for _ in range(1 + number % 5):
            llm.step()
        done = change(llm, pair[1], kv=kv)
        assert bool(done.moved) <= (kv == "move" and family != "windows_with_sinks")
        at = pair[1]
    finish(llm)
    assert len(seen) > len(pairs) // 2
    assert all(tokens(each) == want for each in outputs)


ENGINES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "swap": (EVERY["qwen3_moe"], {"preemption": "swap"}, {}),
    "auto": (EVERY["qwen3_moe"], {"preemption": "auto"}, {}),
    "prefixes": (EVERY["qwen3_moe"], {"prefix_cache": PrefixCacheConfig(enabled=True)}, {}),
    "plain": (EVERY["qwen3_moe"], {"overlap": False}, {}),
    "whole windows": (EVERY["gpt_oss"], {"window_cache": "full"}, {}),
    "linear attention": (EVERY["minimax"], {}, {}),
    "tied embeddings": (EVERY["qwen2_moe"], {}, {}),
    "ngram": (EVERY["qwen3_moe"], {"speculation": SpeculationConfig(method="ngram", k=2)}, {}),
    "fair": (EVERY["qwen3_moe"], {"policy": "fair"}, {}),
    "evicting": (EVERY["qwen3_moe"], {"kv_policy": KvPolicyConfig(method="window", sinks=4, recent=8)}, {}),
    "codes": (EVERY["deepseek_v3"], {}, {"quant": QuantConfig(method="rtn", format="int8", kv_cache="int8")}),
    "adaptive": (EVERY["qwen3_moe"], {"adaptive_batching": AdaptiveBatchingConfig(enabled=True)}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_other_engines(name: str) -> None:
    config, settings, options = ENGINES[name]
    engine = dataclasses.replace(ENGINE, **settings)
    want = wanted(config, engine=engine, **options)
    layouts = ["ep4_tp2", "pp2_ep2", "single"]
    if name in ("adaptive", "ngram", "codes", "linear attention"):
        layouts = ["ep2", "dp_attention_ep2", "single"]
    found, done = served(warm(config, engine=engine, **options), dict(zip((3, 6, 8), layouts, strict=True)))
    assert found == want
    assert any(each.moved for each in done) == (name not in ("linear attention", "evicting"))
    if name == "prefixes":
        assert any(each.forgotten_blocks for each in done)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_at_any_instant(seed: int) -> None:
    draw = random.Random(seed)
    family = draw.choice(list(FAMILIES))
    changes = {step: draw.choice(list(LAYOUTS)) for step in sorted(draw.sample(range(25), 4))}
    assert served(warm(FAMILIES[family]), changes)[0] == wanted(FAMILIES[family])


@pytest.mark.slow
def test_placed_experts_adapters_and_captured_routing_come_along(tmp_path: Path) -> None:
    engine = dataclasses.replace(
        ENGINE, capture_routing=True, adapters=AdaptersConfig(slots=2, rank=4, targets=["attention", "mlp"])
    )
    config = EVERY["qwen3_moe"]
    llm, other = (opened(config, layout, engine=engine) for layout in ("single", "dp_attention_ep4"))
    for each in (llm, other):
        each.load_adapter("one", write_adapter(tmp_path / "one", config, 1, only="attention"))
    choices = [RequestOptions(adapter=name) for name in (None, "one") * 3]
    asks = [(prompt, PARAMS[0], options) for prompt, options in zip(prompts(6), choices, strict=True)]

    def run(each: LLM, changes: dict[int, str]) -> Any:
        outputs = [each.submit(prompt, params, options=options) for prompt, params, options in asks]
        for step in range(9):
            if step in changes:
                if each.parallel_config.ep > 1:
                    shape = config.num_layers, config.num_experts
                    loads = np.random.default_rng(step).integers(1, 99, shape)
                    assert each.rebalance(loads, min_gain=0.0).applied
                change(each, changes[step])
            each.step()
        finish(each)
        trace = each.routing_capture()
        index = zip(trace.request, trace.sample, trace.position, trace.ids, strict=True)
        return tokens(outputs), {(int(r), int(s), int(p)): ids.tolist() for r, s, p, ids in index}

    want = run(llm, {})
    assert run(other, {2: "ep4_tp2", 4: "dp_attention_ep4", 7: "single"}) == want
    other.load_adapter("two", write_adapter(tmp_path / "two", config, 2, only="attention"))
    llm.load_adapter("two", tmp_path / "two")
    options = RequestOptions(adapter="two")
    again = [each.generate([prompts(6)[0]], PARAMS[0], options=options) for each in (llm, other)]
    assert tokens(again[0]) == tokens(again[1])


@pytest.mark.slow
def test_another_thread_waits_for_its_requests() -> None:
    config = EVERY["qwen3_moe"]
    want, llm, found = wanted(config, 20), warm(config), []
    asks = list(map(list, zip(*asked(20), strict=True)))
    thread = threading.Thread(target=lambda: found.extend(llm.generate(*asks)))
    thread.start()
    for layout in ("dp2_tp2", "single"):
        change(llm, layout)
    thread.join()
    assert tokens(found) == want


@pytest.mark.slow
def test_variants_stay_and_memory_goes_back() -> None:
    def live() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    config, before = EVERY["qwen3_moe"], live()
    want = wanted(config)
    assert live() == before
    llm = warm(config, "tp2")
    twin, lone = llm.variant(ENGINE), live()
    changes = {2: "ep4_tp2", 5: "tp2"}
    assert served(llm, changes)[0] == served(twin, {})[0] == want
    assert twin.parallel_config.tp == 2 and llm.model is not twin.model
    twin.close()
    assert served(llm, changes)[0] == want and live() > before
    for pool in llm.runner.pools:
        pool.reset()
    assert live() - lone < 1e4  # weights once: the same layout as before, another copy of it
    llm.close()
    del llm, twin
    assert live() == before


@pytest.mark.slow
def test_blocks_by_formula_and_requests_that_would_not_fit() -> None:
    config = EVERY["qwen3_moe"]
    little = dataclasses.replace(ENGINE, num_blocks=None, kv_cache_memory_gb=2.5e-5)
    llm = opened(config, "tp2", engine=little)
    few, many = prompts(3), [[5] * 30]
    for prompt in few:
        llm.submit(prompt, PARAMS[0])
    for _ in range(4):
        llm.step()
    held = sum(-(-s.computed // ENGINE.block_size) for s in llm.engine.scheduler.running)
    done = change(llm, "ep4_tp2")
    assert done.moved_cache_bytes >= held * block_bytes(config, ENGINE.block_size, "float32") > 0
    llm.submit(many[0], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    with pytest.raises(ConfigError, match="a request could never run there: 60 tokens"):
        llm.reconfigure(ParallelConfig())
    finish(llm)


@pytest.mark.slow
def test_new_weights_while_it_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, other = opened(EIGHT_WAY), opened(EIGHT_WAY, seed=1)
    warm = changing._warm

    def update(*given: Any) -> None:
        warm(*given)
        llm.update_weights(other.model)

    monkeypatch.setattr(changing, "_warm", update)
    change(llm, "tp2")
    asks = list(map(list, zip(*asked(4), strict=True)))
    assert tokens(llm.generate(*asks)) == tokens(other.generate(*asks))
    assert not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(llm.model)))
