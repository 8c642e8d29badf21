"""What bounded a run, by results made up, each of which has one thing that is wrong."""

from typing import Any

import pytest

from moejax.results.diagnosis import RUN_CHECKS, diagnose, run_checks

SOUND = {
    "roofline_percent": 80.0, "roofline_limit": "memory", "recompiles_after_warmup": 0,
    "median_queue_ms": 1.0, "median_e2el_ms": 100.0, "cache_use_saturated": 0.2,
    "preemptions": 0, "padding_waste": 0.1,
    "prefix_hit_rate": 0.5, "prefix_hit_rate_ideal": 0.55, "hit_rate": 0.95, "gpu_slowdown_percent": 0.0,
    "failed": 0, "mean_other_cpu_percent": 1.0,
}  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    row = {**SOUND, **changes}
    return {"metrics": row, "cases": [{**row, "case": 0}], "provenance": {"cpu": {"usable_cores": 2}}}


def test_a_sound_run_has_nothing_to_mend() -> None:
    assert {(f.state, f.remedy) for f in diagnose(result())} == {("ok", "")}


@pytest.mark.parametrize(
    ("check", "changes", "state", "key"),
    [
        ("bound", {"roofline_percent": 20.0}, "warn", "experiments.profile"),
        ("compilation", {"recompiles_after_warmup": 2}, "fail", "engine.seq_buckets"),
        ("contention", {"mean_other_cpu_percent": 90.0}, "warn", "host.cpus"),
        ("waiting", {"median_queue_ms": 70.0}, "warn", "engine.max_num_seqs"),
        ("cache", {"cache_use_saturated": 0.99}, "warn", "engine.num_blocks"),
        ("preemption", {"preemptions": 3}, "warn", "engine.num_blocks"),
        ("padding", {"padding_waste": 0.6}, "warn", "engine.token_buckets"),
        ("prefix misses", {"prefix_hit_rate": 0.1}, "warn", "engine.num_blocks"),
        ("expert misses", {"hit_rate": 0.5}, "warn", "engine.experts.resident"),
        ("slowdown", {"gpu_slowdown_percent": 9.0}, "warn", "nvidia-smi"),
        ("failures", {"failed": 1}, "fail", "first_error"),
    ],
)
def test_each_check_finds_its_own_fault_and_no_other(check, changes, state, key) -> None:
    found = {f.check: f for f in diagnose(result(**changes))}
    assert {name for name, finding in found.items() if finding.state != "ok"} == {check}
    assert found[check].state == state and key in found[check].remedy


def test_what_a_run_did_not_measure_is_unknown() -> None:
    bare = {"metrics": {}, "cases": [], "provenance": {}}
    assert {f.check for f in diagnose(bare) if f.state == "unknown"} == RUN_CHECKS.keys() - {"contention"}
    doubted = result(roofline_percent=None, roofline_doubt="unstable")
    assert "20 % apart" in next(f.reason for f in diagnose(doubted) if f.check == "bound")


def test_a_check_that_raises_is_unknown() -> None:
    (found,) = run_checks({"x": lambda: ("ok", str([][1]), "")})
    assert (found.state, found.reason) == ("unknown", "cannot be read: list index out of range")
