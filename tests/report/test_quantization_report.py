"""Table and plots of a quantization comparison: what is shown is what the result says."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moejax.report.experiments import save_plots
from moejax.report.quantization import conclusions, print_quantization, replay_plot

LAYERS, EXPERTS = 5, 16
MOE = [True, True, False, True, True]

# name, method, format, bits, loss in % of full precision, half the interval's width, routing's share of it
METHODS = [
    ("int8", "rtn", "int8", 8.25, 0.02, 0.05, 0.4),
    ("fp8_e4m3", "rtn", "float8_e4m3fn", 8.25, 0.35, 0.12, 0.3),
    ("w8a8_smoothquant", "smoothquant", "int8_a8", 8.25, 0.11, 0.09, 0.5),
    ("int4_rtn_g64", "rtn", "int4_g64", 4.25, 6.12, 0.4, 0.3),
    ("int4_gptq_g64", "gptq", "int4_g64", 4.25, 2.51, 0.3, 0.25),
    ("int4_awq_g64", "awq", "int4_g64", 4.25, 4.6, 0.35, 0.3),
    ("mxfp4", "rtn", "mxfp4", 4.25, 9.4, 0.6, 0.35),
    ("kv_int8", "none", "int8", 32.0, 0.01, 0.03, 0.5),
]


def case(name, method, fmt, bits, loss, half, routing) -> dict[str, Any]:
    full, delta = 29.24, 29.24 * loss / 100
    row = {
        "name": name, "method": method, "format": fmt, "kv_cache": "int8" if name == "kv_int8" else "auto",
        "error": None, "changes_weights": name != "kv_int8", "perplexity": full + delta,
        "inside_noise": loss < half, "routing_inside_noise": loss * routing < half, "kl": loss / 300,
        "top1_agreement": 1 - loss / 90, "replayed_perplexity": full + delta * (1 - routing),
        "router_flips": loss / 30, "load_shift": loss / 500, "bits_per_weight": bits,
        "model_bytes": bits * 5e5,
        "cache_bits": 9 if name == "kv_int8" else 32, "quantize_seconds": 3.21, "decode_ratio": 0.83,
        "decode_tokens_per_s": 6543.2,
        "decode_percent_of_bound": 12.3, "router_flips_replayed": loss / 60, "popularity_correlation": -0.51,
        "decode_device": "cpu", "pareto": name in ("int8", "int4_gptq_g64"), "cold_experts": 0,
    }  # fmt: skip
    if name != "kv_int8":
        row |= {"expert_error_rare": loss / 20, "expert_error_popular": loss / 25}
    for key, part in (
        ("perplexity_delta", 1.0), ("replayed_delta", 1 - routing), ("routing_delta", routing),
    ):  # fmt: skip
        spread = full * half / 100
        row |= {key: delta * part, f"{key}_low": delta * part - spread, f"{key}_high": delta * part + spread}
    row |= {
        "perplexity_loss_percent": loss, "perplexity_loss_percent_low": loss - half,
        "perplexity_loss_percent_high": loss + half,
    }  # fmt: skip
    return row


def details(methods=METHODS) -> dict[str, Any]:
    rng, found = np.random.default_rng(0), {}
    for name, *_, loss, _, _ in methods:
        by_layer = loss / 20 * np.linspace(0.5, 1.5, LAYERS) * np.array(MOE)
        share = rng.dirichlet(np.full(EXPERTS, 9), LAYERS)
        found[name] = {
            "moe_layers": MOE,
            "router_flips": by_layer.tolist(),
            "router_flips_replayed": (by_layer / 2).tolist(),
            "load_shift": (by_layer / 10).tolist(),
            "expert_error": np.where(share > 0.02, loss / 20 * (1.2 - share), np.nan).tolist(),
            "expert_share": share.tolist(),
            "popularity_bins": (loss / 20 * np.array([1.3, 1.1, 1.0, 0.9])).tolist(),
        }
    return found


@pytest.fixture
def result() -> dict[str, Any]:
    full = {
        "name": "full precision", "method": "none", "format": "float32", "kv_cache": "auto", "error": None,
        "changes_weights": False, "perplexity": 29.24, "bits_per_weight": 32.0, "model_bytes": 17.8e6,
        "cache_bits": 32, "decode_device": "cpu",
    }  # fmt: skip
    cases = [full, *(case(*method) for method in METHODS)]
    cases[5] |= {
        "rtn": "int4_rtn_g64",
        "loss_vs_rtn": 0.41,
        "loss_vs_rtn_low": 0.36,
        "loss_vs_rtn_high": 0.46,
    }
    cases[6] |= {"rtn": "int4_rtn_g64", "loss_vs_rtn": None, "cold_experts": 2}
    pairs = [("full precision", "int8", True), ("full precision", "mxfp4", False), ("int8", "kv_int8", True)]
    return {
        "experiment": "quantization",
        "config": {"model": {"path": "tiny"}},
        "provenance": {"device": {"platform": "cpu"}, "cpu": {"model": "AMD EPYC", "usable_cores": 2}},
        "cases": cases,
        "differences": [{"first": a, "second": b, "inside_noise": c} for a, b, c in pairs],
        "text": {"tokens": 27216, "windows": 107, "resamples": 2000, "confidence": 0.95},
        "wandb_group": "quantization-tiny-x",
    }


def text_of(result: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_quantization(result, console)
    return console.file.getvalue()


def test_the_table_fits_100_columns_and_says_all(result: dict[str, Any]) -> None:
    text = text_of(result)
    tables = text[: text.index("inside the noise (")]
    assert "…" not in tables and max(len(line.rstrip()) for line in tables.splitlines()) <= 100
    line = next(line for line in text.splitlines() if line.startswith(" int4_gptq_g64"))
    assert all(cell in line for cell in ("4.25", "29.97", "+2.51", "+2.21", "+2.81", "+0.63"))
    assert "~+0.02" in text and "W&B: one run per method, in group quantization-tiny-x" in text


def test_what_is_inside_the_noise_is_said(result: dict[str, Any]) -> None:
    first, *rest = conclusions(result)
    assert first == (
        "inside the noise (95 % intervals, 2,000 resamples of 107 windows):"
        " int8 = full precision, kv_int8 = int8"
    )
    assert "int4_gptq_g64 loses 0.41 [0.36, 0.46] times what int4_rtn_g64 loses" in rest
    assert "int4_awq_g64: int4_rtn_g64's loss is inside the noise, so there is no share of it" in rest
    assert "int4_awq_g64: 2 experts saw too little calibration text (fallback)" in rest
    result["differences"] = []
    assert conclusions(result)[0].endswith("no pair")


def test_a_failed_method_keeps_its_row(result: dict[str, Any], tmp_path: Path) -> None:
    result["cases"][4] = {
        "name": "int4_rtn_g64", "method": "rtn", "format": "int4_g64", "kv_cache": "auto",
        "error": "groups of 64 do not divide its 96 inputs", "defect": False, "changes_weights": False,
    }  # fmt: skip
    text = text_of(result)
    assert "int4_rtn_g64 failed: groups of 64 do not divide its 96 inputs" in text
    assert len(save_plots(result, tmp_path, details=details())) == 4


def test_every_plot_is_a_png(result: dict[str, Any], tmp_path: Path) -> None:
    plots = save_plots(result, tmp_path, details=details())
    assert [plot.name for plot in plots] == ["pareto.png", "routing.png", "popularity.png", "replay.png"]
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_a_loss_has_one_interval_in_table_and_plots(result: dict[str, Any]) -> None:
    row = next(row for row in result["cases"] if row.get("replayed_delta") is not None)
    row["perplexity_loss_percent_high"] = 19.5
    bars = replay_plot(result).axes[0].containers[-1]
    assert bars.get_label() == "both (routing free)"
    assert max(end for span in bars.errorbar[2][0].get_segments() for _, end in span) == pytest.approx(19.5)


def test_nothing_is_drawn_of_nothing(result: dict[str, Any], tmp_path: Path) -> None:
    result["cases"] = result["cases"][:1]
    assert save_plots(result, tmp_path, details={}) == []
    assert "full precision" in text_of(result)


def test_a_cache_alone_has_a_plot_too(result: dict[str, Any], tmp_path: Path) -> None:
    result["cases"] = [result["cases"][0], result["cases"][-1]]
    names = [plot.name for plot in save_plots(result, tmp_path, details=details(METHODS[-1:]))]
    assert names == ["pareto.png", "routing.png", "replay.png"]
