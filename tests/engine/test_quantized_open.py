"""`LLM(quant=...)` from its text to a saved directory, opened again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moejax import LLM, EngineConfig, ParallelConfig, QuantConfig, SamplingParams, save_pretrained
from moejax.checkpoint.directory import ASSETS
from moejax.core.config import ModelConfig, RouterConfig
from moejax.core.errors import ConfigError
from moejax.core.quant import CalibrationConfig, ExpertReduction, QuantRule
from moejax.core.tiers import ExpertsConfig
from moejax.engine.opening.resolve import resolve
from moejax.models.decoder import Decoder
from moejax.nn.quantized import weight_size
from tests.engine.mesh_models import FAMILIES

ENGINE = EngineConfig(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, compile_cache=False)
CALIBRATION = CalibrationConfig(num_samples=4, seq_len=32, batch_size=4, min_tokens=8)
PROMPTS = ["The function returns", "This class is a"]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "format"),
    [
        ("gptq", "int4_g64"),
        ("awq", "int4_g64_asym"),
        ("smoothquant", "w8a8_static"),
    ],
)
def test_calibrated_saved_and_opened(method: str, format: str, tmp_path: Path) -> None:
    """The directory holds the same model: the same tokens, the same bytes, no method asked for."""
    shares: list[float] = []
    quant = QuantConfig(method=method, format=format, calibration=CALIBRATION)
    llm = LLM("tiny", engine=ENGINE, quant=quant, on_progress=lambda share, text: shares.append(share))
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert llm.quant_report is not None and llm.quant_report.to_dict()["fallbacks"] >= 0
    wanted = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]

    llm.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "compressed-tensors"
    again = LLM(tmp_path, engine=ENGINE)
    assert [out.outputs[0].token_ids for out in again.generate(PROMPTS, GREEDY)] == wanted
    texts = [each.generate("The function", GREEDY)[0].outputs[0].text for each in (llm, again)]
    assert texts[0] == texts[1] != ""
    assert again.quant_report is None
    formats = [{r.key: r.value for r in each.resolutions}["quant.format"] for each in (llm, again)]
    assert formats[0] == formats[1]


EXPERTS = [QuantRule("layers.*.moe.experts.*"), QuantRule("layers.*", method="none")]


def fewer(how: Any = "prune", keep: float = 0.5, **weights: Any) -> QuantConfig:
    return QuantConfig(experts=ExpertReduction(how, keep), calibration=CALIBRATION, **weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("qwen3_moe", fewer()),
        ("deepseek_v3", fewer("merge")),
        ("gpt_oss", fewer(method="rtn", format="int8")),
        ("gpt_oss", QuantConfig(method="wanda", calibration=CALIBRATION)),
        ("deepseek_v3", QuantConfig(method="magnitude", format="int8_2of4", rules=EXPERTS)),
    ],
    ids=["pruned", "merged", "pruned and rounded", "wanda", "magnitude"],
)
def test_fewer_and_sparser_experts_are_run_saved_and_opened(
    name: str, quant: QuantConfig, tmp_path: Path
) -> None:
    """The certificate is of what stays, and the saved directory is the same model."""
    config: ModelConfig = FAMILIES[name].replace(vocab_size=2048)
    if config.router.groups > 1:
        config = config.replace(router=dataclasses.replace(config.router, groups=2, top_groups=1))
    save_pretrained(Decoder(config, seed=3), tmp_path / "whole", text_from=ASSETS / "tiny")
    shares: list[float] = []
    told = LLM(tmp_path / "whole", engine=ENGINE, quant=quant, fill=False)
    llm = LLM(tmp_path / "whole", engine=ENGINE, quant=quant, on_progress=lambda s, _: shares.append(s))
    kept = config.num_experts // (1 if quant.experts.method == "none" else 2)
    assert llm.config.num_experts == told.config.num_experts == kept
    assert shares == sorted(shares)
    assert weight_size(llm.model)[0] == weight_size(told.model)[0]
    assert llm.memory == told.memory
    report = llm.quant_report
    assert report is not None and report.bytes == weight_size(llm.model)[0] < report.float_bytes
    assert report.float_bytes == weight_size(LLM(tmp_path / "whole", engine=ENGINE, fill=False).model)[0]
    wanted = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]
    llm.save_pretrained(tmp_path / "saved")
    again = LLM(tmp_path / "saved", engine=ENGINE)
    assert [out.outputs[0].token_ids for out in again.generate(PROMPTS, GREEDY)] == wanted
    assert weight_size(again.model)[0] == report.bytes


def test_fewer_experts_are_refused_where_they_cannot_be() -> None:
    few = FAMILIES["qwen3_moe"]
    grouped = few.replace(router=RouterConfig(groups=4, top_groups=2))
    refusals = (
        ({"model": few, "quant": fewer(keep=0.1)}, "leaves too few of"),
        ({"model": grouped, "quant": fewer(keep=6)}, "a number that its 4 groups divide"),
        (
            {"model": few, "quant": fewer()},
            "quant.method=prune calibrates with text, and there is no tokenizer",
        ),
        (
            {"model": "tiny", "quant": fewer("merge"), "parallel": ParallelConfig(ep=2)},
            "quant.method=merge calibrates on one device",
        ),
        (
            {"model": "tiny", "quant": fewer(), "engine": EngineConfig(experts=ExpertsConfig(resident=0.5))},
            "quant.method=prune, which calibrates the whole model",
        ),
    )
    for arguments, said in refusals:
        with pytest.raises(ConfigError) as error:
            resolve(**arguments, load_format="dummy")  # type: ignore[arg-type]
        assert said in str(error.value) and "\n" not in str(error.value)
