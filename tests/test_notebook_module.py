"""`moejax.notebook`: the command line's config and experiments from a cell, and looking at modules."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import treescope
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from experiments.launch import notebook as _cells
from moejax import notebook
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, OutputError
from moejax.models.decoder import Decoder
from moejax.results.result import Result, load_result

TRACE = [
    "model=tiny",
    "generate.kind=zipf",
    "generate.requests=2",
    "generate.prompt_len=4",
    "generate.output_len=4",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in a folder that knows nothing of the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- load_config ---------------------------------------------------------------------------------------------


def test_config_is_the_command_lines() -> None:
    from experiments.launch.schema import LatencyConfig

    config = notebook.load_config(["experiment=quick", "workload.prompt_len=32", "engine.batching=static"])
    assert type(config) is LatencyConfig
    assert config.workload.batch_size == [1, 4, 8] and config.workload.prompt_len == 32
    assert config.engine.batching == "static"
    assert config.tracker.kind == "wandb_offline"  # only `run` leaves tracking out


def test_one_override_needs_no_list() -> None:
    assert notebook.load_config("workload.prompt_len=24") == notebook.load_config(["workload.prompt_len=24"])


@pytest.mark.parametrize("experiment", sorted({*_cells.names()} - {"compare"}))  # which wants runs that exist
def test_every_experiment_has_a_config(experiment: str) -> None:
    config = notebook.load_config(TRACE if experiment == "routing" else (), experiment)
    assert dataclasses.is_dataclass(config)
    assert _cells.experiment_of(config) == experiment


@pytest.mark.parametrize(
    ("overrides", "experiment", "parts"),
    [
        (["workload.batchsize=1"], "latency", ["unknown key 'workload.batchsize'", "'workload.batch_size'"]),
        (["experiment=quik"], "latency", ["'quik'", "did you mean 'quick'"]),
        (["workload=poison"], "throughput", ["'poison'", "'poisson'"]),
        (["workload.iterations=many"], "latency", ["workload.iterations must be an integer", "'many'"]),
        (["workload.batch_size=[1,999]"], "latency", ["999", "engine.max_num_seqs"]),
        (["workload.batch_size=1,2"], "latency", ["[1,2]"]),
        (["--multirun"], "latency", ["KEY=VALUE", "--multirun"]),
        (["seed"], "latency", ["KEY=VALUE"]),
        ([3], "latency", ["texts", "3"]),
        ({"seed": 3}, "latency", ["list of texts"]),
        (None, "latency", ["list of texts", "None"]),
        ([], "latancy", ["unknown experiment 'latancy'", "'latency'"]),
        (["experiment=rate_sweep"], "throughput", ["sweep", "python -m experiments.throughput"]),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], experiment: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        notebook.load_config(overrides, experiment)
    assert "\n" not in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_hydra_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    before = HydraConfig.instance().cfg
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        own = GlobalHydra.instance().hydra
        notebook.load_config("seed=3")
        with pytest.raises(ConfigError):
            notebook.load_config("sed=3")
        assert GlobalHydra.instance().hydra is own and own is not None
        assert compose("mine").a == 1
    assert HydraConfig.instance().cfg is before


# -- run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> Result:
    return notebook.run(notebook.load_config(TRACE, "routing"))


def test_a_run_returns_what_it_has_written(result: Result, capsys: pytest.CaptureFixture[str]) -> None:
    assert result.folder is not None and result == load_result(result.folder)
    assert result["experiment"] == "routing" and result["cases"]
    assert (result.folder / "routing.npz").exists()
    assert f"in {result.folder}" in repr(result) and len(repr(result)) < 200


def test_a_run_is_quiet_and_not_tracked(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = elsewhere / "kept"
    found = notebook.run(notebook.load_config(TRACE, "routing"), out)
    printed = capfd.readouterr()
    assert found.folder == out and (out / "result.json").exists()
    assert printed.out == "" and "tokens" not in printed.err
    assert os.listdir(elsewhere) == ["kept"]  # no wandb, outputs or anything else
    assert found["config"]["tracker"]["kind"] == "none"


def test_verbose_prints_the_tables(capfd: pytest.CaptureFixture[str]) -> None:
    notebook.run(notebook.load_config(TRACE, "routing"), verbose=True)
    assert "entropy" in capfd.readouterr().err


def test_a_folder_with_a_result_is_kept(result: Result) -> None:
    assert result.folder is not None
    before = (result.folder / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="holds a run already"):
        notebook.run(notebook.load_config(TRACE, "routing"), result.folder)
    assert (result.folder / "result.json").read_bytes() == before


def test_what_cannot_be_run() -> None:
    with pytest.raises(ConfigError, match="int is no experiment's config"):
        notebook.run(3)
    with pytest.raises(ConfigError, match="run it on the command line"):
        notebook.run(notebook.load_config((), "generate"))
    with pytest.raises(ConfigError, match="RoutingConfig is the config of routing, not of latency"):
        notebook.run(notebook.load_config(TRACE, "routing"), experiment="latency")
    with pytest.raises(ConfigError, match="as it is"):
        variants = notebook.load_config(["experiment=ab", "ab.variants.x=[engine.overlap=true]"])
        notebook.run(dataclasses.replace(variants, seed=3))
    with pytest.raises(ConfigError, match="unknown experiment 'nosuch'"):
        notebook.run(notebook.load_config(TRACE, "routing"), experiment="nosuch")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        notebook.run(notebook.load_config(TRACE, "routing"), tmp_path / "file" / "below")


# -- plot ----------------------------------------------------------------------------------------------------


def test_plots_of_a_run(result: Result) -> None:
    png, about = notebook.plot(result, "load")._repr_png_()
    assert png.startswith(b"\x89PNG") and 200 < about["width"] < 2000
    assert notebook.plot(str(result.folder), "load") == notebook.plot(result, "load")
    with pytest.raises(ConfigError, match=r"unknown plot 'lod'; did you mean 'load'\?"):
        notebook.plot(result, "lod")
    with pytest.raises(ConfigError, match="there is no folder nosuch"):
        notebook.plot("nosuch", "load")
    with pytest.raises(ConfigError, match="give the run's folder"):
        notebook.plot(Result(result), "load")


# -- show ----------------------------------------------------------------------------------------------------


def test_a_module_is_shown_by_its_shapes(tiny_config: ModelConfig) -> None:
    model = Decoder(tiny_config)
    view = notebook.show(model)
    text = treescope.render_to_text(view.value)
    assert text.startswith("Decoder(") and "ShapeDtypeStruct" in text and "layers=" in text
    assert view._repr_html_().count("treescope") and repr(view) == "<Decoder: a notebook shows it as a tree>"


def test_values_stay_on_the_device_unless_asked_for() -> None:
    tree = {"weights": jax.numpy.full((2, 3), 7.25), "name": "a"}
    assert notebook.show(tree, values=True).value is tree
    leaf = notebook.show(tree).value["weights"]
    assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.shape == (2, 3)
    assert notebook.show(tree).value["name"] == "a"
    assert "7.25" in str(tree["weights"])  # and the tree itself is as it was


def test_show_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "treescope", None)
    with pytest.raises(ConfigError, match=r"pip install 'moejax\[notebooks\]'"):
        notebook.show(np.zeros(2))


# -- errors in a cell ----------------------------------------------------------------------------------------


def test_a_cell_shows_the_users_line_and_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        notebook.load_config("workload.batchsize=1")
    lines = caught.value._render_traceback_()
    assert 'notebook.load_config("workload.batchsize=1")' in lines[0]
    assert lines[-1].startswith("ConfigError: unknown key 'workload.batchsize'")
    assert not [line for line in lines if "Traceback" in line or "launch/notebook.py" in line]


def test_scaling_after_jax_has_started_is_an_error() -> None:
    code = (
        "import jax; jax.devices()\n"
        "from moejax import notebook\n"
        "from moejax.core.errors import DeviceError\n"
        "try: notebook.run(notebook.load_config((), 'scaling'))\n"
        "except DeviceError as error: print(error)"
    )
    plain = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)
    assert "start anew" in done.stdout and "xla_force_host_platform_device_count" in done.stdout, done.stderr
