"""The configuration of `experiments.routing`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from moejax.core.checked import Among, Checked, NonNegativeInt, PositiveInt, Seed
from moejax.core.errors import ConfigError
from moejax.core.scheduling import RebalanceConfig
from moejax.routing.generate import KINDS, check_params
from moejax.routing.source import check_trace

_SHAPE = ("kind", "requests", "prompt_len", "output_len")


@dataclass(frozen=True)
class GenerateSection(Checked, section="generate"):
    """A trace to be made up; parameters left out have their kind's defaults (`moejax.routing.generate`).

    Attributes:
        kind: "uniform", "zipf", "bursty" or "correlated"; None: none is made.
        requests, prompt_len, output_len: requests and tokens of each.
        exponent: of Zipf's law (all kinds but uniform).
        period, intensity, hot: of bursts: tokens that one lasts, how many times as popular its experts are,
            and how many they are.
        token_correlation, layer_correlation: shares of tokens that visit the experts of the token before, or
            the partners of those in the layer before.
        groups, group_correlation: groups of experts that go together, and share of draws within one.
    """

    kind: Annotated[str, Among(KINDS)] | None = None
    requests: PositiveInt = 8
    prompt_len: PositiveInt = 64
    output_len: PositiveInt = 64
    exponent: float | None = None
    period: int | None = None
    intensity: float | None = None
    hot: int | None = None
    token_correlation: float | None = None
    layer_correlation: float | None = None
    groups: int | None = None
    group_correlation: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is not None:
            check_params(self.kind, self.params)
        elif self.params:
            name = next(iter(self.params))
            raise ConfigError(f"generate.{name} is set and generate.kind is not: {', '.join(KINDS)}")

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters that are set, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _SHAPE}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class ReplayedRebalance(RebalanceConfig, section="placement.rebalance"):
    """The engine's rule, as it would have decided over a trace."""


@dataclass(frozen=True)
class PlacementSection(Checked, section="placement"):
    """Devices that the experts are dealt out to, to see how unevenly the traces load them.

    Attributes:
        devices: None takes the largest of 8, 4 and 2 that gives each as many experts, and more than one, and
            leaves placement out where none does; 1 leaves it out.
        redundant: physical experts beyond the model's own in the plan with replicas; None takes one a device.
        nodes: machines that the devices are on.
        rebalance: with `every_steps`, placements over the trace's time (`moejax.bench.routing.over_time`).
    """

    devices: PositiveInt | None = None
    redundant: NonNegativeInt | None = None
    nodes: PositiveInt = 1
    rebalance: ReplayedRebalance = field(default_factory=ReplayedRebalance)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rebalance.every_steps and (self.nodes > 1 or self.redundant == 0 or self.devices == 1):
            raise ConfigError(
                "placement.rebalance needs placement.nodes=1, redundant experts, several devices"
            )


@dataclass(frozen=True)
class RoutingSelection(Checked):
    """Which traces.

    Attributes:
        trace: .npz files or runs' folders, one path or a list; the first is what others are compared with.
        generate: a trace to be made up, analysed after those.
        placement: see `PlacementSection`.
        seed: of the generator.
    """

    trace: str | list[str] = field(default_factory=list)
    generate: GenerateSection = field(default_factory=GenerateSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    seed: Seed = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = [check_trace("trace", path) for path in self.paths]
        object.__setattr__(self, "trace", paths)
        if not paths and self.generate.kind is None:
            raise ConfigError(
                "nothing to look at: give trace=PATH (a routing.npz or a run's folder), or make a trace with"
                f" generate.kind={'|'.join(KINDS)} and model=NAME"
            )

    @property
    def paths(self) -> list[str]:
        return [self.trace] if isinstance(self.trace, str) else list(self.trace)


def needs_model(kind: str) -> ConfigError:
    """The error of a trace that is to be made for no model."""
    return ConfigError(
        f"generate.kind={kind} makes a trace of a model's shape: say which, as in model=tiny or"
        " model=checkpoint model.path=DIR (only its config.json is read)"
    )
