"""A compiled program as a graph, for notebooks: launches, what was fused and what was not, and memory.

Made of a program of `program.json`, which `experiments.program` leaves: nothing is compiled. No JAX here.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from moejax.core import html
from moejax.core.words import byte_words
from moejax.perf.comm import COLLECTIVES
from moejax.report.style import nth_color

RULES: dict[tuple[str, str], Collection[tuple[str, str]]] = {
    ("query, key and value products", "qkv_projection"): {("qkv_projection", "qkv_projection")},
    ("heads' norms, rotary embedding, cache write", "kv_write"): {
        ("qkv_projection", "norm"), ("qkv_projection", "rope"), ("norm", "rope"), ("norm", "kv_write"),
        ("rope", "rope"), ("rope", "kv_write"), ("kv_write", "kv_write"),
    },
    ("attention over all keys", "attention"): {("attention", "attention")},
    ("output projection, residual, norm", "output_projection"): {
        ("output_projection", "output_projection"), ("output_projection", "norm"),
    },
    ("norm, router's product, choice, placement", "router"): {
        ("norm", "router"), ("router", "router"), ("router", "experts_dispatch"),
    },
    ("gate and up products, activation", "experts_gate_up"): {("experts_gate_up", "experts_gate_up")},
    ("dense products, activation", "mlp"): {("mlp", "mlp")},
    ("down product, combination, residual, norm", "experts_down"): {
        ("experts_down", "experts_dispatch"), ("experts_down", "norm"), ("experts_dispatch", "norm"),
    },
}  # fmt: skip
"""What one launch could do: a name, the operation that it is there for, and the pairs of operations whose
values need not leave it."""

_ROW, _LEFT, _LANES = 18, 120, 7  # pixels of a node's line and of the curves beside it; curves side by side


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a program's temporary values need.

    Attributes:
        live: the largest sum of values needed at one place of the schedule: no plan takes less.
        best_fit: a plan that places the largest value first, each in the smallest gap of its lifetime (greedy
            by size, Pisarchyk and Lee, arXiv:2001.03288).
        allocated: as XLA has assigned them.
    """

    live: int
    best_fit: int
    allocated: int


@dataclass(frozen=True)
class ProgramGraph:
    """A compiled program; a notebook shows one of its layers.

    Args:
        program: an item of program.json's "programs".
        layer: the layer to show; None: everything outside of layers.
    """

    program: Mapping[str, Any]
    layer: int | None = 0

    @cached_property
    def nodes(self) -> list[dict[str, Any]]:
        """Returns the launches in order: the fields of `moejax.bench.program.dump.Launch`, their `number`,
        `fused`, `in_place` and `reads`, numbers of the launches whose values it reads."""
        nodes, flows = [], self.program["flows"]
        numbers = {launch["instruction"]: i for i, launch in enumerate(self.program["launches"])}
        for number, launch in enumerate(self.program["launches"]):
            flow = flows.get(launch["instruction"], {"reads": [], "in_place": [], "fused": []})
            reads = sorted(numbers[name] for name in flow["reads"] if name in numbers)
            nodes.append({**launch, **flow, "number": number, "reads": reads})
        return nodes

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Returns the nodes of the layer."""
        return [node for node in self.nodes if node["layer"] == self.layer]

    def rules(self) -> list[dict[str, Any]]:
        """Returns a row for each of `RULES` that the layer has launches of: `rule`, `launches` (kernels),
        and `apart`, a line for each pair of launches that pass a value on, and why they are two."""
        rows = []
        for (rule, operation), pairs in RULES.items():
            involved = {node["number"] for node in self.shown if node["operation"] == operation}
            apart = []
            for node in self.nodes if involved else ():  # a layer's last values go into the next one's norm
                for source in (self.nodes[number] for number in node["reads"]):
                    pair = (source["operation"], node["operation"])
                    if pair in pairs and source["layer"] == self.layer:
                        involved |= {source["number"], node["number"]}
                        apart.append(f"{source['kernel']} → {node['kernel']}: {_why_apart(source, node)}")
            kernels = [self.nodes[number]["kernel"] for number in sorted(involved)]
            rows += [{"rule": rule, "launches": kernels, "apart": apart}] if kernels else []
        return rows

    @cached_property
    def plan(self) -> MemoryPlan:
        """Returns what the temporary values need at least, by a greedy plan, and what XLA gives them."""
        return plan_memory(self.program["temporaries"], self.program["memory"]["temp"])

    def _repr_html_(self) -> str:
        where = "outside of layers" if self.layer is None else f"layer {self.layer}"
        rules = [
            [row["rule"], ", ".join(row["launches"]), "\n".join(row["apart"]) or "one launch"]
            for row in self.rules()
        ]
        return html.card(
            f"Program of rows {self.program['bucket']}, {where}",
            self._drawing(),
            html.note(
                "curves: values from launch to launch; bytes: of such values, read and written; ⟲: written in"
                " place of what is named; what a fusion holds shows where the pointer is"
            ),
            html.table(("Could be one launch", "launches", "apart"), rules, right=()),
            html.heading("Temporary memory of the whole program"),
            html.facts({name: byte_words(size) for name, size in asdict(self.plan).items()}),
        )

    def _drawing(self) -> str:
        """Returns the layer's launches, a line each, with a curve for each value between two of them."""
        shown = self.shown
        places = {node["number"]: place for place, node in enumerate(shown)}
        colors = {name: nth_color(i) for i, name in enumerate(dict.fromkeys(n["operation"] for n in shown))}
        parts = []
        for place, node in enumerate(shown):
            y, color = _ROW * place + _ROW // 2, colors[node["operation"]]
            for source in [places[number] for number in node["reads"] if number in places]:
                top = _ROW * source + _ROW // 2
                bend = _LEFT - min(_LEFT, 14 * min(place - source, _LANES) + 10)
                path = f"M{_LEFT} {top} C{bend} {top} {bend} {y} {_LEFT} {y}"
                parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-opacity=".6"/>')
            words = f"{node['operation'] or 'not known'}: {node['kernel']}"
            if node["in_place"]:
                words += f"  ⟲ {', '.join(node['in_place'])}"
            words += f"  · {node['blocks']} blocks, {byte_words(node['passed_bytes'])}"
            about = f"fused: {', '.join(node['fused'])}" if node["fused"] else "not XLA's fusion"
            parts.append(
                f"<g><title>{html.text(about)}</title>"
                f'<circle cx="{_LEFT}" cy="{y}" r="4" fill="{color}"/>'
                f'<text x="{_LEFT + 12}" y="{y + 4}" fill="currentColor">{html.text(words)}</text></g>'
            )
        height = _ROW * len(shown)
        return f'<svg width="720" height="{height}" font-size="12">{"".join(parts)}</svg>'


def _why_apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Returns why two launches, of which the second reads the first's values, are not one."""
    ours = [node["kernel"] for node in (first, second) if not node["fused"] and node["blocks"]]
    if any(node["kind"] in COLLECTIVES for node in (first, second)):
        return "a collective moves the values between devices"
    if "dot" in first["fused"] and "reduce" in second["fused"] and "dot" not in second["fused"]:
        return (
            "XLA splits the product's inner dimension among blocks (split-K) and sums their parts afterwards"
        )
    if len(ours) == 2:
        return "two kernels with grids of their own; XLA fuses nothing into a custom call"
    if ours:
        return f"{ours[0]} is a custom call, into which XLA fuses nothing"
    if "dot" in first["fused"] and "dot" in second["fused"]:
        return "each is a product, of which XLA has one a kernel"
    return "XLA left two fusions; why is not in its dump"


def plan_memory(values: Iterable[Mapping[str, Any]], allocated: int) -> MemoryPlan:
    """Returns what temporary values need, with those that take each other's place in memory as one.

    Args:
        values: with `size` and `offset` in bytes, and `start` and `end`, places in the schedule.
        allocated: bytes that they have.
    """
    merged: list[tuple[int, int, int]] = []
    previous: dict[int, int] = {}  # the index of an offset's last value
    for value in sorted(values, key=lambda value: (value["start"], value["end"])):
        at = previous.get(value["offset"])
        if at is not None and value["start"] <= merged[at][2]:  # in place, or a tuple and its part
            size, start, end = merged[at]
            merged[at] = (max(size, value["size"]), start, max(end, value["end"]))
        else:
            previous[value["offset"]] = len(merged)
            merged.append((value["size"], value["start"], value["end"]))
    live = max((sum(s for s, a, b in merged if a <= place <= b) for _, place, _ in merged), default=0)
    return MemoryPlan(live, _best_fit(sorted(merged, reverse=True)), allocated)


def _best_fit(values: Sequence[tuple[int, int, int]]) -> int:
    """Returns the bytes of a plan that places values (size, start, end) in this order."""
    placed: list[tuple[int, int, int, int]] = []
    for size, start, end in values:
        beside = sorted((at, length) for at, length, a, b in placed if a <= end and start <= b)
        gaps, top = [], 0
        for at, length in beside:
            gaps += [(at - top, top)] if at - top >= size else []
            top = max(top, at + length)
        placed.append((min(gaps)[1] if gaps else top, size, start, end))
    return max((at + length for at, length, _, _ in placed), default=0)
