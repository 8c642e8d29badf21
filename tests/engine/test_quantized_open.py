"""`LLM(quant=...)` from its text to a saved directory, opened again."""

import json
from pathlib import Path

import pytest

from moejax import LLM, EngineConfig, QuantConfig, SamplingParams
from moejax.core.quant import CalibrationConfig

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
