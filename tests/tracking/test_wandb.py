"""W&B end to end, each run in a process of its own: wandb keeps login and settings for a process's life."""

import functools
import json
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from moejax.tracking.wandb import MAX_TABLE_ROWS

sys.path.insert(0, str(Path(__file__).parent))
from fake_wandb_server import FakeWandb

ROOT = Path(__file__).resolve().parents[2]
KEY = "0" * 40

CHILD = """
    import json, sys
    from pathlib import Path
    import numpy as np
    from matplotlib.figure import Figure
    from moejax.core.errors import MoejaxError
    from moejax.tracking.base import RunInfo, TrackerConfig
    from moejax.tracking.factory import make_tracker

    out = Path("out")
    info = RunInfo("latency", "my-run", out, group="sweep-1", tags=("tiny", "cpu"),
                   config={"model": {"name": "tiny"}, "seed": 3})
    rows = int(sys.argv[2])
    try:
        tracker = make_tracker(TrackerConfig(**json.loads(sys.argv[1])), info)
        tracker.define_metric("train_loss", summary="min")
        tracker.log({"train_loss": 2.5}, step=1)
        tracker.log({"train_loss": np.float32(1.5)}, step=2)
        tracker.table("requests", ["id", "tpot_ms"], [[i, 1.0 if i else None] for i in range(rows)])
        Figure().savefig(out / "latency.png")
        tracker.image("latency", out / "latency.png")
        (out / "result.json").write_text("{}")
        tracker.artifact("result", "result", [out / "result.json"])
        tracker.summary({"mean_ttft_ms": 12.5, "request_goodput": None})
        tracker.finish(0)
        tracker.finish(0)
        print(json.dumps(tracker.hints()))
    except MoejaxError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(2)
"""


def clean_environment(home: Path, **env: str) -> dict[str, str]:
    """This process's environment without the user's W&B settings, caches and proxies."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and "proxy" not in k.lower()}
    clean.update(HOME=str(home), PYTHONPATH=str(ROOT), NETRC=str(home / "netrc"))
    for name in ("CACHE", "CONFIG", "DATA"):
        clean[f"WANDB_{name}_DIR"] = str(home / name.lower())
    return {**clean, **env}


def run_child(folder: Path, config: dict, rows: int = 3, **env: str) -> subprocess.CompletedProcess:
    """The script above in `folder`, without the user's W&B settings."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), json.dumps(config), str(rows)],
        cwd=folder,
        env=clean_environment(folder, **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def child(tmp_path):
    """`run_child` in a folder of its own."""
    return functools.partial(run_child, tmp_path)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """The folder of an offline run, and what it printed."""
    folder = tmp_path_factory.mktemp("offline")
    return folder, run_child(folder, {"kind": "wandb_offline", "tags": ["extra"], "job_type": "bench"})


def wandb_cli(*args: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "wandb", *args], cwd=cwd, capture_output=True, text=True, timeout=60,
        env={**os.environ, "WANDB_MODE": "offline"},
    )  # fmt: skip


@pytest.mark.slow
def test_offline_run_is_read_back_with_leet(offline):
    """The printed path opens, and leet finds what was logged: history, summary, config, tags, media."""
    tmp_path, done = offline
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    leet, sync = json.loads(done.stdout.splitlines()[-1])
    command, run_dir = leet.split(" leet ")
    assert command.endswith("wandb")
    assert run_dir.startswith("out/wandb/offline-run-") and (tmp_path / run_dir).is_dir()
    assert sync == f"{command} sync {run_dir}"

    read = wandb_cli("leet", "inspect", "--json", run_dir, cwd=tmp_path)
    if read.returncode and "not available" in read.stderr:
        pytest.skip(f"wandb-core does not run here: {read.stderr.strip()}")
    records = [json.loads(line) for line in read.stdout.splitlines() if line.startswith("{")]
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert [h["train_loss"] for h in history if "train_loss" in h] == [2.5, 1.5]
    run = next(r["run"] for r in records if r["type"] == "run")
    assert (run["project"], run["run_group"], run["job_type"]) == ("moejax", "sweep-1", "bench")
    assert set(run["tags"]) == {"cpu", "extra", "tiny"}
    artifacts = [r["artifact"]["type"] for r in records if r["type"] == "artifact"]
    assert artifacts == ["run_table", "result"]

    text = wandb_cli("leet", "inspect", "--summary", "--json", run_dir, cwd=tmp_path).stdout
    state = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert state["config"] == {"model": {"name": "tiny"}, "seed": 3}
    assert state["summary"]["mean_ttft_ms"] == 12.5
    assert state["summary"]["latency"]["_type"] == "image-file"
    assert state["summary"]["requests"]["nrows"] == 3
    assert (state["state"], state["exit_code"]) == ("finished", 0)
    assert not (tmp_path / "wandb").exists()  # but below the run's own folder


@pytest.mark.slow
def test_long_table_is_cut_and_said_so(child, tmp_path):
    done = child({"kind": "wandb_offline"}, rows=MAX_TABLE_ROWS + 5)
    assert done.returncode == 0, done.stderr
    assert "kept the first 10000 of 10005 rows" in done.stderr
    text = wandb_cli("leet", "inspect", "--summary", "--json", "out/wandb", cwd=tmp_path).stdout
    summary = json.loads(text[text.index("{") : text.rindex("}") + 1])["summary"]
    assert summary["requests"]["nrows"] == MAX_TABLE_ROWS
    assert summary["requests_rows_total"] == MAX_TABLE_ROWS + 5


def test_online_run_arrives_at_the_server(child, tmp_path):
    with FakeWandb() as server:
        done = child({"kind": "wandb", "entity": "tester"}, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    assert server.exit_code == 0
    assert [row["train_loss"] for row in server.history if "train_loss" in row] == [2.5, 1.5]
    assert server.summary["mean_ttft_ms"] == 12.5
    assert server.summary["train_loss"] == {"min": 1.5}
    assert {k: v for k, v in server.config.items() if k != "_wandb"} == {"model": {"name": "tiny"}, "seed": 3}
    assert server.run["displayName"] == "my-run" and server.run["groupName"] == "sweep-1"
    assert server.run["jobType"] == "latency" and set(server.run["tags"]) == {"tiny", "cpu"}
    assert sorted(server.artifacts) == ["result", "run_table"]
    assert any(name.startswith("media/images/latency") for name in server.files)
    assert any(name.endswith("result.json") and content == b"{}" for name, content in server.files.items())
    lines = json.loads(done.stdout.splitlines()[-1])
    assert lines[1].endswith(f"wandb leet {server.url}/tester/moejax/runs/{server.run['name']}")


def test_offline_run_syncs_later_with_the_printed_line(offline):
    tmp_path, done = offline
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])[1]
    with FakeWandb() as server:
        sync = subprocess.run(
            shlex.split(line),  # exactly as printed
            cwd=tmp_path,
            env=clean_environment(tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert sync.returncode == 0, sync.stderr
    assert [row["train_loss"] for row in server.history if "train_loss" in row] == [2.5, 1.5]
    assert sorted(server.artifacts) == ["result", "run_table"]


def check_refusal(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and lines[0].startswith("TrackingError: "), done.stdout
    assert "Traceback" not in done.stderr
    for word in (*words, "wandb_offline"):
        assert word in lines[0], lines[0]


def test_missing_key_is_an_error_at_once(child, tmp_path):
    start = time.monotonic()
    with FakeWandb() as server:
        done = child({"kind": "wandb"}, WANDB_BASE_URL=server.url)
    assert time.monotonic() - start < 20
    check_refusal(done, "no API key", "WANDB_API_KEY")
    assert not (tmp_path / "wandb").exists()


def test_dead_server_is_an_error_in_bounded_time(child, tmp_path):
    start = time.monotonic()
    env = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY, "WANDB_HTTP_TIMEOUT": "2"}
    done = child({"kind": "wandb", "timeout_s": 3}, **env)
    assert time.monotonic() - start < 30
    check_refusal(done, "127.0.0.1:9", "does not answer", "refused")
    assert not list(tmp_path.glob("out/wandb/*run-*"))


def test_refused_key_is_an_error(child):
    with FakeWandb(denied=True) as server:
        done = child({"kind": "wandb", "timeout_s": 5}, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    check_refusal(done, "refused the login")


@pytest.mark.slow
def test_server_that_fails_during_the_run_is_an_error_in_bounded_time(child, tmp_path):
    start = time.monotonic()
    with FakeWandb(stalled=True) as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        done = child({"kind": "wandb", "finish_timeout_s": 2}, **env)
    assert time.monotonic() - start < 40
    assert done.returncode == 2, done.stderr + done.stdout
    line = done.stdout.splitlines()[-1]
    assert line.startswith("TrackingError: W&B upload is incomplete") and "wandb sync out/wandb/run-" in line
    assert list(tmp_path.glob("out/wandb/run-*/run-*.wandb"))


def test_online_against_wandb_mode_is_an_error(child):
    check_refusal(child({"kind": "wandb"}, WANDB_MODE="offline", WANDB_API_KEY=KEY), "WANDB_MODE=offline")


def test_unwritable_folder_is_an_error_and_not_the_temporary_folder(child, tmp_path):
    (tmp_path / "file").write_text("")
    done = child({"kind": "wandb_offline", "dir": "file/below"})
    assert done.returncode == 2 and done.stdout.startswith("OutputError: cannot write"), (
        done.stdout + done.stderr
    )
