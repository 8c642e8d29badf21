"""Backends side by side: ratios and agreement by hand, whole experiments beside a peer without a model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import moejax
from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.backends.peer_ratios import against_first, blank_unknown
from moejax.bench.common.agreement import percent_agreed
from moejax.bench.latency import run_latency
from moejax.bench.objective import ObjectiveCase, known_objectives, objective_value
from moejax.bench.throughput import run_throughput
from moejax.bench.traffic import ThroughputWorkload
from moejax.bench.workload import WorkloadConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.api import RequestMetrics
from moejax.report.plot_peers import backends_beside
from moejax.report.tables import backends_table, latency_table, throughput_table
from moejax.results.metrics import RequestRecord, compute_metrics, flat_metrics
from moejax.results.result import load_requests, load_result
from moejax.tracking.base import TrackerConfig
from moejax.tracking.telemetry import TelemetryConfig
from tests.bench.backends.peers import open_fake
from tests.bench.fake_llm import FakeLLM
from tests.bench.runs import run_into

NO_TRACKER = TrackerConfig(kind="none")
CONFIG = {"model": {"name": "tiny"}}


def record(*times: float, reason: Any = "length") -> RequestRecord:
    return RequestRecord("r", 0, 4, len(times), RequestMetrics(0.0, list(times)), reason)


# --- by hand ------------------------------------------------------------------------------------------------


def test_ratios_are_medians_over_the_iterations_pairs() -> None:
    """TTFT 1, 1, 1 s against 2, 4, 8; then 1 s a token against 2, 2, 2."""
    ours = [compute_metrics([record(1.0, 2.0, 3.0)], 3.0)] * 3
    theirs = [compute_metrics([record(t, t + 2, t + 4)], t + 4) for t in (2.0, 4.0, 8.0)]
    found = against_first(theirs, ours)
    assert found["ttft_ratio"] == 4.0 and found["tpot_ratio"] == 2.0
    assert found["e2el_ratio"] == pytest.approx(8 / 3) and found["output_ratio"] == pytest.approx(3 / 8)
    assert found["ttft_ratio_low"] == 2.0 and found["ttft_ratio_high"] == 8.0


def test_ratios_without_anything_to_divide_are_none() -> None:
    one = [compute_metrics([record(1.0)], 1.0)]
    assert against_first(one, one)["tpot_ratio"] is None  # a single token has no time per further token
    failed = [compute_metrics([record(reason="error")], 0.0)]
    assert set(against_first(failed, one).values()) == {None}


def test_tokens_agree_up_to_the_first_that_does_not() -> None:
    assert percent_agreed([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == 100.0
    # What comes after a difference continues another text, even where it coincides.
    assert percent_agreed([[1, 9, 3, 4], [5, 6, 7, 9]], [[1, 2, 3, 4], [5, 6, 7, 8]]) == 50.0
    assert percent_agreed([[1, 2]], [[1, 2, 3, 4]]) == 50.0
    assert (
        percent_agreed([[]], [[1]]) is None
        and percent_agreed([], []) is None
        and percent_agreed([[1]], []) is None
    )


def test_made_up_instants_give_no_inter_token_latency() -> None:
    row = {"p99_itl_ms": 1.0, "mean_tpot_ms": 2.0}
    assert blank_unknown(row, itl_known=False) == {"p99_itl_ms": None, "mean_tpot_ms": 2.0}
    assert blank_unknown(row, itl_known=True) == row


# --- experiments --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> moejax.LLM:
    """The shipped model in the fewest buckets."""
    engine = moejax.EngineConfig(
        max_num_seqs=2, max_model_len=32, seq_buckets=(2,), token_buckets=(16,), block_buckets=(4,)
    )
    return moejax.LLM("tiny", engine=engine)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Backend]:
    backend = open_fake(tmp_path, step_s=0.002)
    yield backend
    backend.close()


WORKLOAD = WorkloadConfig(batch_size=[1, 2], prompt_len=4, output_len=3, iterations=2)


def latency(
    engines: list[moejax.LLM | Backend], workload: WorkloadConfig, out: Path, **fields: Any
) -> dict[str, Any]:
    with run_into(out, config=CONFIG, **fields) as run:
        return run_latency(engines, workload, run)


def text_of(table: Any, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.slow
def test_latency_of_two_backends_in_one_table_and_plot(
    llm: moejax.LLM, peer: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = latency([llm, peer], WORKLOAD, tmp_path)
    assert load_result(tmp_path) == result
    rows = result["cases"]
    assert [(row["backend"], row["batch_size"]) for row in rows] == [
        ("moejax", 1), ("fake", 1), ("moejax", 2), ("fake", 2)
    ]  # fmt: skip
    for ours, theirs in (rows[:2], rows[2:]):
        assert "tpot_ratio" not in ours and theirs["tpot_ratio"] > 0 and theirs["output_ratio"] > 0
        assert theirs["tokens_agree_percent"] < 100 and "tokens_agree_percent" not in ours
        assert ours["completed"] == theirs["completed"] == 2 * ours["batch_size"]
        # What only our engine can know is not there for a peer.
        assert ours["mean_experts_hit"] > 0 and "mean_experts_hit" not in theirs
        assert not any(key.startswith("roofline") or key.startswith("mfu") for key in theirs)
    # The flat metrics are the first backend's alone, and no latency is of both its cases.
    assert result["metrics"]["completed"] == 6
    assert not any(name.endswith("_ms") for name in result["metrics"])
    assert objective_value(result, "median_tpot_ms", ObjectiveCase(batch_size=2)) == rows[2]["median_tpot_ms"]
    assert objective_value(result, "output_throughput") == result["metrics"]["output_throughput"]
    assert result["metrics"]["total_output_tokens"] == 18
    assert [backend["name"] for backend in result["backends"]] == ["moejax", "fake"]
    assert result["backends"][1]["model_bytes"] == 1234
    assert len(result["hardware"]["readings"]) == 2, "before and after what was measured"
    assert [backend["name"] for backend in result["provenance"]["backends"]] == ["moejax", "fake"]
    assert {row["case"] for row in load_requests(tmp_path)} == {0, 1, 2, 3}
    names = {path.name for path in tmp_path.glob("*.png")}
    assert {"backends.png", "latency.png", "itl.png", "throughput.png", "expert_load.png"} <= names

    table = text_of(latency_table(result))
    assert max(map(len, table.splitlines())) <= 80 and "fake" in table and "ratio: over moejax's" in table
    assert "fake 1.0" in text_of(backends_table(result), 140)
    err = capsys.readouterr().err
    assert "fake" in err and "same" in err
    assert "roof: 100.0 GB/s, best of 100.0, 100.0 before and after the cases" in err
    figure = backends_beside(result)
    assert figure is not None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["moejax", "fake"]


def test_an_objective_that_is_allowed_has_a_value(llm: moejax.LLM, tmp_path: Path) -> None:
    """Else a search over settings ends after its first whole run."""
    workload = WorkloadConfig(batch_size=1, prompt_len=4, output_len=3, iterations=1)
    result = latency([llm], workload, tmp_path)
    unless_asked_for = {"cost_per_million_output_tokens", "energy_per_output_token_j"}
    assert set(known_objectives("latency")) - unless_asked_for <= result["metrics"].keys()
    assert flat_metrics(result["cases"][0]).items() <= result["metrics"].items()


def test_a_peer_alone_needs_no_engine_of_ours(peer: Backend, tmp_path: Path) -> None:
    workload = WorkloadConfig(batch_size=2, prompt_len=4, output_len=3, iterations=1)
    result = latency([peer], workload, tmp_path, telemetry=TelemetryConfig())
    assert result["metrics"]["completed"] == 2 and result["metrics"]["model_bytes"] == 1234
    for name in (
        "max_process_rss_bytes",
        "mean_process_rss_bytes",
        "mean_cpu_percent",
    ):  # they are of this process
        assert result["metrics"][name] is None
    assert result["metrics"]["process_peak_bytes"] == result["backends"][0]["process_peak_bytes"]
    for name in ("compile_ledger", "routing"):
        assert name not in result
    assert "compile_seconds" not in result["metrics"] and peer.memory()["limit"] == 2


def test_iterations_are_taken_in_turns(llm: moejax.LLM, peer: Backend, tmp_path: Path) -> None:
    """Requests' arrivals tell the order: forwards, then backwards within a case."""
    latency([llm, peer], WORKLOAD, tmp_path)
    rows = sorted(load_requests(tmp_path), key=lambda row: row["arrival_s"])
    order = [row["case"] for row in rows]
    assert list(dict.fromkeys(order[:6])) == [0, 1, 2, 3] and list(dict.fromkeys(order[6:])) == [1, 0, 3, 2]
    # One at a time: a request begins after the case before it has ended.
    ends = [row["arrival_s"] + row["e2el_ms"] / 1e3 for row in rows]
    for before, after in zip(range(11), range(1, 12), strict=True):
        assert order[before] == order[after] or rows[after]["arrival_s"] >= ends[before] - 1e-6


def test_what_a_peer_cannot_do_ends_before_anything_runs(
    llm: moejax.LLM, peer: Backend, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    workload = WorkloadConfig(batch_size=1, prompt_len=60, output_len=30)
    with pytest.raises(ConfigError, match=r"exceed the limit of fake of 64|exceed the limit of 64"):
        latency([peer], workload, out)
    assert not list(out.glob("result.json")) and not list(out.glob("requests.jsonl"))
    traffic = ThroughputWorkload(num_requests=2, prompt_len=2, output_len=2, compare=("static",))
    refused = pytest.raises(ConfigError, match=r"workload.compare is of moejax's batching modes")
    with refused, run_into(out, "throughput") as run:
        run_throughput([peer], traffic, run)


@pytest.mark.slow
def test_throughput_beside_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our batching modes first, the peer last; what the peer does not tell of its cache is left out."""
    peer = open_fake(tmp_path, step_s=0.002)
    llm = FakeLLM(advance=lambda seconds: None)
    workload = ThroughputWorkload(
        num_requests=9, prompt_len=4, output_len=3, compare=("static",), iterations=2
    )
    with run_into(tmp_path, "throughput", CONFIG) as run:
        result = run_throughput([MoejaxBackend(llm), peer], workload, run)  # type: ignore[arg-type]
    peer.close()
    rows = result["cases"]
    assert [(row["backend"], row["batching"]) for row in rows] == [
        ("moejax", "continuous"), ("moejax", "static"), ("fake", "continuous")
    ]  # fmt: skip
    theirs = rows[2]
    assert theirs["completed"] == 18 and theirs["total_output_tokens"] == rows[0]["total_output_tokens"]
    assert 1 < theirs["mean_batch_size"] <= 4 and theirs["max_waiting"] > 0 and theirs["output_ratio"] > 0
    for name in ("cache_use_peak", "cache_use_mean", "cache_fill", "preemptions"):
        assert theirs[name] is None
    assert rows[0]["cache_use_peak"] > 0 and "output_ratio" not in rows[1]
    # Continuous over static is of our modes alone, whatever a peer's is called.
    assert result["metrics"]["speedup_over_static"] > 0
    assert {row["backend"] for row in load_requests(tmp_path)} == {"moejax", "fake"}
    assert (tmp_path / "backends.png").exists()
    table = text_of(throughput_table(result))
    assert "fake" in table and max(map(len, table.splitlines())) <= 85
    json.dumps(result, allow_nan=False)
    capsys.readouterr()


def test_a_peer_that_refuses_the_sampling(peer: Backend) -> None:
    from moejax.engine.requests.api import SamplingParams

    with pytest.raises(RequestError, match="has no n=3"):
        peer.check(SamplingParams(n=3))
