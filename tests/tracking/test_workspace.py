"""The workspace: every panel shows something that our runs log, and its specification needs no server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moejax.bench.latency import run_latency
from moejax.bench.ramp.rule import user_rates
from moejax.bench.throughput import run_throughput
from moejax.bench.traffic import ThroughputWorkload
from moejax.bench.workload import WorkloadConfig
from moejax.core.errors import ConfigError
from moejax.core.price import Price
from moejax.engine.llm import LLM
from moejax.results.metrics import Slo
from moejax.tracking import workspace
from moejax.tracking.base import CompositeTracker
from moejax.tracking.dashboard import SECTIONS, DashboardConfig
from moejax.tracking.probes import HostProbe
from moejax.tracking.publish import publish
from moejax.tracking.telemetry import TelemetryConfig
from tests.bench.fake_llm import FakeLLM
from tests.bench.runs import run_into
from tests.engine.paged import TIGHT
from tests.engine.tiny import small_config
from tests.tracking.fake_nvml import FakeGpu, on_gpus
from tests.tracking.fake_wandb_server import FakeWandb
from tests.tracking.recorder import Recorder, shown
from tests.tracking.test_wandb import KEY, clean_environment

QUANTIZATION = ("perplexity", "perplexity_loss_percent", "bits_per_weight", "router_flips", "kl")
"""Named by tests/bench/test_quantization_run.py."""

LOGGED = {name for section in SECTIONS for panel in section.panels for name in shown(panel)}
"""Every name that a panel shows."""

SAMPLING = TelemetryConfig(interval_s=0.02)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names that a latency run, a throughput run and a run on a GPU give to a tracker."""
    found: set[str] = set()
    llm = LLM(small_config(), load_format="dummy", engine=TIGHT)
    with pytest.MonkeyPatch.context() as patch:
        for experiment in ("latency", "throughput"):
            told = Recorder()
            make = lambda *_, told=told: CompositeTracker([told])  # noqa: E731
            patch.setattr("moejax.bench.experiment_run.make_tracker", make)
            _run(experiment, llm, tmp_path_factory.mktemp(experiment))
            found |= told.names
    return found | _gpu_names() | _ramp_names()


def _run(experiment: str, llm: LLM, out: Path) -> None:
    fields: dict[str, Any] = {"telemetry": SAMPLING, "price": Price(1.0), "hardware_kind": "a100_80gb"}
    lengths = {"prompt_len": 8, "output_len": 4}
    with run_into(out, experiment, **fields) as run:
        if experiment == "latency":
            run_latency([llm], WorkloadConfig(batch_size=4, iterations=25, **lengths), run)
        else:
            slo = Slo(ttft_ms=1000.0)
            traffic = ThroughputWorkload(request_rate=200.0, num_requests=100, slo=slo, **lengths)
            run_throughput([FakeLLM()], traffic, run)  # type: ignore[list-item]


def _ramp_names() -> set[str]:
    """A ramp's rows are a throughput run's with these beside (`tests/bench/test_ramp.py` runs one)."""
    row = dict.fromkeys([*user_rates([], None), "tokens_per_s_per_device"], 1.0)
    told = Recorder()
    publish(told, {"experiment": "throughput", "metrics": {}, "cases": [row]})
    return told.names


def _gpu_names() -> set[str]:
    telemetry, _, clock = on_gpus(FakeGpu(), beside=[HostProbe()], config=TelemetryConfig(interval_s=0.5))
    with telemetry.part():
        for _ in range(4):
            clock.now += 1.0
            telemetry._sample()
    told = Recorder()
    metrics = {**telemetry.summary(output_tokens=10), "device_peak_bytes": 1}
    publish(told, {"experiment": "latency", "metrics": metrics, "telemetry": telemetry.report()})
    return told.names


def test_every_panel_shows_what_a_run_logs(logged: set[str]) -> None:
    known = logged | set(QUANTIZATION)
    missing = [name for name in LOGGED if name not in known]
    assert missing == []
    assert {"ttft_cdf", "expert_load", "telemetry/gpu0_power_w", "energy_per_output_token_j"} <= known


def test_a_misspelt_panel_would_be_found(logged: set[str]) -> None:
    assert "median_tpot" not in logged and "median_tpot_ms" in logged


def test_the_specification_holds_all_panels_and_their_kinds() -> None:
    pytest.importorskip("wandb_workspaces")
    spec = workspace.workspace_spec(
        workspace.build_workspace(DashboardConfig(entity="me", group="latency/s1"))
    )
    json.dumps(spec, allow_nan=False)
    banks = spec["spec"]["section"]["panelBankConfig"]["sections"]
    assert [bank["name"] for bank in banks] == [section.name for section in SECTIONS]
    kinds = {panel["viewType"] for bank in banks for panel in bank["panels"]}
    assert {
        "Scatter Plot",
        "Bar Chart",
        "Run History Line Plot",
        "Vega2",
        "Media Browser",
        "Run Comparer",
    } <= kinds
    scatter = banks[0]["panels"][0]["config"]
    assert (scatter["xAxis"], scatter["yAxis"]) == ("summary:median_tpot_ms", "summary:output_throughput")
    assert "latency/s1" in json.dumps(spec["spec"]["section"]["runSets"])
    text = json.dumps(spec)
    assert all(json.dumps(name)[1:-1] in text for name in LOGGED)


def test_a_dry_run_writes_a_file_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr(workspace, "require_login", lambda *_: pytest.fail("asked a server"))
    done = workspace.run_dashboard(DashboardConfig(dry_run=True), tmp_path / "out")
    assert done["url"] is None and Path(done["spec"]) == tmp_path / "out" / workspace.SPEC_FILE
    assert json.loads(Path(done["spec"]).read_text())["project"] == "moejax"
    assert done["panels"] == sum(len(section.panels) for section in SECTIONS)
    elsewhere = workspace.run_dashboard(DashboardConfig(dry_run=True, out=str(tmp_path / "w.json")), tmp_path)
    assert elsewhere["spec"] == str(tmp_path / "w.json")


def test_without_the_extra_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(ConfigError, match=r"pip install 'moejax\[workspaces\]'"):
        workspace.build_workspace(DashboardConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"project": " "}, r"dashboard\.project must be a name that is not empty"),
        ({"entity": "a/b"}, r"dashboard\.entity must be a name .* without"),
        ({"timeout_s": 0}, r"dashboard\.timeout_s"),
        ({"group": ""}, r"dashboard\.group must be a string that is not empty"),
    ],
)
def test_wrong_configuration_is_one_clear_line(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        DashboardConfig(**changes)


def test_a_group_with_a_quote_is_refused() -> None:
    pytest.importorskip("wandb_workspaces")
    with pytest.raises(ConfigError, match=r"dashboard\.group must have no quote"):
        workspace.build_workspace(DashboardConfig(group="it's"))


CHILD = """
import json, sys
from pathlib import Path
from moejax.core.errors import MoejaxError
from moejax.tracking.dashboard import DashboardConfig
from moejax.tracking.workspace import run_dashboard
try:
    print(json.dumps(run_dashboard(DashboardConfig(**json.loads(sys.argv[1])), Path("out"))))
except MoejaxError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(2)
"""


def child(folder: Path, config: dict[str, Any], **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(config)], cwd=folder, env=clean_environment(folder, **env),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_without_a_key_it_is_one_line_and_the_file_is_there(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    with FakeWandb() as server:
        done = child(tmp_path, {}, WANDB_BASE_URL=server.url)
    assert done.returncode == 2, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("TrackingError: ") and "no API key" in line and "dashboard.dry_run=true" in line
    assert (tmp_path / "out" / workspace.SPEC_FILE).is_file() and "Traceback" not in done.stderr


def test_the_workspace_arrives_at_the_server(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    with FakeWandb() as server:
        done = child(
            tmp_path, {"entity": "tester", "name": "mine"}, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY
        )
    assert done.returncode == 0, done.stderr + done.stdout
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("tester", "moejax", "mine")
    told = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert sum(len(bank["panels"]) for bank in told) == sum(len(section.panels) for section in SECTIONS)
    assert json.loads(done.stdout.splitlines()[-1])["url"].startswith(server.url)
