"""Layers with a sliding window keep its tokens only: requests give what they give where all are kept."""

import dataclasses
import re
from typing import Any

import jax
import pytest

from moejax import LLM, EngineConfig, QuantConfig, SamplingParams
from moejax.cache.allocator import GONE, WindowAllocator, first_seen, window_blocks
from moejax.core.config import PrefixCacheConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.engine.opening.start import cache_blocks
from moejax.perf.memory import device_memory
from tests.engine.mesh_models import ENGINE as MESH_ENGINE
from tests.engine.mesh_models import FAMILIES
from tests.engine.paged import SCARCE, assert_clean, greedy, prompt, tight
from tests.engine.tiny import VOCAB, FullForward, main_config, windowed_config
from tests.examples import slow_but
from tests.model_shapes import SINKS

SEEN = 5
HALF = windowed_config().replace(**SINKS, sliding_windows=(SEEN, None), num_kv_heads=4)
ALL = windowed_config()
LENGTHS = (3, 11, 1, 22, 8)


def ids(outs: Any) -> list[list[int]]:
    return [sample.token_ids for out in outs for sample in out.outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(HALF, load_format="dummy", engine=SCARCE)


ENGINES: dict[str, EngineConfig] = {
    "preempting": SCARCE,
    "plain_loop": tight(overlap=False),
    "static": dataclasses.replace(SCARCE, batching="static"),
    "one_block": dataclasses.replace(SCARCE, block_size=8, num_blocks=6, block_buckets=[6]),
}


@pytest.mark.parametrize("name", slow_but(["preempting"], list(ENGINES)))
def test_chunks_forks_and_preemption(name: str, llm: LLM) -> None:
    """Sample i draws from seed + i; beside each other they give what each gives with all tokens kept."""
    prompts, drawn = [prompt(n) for n in LENGTHS], {"temperature": 1.0, "max_tokens": 9, "ignore_eos": True}
    engine, twin = (
        llm.variant(ENGINES[name]),
        llm.variant(dataclasses.replace(ENGINES[name], window_cache="full")),
    )
    assert engine.runner.limits.window == SEEN and twin.runner.limits.window is None
    params = [SamplingParams(n=n, seed=n, **drawn) for n in (3, 1, 2, 1, 2)]
    assert ids(engine.generate(prompts, params)) == ids(twin.generate(prompts, params))
    whole = FullForward(llm.model)
    assert ids(engine.generate(prompts, greedy(9))) == [whole.greedy(p, 9) for p in prompts]
    assert (engine.stats()["preemptions"] > 0) == (name in ("preempting", "one_block"))
    assert_clean(engine)
    assert engine.engine.scheduler.windows.num_used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"quant": QuantConfig(kv_cache="int8")}, {"engine": {"kernels": "pallas_triton", "block_size": 8}}],
    ids=["int8", "kernels"],
)
@pytest.mark.parametrize("config", [HALF, ALL], ids=["half", "all"])
def test_codes_and_kernels(config: Any, how: dict[str, Any]) -> None:
    prompts, given = [prompt(n) for n in LENGTHS], dict(how)
    changes = given.pop("engine", {})
    outs = [
        ids(
            LLM(
                config,
                load_format="dummy",
                engine=dataclasses.replace(SCARCE, window_cache=kept, **changes),
                **given,
            ).generate(prompts, greedy(9, n=2))
        )
        for kept in ("window", "full")
    ]
    assert outs[0] == outs[1]


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("layout", [{"pp": 2, "ep": 4}, {"ep": 4, "tp": 2, "attention": "data"}])
def test_meshes(layout: dict[str, Any]) -> None:
    """Every stage and every data group has its own; a chunk's parts are in several microbatches."""
    config = FAMILIES["gpt_oss"].replace(vocab_size=VOCAB)
    engine = dataclasses.replace(MESH_ENGINE, max_num_batched_tokens=8, token_buckets=[8])
    asked = [prompt(13), prompt(2), prompt(21), prompt(1)]
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=6, ignore_eos=True)
    one = LLM(config, load_format="dummy", engine=dataclasses.replace(engine, window_cache="full"))
    mesh = LLM(config, load_format="dummy", engine=engine, parallel=ParallelConfig(**layout))
    assert mesh.runner.limits.window is not None
    assert ids(mesh.generate(asked, params)) == ids(one.generate(asked, params))


def test_memory_is_bounded(llm: LLM) -> None:
    """Long outputs keep as many blocks as short ones, and the formula of memory has them."""
    block = 2 * HALF.num_kv_heads * 8 * 4 * SCARCE.block_size
    own = window_blocks(SEEN, SCARCE.block_size, SCARCE.max_num_seqs, SCARCE.max_num_batched_tokens, 12)
    assert own == 12  # never more than there are of the others
    roomy = llm.variant(tight(max_model_len=64, num_blocks=64, block_buckets=[64]))
    own = 4 * (1 + 2) + 2
    assert roomy.stats()["kv_cache_capacity_bytes"] == (64 + own) * block
    (held,) = device_memory(
        HALF, ParallelConfig(), {}, num_blocks=64, block_size=4, window=SEEN, window_blocks=own
    )
    assert held.cache == (64 + own) * block
    used = []
    roomy.engine.on_step = lambda record: used.append(roomy.engine.scheduler.windows.num_used)
    roomy.generate([prompt(40)] * 4, greedy(20))
    assert max(used) <= own and max(used[-20:]) <= 4 * 2
    windows = roomy.runner.windows
    assert windows.layout.ends == (own,)
    assert [segment[1] for segment in windows.take(1)] == [None]
    assert len(jax.tree.leaves(windows.take(1))) == 2


def test_memory_that_is_given_is_shared() -> None:
    """What the windows need goes off what the others may have; where that is little, both have the same."""
    block = 2 * HALF.num_kv_heads * 8 * 4 * 4
    for blocks, room in ((64, 64 + 14), (14, 28), (5, 11)):
        engine = tight(num_blocks=None, kv_cache_memory_gb=(room + 0.5) * block / 1e9)
        assert cache_blocks(engine, HALF, 1024, ParallelConfig(), window=SEEN).value == str(blocks)
    found = cache_blocks(tight(num_blocks=None), HALF, 64, ParallelConfig(), window=SEEN)
    assert found.value == "64" and "65.5 kB and 14.3 kB of windows (14 blocks) a device" in found.reason
    engine = tight(num_blocks=None, kv_cache_memory_gb=14.5 * block / 1e9)
    assert cache_blocks(engine, ALL, 1024, ParallelConfig(), window=SEEN).value != "0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": SEEN}, "no layer has a sliding window below the 5 tokens of engine.max_model_len"),
        ({"prefix_cache": PrefixCacheConfig(enabled=True)}, "engine.prefix_cache.enabled=true needs all"),
        ({"preemption": "swap"}, "engine.preemption=swap moves all tokens"),
    ],
)
def test_where_it_cannot_be(changes: dict[str, Any], message: str, llm: LLM) -> None:
    asked = dataclasses.replace(SCARCE, window_cache="window", **changes)
    with pytest.raises(ConfigError, match=re.escape(f"engine.window_cache=window: {message}")):
        llm.variant(asked)
    full = llm.variant(dataclasses.replace(asked, window_cache="auto"))
    assert full.runner.limits.window is None
    (why,) = [item for item in full.resolutions if item.key == "engine.window_cache"]
    assert why.value == "full" and message in why.reason


def test_no_window_no_blocks() -> None:
    with pytest.raises(ConfigError, match="no layer has a sliding window"):
        LLM(main_config(), load_format="dummy", engine=tight(window_cache="window"))


def test_a_table_forgets_what_no_query_sees() -> None:
    allocator, table = WindowAllocator(5, 4, window=6), []
    assert [first_seen(p, 6, 4) for p in (0, 5, 8, 9, 13)] == [0, 0, 0, 1, 2]
    assert allocator.slide(table, 0, 9) == [] and table == [0, 1, 2]
    assert allocator.slide(table, 9, 10) == [] and table == [GONE, 1, 2]
    fork = allocator.fork(table)
    assert allocator.slide(fork, 10, 11) == [(2, 0)] and fork == [GONE, 1, 0]
    allocator.check_integrity([table, fork])
    assert allocator.slide(fork, 13, 14) == [] and fork == [GONE, GONE, 0, 3] and allocator.refcount(1) == 1
    allocator.release(table)
    allocator.release(fork)
    assert allocator.num_free == 5
