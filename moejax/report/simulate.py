"""Table and plot of `experiments.simulate`. No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from moejax.report.ablation import print_ablation
from moejax.report.figure import log_scale, new_figure
from moejax.report.style import nth_color, run_title
from moejax.report.tables import Column, column_table, print_lines, share, three_digits
from moejax.results.metrics import is_number, objectives

Row = Mapping[str, Any]


def _load(row: Row) -> str:
    """Returns a case's load in words: its name, users, or requests a second."""
    if row.get("load"):
        return str(row["load"])
    if row.get("concurrency"):
        return f"{row['concurrency']} user" + "s" * (row["concurrency"] > 1)
    return "at once" if row["request_rate"] == "inf" else f"{row['request_rate']:g} req/s"


def _with_interval(title: str, name: str) -> Column:
    """Returns a column of a metric with its 90 % interval behind it."""

    def cell(row: Row) -> str | None:
        if row.get(name) is None:
            return None
        text = three_digits(float(row[name]))
        low, high = (row.get(f"{name}_{end}") for end in ("low", "high"))
        return text if low is None else f"{text} [{three_digits(low)}, {three_digits(high)}]"

    return Column(title, cell)


_COLUMNS = (
    Column("layout", "layout", left=True, once=True),
    Column("GPUs", "num_devices"),
    Column("load", lambda row: _load(row)),
    _with_interval("TTFT p50 ms", "median_ttft_ms"),
    _with_interval("p99", "p99_ttft_ms"),
    _with_interval("TPOT p50 ms", "median_tpot_ms"),
    _with_interval("tok/s", "output_throughput"),
    Column("good\nreq/s", "request_goodput", cell=three_digits),
    Column("cache\n%", "cache_use_peak", cell=share),
    Column("from\ntables %", lambda row: row["from_table"] + row["from_interpolated"], cell=share),
)


_CAPTION = "SIMULATED; [ ]: 90 % interval; from tables: share of simulated time from measured shapes"
_FLEET = (
    Column("", "layout", left=True),
    Column("most\nreplicas", "replicas"),
    Column("most\nGPUs", "num_devices"),
    Column("load", lambda row: _load(row)),
    _with_interval("TTFT p99 ms", "p99_ttft_ms"),
    _with_interval("ITL p99 ms", "p99_itl_ms"),
    Column("kept\n%", "attainment", cell=share),
    Column("GPU\nseconds", "device_seconds", cell=three_digits),
    Column("sent\nGB", lambda row: row["kv_sent_bytes"] / 1e9 or None, cell=three_digits),
    Column("link\nms", lambda row: row["mean_kv_sent_ms"] or None, cell=three_digits),
    Column("begun\nanew", lambda row: row["requeued"] or None),
    Column("assumed\nJ/token", "assumed_joules_per_output_token", cell=three_digits),
    Column("a million\ntokens", "cost_per_million_output_tokens"),
)
_PLAN = (
    Column("device", "device_kind", left=True),
    Column("layout", "layout", left=True),
    Column("GPUs", "num_devices"),
    Column("replicas", "replicas"),
    Column("batch", "batch_size"),
    Column(
        "steady\ntok/s GPU", lambda row: row["steady_tokens_per_s"] * row["replicas"] / row["num_devices"]
    ),
    Column("asked\nreq/s", "request_rate", cell=three_digits),
    _with_interval("TTFT p50 ms", "median_ttft_ms"),
    _with_interval("TPOT p50 ms", "median_tpot_ms"),
    Column("good\nreq/s", "request_goodput", cell=three_digits),
    Column("tok/s\n/GPU", "tokens_per_s_per_device"),
    Column("a million\ntokens", "cost_per_million_output_tokens"),
)
_MOST_PLANNED, _MOST_BOUND = 12, 0.6


def print_plan(result: Mapping[str, Any], console: Console) -> None:
    """Prints the layouts that serve what is wanted, those first that were simulated under the workload."""
    rows, wanted = result["cases"], result["config"]["simulate"]["plan"]["tokens_per_s"]
    title = f"plan for {wanted:,.0f} output tokens/s: {run_title(result)} ({objectives(result)})"
    caption = (
        "SIMULATED; batch: of a replica; steady: of a steady state, which lines without req/s rest on alone"
    )
    console.print(column_table(title, _PLAN, rows[:_MOST_PLANNED], caption))
    if len(rows) > _MOST_PLANNED:
        print_lines(console, [f"{len(rows) - _MOST_PLANNED} further layouts: cases of result.json"])


_PER_CENT = "{:.1%}".format
_HELD_OUT = (
    Column("device", "device", left=True, once=True),
    Column("operation", "operation", left=True, once=True),
    Column("held out", "held_out", left=True),
    Column("cells", "count"),
    Column("median\nerror", "median_error", cell=_PER_CENT),
    Column("p90", "p90_error", cell=_PER_CENT),
    Column("bias", "bias", cell="{:+.1%}".format),
)
_PUBLISHED = (
    Column("points", "group", left=True, once=True),
    Column("metric", "metric", left=True),
    Column("judged", "count"),
    Column("without\na figure", "without"),
    Column("median\nerror", "median_error", cell=_PER_CENT),
    Column("p90", "p90_error", cell=_PER_CENT),
    Column("worst", "worst_error", cell=_PER_CENT),
    Column("bias", "bias", cell="{:+.1%}".format),
    Column("inside\n90 %", "inside", cell="{:.0%}".format),
    Column("width", "median_width", cell="{:.0%}".format),
)
_TRACE = (
    Column("routing law", "routing", left=True, once=True),
    Column("metric", "metric", left=True),
    Column("published", "published", cell=three_digits),
    Column("simulated", "simulated", cell=three_digits),
    Column("error", "error", cell="{:+.1%}".format),
)


def print_validation(result: Mapping[str, Any], console: Console) -> None:
    """Prints the errors of held-out table cells, of published points by group, and of the published trace."""
    if result["tables"]:
        caption = "each cell estimated without its own curve's cell, shape, layout or skew"
        console.print(column_table("Tables, held out", _HELD_OUT, result["tables"], caption))
    caption = "points used for calibration count in none; bias: median signed error; width: high over low"
    console.print(column_table("Published points", _PUBLISHED, result["points_by_group"], caption))
    if result["trace"]:
        title = "300 requests, vLLM 0.19 on two RTX PRO 6000: nothing fitted"
        console.print(column_table(title, _TRACE, result["trace"], section=lambda row: row["routing"]))


_MACHINE = (
    Column("model", "model", left=True, once=True),
    Column("case", "case", left=True, once=True),
    Column("metric", "metric", left=True),
    Column("measured", "measured", cell=three_digits),
    Column("repeats", lambda row: f"{three_digits(row['low'])} to {three_digits(row['high'])}"),
    Column("simulated", "simulated", cell=three_digits),
    Column("error", "error", cell="{:+.1%}".format),
    Column("spread", "spread", cell=_PER_CENT),
    Column("goal", "goal", cell="{:.0%}".format),
    Column("", "verdict", left=True),
)


def print_machine(result: Mapping[str, Any], console: Console) -> None:
    """Prints what this machine's engine did beside what was simulated of it."""
    rows = result["machine"]
    caption = (
        "measured: median of the repeats; spread: most over least of them less 1, from 5 % on it is unclear"
    )
    title = "The simulated and the real engine on this machine"
    console.print(
        column_table(title, _MACHINE, rows, caption, section=lambda row: (row["model"], row["case"]))
    )
    unclear = [row for row in rows if row["verdict"] == "unclear"]
    counts = result["metrics"]
    inside = sum(row["low"] <= row["simulated"] <= row["high"] for row in unclear)
    within = sum(abs(row["error"]) <= row["goal"] for row in unclear)
    lines = [
        f"{counts['figures_met']} figures met, {counts['figures_missed']} missed, {len(unclear)} unclear, of"
        f" which {inside} simulated ones are between the repeats and {within} within the goal",
        f"recorded durations told again: off by {counts['replay_worst_error']:.2%} at most",
    ]
    print_lines(console, lines)


def print_calibration(result: Mapping[str, Any], console: Console) -> None:
    """Prints each stack's constants."""
    rows = [
        {**row, "told": ", ".join(f"{k} {v:g}" for k, v in row["host"].items())}
        for row in result["calibration"]
    ]
    columns = (
        Column("device", "device", left=True),
        Column("stack", "stack", left=True),
        Column("points", "points"),
        Column("constants", "told", left=True),
    )
    console.print(column_table("Constants chosen on the listed points", columns, rows))


def print_simulate(result: Mapping[str, Any], console: Console) -> None:
    """Prints a row per layout and rate, what it stands on, and what other routing would change."""
    rows = _sound(result)
    goal = objectives(result)
    title = f"simulated: {run_title(result)}" + (f" ({goal})" if goal else "")
    console.print(column_table(title, _COLUMNS, rows, _CAPTION, section=lambda row: row["layout"]))
    if any("fleet" in row for row in rows):
        console.print(column_table("fleets", _FLEET, rows))
    print_lines(console, simulate_lines(result))
    print_lines(
        console, [f"{row['layout']}: {row['error']}" for row in result["cases"] if row["error"]], "yellow"
    )


def _times(row: Row) -> str:
    times = {key[5:]: value for key, value in row.items() if key.startswith("time_") and value >= 0.01}
    return ", ".join(f"{op} {value:.0%}" for op, value in sorted(times.items(), key=lambda item: -item[1]))


def _experts(row: Row) -> str:
    """Returns how evenly experts were loaded, what moved and what found no room, for the end of a line."""
    uneven = row.get("expert_imbalance") or 1.0
    told = [f"fullest rank {uneven:.2f}x the mean"] if uneven > 1 else []  # 1: one rank has all
    shares = ((name, row.get(f"{name}_share")) for name in ("dropped", "rerouted"))
    told += [f"{name} {part:.1%}" for name, part in shares if part]
    if row.get("rebalances") is not None:
        moved, seconds = row["rebalance_bytes"] / 1e9, row["rebalance_seconds"]
        told.append(f"experts placed anew {row['rebalances']} times ({moved:.3g} GB, {seconds:.2g} s)")
    return "".join(f"; {each}" for each in told)


def simulate_lines(result: Mapping[str, Any]) -> list[str]:
    """Returns lines: the assumed cache, where time goes, the routing law and others' effect, the verdict."""
    lines, rows = [], _sound(result)
    for name in dict.fromkeys(row["layout"] for row in rows):
        first = next(row for row in rows if row["layout"] == name)
        where = f"{_times(first)}{_experts(first)}"
        lines.append(f"{name}: {first['num_blocks']:,} cache blocks; time ({_load(first)}): {where}")
    for row in rows:
        told = [f"{e['at_s']:g} s {e['from']} → {e['to']}" for e in row.get("scale_events") or ()]
        lines += [f"{row['layout']} ({_load(row)}): scaled at {', '.join(told)}"] if told else []
    lines += _bare(rows)
    if rows:
        lines.append(f"routing law {rows[0]['routing_law']}; host costs and spreads: {result['calibration']}")
    laws = result.get("routing_laws") or []
    for name in dict.fromkeys(row["layout"] for row in laws):
        told = [f"{r['law']} {three_digits(r['median_tpot_ms'])}" for r in laws if r["layout"] == name]
        lines.append(f"{name}: TPOT p50 under other laws, ms: {', '.join(told)}")
    return [*lines, *verdict_lines(rows)]


def _bare(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(row["layout"] for row in rows if row["from_roofline"] > _MOST_BOUND)
    return [f"{', '.join(names)}: mostly a bound over an efficiency, no estimate"] if names else []


def print_stages(result: Mapping[str, Any], console: Console) -> None:
    """Prints stages that were simulated, each one's cases, where the first one's time goes, and why others
    have none."""
    print_ablation(result, console)
    rows = [row for row in result["cases"] if row["error"] is None]
    columns = [Column("stage", "stage", left=True, once=True), *_COLUMNS]
    console.print(column_table("cases", columns, rows, _CAPTION, section=lambda row: row["stage"]))
    firsts = [next(r for r in rows if r["stage"] == name) for name in dict.fromkeys(r["stage"] for r in rows)]
    print_lines(
        console, [f"{row['stage']}: time ({_load(row)}): {_times(row)}{_experts(row)}" for row in firsts]
    )
    print_lines(console, _bare([{**row, "layout": row["stage"]} for row in rows]))
    print_lines(
        console, [f"{row['stage']}: {row['error']}" for row in result["cases"] if row["error"]], "yellow"
    )


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """Returns for each load the layout with the most good requests a second, or else the least TPOT, where
    its interval is apart from the others'; nothing of rows without intervals."""
    lines = []
    for load in dict.fromkeys(map(_load, rows)):
        words = []
        for metric, sign, word in (("request_goodput", 1, "good req/s"), ("median_tpot_ms", -1, "TPOT p50")):
            known = [row for row in rows if _load(row) == load and f"{metric}_low" in row]
            if len(known) < 2:
                continue
            words.append("no layout is ahead by more than the intervals")
            best = max(known, key=lambda row: sign * row[metric])
            near, far = ("low", "high") if sign > 0 else ("high", "low")
            least = sign * best[f"{metric}_{near}"]
            if all(least > sign * row[f"{metric}_{far}"] for row in known if row is not best):
                words = [f"{best['layout']} has the best {word}, intervals apart"]
                break
        lines += [f"{load}: {word}" for word in words[:1]]
    return lines


def simulate_plot(result: Mapping[str, Any]) -> Figure | None:
    """Draws latencies and throughput over the load with their intervals, and where time goes."""
    rows = _sound(result)
    if not rows:
        return None
    figure, axes = new_figure("Simulated, not measured: 90 % intervals", result, 11.0, 7.0, 2, 2)
    names, loads = (list(dict.fromkeys(values)) for values in ([r["layout"] for r in rows], map(_load, rows)))
    numbered = {key for key in ("request_rate", "concurrency") if all(is_number(r.get(key)) for r in rows)}
    series = (
        ("median_ttft_ms", "TTFT p50 (ms)"),
        ("median_tpot_ms", "TPOT p50 (ms)"),
        ("output_throughput", "output tokens/s"),
    )
    for axis, (metric, label) in zip(axes, series, strict=False):
        for index, name in enumerate(names):
            mine = [row for row in rows if row["layout"] == name and row.get(metric) is not None]
            places = [row[min(numbered)] if numbered else loads.index(_load(row)) for row in mine]
            values = [row[metric] for row in mine]
            axis.plot(places, values, "o-", color=nth_color(index), label=name, markersize=4)
            low, high = ([row.get(f"{metric}_{end}", row[metric]) for row in mine] for end in ("low", "high"))
            axis.fill_between(places, low, high, color=nth_color(index), alpha=0.18, linewidth=0)
        axis.set_ylabel(label)
        if numbered:
            axis.set_xlabel("users" if "concurrency" in numbered else "requests/s asked")
            log_scale(axis.xaxis, [row[min(numbered)] for row in rows])
        else:
            axis.set_xticks(range(len(loads)), loads, fontsize=8, rotation=20)
        log_scale(axis.yaxis, [row.get(metric) for row in rows])
    axes[0].legend(fontsize=8, frameon=False)
    firsts = [next(row for row in rows if row["layout"] == name) for name in names]
    bottom = [0.0] * len(firsts)
    for index, key in enumerate(key for key in firsts[0] if key.startswith("time_")):
        shares = [row[key] for row in firsts]
        axes[3].bar(names, shares, bottom=bottom, color=nth_color(index), label=key[5:])
        bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
    axes[3].set_title(f"share of a replica's time at {_load(firsts[0])}", fontsize=10)
    axes[3].legend(fontsize=8, frameon=False, ncols=2)
    return figure


def _sound(result: Mapping[str, Any]) -> list[Row]:
    """Returns the rows without an error, a fleet's name behind its layout's."""
    named = [
        {**row, "layout": " ".join(filter(None, (row["layout"], row.get("fleet"))))}
        for row in result["cases"]
    ]
    return [row for row in named if row["error"] is None]
