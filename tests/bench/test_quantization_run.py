"""The quantization experiment from models to files, with stand-ins for the methods."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.bench.quantization.config import QuantizationSection, SpeedSection
from moejax.bench.quantization.method import compiling
from moejax.bench.quantization.rows import FULL
from moejax.bench.quantization.run import check_methods, run_quantization
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import CalibrationConfig, QuantConfig
from moejax.nn.param import iter_params
from moejax.routing.generate import generate
from moejax.tracking.dashboard import SECTIONS
from tests.bench.runs import run_into
from tests.decoding import random_model
from tests.model_shapes import TWO_LAYERS
from tests.numerics import tolerance
from tests.tracking.recorder import shown

PRESETS = {
    "mild": QuantConfig(method="rtn", format="int8"),
    "rough": QuantConfig(method="rtn", format="int4_g32"),
    "better": QuantConfig(method="gptq", format="int4_g32"),
    "wrong": QuantConfig(method="rtn", format="int4_g128"),
    "broken": QuantConfig(method="awq", format="int4_g32"),
}
NOISE = {"int8": 0.003, "int4_g32": 0.15}


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) % 96 for c in text]


def open_model(config: ModelConfig, quant: QuantConfig | None) -> Any:
    """An `LLM`, as far as the experiment looks at it; its weights disturbed as the method would have."""
    model, report = random_model(config), None
    if quant is not None:
        if quant.format == "int4_g128":
            raise ConfigError("groups of 128 do not divide its 32 inputs")
        if quant.method == "awq":
            raise ZeroDivisionError("a defect")
        size = NOISE[quant.format] * (0.5 if quant.method == "gptq" else 1)
        rng = np.random.default_rng(0)
        for _, param in iter_params(model):
            value = np.asarray(param[...])
            param.set_value(jnp.asarray(value * (1 + size * rng.normal(size=value.shape)), jnp.float32))
        report = SimpleNamespace(seconds=0.5, fallbacks=1, damping_raised=0, to_dict=dict, stages=[])
    llm = SimpleNamespace(
        model=model, config=config, model_dir=None, tokenizer=Letters(), max_model_len=64,
        kv_cache_dtype="float32", quant_report=report, parallel_config=ParallelConfig(), closed=False,
        eos_token_ids=(),
    )  # fmt: skip
    llm.close = lambda: setattr(llm, "closed", True)
    return llm


CONFIG = TWO_LAYERS.replace(qk_norm="none")


def run(out: Path, methods: list[str], **options: Any) -> dict[str, Any]:
    text = out / "text.txt"
    text.write_text("".join(chr(c) for c in np.random.default_rng(0).integers(32, 120, 300)))
    section = QuantizationSection(
        methods=methods, presets=PRESETS, text=str(text), seq_len=20, batch_size=8, resamples=200,
        speed=SpeedSection(iterations=0), **options,
    )  # fmt: skip
    config = {"quantization": dataclasses.asdict(section)}
    opened = []

    def opening(quant: QuantConfig | None) -> Any:
        opened.append(open_model(CONFIG, quant))
        return opened[-1]

    with run_into(out / "run", "quantization", config) as this:
        result = run_quantization(opening, section, this)
    assert all(llm.closed for llm in opened)
    return result


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("quantization")
    return run(out, list(PRESETS)), out / "run"


@pytest.mark.slow
def test_experts_popularity_can_be_a_traces(
    done: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape: dict[str, Any] = {"num_experts": 8, "top_k": 2, "requests": 4, "prompt_len": 50, "output_len": 1}
    trace = generate("zipf", layers=2, exponent=1.5, **shape)
    path = trace.save(tmp_path / "routing.npz")
    result = run(tmp_path, ["mild"], routing_trace=str(path))
    plain = {row["name"]: row for row in done[0]["cases"]}["mild"]
    row = result["cases"][1]
    assert row["perplexity"] == plain["perplexity"]  # only the weighting differs
    details = json.loads((tmp_path / "run" / "quantization.json").read_text())["mild"]
    share = trace.counts() / trace.counts().sum(1, keepdims=True)
    np.testing.assert_allclose(details["expert_share"], share)
    error = np.array(details["expert_error"], float)
    seen = np.isfinite(error)
    squares = np.where(seen, share * error**2, 0).sum(1) / np.where(seen, share, 0).sum(1)
    assert row["expert_error_weighted"] == pytest.approx(np.sqrt(squares.mean()), rel=1e-9)
    assert row["expert_error_weighted"] != plain["expert_error_weighted"] > 0
    assert f"in the routing trace {path}" in capsys.readouterr().err

    other = generate("zipf", layers=3, **shape).save(tmp_path / "other.npz")
    with pytest.raises(
        ConfigError, match=r"quantization\.routing_trace=.*it has 3 MoE layers and the model has 2"
    ):
        run(tmp_path, ["mild"], routing_trace=str(other))
    with pytest.raises(ConfigError, match=r"quantization\.routing_trace=gone: there is no such file"):
        run(tmp_path, ["mild"], routing_trace="gone")


def test_a_dashboard_finds_its_figures(done: Any) -> None:
    """A method's row is the summary of its W&B run."""
    (section,) = [section for section in SECTIONS if section.name == "Quantization"]
    assert {name for panel in section.panels for name in shown(panel)} <= done[0]["cases"][1].keys()


def test_every_method_has_a_row_and_its_reason(done: Any) -> None:
    result, out = done
    rows = {row["name"]: row for row in result["cases"]}
    assert list(rows) == [FULL, *PRESETS]
    assert json.loads((out / "result.json").read_text()) == result
    assert (
        rows["wrong"]["error"] == "groups of 128 do not divide its 32 inputs" and not rows["wrong"]["defect"]
    )
    assert rows["broken"]["error"] == "ZeroDivisionError: a defect" and rows["broken"]["defect"]
    assert result["metrics"]["methods"] == 3 and result["metrics"]["failed_methods"] == 2
    assert rows["rough"]["perplexity"] > rows[FULL]["perplexity"]
    assert rows["rough"]["router_flips"] > rows["mild"]["router_flips"]
    assert rows["rough"]["kl"] > rows["better"]["kl"] > rows["mild"]["kl"] > 0
    assert rows["better"]["rtn"] == "rough" and rows["mild"]["cold_experts"] == 1
    assert all(rows[name]["expert_error_rare"] > 0 for name in ("mild", "rough", "better"))
    split = rows["rough"]
    # Full precision's own losses come from two programs.
    assert split["perplexity_delta"] == pytest.approx(
        split["replayed_delta"] + split["routing_delta"], rel=tolerance(*[32] * 20)
    )
    assert len(result["differences"]) == 6 and result["text"]["tokens"] == 299


def test_details_and_plots_lie_beside_it(done: Any) -> None:
    _, out = done
    details = json.loads((out / "quantization.json").read_text())
    assert np.shape(details["rough"]["router_flips"]) == (2,)
    assert np.shape(details["rough"]["expert_error"]) == (2, 8)
    assert np.shape(details["rough"]["window_nats"]) == (3, 15)
    assert details["broken"] == {}
    for name in ("pareto", "routing", "popularity", "replay"):
        assert (out / f"{name}.png").is_file()
    summary = json.loads((out / "methods" / "rough" / "summary.json").read_text())
    assert summary["method"] == "rtn" and summary["router_flips"] > 0
    layers = (out / "methods" / "rough" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["layer"] for line in layers] == [0, 1]


def test_failed_methods_end_the_run_at_its_end(done: Any) -> None:
    result, _ = done
    with pytest.raises(
        RuntimeError, match=r"2 of 5 methods failed: wrong: groups.*; broken: ZeroDivisionError"
    ):
        check_methods(result)
    sound = [row for row in result["cases"] if not row.get("defect")]
    with pytest.raises(ConfigError, match="1 of 4 methods failed"):
        check_methods({"cases": sound})
    check_methods({"cases": sound[:3]})


def test_windows_longer_than_the_model_are_refused(tiny_config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 300)
    section = QuantizationSection(
        methods=["mild"], presets=PRESETS, text=str(tmp_path / "text.txt"), seq_len=64
    )
    with pytest.raises(
        ConfigError, match=r"quantization\.seq_len=64 and one token more exceed the limit of 64"
    ):
        run_quantization(lambda quant: open_model(tiny_config, quant), section, run_into(tmp_path))


def test_one_calibration_for_all() -> None:
    shared = CalibrationConfig(num_samples=4)
    section = QuantizationSection(methods=["better"], presets=PRESETS, calibration=shared)
    assert section.quant("better").calibration is shared
    assert QuantizationSection(methods=["better"], presets=PRESETS).quant("better") is PRESETS["better"]


def test_compile_time_is_counted_only_inside() -> None:
    def fresh() -> Any:
        graph, state = nnx.split(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
        return jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, jnp.ones((2, 3)))

    with compiling() as inside:
        fresh()
    counted = sum(inside)
    fresh()
    assert sum(inside) == counted > 0
