"""`python -m experiments.models`: the command line over a repository, and W&B's artifacts beside it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import models
from experiments.launch.app import launch
from moejax.core.errors import TrackingError
from moejax.tracking import wandb as tracking


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        (tmp_path / f"source{number}").mkdir()
        (tmp_path / f"source{number}" / "config.json").write_text(f"{number}")


def run(*argv: str) -> int:
    return launch(models.main, "models", list(argv))


def told(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_add_promote_roll_back_list(tmp_path: Path, capsys) -> None:
    for argv in (["action=add", "path=source1"], ["action=add", "path=source2"]):
        assert run(*argv, "name=tiny") == 0
    for argv in (["version=1"], ["version=2"]):
        assert run("action=promote", "name=tiny", *argv) == 0
    assert run("action=rollback", "name=tiny") == 0
    capsys.readouterr()
    assert run() == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["models"]
    assert [(row["version"], row["stage"]) for row in rows] == [(1, "production"), (2, "archived")]
    assert rows[0]["hash"][:12] in err and "source2" in err
    assert {path.name for path in tmp_path.iterdir()} == {"models", "source1", "source2"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["action=add", "name=tiny"], "action=add needs path=…"),
        (["action=promote", "name=tiny"], "action=promote needs version=…"),
        (["action=rollback", "name=tiny", "version=1"], "action=rollback takes no version; leave it out"),
        (["name=tiny"], "models: unknown model 'tiny' (known: none)"),
        (["wandb_project=x"], "action=list takes no wandb_project; leave it out"),
        (["action=remove"], "action: unknown value 'remove' (known: add, list, promote, rollback)"),
        (["--dry-run"], "experiments.models has no run folder: leave out --dry-run"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys) -> None:
    assert run(*argv) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_wandb_has_versions_as_artifacts_and_the_stage_as_alias(monkeypatch, capsys) -> None:
    sent, aliases, saved = [], ["version-1"], []

    class Tracker:
        def __init__(self, config, info) -> None:
            assert (config.kind, config.entity, config.project) == ("wandb", "team", "moe")

        def artifact(self, name, kind, paths, aliases) -> None:
            sent.append((name, kind, [str(path) for path in paths], aliases))

        def finish(self) -> None:
            sent.append("finished")

    def found(path: str, type: str) -> SimpleNamespace:
        assert (path, type) == ("team/moe/tiny:version-1", "model")
        return SimpleNamespace(aliases=aliases, save=lambda: saved.append(list(aliases)))

    monkeypatch.setattr(tracking, "require_login", lambda *_: None)
    monkeypatch.setattr(tracking, "WandbTracker", Tracker)
    monkeypatch.setattr(tracking.wandb, "Api", lambda: SimpleNamespace(artifact=found))
    assert run("action=add", "name=tiny", "path=source1", "wandb_project=team/moe") == 0
    assert sent == [("tiny", "model", ["models/tiny/1"], ["version-1"]), "finished"]
    assert run("action=promote", "name=tiny", "version=1", "wandb_project=team/moe") == 0
    assert saved == [["version-1", "production"]]
    sent.clear()  # a call that did not reach W&B may be made again
    assert run("action=add", "name=tiny", "path=source1", "wandb_project=team/moe") == 0
    assert run("action=promote", "name=tiny", "version=1", "wandb_project=team/moe") == 0
    assert [item[3] for item in sent if item != "finished"] == [["version-1"]] and len(saved) == 2
    capsys.readouterr()
    assert run("action=add", "name=tiny", "path=source1") == 2
    assert capsys.readouterr().err == "error: source1 is version 1 of tiny already\n"
    assert run("action=promote", "name=tiny", "version=2", "wandb_project=team/moe") == 2


def test_without_a_server_nothing_is_changed(monkeypatch, capsys) -> None:
    def offline(*_) -> None:
        raise TrackingError("W&B: no API key")

    monkeypatch.setattr(tracking, "require_login", offline)
    assert run("action=add", "name=tiny", "path=source1", "wandb_project=moe") == 2
    assert capsys.readouterr().err == "error: W&B: no API key\n" and not Path("models").exists()
