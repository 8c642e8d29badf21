"""Matches a checkpoint's keys and shapes with a model's declarations, before any weight is read.

Every fault is collected, so that one message lists them all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moejax.checkpoint.maps.rules import Rule, Target, source_shape
from moejax.core.errors import CheckpointError
from moejax.nn.param import ParamSpec

MAX_LISTED = 20


@dataclass(frozen=True)
class Fill:
    """One checkpoint tensor's part in one parameter; expert is None for a whole parameter."""

    param: str
    target: Target
    expert: int | None


@dataclass
class LoadPlan:
    """What each checkpoint key fills, and how many fills complete each parameter."""

    fills: dict[str, list[Fill]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)


@dataclass
class Faults:
    """Everything wrong with a checkpoint, by kind."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, what: str) -> None:
        self.found.setdefault(kind, []).append(what)

    def check(self, source: str) -> None:
        """Raises one `CheckpointError` that lists what was found."""
        if not self.found:
            return
        parts = []
        for kind, items in self.found.items():
            more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
            parts.append(f"{len(items)} {kind}: {', '.join(items[:MAX_LISTED])}{more}")
        raise CheckpointError(f"{source}: the weights do not fit config.json; {'; '.join(parts)}")


def plan_load(
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, ParamSpec],
    rules: Iterable[Rule],
    *,
    num_experts: int,
    tied: bool,
    source: str,
    faults: Faults | None = None,
) -> LoadPlan:
    """Which tensor fills what.

    Args:
        shapes: checkpoint key → shape.
        specs: parameter path → declaration.
        tied: with tied embeddings a stored `lm_head.weight` is the embedding again, and is not read.
        faults: what is known to be wrong already, to be listed with the rest.

    Raises:
        CheckpointError: listing all unmapped, doubly mapped, misshapen and missing keys.
    """
    rules = tuple(rules)
    plan, faults = LoadPlan(), faults or Faults()
    filled: dict[tuple[str, int | None], str] = {}
    for key, shape in shapes.items():
        if tied and key == "lm_head.weight":
            continue
        matched = [(rule, match) for rule in rules if (match := rule.pattern.fullmatch(key))]
        if not matched:
            faults.add("unmapped", key)
            continue
        if len(matched) > 1:
            faults.add("matching several rules", key)
            continue
        rule, match = matched[0]
        groups = match.groupdict()
        expert = int(groups["e"]) if groups.get("e") is not None else None
        fills = _fills_of(key, shape, rule, groups, expert, specs, num_experts, faults)
        for fill in fills:
            parts: list[int | None] = (
                [fill.expert] if rule.per_expert else list(_all_parts(rule, fill, specs))
            )
            for part in parts:
                if (fill.param, part) in filled:
                    faults.add("doubly mapped", f"{key} and {filled[fill.param, part]}")
                filled[fill.param, part] = key
            plan.parts[fill.param] = plan.parts.get(fill.param, 0) + 1
        plan.fills[key] = fills
    for missing in _missing(filled, specs, rules):
        faults.add("missing", missing)
    faults.check(source)
    return plan


def _fills_of(
    key: str,
    shape: tuple[int, ...],
    rule: Rule,
    groups: dict[str, str | None],
    expert: int | None,
    specs: Mapping[str, ParamSpec],
    num_experts: int,
    faults: Faults,
) -> list[Fill]:
    fills = []
    for target in rule.targets:
        param = target.param.replace("{l}", str(groups.get("l")))
        spec = specs.get(param)
        if spec is None or (expert is not None and expert >= num_experts):
            faults.add("unmapped", key)
            return []
        expected = source_shape(target.transform, spec.canonical_shape, rule.per_expert)
        if tuple(shape) != expected:
            faults.add("misshapen", f"{key} is {list(shape)}, expected {list(expected)}")
            # Still counts as present, so that it is not also listed as missing.
        fills.append(Fill(param, target, expert))
    return fills


def _all_parts(rule: Rule, fill: Fill, specs: Mapping[str, ParamSpec]) -> Iterable[int | None]:
    """A fused tensor fills every expert's part, so that it collides with per-expert keys."""
    if fill.target.transform.startswith("fused"):
        return range(specs[fill.param].shape[0])
    return (None,)


def _missing(
    filled: Mapping[tuple[str, int | None], str], specs: Mapping[str, ParamSpec], rules: tuple[Rule, ...]
) -> Iterable[str]:
    """Canonical checkpoint keys of the parameters, or parts of them, that nothing fills."""
    for param, spec in specs.items():
        key, per_expert = canonical_key(param, rules)
        if not per_expert:
            if (param, None) not in filled:
                yield key
            continue
        for expert in range(spec.shape[0]):
            if (param, expert) not in filled:
                yield key.replace("{e}", str(expert))


def canonical_key(param: str, rules: Iterable[Rule]) -> tuple[str, bool]:
    """The checkpoint key, with `{e}` left open, that a parameter is written under."""
    layer = param.split(".")[1] if param.startswith("layers.") else ""
    for rule in rules:
        if not rule.canonical:
            continue
        for target in rule.targets:
            if target.param.replace("{l}", layer) == param:
                return rule.key.replace("{l}", layer), rule.per_expert
    raise AssertionError(f"no rule writes {param}")
