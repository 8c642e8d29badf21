"""`engine.initial_blocks`: the cache grows before anyone has to wait, shrinks, and tokens are the same."""

import dataclasses
from typing import Any

import pytest

from moejax import LLM, EngineConfig, ParallelConfig, QuantConfig, SamplingParams
from moejax.core.config import PrefixCacheConfig
from moejax.core.errors import ConfigError
from tests.engine.mesh_models import FAMILIES
from tests.engine.test_swap import GREEDY, ROOMY, SAMPLED, dummy, prompts
from tests.engine.test_swap import outcome as swapped_outcome
from tests.engine.tiny import small_config
from tests.examples import slow_but

WHOLE = dataclasses.replace(ROOMY, block_buckets=[8, 32, 64])
GROWS = dataclasses.replace(WHOLE, initial_blocks=5)


@pytest.mark.parametrize(
    ("family", "options"),
    slow_but(
        [],
        [
            (family, options)
            for family in ("small", "qwen3_moe", "deepseek_v3", "gpt_oss")
            for options in (
                {}, {"compact_cache": True, "overlap": False},
                {"num_blocks": 14, "block_buckets": [8, 14], "preemption": "swap"},
                {"prefix_cache": PrefixCacheConfig(enabled=True, place="device")},
                {"prefix_cache": PrefixCacheConfig(enabled=True, place="host")},
            )
        ],
    ),
)  # fmt: skip
def test_same_tokens(family: str, options: dict[str, Any]) -> None:
    make = dummy(small_config() if family == "small" else FAMILIES[family])
    with make(WHOLE) as plain:
        want = swapped_outcome(plain)
        assert plain.stats()["preemptions"] == 0
    with make(dataclasses.replace(GROWS, **options)) as llm:
        assert llm.stats()["pool_blocks"] == 8  # a segment's end
        for _ in range(2):
            requests = [
                llm.submit(prompt, SAMPLED if i % 2 else GREEDY)
                for i, prompt in enumerate(prompts(llm.config.vocab_size))
            ]
            most = bytes_ = 0
            while llm.step():
                most = max(most, llm.stats()["pool_blocks"])
                bytes_ = max(bytes_, llm.stats()["kv_cache_allocated_bytes"])
                llm.engine.scheduler.check_integrity()
            assert all(request.finished for request in requests)
            assert [[s.token_ids for s in r.outputs] for r in requests] == want
            assert most > 8 and llm.stats()["num_blocks"] == options.get("num_blocks", 64)
            if "prefix_cache" not in options or options["prefix_cache"].place == "host":
                assert llm.stats()["pool_blocks"] == 8
                assert llm.stats()["kv_cache_allocated_bytes"] < bytes_
            else:  # what is kept stays where it is
                assert most >= llm.stats()["pool_blocks"] >= llm.stats()["prefix_blocks_kept"]
        assert (llm.stats()["preemptions"] > 0) == ("num_blocks" in options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "codes"), [("qwen3_moe", "int8"), ("qwen3_moe", "int4"), ("deepseek_v3", "int8")]
)
def test_codes(family: str, codes: Any) -> None:
    """Without preemption steps are those of a cache that has all its blocks, and so are the codes."""
    make = dummy(FAMILIES[family], QuantConfig(kv_cache=codes))
    with make(WHOLE) as plain, make(GROWS) as llm:
        assert swapped_outcome(llm) == swapped_outcome(plain)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up() -> None:
    engine = dataclasses.replace(GROWS, strict_compile=True, seq_buckets=None, block_buckets=None)
    with dummy(small_config())(engine) as llm:
        llm.warmup(max_total_len=50, sampling_params=[GREEDY, SAMPLED])
        swapped_outcome(llm)
        assert llm.stats()["recompiles_after_warmup"] == 0 and llm.stats()["pool_blocks"] == 8


def test_one_that_needs_more_than_there_are_at_first() -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with dummy(small_config())(GROWS) as llm:
        (request,) = llm.generate([list(range(2, 52))], params)
        assert len(request.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_blocks": 65}, "initial_blocks=65 exceeds engine.num_blocks=64"),
        ({"batching": "static"}, "initial_blocks does not go with engine.batching=static"),
        ({"kernels": "pallas_triton", "block_size": 8}, "initial_blocks does not go with GPU kernels"),
        ({"deterministic": "tiles"}, "initial_blocks does not go with engine.deterministic=tiles"),
        ({"parallel": ParallelConfig(tp=2)}, "initial_blocks does not go with several devices"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    outside = {"parallel": options.pop("parallel")} if "parallel" in options else {}
    with pytest.raises(ConfigError, match=message) as error:
        engine: EngineConfig = dataclasses.replace(GROWS, **options)
        LLM(small_config(head_dim=8), load_format="dummy", engine=engine, **outside)
    assert "\n" not in str(error.value)
