"""A W&B workspace from `dashboard.SECTIONS`. The only module that imports wandb-workspaces, an extra.

The workspace is made without a server, and written as JSON without one; only saving it asks.
"""

import contextlib
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moejax.core.errors import ConfigError, TrackingError
from moejax.core.files import atomic_write_text, dump_json, ensure_writable
from moejax.tracking.dashboard import PINNED, SECTIONS, DashboardConfig, Panel, Section
from moejax.tracking.wandb import default_entity, require_login, tracking_errors

SPEC_FILE = "workspace.json"

_REMEDY = "or use dashboard.dry_run=true"


def run_dashboard(config: DashboardConfig, out_dir: Path) -> dict[str, Any]:
    """Writes the workspace's specification into a file and, unless `config.dry_run`, to W&B.

    Returns:
        `spec`, the file's path, and `url`, the workspace's address (None for a dry run).

    Raises:
        ConfigError: wandb-workspaces is not installed.
        OutputError: the file cannot be written.
        TrackingError: no key, no server, or one that refuses; the file is then there all the same.
    """
    path = Path(config.out) if config.out else out_dir / SPEC_FILE
    ensure_writable(path.parent)
    workspace = build_workspace(config)
    atomic_write_text(path, dump_json(workspace_spec(workspace), indent=2) + "\n")
    url = None if config.dry_run else _save(workspace, config)
    return {"spec": str(path), "url": url, "panels": sum(len(section.panels) for section in SECTIONS)}


def build_workspace(config: DashboardConfig) -> Any:
    """A `wandb_workspaces.workspaces.Workspace`.

    Raises:
        ConfigError: wandb-workspaces is not installed, or the group's name cannot be quoted.
    """
    ws, wr = _modules()
    if config.group and set(config.group) & set("'\\"):
        raise ConfigError(f"dashboard.group must have no quote and no backslash, got {config.group!r}")
    filters = f"Metric('Group') in ['{config.group}']" if config.group else ""
    return ws.Workspace(
        entity=config.entity or "",
        project=config.project,
        name=config.name,
        sections=[_section(ws, wr, section) for section in SECTIONS],
        settings=ws.WorkspaceSettings(max_runs=20, smoothing_weight=0, ignore_outliers=False),
        runset_settings=ws.RunsetSettings(filters=filters, pinned_columns=list(PINNED)),
        auto_generate_panels=False,
    )


def workspace_spec(workspace: Any) -> dict[str, Any]:
    """Returns what the server would be sent, as JSON's own types."""
    return workspace._to_model().model_dump(by_alias=True, exclude_none=True, mode="json")


def _modules() -> tuple[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its classes are made in pydantic's old way
            import wandb_workspaces.reports.v2 as wr
            import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise ConfigError(
            "experiments.dashboard needs wandb-workspaces: pip install 'moejax[workspaces]'"
        ) from error
    return ws, wr


def _section(ws: Any, wr: Any, section: Section) -> Any:
    rows = math.ceil(len(section.panels) / section.columns)  # all at once, without leafing
    return ws.Section(
        name=section.name,
        panels=[_MAKERS[panel.kind](wr, panel) for panel in section.panels],
        is_open=section.is_open,
        layout_settings=ws.SectionLayoutSettings(columns=section.columns, rows=rows),
    )


def _scatter(wr: Any, panel: Panel) -> Any:
    return wr.ScatterPlot(
        title=panel.title,
        x=wr.SummaryMetric(panel.x),
        y=wr.SummaryMetric(panel.y[0]),
        # Runs go from left to right: the most so far is the frontier where more of y is better.
        running_ymax=panel.y[0].endswith(("throughput", "goodput")) or None,
        running_ymin=panel.y[0].endswith(("percent", "flips")) or None,
    )


def _cdf(wr: Any, panel: Panel) -> Any:
    return wr.CustomChart(
        query={"summaryTable": {"tableKey": panel.y[0]}},
        chart_name="wandb/line/v0",
        chart_fields={"x": "milliseconds", "y": "share", "stroke": "case"},
        chart_strings={"title": f"{panel.title}: share of all within so many milliseconds"},
    )


def _parallel(wr: Any, panel: Panel) -> Any:
    columns = []
    for name in panel.y:
        setting = name.startswith("config.")
        metric = wr.Config(name.removeprefix("config.")) if setting else wr.SummaryMetric(name)
        columns.append(wr.ParallelCoordinatesPlotColumn(metric=metric))
    return wr.ParallelCoordinatesPlot(title=panel.title, columns=columns)


_MAKERS: dict[str, Callable[[Any, Panel], Any]] = {
    "scatter": _scatter,
    "bar": lambda wr, panel: wr.BarPlot(title=panel.title, metrics=list(panel.y)),
    "line": lambda wr, panel: wr.LinePlot(title=panel.title, x=panel.x, y=list(panel.y)),
    "cdf": _cdf,
    "image": lambda wr, panel: wr.MediaBrowser(title=panel.title, media_keys=list(panel.y), num_columns=2),
    "table": lambda wr, panel: wr.WeavePanelSummaryTable(table_name=panel.y[0]),
    "run_comparer": lambda wr, panel: wr.RunComparer(diff_only="split"),
    "importance": lambda wr, panel: wr.ParameterImportancePlot(with_respect_to=panel.y[0]),
    "parallel": _parallel,
}


def _save(workspace: Any, config: DashboardConfig) -> str:
    """Sends the workspace and returns its address."""
    require_login(config.timeout_s, _REMEDY)
    if not workspace.entity:
        entity = default_entity()
        if not entity:
            raise TrackingError(f"W&B names no entity for this key; set dashboard.entity, {_REMEDY}")
        workspace.entity = entity
    # The library prints where it saved the view; that line is the caller's.
    with tracking_errors("W&B workspace cannot be written", f" ({_REMEDY})"):
        with contextlib.redirect_stderr(io.StringIO()):
            workspace.save()
            return str(workspace.url)
