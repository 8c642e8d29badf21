"""The stress experiment on a small model: it passes there, and each check finds what it is for."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.bench.stress import run
from moejax.bench.stress.checks import Prober, Snapshot, growth, idle_faults, leak_faults, snapshot
from moejax.bench.stress.config import StressSection
from moejax.bench.stress.phases import RUN, Load
from moejax.bench.stress.run import StressError, check_stress, run_stress
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.report.stress import stress_figure
from moejax.tracking.base import TrackerConfig
from tests.bench.runs import run_into
from tests.engine.paged import SCARCE
from tests.engine.tiny import small_config

NO_TRACKER = TrackerConfig(kind="none")
SMALL = StressSection(rounds=3, requests=8, probes=2, probe_tokens=4, tpot_band=1e6, rss_mb_per_round=1e6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(small_config(), load_format="dummy", engine=SCARCE)


@pytest.fixture(scope="module")
def shared(llm: LLM) -> Prober:
    """With a control that is compiled once for all tests."""
    return Prober(llm, SMALL)


@pytest.fixture
def prober(shared: Prober, monkeypatch: pytest.MonkeyPatch) -> Prober:
    """The one that runs take."""
    own = copy.copy(shared)

    def take(llm: LLM, section: StressSection) -> Prober:
        own.section = dataclasses.replace(section, probes=SMALL.probes, probe_tokens=SMALL.probe_tokens)
        return own

    monkeypatch.setattr(run, "Prober", take)
    return own


def stress(llm: LLM, out: Path, section: StressSection = SMALL) -> dict[str, Any]:
    with run_into(out, "stress", {"stress": {"tpot_band": 1.5}}) as this:
        return run_stress(llm, section, this)


@pytest.mark.usefixtures("prober")
def test_a_sound_engine_passes(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = stress(llm, tmp_path)
    check_stress(result)
    rows = {row["phase"]: row for row in result["cases"]}
    assert list(rows) == ["long", "burst", "abort", "memory", "stream"]
    assert all(row["passed"] and not row["failed"] and not row["unfinished"] for row in rows.values())
    for name in ("long", "burst", "memory"):
        assert rows[name]["done"] == rows[name]["requests"] > 0
    assert rows["abort"]["aborted"] > 0 and rows["abort"]["done"] > 0
    assert rows["stream"]["left"] > 0 and rows["stream"]["done"] > 0
    assert rows["memory"]["preemptions"] > 0 and rows["memory"]["cache_use_peak"] > 0.8
    assert rows["burst"]["max_waiting"] >= 4
    metrics = result["metrics"]
    assert metrics["failed_checks"] == metrics["recompiles_after_warmup"] == 0
    assert metrics["requests"] == sum(row["requests"] for row in rows.values())
    assert metrics["live_arrays_per_round"] == metrics["programs_per_round"] == 0
    assert len(result["rounds"]) == 3 and all(len(drift) == 3 for drift in result["probes"].values())
    assert (tmp_path / "stress.png").is_file() and stress_figure(result) is not None
    json.dumps(result, allow_nan=False)
    err = capsys.readouterr().err
    assert "memory" in err and "growth a round" in err and "FAILED" not in err


def test_blocks_that_do_not_come_back(llm: LLM, tmp_path: Path) -> None:
    allocator = llm.engine.scheduler.allocator
    table: list[int] = []
    allocator.grow(table, 3)  # type: ignore[attr-defined]
    try:
        faults = idle_faults(llm)
        assert faults[0] == "1 cache blocks not returned" and faults[1].startswith("integrity: ")
    finally:
        allocator.release(table)  # type: ignore[attr-defined]
    assert idle_faults(llm) == []


def test_requests_that_do_not_end_or_fail_are_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(llm, SMALL, np.random.default_rng(0))
    monkeypatch.setattr(llm, "step", lambda: False)
    counts = RUN["long"](load)
    assert counts.unfinished == counts.requests == 2
    monkeypatch.undo()
    while llm.step():
        pass

    def broken(plan: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.runner, "launch", broken)
    counts = RUN["burst"](Load(llm, SMALL, np.random.default_rng(0)))
    assert counts.failed == counts.requests == 8 and "the device is gone" in counts.errors[0]
    assert any("steps failed" in fault for fault in idle_faults(llm))
    monkeypatch.undo()
    llm.reset_stats()
    assert idle_faults(llm) == []


def test_an_abort_must_end_a_request_and_nothing_else_may(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "abort", lambda request_id: None)
    counts = RUN["abort"](Load(llm, SMALL, np.random.default_rng(0)))
    assert counts.aborted == 0 and counts.failed > 0 and set(counts.errors) == {"an aborted request ran on"}
    monkeypatch.undo()
    load = Load(llm, SMALL, np.random.default_rng(0))
    load.submit(4, 4)
    llm.abort(load.live[0][0].request_id)
    assert load.finish().errors == ["a request ended as aborted by nobody"]


def test_other_tokens_and_a_slower_engine_are_drift(
    llm: LLM, prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prober.check()[1] == []
    right = prober._run

    def other(engine: LLM) -> tuple[np.ndarray, float]:
        tokens, seconds = right(engine)
        return (tokens + 1 if engine is llm else tokens), seconds

    monkeypatch.setattr(prober, "_run", other)
    assert prober.check()[1] == ["2 of 2 probes give other tokens than before"]
    slow = {"llm": 3.0}
    monkeypatch.setattr(
        prober, "_run", lambda engine: (prober.before.tokens, slow["llm"] if engine is llm else 1.0)
    )
    monkeypatch.setattr("moejax.bench.stress.checks._PAUSE_S", 0.0)
    prober.before = prober.take()
    prober.section = StressSection(probes=2, tpot_band=1.5)
    assert prober.check()[1] == []
    slow["llm"] = 6.0
    after, faults = prober.check()
    assert prober.drift(after) == 2.0 and "2.00 times as long per token" in faults[0]


def held(**fields: int) -> Snapshot:
    base = {"rss_bytes": 10**9, "live_arrays": 50, "live_bytes": 10**8, "programs": 5, "live_requests": 0}
    return Snapshot(**{**base, **fields})


def test_growth_is_judged_from_the_second_round_on() -> None:
    assert growth([0, 100, 100, 100]) == 0 and growth([5]) == 0
    assert growth([0, 10, 20, 30]) == pytest.approx(10)
    section = StressSection()
    sound = [held(rss_bytes=1), held(), held(), held()]
    assert leak_faults(sound, section)[1] == []
    for field, step, text in (
        ("rss_bytes", 20_000_000, "resident memory grow by 20 MB a round"),
        ("live_bytes", 1_000_000, "JAX arrays grow by 1 MB a round"),
        ("live_arrays", 2, "2 more JAX arrays each round"),
        ("programs", 1, "1 more compiled steps each round"),
    ):
        rounds = [held(**{field: 10**9 + step * i}) for i in range(4)]
        (fault,) = leak_faults(rounds, section)[1]
        assert fault.startswith(text)
    assert leak_faults([held(), held(), held(live_requests=3)], section)[1] == [
        "3 requests are still reachable"
    ]


@pytest.mark.usefixtures("prober")
def test_a_leak_fails_the_run(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def leaking(engine: LLM) -> Snapshot:
        kept.append(jnp.zeros((1000, 1000)))
        return snapshot(engine)

    monkeypatch.setattr(run, "snapshot", leaking)
    result = stress(llm, tmp_path, dataclasses.replace(SMALL, phases=("burst",), rounds=4, requests=4))
    assert result["metrics"]["live_mb_per_round"] == pytest.approx(4.0)
    with pytest.raises(
        StressError,
        match=r"stress: JAX arrays grow by 4 MB a round \(allowed: 0.1\) \(and 1 more in result.json\)",
    ):
        check_stress(result)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"phases": ("long", "brust")}, "unknown phase 'brust'; did you mean 'burst'"),
        ({"phases": "brust"}, "unknown phase 'brust'"),
        ({"phases": ()}, "stress.phases is empty"),
        ({"rounds": 2}, "at least 3"),
        ({"abort_share": 2.0}, r"abort_share must be a number in \[0, 1\]"),
        ({"tpot_band": 0.5}, "at least 1"),
        ({"tpot_band": float("nan")}, "at least 1"),
        ({"requests": 0}, "stress.requests"),
    ],
)
def test_bad_config(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        StressSection(**fields)


def test_probes_that_do_not_fit(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stress.probe_tokens 40 leave no room"):
        stress(llm, tmp_path, StressSection(probe_tokens=40))
