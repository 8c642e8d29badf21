"""The configuration of `experiment=ab`."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from moejax.core.checked import Checked, Must, Name, PositiveInt, PositiveNumber
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
        mismatch: set the log-probabilities of what each engine samples beside those of a training forward of
            the first variant's weights, with its own routing and with the engine's replayed.
        tenant: whose requests of `workload.mix` all figures are of, but for the table by tenant; None: all.
        alone: variants that are sent that tenant's requests without the others'.
    """

    enabled: bool = False
    variants: dict[str, list[str]] = field(default_factory=dict)
    rounds: PositiveInt = 20
    target: Target | None = None
    max_rounds: PositiveInt = 100
    metrics: list[str] = field(default_factory=list)
    seed: int = 0
    mismatch: bool = False
    tenant: str | None = None
    alone: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled and not self.variants:
            raise ConfigError(
                "ab.variants is empty: add 'ab.variants.NAME=[KEY=VALUE]', such as"
                " 'ab.variants.plain=[engine.overlap=false]'"
            )
        _check_overrides("ab.variants", self.variants)
        if len(self.variants) == 1 and BASE in self.variants:
            raise ConfigError(f"ab.variants.{BASE}: give a second variant; alone it needs another name")
        if self.target is not None and self.max_rounds < self.rounds:
            raise ConfigError(f"ab.max_rounds {self.max_rounds} is below ab.rounds {self.rounds}")
        _check_metrics("ab.metrics", self.metrics)
        for name in self.alone:
            if self.tenant is None or name not in self.all_variants:
                wrong = unknown("variant", name, self.all_variants) if self.tenant else "it needs ab.tenant"
                raise ConfigError(f"ab.alone: {wrong}")

    @property
    def all_variants(self) -> dict[str, list[str]]:
        """The variants with the baseline first, also where it was not named."""
        return ({BASE: []} if len(self.variants) == 1 else {}) | self.variants


@dataclass(frozen=True)
class PublishedStage(Checked, section="ablation.reference"):
    """A stage of somebody else's ladder, to be set beside; None and "OOM" (out of memory) are no figures."""

    stage: Name
    latency_ms: PositiveNumber
    memory_gb: PositiveNumber | Literal["OOM"] | None = None


@dataclass(frozen=True)
class AblationSection(Checked, section="ablation"):
    """Stages, each of which adds its overrides to those of the stage before.

    Attributes:
        of: what is measured of each: requests over time (`workload`), or fixed batches (`batches`).
        stages: name → overrides of the command line, in their order; the first is the baseline.
        metrics: what is reported of each stage, besides memory and the gains in mean end-to-end latency.
        reference: published figures of another ladder.
    """

    of: Literal["latency", "throughput"] = "throughput"
    stages: dict[str, list[str]] = field(default_factory=dict)
    metrics: list[str] = field(
        default_factory=lambda: ["mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"]
    )
    reference: list[PublishedStage] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_overrides("ablation.stages", self.stages)
        _check_metrics("ablation.metrics", self.metrics)

    @property
    def variants(self) -> dict[str, list[str]]:
        """Each stage's overrides with those of all before; of a key that is set again the last one."""
        found, kept = {}, dict[str, str]()
        for name, overrides in self.stages.items():
            kept |= {item.partition("=")[0].lstrip("+~"): item for item in overrides}
            found[name] = list(kept.values())
        return found


def _check_overrides(key: str, named: dict[str, list[str]]) -> None:
    """Raises `ConfigError` unless `named` has names and lists of texts."""
    for name, overrides in named.items():
        if not _NAME.fullmatch(str(name)):
            raise ConfigError(f"{key}: {name!r} is no name: letters, digits, - and _")
        if not (isinstance(overrides, (list, tuple)) and all(isinstance(o, str) for o in overrides)):
            raise ConfigError(
                f"{key}.{name} must be a list of overrides, '{key}.{name}=[KEY=VALUE]', got {overrides!r}"
            )


def _check_metrics(key: str, names: list[str]) -> None:
    """Raises `ConfigError` for one that a pass does not have."""
    for name in names:
        if latency_name(name) is None and name not in (*RATES, *SERVICE):
            known = ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms", *RATES, *SERVICE)
            raise ConfigError(f"{key}: {unknown('metric', name, known)}")
