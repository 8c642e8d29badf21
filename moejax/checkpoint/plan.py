"""Matches a checkpoint's keys and shapes with a model's declarations, before any weight is read.

Every fault is collected, so that one message lists them all.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from moejax.checkpoint.maps.rules import Rule, Transform, source_shape
from moejax.core.errors import CheckpointError
from moejax.nn.param import ParamSpec

MAX_LISTED = 20


@dataclass(frozen=True)
class Source:
    """The checkpoint tensor that holds a parameter, or one expert's matrix of it.

    Attributes:
        transform: how it becomes that (see `moejax.checkpoint.maps.rules.Target`).
        expert: whose matrix; None for a parameter that is not kept by expert.
    """

    key: str
    transform: Transform
    expert: int | None


LoadPlan = dict[str, dict[int | None, Source]]
"""Source of each parameter: path → expert (None for the whole) → source."""


@dataclass
class Faults:
    """Everything wrong with a checkpoint, by kind."""

    by_kind: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, kind: str, what: str) -> None:
        """Adds a fault; the same fault is listed once."""
        self.by_kind.setdefault(kind, {})[what] = None

    def check(self, source: str, what: str = "the weights do not fit config.json") -> None:
        """Raises one `CheckpointError` that lists all faults; `what` sums them up."""
        if not self.by_kind:
            return
        parts = []
        for kind, named in self.by_kind.items():
            items = list(named)
            more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
            parts.append(f"{len(items)} {kind}: {', '.join(items[:MAX_LISTED])}{more}")
        raise CheckpointError(f"{source}: {what}; {'; '.join(parts)}")


def plan_load(
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, ParamSpec],
    rules: Iterable[Rule],
    *,
    num_experts: int,
    tied: bool,
    source: str,
    faults: Faults | None = None,
    elsewhere: Container[str] = (),
) -> LoadPlan:
    """Plans which tensor fills which parameter.

    Args:
        shapes: checkpoint key → shape.
        specs: parameter path → declaration. An expert axis may be longer than `num_experts`, where some have
            replicas.
        tied: with tied embeddings a stored `lm_head.weight` is the embedding again, and is not read.
        faults: what is known to be wrong already, to be listed with the rest.
        elsewhere: paths of parameters that other pipeline stages have; their tensors are passed over.

    Raises:
        CheckpointError: listing all unmapped, doubly mapped, misshapen and missing keys.
    """
    rules = tuple(rules)
    plan: LoadPlan = {}
    faults = faults or Faults()
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
        if any(
            target.param.replace("{l}", match.groupdict().get("l", "")) in elsewhere
            for target in rule.targets
        ):
            continue
        for param, part in _sources_of(key, shape, rule, match.groupdict(), specs, num_experts, faults):
            sources = plan.setdefault(param, {})
            if part.expert in sources:
                faults.add("doubly mapped", f"{key} and {sources[part.expert].key}")
            sources[part.expert] = part
    for missing in _missing(plan, specs, rules, num_experts):
        faults.add("missing", missing)
    faults.check(source)
    return plan


def _sources_of(
    key: str,
    shape: tuple[int, ...],
    rule: Rule,
    groups: dict[str, str | None],
    specs: Mapping[str, ParamSpec],
    num_experts: int,
    faults: Faults,
) -> list[tuple[str, Source]]:
    """Returns the source for each parameter of a tensor's rule; none where one is not there."""
    sources = []
    for target in rule.targets:
        param = target.param.replace("{l}", str(groups.get("l")))
        spec = specs.get(param)
        expert = int(groups["e"] or 0) if rule.per_expert else None
        if spec is None or (expert is not None and expert >= num_experts):
            faults.add("unmapped", key)
            return []
        stacked = target.transform.startswith(("fused", "stacked"))
        part = spec.canonical_shape[1:] if rule.per_expert or stacked else spec.canonical_shape
        expected = source_shape(target.transform, part, num_experts)
        if tuple(shape) != expected:
            faults.add("misshapen", f"{key} is {list(shape)}, expected {list(expected)}")
            # Still counts as present, so that it is not also listed as missing.
        # A stacked tensor holds every expert's matrix, so that it collides with keys by expert.
        experts = range(num_experts) if stacked else (expert,)
        sources += [(param, Source(key, target.transform, e)) for e in experts]
    return sources


def _missing(
    plan: LoadPlan, specs: Mapping[str, ParamSpec], rules: tuple[Rule, ...], num_experts: int
) -> Iterable[str]:
    """Returns canonical checkpoint keys of the parameters, or parts of them, that nothing fills."""
    for param in specs:
        key, per_expert, transform = canonical_key(param, rules)
        stacked, sources = transform.startswith(("fused", "stacked")), plan.get(param, {})
        for expert in range(num_experts) if per_expert or stacked else (None,):
            if expert not in sources:
                yield key.replace("{e}", str(expert))


def canonical_key(param: str, rules: Iterable[Rule], *, stacked: bool = True) -> tuple[str, bool, Transform]:
    """Returns the checkpoint key, with `{e}` left open, that a parameter is written under; without `stacked`
    the first that is not of all experts' matrices together, which is where quantized ones are.

    Beside it whether there is one for each expert, and the transform that reads it.
    """
    layer = param.split(".")[1] if param.startswith("layers.") else ""
    for rule in rules:
        if not rule.canonical:
            continue
        for target in rule.targets:
            fits = stacked or not target.transform.startswith(("fused", "stacked"))
            if fits and target.param.replace("{l}", layer) == param:
                return rule.key.replace("{l}", layer), rule.per_expert, target.transform
    raise AssertionError(f"no rule writes {param}")
