"""An engine whose chunks take either form of latent attention gives what the absorbed form alone gives."""

import dataclasses
from typing import Any

import pytest

from moejax.core.config import RouterConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig, QuantRule
from moejax.engine.llm import LLM
from moejax.engine.step import attention_xla
from moejax.ops import paged_attention
from moejax.perf import sizes
from tests.engine.paged import SCARCE, greedy, prompt, tokens
from tests.engine.tiny import FullForward, main_config, small_config
from tests.examples import slow_but
from tests.model_shapes import LATENT

CONFIG = main_config(**LATENT | {"router": RouterConfig("sigmoid", True)}, moe_layers=(False, True))
ONE_LAYER = small_config(**LATENT | {"router": RouterConfig("sigmoid", True)})
PROMPTS = [prompt(n) for n in (3, 11, 16, 1, 22, 8)]
PARAMS = [greedy(9, n=2 if i % 3 else 1) for i in range(len(PROMPTS))]
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "cache_int8": {"quant": QuantConfig(kv_cache="int8")},
    "cache_fp8_tp2": {"quant": QuantConfig(kv_cache="float8_e4m3fn"), "parallel": ParallelConfig(tp=2)},
    "weights_int8": {"quant": QuantConfig("rtn", "int8", rules=[QuantRule("*.kv_b_proj", "rtn", "int8")])},
    "stages": {"parallel": ParallelConfig(pp=2, ep=2)},
    "data_parallel": {"parallel": ParallelConfig(ep=2, attention="data")},
}


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "name",
    slow_but([], CASES),
)
def test_both_forms_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked, preempted and forked. Keys are made by blocks of 4; chunks of these sizes are then plain at
    a prompt's beginning, and absorbed later."""

    def run() -> tuple[Any, LLM]:
        config = ONE_LAYER if name == "cache_int8" else CONFIG
        llm = LLM(config, load_format="dummy", engine=dataclasses.replace(SCARCE), **CASES[name])
        outs = llm.generate(PROMPTS, PARAMS)
        assert llm.stats()["preemptions"] > 0 or name == "data_parallel"
        llm.engine.scheduler.check_integrity()
        assert llm.stats()["used_blocks"] == 0
        return tokens(outs), llm

    absorbed, llm = run()
    if not CASES[name]:
        whole = FullForward(llm.model)
        assert [each[0] for each in absorbed] == [whole.greedy(ids, 9) for ids in PROMPTS]
    taken: list[bool] = []

    def noted(*chunk: Any) -> Any:
        taken.append(bool(sizes.takes_plain_form(*chunk)))
        return taken[-1]

    monkeypatch.setattr(attention_xla, "takes_plain_form", noted)
    monkeypatch.setattr(sizes, "PLAIN_KEYS", 1)
    monkeypatch.setattr(paged_attention, "PLAIN_KEYS", 4)
    assert run()[0] == absorbed
    assert 3 < sum(taken) < len(taken) - 3
