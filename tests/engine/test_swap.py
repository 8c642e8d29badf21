"""What is preempted and waits in the host's memory goes on as if it had never lost its place."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, QuantConfig, SamplingParams
from moejax.cache.pool import block_bytes
from moejax.core.config import PrefixCacheConfig
from moejax.core.errors import ConfigError
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.scheduling.swap import SwapSpace
from tests.engine.mesh_models import FAMILIES
from tests.engine.test_prefix_cache import ENGINE, LAYOUTS, dummy
from tests.engine.tiny import small_config
from tests.examples import slow_but

ROOMY = dataclasses.replace(ENGINE, num_blocks=64, block_buckets=[64])
SCARCE = dataclasses.replace(ENGINE, num_blocks=14, block_buckets=[14])
GREEDY = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, temperature=1.0, seed=5, n=2, ignore_eos=True)


def swapping(preemption: str = "swap", engine: EngineConfig = SCARCE, **fields: Any) -> EngineConfig:
    return dataclasses.replace(engine, preemption=preemption, **fields)


def remembering(place: str | None) -> dict[str, Any]:
    return {"prefix_cache": PrefixCacheConfig(enabled=place is not None, place=place or "auto")}


def prompts(vocab: int) -> list[list[int]]:
    """More than fit at a time, some of which begin alike; one takes several steps."""
    rng = np.random.default_rng(11)
    shared = rng.integers(2, vocab - 2, 9).tolist()
    return [[*shared, *rng.integers(2, vocab - 2, n).tolist()] for n in (3, 7, 1)] + [
        rng.integers(2, vocab - 2, n).tolist() for n in (5, 27, 12)
    ]


def outcome(llm: LLM, sampled: bool = True) -> list[list[list[int]]]:
    asked = prompts(llm.config.vocab_size)
    params = [SAMPLED if sampled and i % 2 else GREEDY for i in range(len(asked))]
    got = [[sample.token_ids for sample in out.outputs] for out in llm.generate(asked, params)]
    llm.engine.scheduler.check_integrity()
    assert llm.stats()["used_blocks"] == 0
    return got


@pytest.fixture(scope="module")
def never_preempted() -> list[list[list[int]]]:
    llm = dummy(small_config())(ROOMY)
    got = outcome(llm)
    assert llm.stats()["preemptions"] == 0
    return got


@pytest.mark.parametrize(
    ("preemption", "place", "overlap"),
    slow_but(
        [],
        [
            (mode, place, overlap)
            for mode in ("recompute", "swap", "auto")
            for place in (None, "host", "device")
            for overlap in (True, False)
        ],
    ),
)
def test_swapped_is_computed_again_is_never_preempted(
    preemption: str, place: str | None, overlap: bool, never_preempted: list[list[list[int]]]
):
    llm = dummy(small_config())(swapping(preemption, overlap=overlap, **remembering(place)))
    for _ in range(2):
        assert outcome(llm) == never_preempted
    stats = llm.stats()
    assert stats["preemptions"] > 0 and stats["swaps_without_room"] == 0
    if preemption != "auto":
        assert (stats["swapped_tokens"] > 0) == (preemption == "swap")
        assert stats["recomputed_tokens"] == 0 or preemption == "recompute"
    llm.reset_stats()
    assert llm.stats()["swapped_tokens"] == 0


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    slow_but([], [(f, kv) for f in FAMILIES for kv in ("auto", "int8", *["int4"] * (f == "qwen3_moe"))]),
)
def test_every_kind_of_cache(family: str, kv_cache: Any):
    """Codes come back bit for bit, so not even those of prompts that are cut differently round otherwise."""
    make = dummy(FAMILIES[family], QuantConfig(kv_cache=kv_cache))
    if FAMILIES[family].linear_layers and any(FAMILIES[family].linear_layers):
        with pytest.raises(ConfigError, match="linear attention"):
            make(swapping())
        return
    swaps = make(swapping())
    a, b = outcome(swaps, sampled=False), outcome(make(ROOMY), sampled=False)
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert all(same) if kv_cache == "auto" else np.mean(same) > 0.8
    assert swaps.stats()["swapped_tokens"] > 0


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("layout", "family", "place"),
    slow_but(
        [],
        [
            (layout, family, place)
            for layout in LAYOUTS
            for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")
            for place in (None, "host")
        ],
    ),
)
def test_same_tokens_on_meshes(layout: str, family: str, place: str | None):
    make = dummy(FAMILIES[family], **LAYOUTS[layout])
    groups = LAYOUTS[layout].get("dp", LAYOUTS[layout].get("ep", 1) if "attention" in LAYOUTS[layout] else 1)
    few = dataclasses.replace(SCARCE, num_blocks=SCARCE.num_blocks if groups == 1 else 12, block_buckets=None)
    swaps = make(swapping("swap", few, **remembering(place)))
    assert outcome(swaps) == outcome(dummy(FAMILIES[family])(ROOMY))
    assert swaps.stats()["swapped_tokens"] > 0


@pytest.mark.slow
def test_what_finds_no_room_is_computed_again(never_preempted: list[list[list[int]]]):
    size = block_bytes(small_config(), SCARCE.block_size, "float32")
    llm = dummy(small_config())(swapping(swap_memory_gb=4.5 * size / 1e9))
    assert outcome(llm) == never_preempted
    assert llm.stats()["swaps_without_room"] > 0 and llm.stats()["recomputed_tokens"] > 0


@pytest.mark.slow
def test_who_must_see_every_token_is_computed_again():
    penalized = dataclasses.replace(GREEDY, repetition_penalty=1.3)
    plain, swaps = (dummy(small_config())(engine) for engine in (ROOMY, swapping()))
    asked = prompts(plain.config.vocab_size)
    a, b = ([out.outputs[0].token_ids for out in llm.generate(asked, penalized)] for llm in (plain, swaps))
    assert a == b
    stats = swaps.stats()
    assert stats["recomputed_tokens"] > 0 == stats["swapped_tokens"]


def until_swapped(llm: LLM) -> list[Any]:
    """Requests of which some wait in the host's memory."""
    streams = [llm.submit(prompt, GREEDY) for prompt in prompts(llm.config.vocab_size)]
    while not any(s.swapped for s in llm.engine.scheduler.waiting()):
        assert llm.step()
    return streams


@pytest.mark.slow
def test_what_ends_from_outside_gives_its_places_back(
    never_preempted: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
):
    llm = dummy(small_config())(swapping(retries=1))
    for request in until_swapped(llm):
        llm.abort(request.request_id)
    while llm.step():
        pass
    llm.engine.scheduler.check_integrity()
    assert outcome(llm) == never_preempted and llm.stats()["swapped_tokens"] > 0

    # A failed step forgets what the host has.
    run, calls = llm.runner._run, [0]

    def fails(*arguments: Any) -> Any:
        calls[0] += any(s.swapped for s in llm.engine.scheduler.waiting())
        if calls[0] == 2:
            calls[0] = 99
            raise RuntimeError("on purpose")
        return run(*arguments)

    monkeypatch.setattr(llm.runner, "_run", fails)
    assert outcome(llm) == never_preempted
    assert llm.stats()["failed_steps"] == 1


@pytest.mark.slow
def test_a_warmed_up_engine_compiles_nothing_to_swap():
    engine = swapping(strict_compile=True, seq_buckets=None, block_buckets=None)
    llm = dummy(small_config())(engine)
    llm.warmup(max_total_len=50, sampling_params=[GREEDY, SAMPLED])
    outcome(llm)
    assert llm.stats()["recompiles_after_warmup"] == 0 < llm.stats()["swapped_tokens"]


def test_auto_takes_what_takes_less_time():
    sequence = Sequence(list(range(40)), 30, GREEDY, 60, 0, computed=39, blocks=list(range(10)))
    space = SwapSpace("auto", 5, 20)
    space.move_s = 0.010
    assert space.recompute_s(39) == 0  # nothing has been measured
    for seconds, tokens in [(0.004, 0), (0.024, 20), (0.003, 0), (0.005, 0), (3.0, 10), (0.014, 10)]:
        space.observe(seconds, tokens)
    assert space.recompute_s(39) == pytest.approx(0.039)
    for move_s, swapped in ((0.040, []), (0.038, list(range(5, 15)))):
        space.move_s = move_s
        space.out(sequence, 4)
        assert sequence.swapped == swapped
    assert space.take_saves() == [(block, 5 + block) for block in range(10)]


@pytest.mark.slow
def test_moving_is_timed_where_it_decides():
    llm = dummy(small_config())(swapping("auto"))
    assert 0 < llm.engine.scheduler.swap.move_s < 10
    assert dummy(small_config())(swapping("swap")).engine.scheduler.swap.move_s == 0


@pytest.mark.parametrize(
    ("engine", "model", "message"),
    [
        ({"batching": "static"}, {}, r"preemption=swap does not go with engine\.batching=static"),
        ({"swap_memory_gb": 1e-7}, {}, r"swap_memory_gb=1e-07 does not hold one block"),
    ],
)
def test_mistakes(engine: dict[str, Any], model: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        dummy(small_config(**model))(swapping(**engine))
    assert "\n" not in str(error.value)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch):
    llm = dummy(small_config())(SCARCE)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ConfigError, match="does not go with several processes; use recompute"):
        llm.variant(swapping())


@pytest.mark.slow
@pytest.mark.parametrize("place", [None, "device"])
def test_gpu_kernels_swap_their_pages(place: str | None):
    """Pages of a prefix that another still has are shared again, the others come back from the host."""
    engine = dataclasses.replace(SCARCE, kernels="pallas_triton", block_size=8, num_blocks=8)
    make = dummy(small_config(head_dim=8))
    plain, swaps = (
        make(dataclasses.replace(engine, num_blocks=40)),
        make(swapping("swap", engine, **remembering(place))),
    )
    rng = np.random.default_rng(3)
    shared = rng.integers(2, 60, 16).tolist()
    asked = [[*shared, *rng.integers(2, 60, n).tolist()] for n in (1, 3, 2, 5)]
    params = dataclasses.replace(GREEDY, max_tokens=14)
    got, want = ([o.outputs[0].token_ids for o in llm.generate(asked, params)] for llm in (swaps, plain))
    assert got == want and swaps.stats()["swapped_tokens"] > 0
    swaps.engine.scheduler.check_integrity()
