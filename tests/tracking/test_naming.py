"""Names, groups and tags: what a workspace's list of runs shows."""

from pathlib import Path

import pytest

from moejax.tracking.naming import device_word, preset, run_info, run_name, sweep_group

CPU = {
    "device": {"platform": "cpu", "kind": "cpu", "count": 8},
    "git": {"commit": "abcdef0123", "dirty": True},
}
A100 = {"device": {"platform": "gpu", "kind": "NVIDIA A100-SXM4-80GB", "count": 8}, "git": {"commit": None}}
CONFIG = {
    "model": {"path": "/models/tiny/", "dtype": "bfloat16", "hf_config": None},
    "workload": {"batch_size": [1, 4, 8], "prompt_len": 64, "output_len": 32},
    "quant": {"method": "rtn", "format": "int8", "kv_cache": "auto"},
    "parallel": {"dp": 1, "pp": 1, "ep": 4, "tp": 2},
    "backend": {"kind": "moejax", "compare_with": ["llama_cpp"]},
}


def test_a_name_says_what_ran_on_what() -> None:
    assert run_name("latency", CONFIG, A100) == "tiny · b1-8 p64 o32 · int8 · ep4 tp2 · llama_cpp · 8x a100"
    plain = {"model": {"path": "tiny"}, "quant": {"method": "none", "format": "int8", "kv_cache": "int8"}}
    assert run_name("latency", plain, CPU) == "tiny · kv-int8 · cpu"
    assert run_name("kernels", {}, CPU, variant="bench") == "kernels · bench · cpu"
    assert run_name("train", {}, {}, model="wide") == "wide"


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (
            {"request_rate": float("inf"), "prompt_len": {"low": 8, "high": 96}, "output_len": 16},
            "all at once p8-96 o16",
        ),
        ({"request_rate": [2, 8.5], "output_len": {"mean": 40}}, "rate 2-8.5 o40"),
        ({"trace_file": "/data/azure.jsonl", "request_rate": 1}, "trace azure"),
    ],
)
def test_traffic_in_a_name(workload, expected) -> None:
    assert run_name("throughput", {"workload": workload}, {}) == f"throughput · {expected}"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx 4090"), ("Tesla V100-SXM2-16GB", "v100"), ("TPU v5", "tpu v5"),
    ],
)  # fmt: skip
def test_devices_in_a_word(kind, expected) -> None:
    device = {"device": {"platform": "gpu", "kind": kind, "count": 2}}
    assert device_word(device, {}) == f"2x {expected}"
    assert device_word(device, {"parallel": {"dp": 1, "pp": 1, "ep": 1, "tp": 1}}) == expected


def test_groups_tags_and_provenance(tmp_path: Path) -> None:
    sweep = tmp_path / "2026-01-02_03-04-05" / "7"
    provenance = {**CPU, "argv": ["experiments/latency.py", "experiment=quick", "seed=1"]}
    info = run_info("latency", sweep, CONFIG, provenance, tags=("mine",))
    assert info.group == "latency/2026-01-02_03-04-05" and info.job_type == "latency"
    assert info.tags == (
        "tiny", "cpu", "bfloat16", "int8", "moejax", "llama_cpp", "commit-abcdef0-dirty", "quick", "mine",
    )  # fmt: skip
    assert info.config["provenance"] == provenance and info.config["model"] == CONFIG["model"]
    assert sweep_group("latency", tmp_path / "2026-01-02_03-04-05") is None
    assert preset({"argv": ["x", "experiment=null"]}) is None and preset({}) is None


def test_wandb_s_limits_are_kept() -> None:
    long = {"model": {"path": "m" * 200}}
    info = run_info("latency", Path("out"), long, {"git": {"commit": "1" * 40}})
    assert len(info.name) <= 128 and all(0 < len(tag) <= 64 for tag in info.tags)
