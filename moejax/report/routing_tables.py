"""Tables of `experiments.routing`. No JAX here."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from moejax.core.words import byte_words
from moejax.report.style import run_title
from moejax.report.tables import Column, column_table, metric_columns, print_lines, rounded


def _cell(value: float) -> str:
    return rounded(value, 10)


_SKEW = metric_columns(
    "max_over_mean", "entropy", "gini", "zipf_exponent", "burstiness", "reuse", "reuse_by_chance",
    "next_layer_bits", "prefill_hits", "decode_hits", cell=_cell,
)  # fmt: skip
_SIZE = (Column("tokens", "rows", 1, _cell), Column("steps", "steps", 1, _cell))
_MOST_LAYERS = 48
_WAYS = (
    Column("placement", "placement", left=True),
    Column("load max\n/ mean", "imbalance", cell=_cell),
    Column("\nworst", "imbalance_max", cell=_cell),
    Column("experts\nmoved", "moved"),
    Column("\nMB", "moved_bytes", 1e-6),
    Column("prefill\nms", "prefill_ms"),
    Column("\n× faster", "prefill_ratio"),
)
_NOTE = """\
max/mean, entropy (of even), Gini: of the experts' loads; Zipf: the likeliest exponent
bursts: how much loads change over time, × chance; reuse: visits that the sequence's next token repeats
next bits: what a token's first expert tells of its next layer's; hits: distinct experts that a step visits
"""


def print_routing(result: Mapping[str, Any], console: Console) -> None:
    """Each trace as a whole, each of its layers, what traces differ in, placement."""
    cases, layers = result["cases"], result["layers"]
    shape = "; ".join(
        f"{c['trace']}: {c['moe_layers']} layers, top-{c['experts_per_token']} of {c['experts']}"
        for c in cases
    )
    title = f"routing: {run_title(result)}\n{shape}"
    look: dict[str, Any] = {"padding": (0, 1, 0, 0), "collapse_padding": False}
    console.print(column_table(title, (Column("trace", "trace", fold=True), *_SIZE, *_SKEW), cases, **look))
    for case in cases:
        rows = [row for row in layers if row["trace"] == case["trace"]]
        shown, columns = rows[:_MOST_LAYERS], (Column("layer", "layer", left=True), *_SKEW)
        console.print(column_table(f"{case['trace']}, by layer", columns, shown, **look))
        if len(rows) > len(shown):
            print_lines(console, [f"{len(rows) - len(shown)} more layers are in result.json"])
    console.print(_NOTE, highlight=False)
    if ways := result.get("placement_over_time"):
        title = f"{cases[0]['trace']}: placements over time, on steps not seen before; ms of A100s, modelled"
        console.print(column_table(title, _WAYS, ways, **look))
    print_lines(console, conclusions(result))


def conclusions(result: Mapping[str, Any]) -> list[str]:
    """A line each: weights read, placements, differences."""
    lines = []
    for case in result["cases"]:
        if case.get("decode_bytes_per_step"):
            size = case["decode_bytes_per_step"]
            lines.append(
                f"{case['trace']}: a decode step reads {byte_words(size)} of experts"
                f" ({100 * case['decode_hits'] / case['experts']:.0f} % of them)"
            )
    lines += [_placement(case) for case in result["cases"] if case.get("contiguous_imbalance")]
    return lines + [_difference(row) for row in result["differences"]]


def _placement(case: Mapping[str, Any]) -> str:
    """Load of the heaviest device over the mean: as it is, planned, planned with replicas."""

    def placements(part: str) -> str:
        ratios = [case[f"{name}{part}_imbalance"] for name in ("contiguous", "planned", "replicated")]
        words = "in the model's order", "placed by load", f"and with {case['redundant']} redundant experts"
        return ", ".join(f"{ratio:.2f} × {word}" for ratio, word in zip(ratios, words, strict=True))

    line = f"{case['trace']}: the heaviest of {case['devices']} devices has, of a mean load, {placements('')}"
    if case.get("replicated_holdout_imbalance"):
        line += f"; planned on the first half of the steps, on the second: {placements('_holdout')}"
    return line


def _difference(row: Mapping[str, Any]) -> str:
    pair = f"{row['second']} against {row['first']}"
    if row["reason"]:
        return f"{pair}: {row['reason']}, not compared token by token"
    line = f"{pair}: loads {row['load_divergence_bits']:.3f} bits apart (Jensen-Shannon; 0 same, 1 disjoint)"
    if not row["matched_rows"]:
        return f"{line}; no token in common"
    return (
        f"{line}; of {row['matched_rows']:,} tokens that both have, {100 * row['flips']:.1f} % visit other"
        f" experts ({100 * row['overlap']:.1f} % of the experts are the same)"
    )
