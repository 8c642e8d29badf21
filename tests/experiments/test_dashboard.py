"""`python -m experiments.dashboard`: a dry run from start to end, and mistakes in one line."""

import json
from pathlib import Path

import pytest

from experiments.dashboard import main
from experiments.launch.app import launch


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["dashboard.dryrun=true"], "did you mean 'dashboard.dry_run'?"),
        (["dashboard.project="], "dashboard.project must be a name that is not empty"),
        (["dashboard.timeout_s=-1"], "dashboard.timeout_s"),
        (["dashbord.project=x"], "did you mean 'dashboard"),
        (["dashboard.entity=a/b"], "dashboard.entity must be a name that is not empty and without"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    argv: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = launch(main, "dashboard", argv)
    out, err = capsys.readouterr()
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert expected in err and out == "" and list(tmp_path.iterdir()) == []


def test_a_dry_run_says_where_the_specification_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb_workspaces")
    monkeypatch.chdir(tmp_path)
    code = launch(main, "dashboard", ["dashboard.dry_run=true", "dashboard.name=mine", "hydra.run.dir=out"])
    out, err = capsys.readouterr()
    assert code == 0, err
    done = json.loads(out.splitlines()[-1])
    spec = json.loads((tmp_path / "out" / "workspace.json").read_text())
    assert Path(done["spec"]).name == "workspace.json" and "url" not in done
    assert spec["displayName"] == "mine" and "dashboard.dry_run" in err
