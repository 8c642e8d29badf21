"""How far measured tables carry: points, shapes, layouts and skews held out and estimated from the rest."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from moejax.simulate.kernels import TABLES, Estimate, ExpertShape, HeadShape, Kernels
from moejax.simulate.routing import Loads, RoutingLaw
from moejax.simulate.tables import Curve, load

_KINDS = {
    "gemm": "gemm",
    "moe": "experts",
    "attention_decode": "decode",
    "attention_prefill": "prefill",
    "mla_decode": "mla",
    "mla_prefill": "mla",
    "collectives": "collective",
}
_SHAPES = {
    "gemm": ("n", "k"),
    "experts": ("hidden", "inter", "topk", "experts"),
    "decode": ("heads", "kv_heads", "head_dim"),
    "prefill": ("heads", "kv_heads", "head_dim"),
    "collective": ("gpus", "op"),
}
"""Columns that are a shape."""

_OPERATIONS = {"decode": "attention", "prefill": "attention", "mla": "attention"}
_CURVES, _SAMPLED, _EACH = 300, 60, 4
"""Curves whose points are held out, shapes that are, and of a shape's curves then every fourth cell."""

Fields = Mapping[str, str]
Ask = Callable[[float], Estimate]


class Held(NamedTuple):
    """One cell that was held out: which, by what it was told, and told over measured seconds, less 1."""

    operation: str
    held_out: str
    source: str
    error: float


def table_errors(device: str, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows of errors of a device kind's tables; none where it has no tables.

    A row has `device`, `operation`, `held_out` ("point": a cell between two of its curve; "shape"; "layout"
    with what differs; "skew": by a law from even loads), `count` of cells, `median_error` and `p90_error` in
    shares of the measured time, and `bias`, the median of the signed error. Rows of experts' ranks are by
    stack: each stack's collector dealt out rows in its own way. Large tables are sampled by `seed`.
    """
    grouped: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for held in _held(device, seed):
        grouped[held.operation, held.held_out].append(held.error)
    rows = []
    for (operation, what), errors in sorted(grouped.items()):
        sizes = np.abs(errors)
        row = {"device": device, "operation": operation, "held_out": what, "count": len(errors)}
        row |= {"median_error": float(np.median(sizes)), "p90_error": float(np.quantile(sizes, 0.9))}
        rows.append({**row, "bias": float(np.median(errors))})
    return rows


def table_spreads(device: str, seed: int = 0) -> dict[str, dict[str, float]]:
    """Returns half of the relative width of 90 % intervals by kind of operation and source: the held-out
    errors' p90, of cells between two ("interpolated") and of whole shapes ("nearest")."""
    grouped: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for held in _held(device, seed):
        if not held.held_out.startswith(("skew", "layout (ep")):  # the law's, not the kernel's
            operation = _OPERATIONS.get(held.operation, held.operation)
            grouped[operation, held.source].append(abs(held.error))
    spreads: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (operation, source), errors in sorted(grouped.items()):
        spreads[operation][source] = round(float(np.quantile(errors, 0.9)), 3)
    return dict(spreads)


def _held(device: str, seed: int) -> Iterator[Held]:
    for kind, operation in _KINDS.items():
        table = load(TABLES[device], kind) if device in TABLES else None
        if table is None:
            continue
        rng = random.Random(seed)
        named = [(dict(zip(table.keys, key, strict=True)), curve) for key, curve in table.curves.items()]
        if kind == "attention_decode":  # not used: beyond the memory's rate
            named = [each for each in named if not each[0]["stack"].startswith("trtllm")]
        for _, curve in rng.sample(named, min(_CURVES, len(named))):
            for place in range(1, len(curve.xs) - 1):
                told = curve.without(place).at(curve.xs[place])
                yield Held(operation, "point", "interpolated", told / curve.seconds[place] - 1)
        if (columns := _SHAPES.get(operation)) is None:
            continue
        shapes = sorted({tuple(fields[name] for name in columns) for fields, _ in named})
        kept = set(rng.sample(shapes, min(_SAMPLED, len(shapes))))
        kernels = cache(partial(_kernels, device))
        for fields, curve in named:
            if tuple(fields[name] for name in columns) in kept and fields.get("mode") != "eager":
                yield from _carried(operation, fields, curve, kernels, rng)


def _kernels(
    device: str, stack: str, without: tuple[tuple[str, str], ...], weights: str, cache: str
) -> Kernels:
    """Returns the kernels of a stack without the curves that have all of some keys; with none of skewed loads
    where there are no keys."""

    def left_out(fields: Fields) -> bool:
        return all(fields[name] == value for name, value in without) if without else fields["skew"] != "0"

    return Kernels(device, stack, weights, weights, cache, left_out=left_out)


@cache
def _loads(experts: int, top_k: int, ranks: int, skew: str) -> Loads:
    law = RoutingLaw("power", {"exponent": float(skew)}) if skew != "0" else RoutingLaw("even")
    return law.loads(experts, top_k, ranks)


def _carried(
    operation: str, fields: Fields, curve: Curve, kernels: Callable[..., Kernels], rng: random.Random
) -> Iterator[Held]:
    """Yields cells of a curve that is told from others."""
    stack, columns = fields["stack"].split("-")[0], _SHAPES[operation]
    names = {"layout (devices)" if operation == "collective" else "shape": columns}
    if operation == "experts":
        ranks = f" (ep, {stack})" if fields["ep"] != "1" else ""
        if fields["skew"] != "0" or ranks:
            names = {("skew" if fields["skew"] != "0" else "layout") + ranks: ()}
        else:
            names["layout (tp)"] = (*columns, "tp")
    dtype = fields.get("kv_dtype", "bf16")
    if operation == "prefill" and dtype != "bf16":
        return
    for what, same in names.items():
        without = tuple((name, fields[name]) for name in same)
        if operation == "collective":  # NCCL's curves stand for NCCL's
            without = (("gpus", fields["gpus"]),)
        ask = _asked(operation, fields, kernels(stack, without, fields.get("dtype", "bf16"), dtype))
        cells = list(zip(curve.xs, curve.seconds, strict=True))
        for x, measured in cells[rng.randrange(_EACH) :: _EACH]:
            told = ask(x)
            if told.source != "roofline":
                yield Held(operation, what, "nearest", told.seconds / measured - 1)


def _asked(operation: str, fields: Fields, kernels: Kernels) -> Ask:
    """Returns what kernels tell of a curve's operation at a place of its axis."""
    size = {name: int(value) for name, value in fields.items() if value.isdigit()}
    if operation == "gemm":
        return lambda m: kernels.gemm(m, size["n"], size["k"])
    if operation == "experts":
        shape = ExpertShape(size["hidden"], size["inter"] // size["tp"], size["experts"] // size["ep"])
        loads = _loads(size["experts"], size["topk"], size["ep"], fields["skew"])
        return lambda tokens: kernels.experts(shape, *loads.at(int(tokens)))
    if operation == "collective":
        gpus, op = size["gpus"], fields["op"]
        return lambda b: kernels.collective(op, b / gpus if op == "all-gather" else b, gpus, 1)
    heads, batch = HeadShape(size["heads"], size["kv_heads"], size["head_dim"]), size["batch"]
    if operation == "decode":
        return lambda n: kernels.decode(heads, batch, n)
    return lambda n: kernels.prefill(heads, [(int(n), int(n))] * batch)
