"""For cells: the command line's configuration, its experiments, and looking at modules.

    from moejax import notebook

    config = notebook.load_config(["workload.batch_size=[1,8]"])
    result = notebook.run(config)          # a dict, shown as a table
    notebook.plot(result, "latency")       # a picture that the run has left
    notebook.program_graph(result, "8")    # of `experiments.program`: launches, fusions, memory
    notebook.show(llm.model)               # a tree to unfold

Works from any working directory. Nothing is tracked unless asked for.
"""

import dataclasses
import io
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from moejax.bench.run_folder import claimed
from moejax.core.errors import ConfigError, unknown
from moejax.core.files import ensure_writable
from moejax.report.program_graph import ProgramGraph
from moejax.results.result import Result, load_result

__all__ = ["Picture", "View", "load_config", "load_result", "plot", "program_graph", "run", "show"]

PICTURE_SCALE = 0.6  # files have 150 dots an inch, screens about 90


def load_config(overrides: str | Sequence[str] = (), experiment: str = "latency") -> Any:
    """The configuration that `python -m experiments.<experiment> <overrides>` would run.

    Args:
        overrides: KEY=VALUE as on the command line, a list or a single one: `"workload.prompt_len=64"`,
            `"experiment=quick"`, `"model.path=DIR"`, `"engine.moe.execution=dense"`.
        experiment: its name, such as "throughput".

    Returns:
        The experiment's frozen dataclass; its sections are the library's own (`config.engine` is an
        `EngineConfig`). `dataclasses.replace` makes a changed one.

    Raises:
        ConfigError: in the command line's words, with the nearest valid name.
    """
    experiments = _experiments()
    given = [overrides] if isinstance(overrides, str) else overrides
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, str) for item in given):
        raise ConfigError(f"overrides are a list of texts such as 'workload.seed=1', got {overrides!r}")
    return experiments.compose(given, experiment)


def run(
    config: Any,
    out_dir: str | Path | None = None,
    *,
    experiment: str | None = None,
    track: bool = False,
    verbose: bool = False,
) -> Result:
    """Runs an experiment and returns its result, which shows itself as the tables of the command line.

    Args:
        config: from `load_config`.
        out_dir: where `result.json`, plots and the rest go; a folder that holds a run already is refused,
            unless `config.overwrite` is true. None: a new folder below the system's temporary one.
            `result.folder` says where it was.
        experiment: which, where the config alone does not say it.
        track: send the run to the tracker that `config.tracker` names (W&B, offline by default); else none.
        verbose: print what the command line would print.

    Raises:
        ConfigError: the config is no experiment's, the folder is taken, or what the experiment itself raises.
        OutputError: the folder cannot be written.
    """
    experiments = _experiments()
    name = experiments.experiment_of(config, experiment)
    if not any(f.name == "tracker" for f in dataclasses.fields(config)):
        raise ConfigError(f"experiments.{name} leaves no result.json to return; run it on the command line")
    if not track:
        config = experiments.untracked(config, name)
    folder = Path(tempfile.mkdtemp(prefix=f"moejax-{name}-")) if out_dir is None else Path(out_dir)
    ensure_writable(folder)
    with claimed(folder, overwrite=config.overwrite):
        with redirect_stdout(io.StringIO()) if verbose else _quiet():
            experiments.call_main(config, name, folder)
    return load_result(folder)


def _experiments() -> ModuleType:
    """Returns what of the experiments a notebook needs.

    Raises:
        ConfigError: this moejax was installed from a wheel, which is the library alone.
    """
    try:
        from experiments.launch import notebook
    except ModuleNotFoundError as error:
        if error.name != "experiments":
            raise
        raise ConfigError(
            "experiments run in a checkout of moejax's repository, and a wheel is the library alone: "
            "pip install -e CHECKOUT"
        ) from None
    return notebook


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the closing tables and the machine-readable line from the cell, since the result shows the same.
    Warnings come through."""
    with warnings.catch_warnings(record=True) as seen:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    for warning in seen:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG file that a notebook shows."""

    path: Path

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        data = self.path.read_bytes()
        return data, {"width": int(PICTURE_SCALE * int.from_bytes(data[16:20], "big"))}


def plot(run: Result | str | Path, name: str) -> Picture:
    """A plot that a run has left in its folder.

    Args:
        run: a result of `run` or `load_result`, or the folder.
        name: the file's, without `.png`; docs/experiments/ says which an experiment draws.

    Raises:
        ConfigError: the run has no such plot; the text names those that it has.
    """
    folder = run.folder if isinstance(run, Result) else Path(run)
    if folder is None:
        raise ConfigError("this result was not read from a folder; give the run's folder")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    plots = {path.stem: path for path in sorted(folder.glob("*.png"))}
    if name not in plots:
        raise ConfigError(f"{folder}: {unknown('plot', name, plots)}")
    return Picture(plots[name])


def program_graph(run: Result | str | Path, step: str | None = None, layer: int | None = 0) -> ProgramGraph:
    """Returns a compiled step of `experiments.program` as a graph: launches, what is fused or why not.

    Args:
        run: a result of `run` or `load_result`, or the folder.
        step: its name in the table, such as "8" or "8+512"; None: the first.
        layer: one that was compiled; None: everything outside of layers.

    Raises:
        ConfigError: the run has left no programs, or not that step or layer.
    """
    folder = run.folder if isinstance(run, Result) else Path(run)
    file = Path(folder or "") / "program.json"
    if not file.is_file():
        raise ConfigError(f"{file} is not there: a run of experiments.program leaves it")
    programs = {program["bucket"]: program for program in json.loads(file.read_text())["programs"]}
    name = next(iter(programs)) if step is None else step
    if name not in programs:
        raise ConfigError(f"{file}: {unknown('step', name, programs)}")
    layers = programs[name]["layers"]
    if layer is not None and not 0 <= layer < layers:
        raise ConfigError(f"layer {layer}: {layers} were compiled, from 0; None is what is outside of them")
    return ProgramGraph(programs[name], layer)


@dataclasses.dataclass(frozen=True)
class View:
    """A value that a notebook shows as a tree to unfold."""

    value: Any

    def _repr_html_(self) -> str:
        import treescope

        with treescope.active_autovisualizer.set_scoped(None):
            return treescope.render_to_html(self.value, ignore_exceptions=True)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}: a notebook shows it as a tree>"


def show(module: Any, *, values: bool = False) -> View:
    """A module or pytree as a tree to unfold, by treescope.

    Args:
        module: an NNX module (`llm.model`), an `LLM`, or any pytree.
        values: with the arrays' contents, copied from the device; else shapes and dtypes only, which costs
            nothing however large the model is.

    Raises:
        ConfigError: treescope is not installed.
    """
    try:
        import treescope  # noqa: F401
    except ImportError:
        raise ConfigError("show needs treescope: pip install 'moejax[notebooks]'") from None
    stages = getattr(module, "stages", None)
    if stages is not None and hasattr(module, "engine_config"):  # an LLM, without importing the engine
        module = stages[0] if len(stages) == 1 else list(stages)
    return View(module if values else _abstract(module))


def _abstract(tree: Any) -> Any:
    """The same with every array's shape and dtype in its place; what is not an array stays."""
    import jax
    from flax import nnx

    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf

    if isinstance(tree, nnx.Module):
        graph, state = nnx.split(tree)
        return nnx.merge(graph, jax.tree.map(shape, state))
    if isinstance(tree, list) and any(isinstance(item, nnx.Module) for item in tree):
        return [_abstract(item) for item in tree]
    return jax.tree.map(shape, tree)
