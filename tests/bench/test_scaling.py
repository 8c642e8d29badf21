"""The scaling experiment: what it models adds up, and what it runs is what it models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moejax.bench.scaling.config import ScalingSection
from moejax.bench.scaling.measured import fitting
from moejax.bench.scaling.modelled import layout_row
from moejax.bench.scaling.run import run_scaling
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import KNOWN
from moejax.core.parallel import PRESETS, ParallelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import num_params
from moejax.perf import links
from moejax.perf.comm import Exchange
from moejax.perf.memory import StageMemory
from moejax.perf.scaling import Phase, model_step
from moejax.report.experiments import save_plots
from moejax.report.scaling import print_scaling
from tests.bench.runs import run_into
from tests.engine.mesh_models import BASE
from tests.model_shapes import LATENT

pytestmark = pytest.mark.multidevice

A100 = KNOWN["a100_80gb"]
SECTION = ScalingSection(batch_size=64, context_len=512, prompt_len=256, num_prompts=32)
MODEL = BASE.replace(
    num_experts=32, num_layers=4, moe_layers=(True,) * 4, sliding_windows=(None,) * 4, dtype="bfloat16"
)


def row(layout: str | ParallelConfig, model: ModelConfig = MODEL) -> dict[str, Any]:
    parallel = PRESETS[layout] if isinstance(layout, str) else layout
    return layout_row(model, parallel, A100, SECTION, 32)


def test_one_device_holds_the_whole_model_and_sends_nothing() -> None:
    alone = row("single")
    assert alone["device_weight_bytes"] == 2 * num_params(Decoder(MODEL))
    assert alone["decode_comm_bytes"] == alone["prefill_comm_bytes"] == 0
    assert alone["decode_link_ms"] == alone["decode_bubble"] == 0
    cache_tokens = 64 * 544  # 513 tokens in blocks of 32
    assert alone["device_cache_bytes"] == cache_tokens * 4 * 2 * 2 * 8 * 2


@pytest.mark.parametrize("layout", [name for name in PRESETS if name != "single"])
def test_experts_are_split_over_all_devices_and_something_is_sent(layout: str) -> None:
    found, alone = row(layout), row("single")
    parallel = PRESETS[layout]
    assert found["device_expert_weight_bytes"] * parallel.num_devices == alone["device_expert_weight_bytes"]
    assert found["decode_comm_bytes"] > 0
    roles = [v for k, v in found.items() if k.startswith("decode_comm_bytes_")]
    assert sum(roles) == pytest.approx(found["decode_comm_bytes"], rel=1e-12)
    assert (found["decode_bubble"] > 0) == (parallel.pp > 1)


def test_latents_that_are_split_by_tokens() -> None:
    """A device holds and reads an eighth of what it now has whole; queries and results travel."""
    model = MODEL.replace(**LATENT)
    now, alone = row("tp8", model), row("single", model)
    assert now["device_cache_bytes"] == alone["device_cache_bytes"]
    saved = now["device_memory_bytes"] - now["split_latents_memory_bytes"]
    assert saved == pytest.approx(now["device_cache_bytes"] * 7 / 8, rel=1e-6)
    assert "split_latents_decode_ms" not in alone and "split_latents_decode_ms" not in row("tp8")
    assert "split_latents_decode_ms" not in row("dp_attention_ep8", model)
    sent = 4 * 7 * 64 * (22 * 2 + 8 * (16 * 2 + 4) / 8)  # layers, peers, rows; a head's query, results of 8
    latency = 4 * 2 * links.latency("all-gather", 8, 1)
    numbers = 64 * 512 * 4 * (16 + 6)
    more = sent / (A100.link_bandwidth / 2) + latency - numbers * 2 * 7 / 8 / A100.bandwidth
    assert now["split_latents_decode_ms"] - now["decode_ms"] == pytest.approx(more * 1e3, rel=1e-6)


def test_between_nodes_the_network_counts() -> None:
    parallel = PRESETS["cluster_4x8"]
    slow = dataclasses.replace(A100, network_bandwidth=A100.network_bandwidth / 10)
    near, far = (layout_row(MODEL, parallel, kind, SECTION, 32) for kind in (A100, slow))
    assert far["decode_link_ms"] > near["decode_link_ms"] > 0
    within = dataclasses.replace(parallel, nodes=1, exchange="all_to_all")
    assert layout_row(MODEL, within, slow, SECTION, 32)["prefill_link_ms"] < far["prefill_link_ms"]


def test_a_step_of_a_pipeline_by_hand() -> None:
    """Two stages of unequal weights, three microbatches: the sum of both and twice the slower."""
    parallel = ParallelConfig(pp=2)
    stages = [StageMemory((0,), 0, 4_000_000, 0), StageMemory((1, 2, 3), 0, 10_000_000, 0)]
    plain = dataclasses.replace(A100, flops={}, link_bandwidth=None)
    phase = Phase("decode", 6, 6, 0.0, 6)
    step = model_step(MODEL, parallel, plain, stages, phase, Exchange(), microbatches=3)
    table = 2 * MODEL.vocab_size * MODEL.hidden_size
    first, second = (4_000_000 - table) / 2039e9, 10_000_000 / 2039e9
    assert step.transfer == step.latency == 0
    assert step.seconds == pytest.approx(first + second + 2 * second, rel=1e-12)
    assert step.bubble == pytest.approx(1 - 3 * (first + second) / 2 / step.seconds, rel=1e-12)


def test_the_heaviest_devices_rows_take_their_arithmetic() -> None:
    parallel, fast = ParallelConfig(ep=4, attention="data"), dataclasses.replace(A100, bandwidth=1e30)
    even, uneven = (layout_row(MODEL, parallel, fast, SECTION, 32, load) for load in (1.0, 1.5))
    rows = 32 * 256 * MODEL.num_experts_per_tok / 4
    more = 2 * 4 * 0.5 * rows * 3 * MODEL.hidden_size * MODEL.moe_intermediate_size / A100.flops["bfloat16"]
    assert uneven["prefill_compute_ms"] - even["prefill_compute_ms"] == pytest.approx(more * 1e3)
    assert uneven["prefill_comm_bytes"] == even["prefill_comm_bytes"]


def test_a_layout_too_large_for_the_devices_is_measured_in_a_smaller_form() -> None:
    assert fitting(PRESETS["tp8"], 8) == PRESETS["tp8"]
    small = fitting(PRESETS["cluster_4x8"], 8)
    assert (small.ep, small.nodes, small.exchange) == (8, 2, "hierarchical")
    with pytest.raises(ConfigError, match="8 devices, of which 4 are here"):
        fitting(PRESETS["tp8"], 4)


def test_wrong_sections_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scaling\.layouts\[0\]: unknown layout 'tp9'; did you mean 'tp8'"):
        ScalingSection(layouts=["tp9"])
    with pytest.raises(ConfigError, match=r"scaling\.layouts is empty"):
        ScalingSection(layouts=[])
    with pytest.raises(ConfigError, match=r"scaling\.measure"):
        ScalingSection(measure="maybe")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two layouts run, one that the model's four experts do not divide over, one only modelled."""
    out = tmp_path_factory.mktemp("scaling")
    section = ScalingSection(
        layouts=["single", "dp_attention_ep8", "cluster_4x8"], batch_size=16, context_len=64, prompt_len=16,
        num_prompts=16, measure="on", steps=6,
    )  # fmt: skip
    model = MODEL.replace(num_experts=8, num_experts_per_tok=2, num_layers=1, moe_layers=(True,),
                          sliding_windows=(None,))  # fmt: skip
    with run_into(out, "scaling", {"scaling": dataclasses.asdict(section)}) as run:
        return run_scaling(model, section, run, load_format="dummy"), out


@pytest.mark.slow
def test_measured_programs_send_what_the_formulas_say(result: Any) -> None:
    found, out = result
    alone, data, cluster = found["cases"]
    assert alone["program_comm_bytes"] == 0
    assert data["formulas_agree"] is True and data["program_comm_bytes"] > 0
    assert data["measured_devices"] == 8 and data["cpu_decode_ms"] > 0
    assert "num_experts 8 % ep=32 = 8" in cluster["error"]
    assert found["metrics"]["formulas_agree"] is True and found["metrics"]["layouts"] == 2
    assert json.loads((out / "result.json").read_text())["cases"][1]["layout"] == "dp_attention_ep8"


def test_the_table_says_what_was_left_out(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=160)
    print_scaling(result[0], console)
    text = capsys.readouterr().out
    assert "dp_attention_ep8" in text and "cluster_4x8: parallel: the model cannot be spread so" in text


def test_plots_are_written(result: Any, tmp_path: Path) -> None:
    (plot,) = save_plots(result[0], tmp_path)
    assert plot.read_bytes().startswith(b"\x89PNG")
