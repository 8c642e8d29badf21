"""The configuration of `experiment=ab`."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from moejax.core.checked import Checked, Must, PositiveInt
from moejax.core.errors import ConfigError, unknown
from moejax.results.metric_names import RATES, SERVICE, latency_name

BASE = "base"
"""Name of the configuration without any overrides, which is the baseline where only one variant is given."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

Target = Annotated[float, Must(lambda x: 0 < x < 1, "above 0 and below 1 (0.01: one per cent)")]


@dataclass(frozen=True)
class AbSection(Checked, section="ab"):
    """Variants, and how often they are measured.

    Attributes:
        enabled: whether there must be variants; with any there is an A/B run in any case.
        variants: name → overrides of the command line (`[engine.overlap=true]`); the first is the baseline,
            and a single one is measured against the command line as it is. Empty: no A/B run.
        rounds: times that every variant is measured; with `target` the fewest.
        target: go on after `rounds` until every judged ratio's interval reaches at most so far from its
            estimate (0.01: one per cent) or `max_rounds` are done. None: `rounds`, as planned beforehand.
        max_rounds: see `target`.
        metrics: what to judge by; none takes the usual ones.
        seed: of the order in which the variants take turns.
    """

    enabled: bool = False
    variants: dict[str, list[str]] = field(default_factory=dict)
    rounds: PositiveInt = 20
    target: Target | None = None
    max_rounds: PositiveInt = 100
    metrics: list[str] = field(default_factory=list)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled and not self.variants:
            raise ConfigError(
                "ab.variants is empty: add 'ab.variants.NAME=[KEY=VALUE]', such as"
                " 'ab.variants.plain=[engine.overlap=false]'"
            )
        for name, overrides in self.variants.items():
            if not _NAME.fullmatch(str(name)):
                raise ConfigError(f"ab.variants: {name!r} is no name: letters, digits, - and _")
            listed = isinstance(overrides, (list, tuple)) and all(isinstance(o, str) for o in overrides)
            if not listed:
                raise ConfigError(
                    f"ab.variants.{name} must be a list of overrides, 'ab.variants.{name}=[KEY=VALUE]', got"
                    f" {overrides!r}"
                )
        if len(self.variants) == 1 and BASE in self.variants:
            raise ConfigError(f"ab.variants.{BASE}: give a second variant; alone it needs another name")
        if self.target is not None and self.max_rounds < self.rounds:
            raise ConfigError(f"ab.max_rounds {self.max_rounds} is below ab.rounds {self.rounds}")
        for name in self.metrics:
            if latency_name(name) is None and name not in (*RATES, *SERVICE):
                known = ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms", *RATES, *SERVICE)
                raise ConfigError(f"ab.metrics: {unknown('metric', name, known)}")

    @property
    def all_variants(self) -> dict[str, list[str]]:
        """The variants with the baseline first, also where it was not named."""
        return ({BASE: []} if len(self.variants) == 1 else {}) | self.variants
