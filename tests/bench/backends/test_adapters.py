"""Benchmarks' adapters: in slots, and merged into copies of the model, which are swapped."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, SamplingParams
from moejax.bench.ab.run import _control
from moejax.bench.ab.variants import Arm
from moejax.bench.backends.adapters import MergedBackend, open_ours
from moejax.bench.backends.config import BackendOptions, BackendSection
from moejax.core.adapters import AdaptersConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.api import RequestOutput
from tests.adapters import write_adapter
from tests.examples import slow_but
from tests.model_shapes import TWO_LAYERS

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[32], block_buckets=[8], max_model_len=40,
    max_num_seqs=4, autotune="rules",
)  # fmt: skip
PROMPTS = [[7, 11, 13, 17 + i % 2, 19] for i in range(4)]
PARAMS = [SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)] * 4


def opened(adapters: Any, merged: bool = False, slots: int = 0) -> Any:
    engine = dataclasses.replace(ENGINE, adapters=AdaptersConfig(slots, 4))
    return open_ours(
        BackendOptions(adapters=adapters, merged=merged), LLM(TWO_LAYERS, load_format="dummy", engine=engine)
    )


def logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    return np.array([[x.logprob for x in output.outputs[0].logprobs or []] for output in outputs])


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("source", slow_but(["directories"], ["random", "directories"]))
def test_slots_and_merged_models_give_the_same(source: str, tmp_path: Path) -> None:
    """In turns: with three adapters for four requests the first and the last have one."""
    asked: Any = 3
    if source == "directories":
        asked = [str(write_adapter(tmp_path / str(i), TWO_LAYERS, i, rank=2)) for i in range(3)]
    slots, merged, base = opened(asked, slots=3), opened(asked, merged=True), opened(0)
    together, apart = slots.generate(PROMPTS, PARAMS), merged.generate(PROMPTS, PARAMS)
    assert tokens(together) == tokens(apart)
    np.testing.assert_allclose(logprobs(together), logprobs(apart), atol=1e-4)
    assert np.abs(logprobs(apart) - logprobs(base.generate(PROMPTS, PARAMS))).min(axis=1).max() > 1e-3
    assert [output.prompt_token_ids for output in apart] == PROMPTS
    # All were asked for together, and each waited for those before it.
    assert len({output.metrics.arrival_time for output in apart}) == 1
    assert apart[0].metrics.token_times[-1] < apart[1].metrics.token_times[0]
    assert tokens(merged.generate(PROMPTS[:1], PARAMS[:1])) == tokens(apart)[:1]


def test_adapters_by_arrival_and_in_another_engine() -> None:
    backend = opened(2, slots=2)
    whole = tokens(backend.generate(PROMPTS, PARAMS))
    other = _control(Arm("base", [], backend)).backend
    assert tokens(other.generate(PROMPTS, PARAMS)) == whole
    for _ in range(2):  # each pass begins with the first adapter
        backend.reset_stats()
        outputs = [
            backend.submit(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS, strict=False)
        ]
        while backend.step():
            pass
        assert tokens(outputs) == whole[:3]


def test_mistakes() -> None:
    merged = opened(1, merged=True)
    assert isinstance(merged, MergedBackend) and _control(Arm("base", [], merged)).backend is merged
    with pytest.raises(RequestError, match=r"backend.merged=true is for fixed batches"):
        merged.submit(PROMPTS[0], PARAMS[0])
    with pytest.raises(ConfigError, match=r"the engine has no slots; set engine.adapters.slots"):
        opened(1)
    with pytest.raises(ConfigError, match="all 1 slots are taken"):
        opened(2, slots=1)
    with pytest.raises(ConfigError, match=r"backend.merged=true needs backend.adapters"):
        BackendSection(merged=True)
    with pytest.raises(ConfigError, match=r"backend.adapters is for moejax, and this is openai_endpoint"):
        BackendSection(kind="openai_endpoint", url="http://localhost:8000/v1", adapters=2)
