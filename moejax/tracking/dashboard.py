"""The sections and panels of a W&B workspace of our runs, as plain values.

`workspace.py` makes W&B's own form of them; no wandb is imported here. Every name is one that `publish` gives
(a test compares them).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from moejax.core.checked import Checked, Must, Name, PositiveNumber

Kind = Literal["scatter", "bar", "line", "cdf", "image", "table", "run_comparer", "importance", "parallel"]

WandbName = Annotated[
    str,
    Must(
        lambda name: name.strip() and not set(name) & set("/\\#?%:"),
        "a name that is not empty and without / \\ # ? % :",
    ),
]


@dataclass(frozen=True)
class DashboardConfig(Checked, section="dashboard"):
    """Configures `experiments.dashboard`: which workspace is written, and where.

    Attributes:
        project, entity: W&B's; entity None takes the login's own.
        name: name of the workspace in the project's list of views. Each call makes a new view.
        group: only runs of this group (`tracker.group`, a sweep's); None: all.
        dry_run: writes the specification into the output folder and asks no server.
        out: a file for the specification, beside what the server gets; with dry_run instead of the folder.
        timeout_s: most seconds until the server has answered.
    """

    project: WandbName = "moejax"
    entity: WandbName | None = None
    name: Name = "moejax"
    group: Name | None = None
    dry_run: bool = False
    out: Name | None = None
    timeout_s: PositiveNumber = 30.0


@dataclass(frozen=True)
class Panel:
    """Describes one panel of a section.

    Attributes:
        kind: type of the panel; `workspace.py` maps it to W&B's.
        title: heading of the panel.
        x: a summary metric (scatter), a name of the history (line); of no other kind.
        y: names; for `cdf`, `image` and `table` those of tables and pictures. For `parallel` a name with
            `config.` before it is a setting.
    """

    kind: Kind
    title: str
    y: tuple[str, ...] = ()
    x: str | None = None


@dataclass(frozen=True)
class Section:
    """Groups panels of one size, `columns` to a row; the reader can fold it."""

    name: str
    panels: tuple[Panel, ...]
    is_open: bool = True
    columns: int = 3


def _bars(*names: str) -> tuple[Panel, ...]:
    return tuple(Panel("bar", name, (name,)) for name in names)


def _lines(x: str, *names: str) -> tuple[Panel, ...]:
    return tuple(Panel("line", name, (name,), x=x) for name in names)


SECTIONS: tuple[Section, ...] = (
    # Runs lie from short latencies to long ones, so the best throughput so far is the Pareto frontier.
    # A run of several cases has no latency of its own: it is a line over its cases.
    Section("Throughput against latency", (
        Panel("scatter", "Output tokens/s against TPOT", ("output_throughput",), x="median_tpot_ms"),
        Panel("scatter", "Output tokens/s against p99 TTFT", ("output_throughput",), x="p99_ttft_ms"),
        Panel("scatter", "Goodput against p99 TTFT", ("request_goodput",), x="p99_ttft_ms"),
        Panel("scatter", "Requests/s against E2E", ("request_throughput",), x="median_e2el_ms"),
        *_lines("case/median_tpot_ms", "case/output_throughput"),
        *_lines("case/p99_ttft_ms", "case/output_throughput"),
    ), columns=2),
    Section("Medians of runs of one case, and totals", _bars(
        "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms", "p99_ttft_ms", "p99_tpot_ms",
        "output_throughput", "request_throughput",
    )),
    Section("Distributions", (
        Panel("cdf", "Time to the first token", ("ttft_cdf",)),
        Panel("cdf", "Time per output token", ("tpot_cdf",)),
        Panel("cdf", "Inter-token latency", ("itl_cdf",)),
        Panel("cdf", "End to end", ("e2el_cdf",)),
    ), columns=2),
    Section("Cases of a run", (
        *_lines("case/batch_size", "case/output_throughput", "case/median_ttft_ms", "case/median_tpot_ms"),
        *_lines("case/index", "case/median_itl_ms", "case/median_e2el_ms", "case/p99_ttft_ms"),
        *_lines("case/index", "case/p99_tpot_ms", "case/roofline_percent", "case/mean_experts_hit"),
        Panel("table", "Cases", ("cases",)),
    )),
    # A point per rate: what one user gets against what a device gives, and where it stops following.
    Section("Rate ramp", (
        Panel(
            "line", "tokens/s of a device against a user's", ("case/tokens_per_s_per_device",),
            x="case/tokens_per_s_per_user",
        ),
        *_lines("case/request_rate", "case/p99_ttft_ms", "case/request_goodput"),
    ), False),
    Section("Quantization", (
        Panel("scatter", "Perplexity lost against size", ("perplexity_loss_percent",), x="bits_per_weight"),
        Panel("scatter", "Routing changed against size", ("router_flips",), x="bits_per_weight"),
        *_bars("perplexity", "kl"),
    ), False),
    Section("Experts", (
        Panel("image", "Load of layers x experts", ("expert_load",)),
        *_bars("expert_load_max", "expert_load_entropy"),
    )),
    Section("What differs, and what matters", (
        Panel("run_comparer", "Runs side by side"),
        Panel("parallel", "Settings to figures", (
            "config.engine.max_num_seqs", "config.engine.block_size", "config.quant.method",
            "median_ttft_ms", "median_tpot_ms", "output_throughput",
        )),
        Panel("importance", "What output throughput depends on", ("output_throughput",)),
        Panel("importance", "What time per output token depends on", ("median_tpot_ms",)),
    ), columns=2),
    Section("Engine over time", _lines(
        "timeline/time_s", "timeline/running_max", "timeline/waiting_max", "timeline/used_blocks_max"
    ), False),
    Section("Pictures", (
        Panel("image", "Latency", ("latency",)),
        Panel("image", "Inter-token latency by token", ("itl",)),
        Panel("image", "Load over time", ("load",)),
    ), False),
    Section("Machine, power and cost", (
        *_bars("model_bytes"),
        *_bars("energy_per_output_token_j", "cost_per_million_output_tokens", "mean_cpu_percent"),
        *_bars("mean_process_rss_bytes", "process_peak_bytes", "device_peak_bytes"),
        *_lines("telemetry/time_s", "telemetry/cpu_percent", "telemetry/process_rss_bytes"),
        *_lines("telemetry/time_s", "telemetry/gpu0_power_w", "telemetry/gpu0_sm_clock_mhz"),
    ), False),
)  # fmt: skip
"""The workspace from top to bottom: results, then what they follow from and took. A panel whose metrics no
run has stays empty; sections that only some experiments fill are closed."""

PINNED = (
    "summary:median_ttft_ms", "summary:median_tpot_ms", "summary:output_throughput",
    "summary:request_goodput", "summary:energy_per_output_token_j", "config:model.path",
)  # fmt: skip
"""Columns of the list of runs, beside the names."""
