"""How far measured tables carry: points, shapes, layouts and skews held out and estimated from the rest."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from moejax.perf.comm import wire_bytes
from moejax.simulate.kernels import TABLES, Estimate, ExpertShape, HeadShape, Kernels
from moejax.simulate.routing import RoutingLaw
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
_MODEL = ("hidden", "inter", "topk", "experts")
_HEADS = ("heads", "kv_heads", "head_dim")
_CURVES, _SHAPES, _EACH = 300, 60, 4
"""Curves whose points are held out, shapes that are, and of a curve then every fourth cell."""

Fields = Mapping[str, str]


class Held(NamedTuple):
    """One cell that was held out: what was measured, and what the others say."""

    operation: str
    held_out: str
    error: float
    source: str


def table_errors(device: str, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows of errors of a device kind's tables: `operation`, `held_out` ("point": a cell between two
    of its curve; "shape"; "layout (tp)", "layout (ep)"; "skew", "skew (ep)"), `count` of cells,
    `median_error` and `p90_error` (shares of the measured time), and `bias` (the median of the signed error).

    Large tables are sampled by `seed`. Empty where the kind has no tables.
    """
    grouped: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for held in _held(device, seed):
        grouped[held.operation, held.held_out].append(held.error)
    rows = []
    for (operation, what), errors in sorted(grouped.items()):
        sizes = np.abs(errors)
        rows.append(
            {
                "device": device,
                "operation": operation,
                "held_out": what,
                "count": len(errors),
                "median_error": float(np.median(sizes)),
                "p90_error": float(np.quantile(sizes, 0.9)),
                "bias": float(np.median(errors)),
            }
        )
    return rows


def table_spreads(device: str, seed: int = 0) -> dict[str, dict[str, float]]:
    """Returns half of the relative width of 90 % intervals by kind of operation and source, which are the
    held-out errors' p90: of cells between two ("interpolated"), and of whole shapes ("nearest")."""
    grouped: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for held in _held(device, seed):
        operation = {"decode": "attention", "prefill": "attention", "mla": "attention"}.get(
            held.operation, held.operation
        )
        if not held.held_out.startswith(("skew", "layout (ep")):  # the law's, not the kernel's
            grouped[operation, held.source].append(abs(held.error))
    spreads: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (operation, source), errors in sorted(grouped.items()):
        spreads[operation][source] = round(float(np.quantile(errors, 0.9)), 3)
    return dict(spreads)


def _held(device: str, seed: int) -> Iterator[Held]:
    prefix = TABLES.get(device)
    for kind, operation in _KINDS.items():
        table = load(prefix, kind) if prefix else None
        if table is None:
            continue
        rng = random.Random(seed)
        named = [(dict(zip(table.keys, key, strict=True)), curve) for key, curve in table.curves.items()]
        if kind == "attention_decode":  # not used: beyond the memory's rate
            named = [each for each in named if not each[0]["stack"].startswith("trtllm")]
        for _, curve in rng.sample(named, min(_CURVES, len(named))):
            for place in range(1, len(curve.xs) - 1):
                told = curve.without(place).at(curve.xs[place])
                yield Held(operation, "point", told / curve.seconds[place] - 1, "interpolated")
        for what, fields, curve, ask in _SPLITS.get(operation, lambda *_: iter(()))(device, named, rng):
            cells = list(zip(curve.xs, curve.seconds, strict=True))
            for x, measured in cells[rng.randrange(_EACH) :: _EACH]:
                told = ask(x)
                if told.source != "roofline":
                    yield Held(operation, what, told.seconds / measured - 1, "nearest")


Named = list[tuple[dict[str, str], Curve]]
Asked = Iterator[tuple[str, Fields, Curve, Callable[[float], Estimate]]]


def _without(device: str, fields: Fields, names: tuple[str, ...], **dtypes: str) -> Kernels:
    """Returns the kernels of a curve's stack without all curves that have the same in `names`."""
    same = {name: fields[name] for name in names}
    return Kernels(
        device,
        fields["stack"].split("-")[0],
        left_out=lambda other: all(other[name] == value for name, value in same.items()),
        **dtypes,
    )


def _sample(named: Named, names: tuple[str, ...], rng: random.Random) -> Named:
    """Returns the curves of so many shapes."""
    shapes = sorted({tuple(fields[name] for name in names) for fields, _ in named})
    kept = set(rng.sample(shapes, min(_SHAPES, len(shapes))))
    return [each for each in named if tuple(each[0][name] for name in names) in kept]


def _gemms(device: str, named: Named, rng: random.Random) -> Asked:
    for fields, curve in _sample(named, ("n", "k"), rng):
        kernels = _without(device, fields, ("n", "k"), dense=fields["dtype"])
        n, k = int(fields["n"]), int(fields["k"])
        yield "shape", fields, curve, lambda m, g=kernels.gemm, n=n, k=k: g(m, n, k)


def _experts(device: str, named: Named, rng: random.Random) -> Asked:
    kernels: dict[Any, Kernels] = {}
    laws = {"0": RoutingLaw("even"), "1.01": RoutingLaw("power", {"exponent": 1.01})}
    laws["1.2"] = RoutingLaw("power", {"exponent": 1.2})
    loads: dict[Any, Any] = {}
    for fields, curve in named:
        D, F, k, E = (int(fields[name]) for name in _MODEL)
        ep, tp, skew, stack = int(fields["ep"]), int(fields["tp"]), fields["skew"], fields["stack"]
        shape, even = ExpertShape(D, F // tp, E // ep), skew == "0"
        if even and ep == 1:
            names = {"shape": _MODEL, "layout (tp)": (*_MODEL, "tp")}
        else:
            what = ("skew" if not even else "layout") + (f" (ep, {stack.split('-')[0]})" if ep > 1 else "")
            names = {what: ()}
        load = loads.setdefault((E, k, ep, skew), laws[skew].loads(E, k, ep))

        def ask(tokens: float, kernels: Kernels, shape: ExpertShape = shape, load: Any = load) -> Estimate:
            return kernels.experts(shape, *load.at(int(tokens)))

        for what, same in names.items():
            key = stack, fields["dtype"], what, *(fields[name] for name in same)
            if key not in kernels:
                kernels[key] = _without(device, fields, same, weights=fields["dtype"])
                if not same:
                    kernels[key].left_out = lambda other: other["skew"] != "0"
            yield what, fields, curve, lambda t, ask=ask, at=kernels[key]: ask(t, at)


def _decodes(device: str, named: Named, rng: random.Random) -> Asked:
    yield from _heads(device, named, rng, "decode")


def _prefills(device: str, named: Named, rng: random.Random) -> Asked:
    yield from _heads(device, named, rng, "prefill")


def _heads(device: str, named: Named, rng: random.Random, phase: str) -> Asked:
    kernels: dict[Any, Kernels] = {}
    for fields, curve in _sample(named, _HEADS, rng):
        shape, batch = HeadShape(*(int(fields[name]) for name in _HEADS)), int(fields["batch"])
        cache = fields["kv_dtype"] if phase == "decode" else "bf16"
        if phase == "prefill" and fields["kv_dtype"] != "bf16":
            continue
        key = fields["stack"], cache, shape
        if key not in kernels:
            kernels[key] = _without(device, fields, _HEADS, cache=cache)
        at = kernels[key]
        if phase == "decode":
            yield "shape", fields, curve, lambda n, at=at, s=shape, b=batch: at.decode(s, b, n)
        else:
            yield (
                "shape",
                fields,
                curve,
                lambda n, at=at, s=shape, b=batch: at.prefill(s, [(int(n), int(n))] * b),
            )


def _collectives(device: str, named: Named, rng: random.Random) -> Asked:
    for fields, curve in named:
        if fields["mode"] == "eager":
            continue
        op, gpus, used = fields["op"], int(fields["gpus"]), {**fields}
        kernels = Kernels(
            device,
            fields["stack"].split("-")[0],
            left_out=lambda other, used=used: (
                other["gpus"] == used["gpus"] or other["stack"] != used["stack"]
            ),
        )

        def ask(size: float, kernels: Kernels = kernels, op: str = op, gpus: int = gpus) -> Estimate:
            return kernels.collective(op, size / gpus if op == "all-gather" else size, gpus, 1)

        yield "layout (devices)", fields, curve, ask


_SPLITS: dict[str, Callable[[str, Named, random.Random], Asked]] = {
    "gemm": _gemms,
    "experts": _experts,
    "decode": _decodes,
    "prefill": _prefills,
    "collective": _collectives,
}
