"""The configuration of `experiments.routing_policies`."""

from dataclasses import dataclass, field, fields, replace

from moejax.bench.common.held_out import HeldOutText
from moejax.bench.quantization.config import SpeedSection
from moejax.core.checked import PositiveNumber
from moejax.core.errors import ConfigError, unknown
from moejax.core.moe import MoeConfig, OverflowPolicy, RoutingPolicy


@dataclass(frozen=True)
class PolicyPreset(RoutingPolicy, section="routing_policies.presets"):
    """A `RoutingPolicy`, and the room that experts have.

    Attributes:
        capacity_factor, overflow: as in `MoeConfig`, of `execution="capacity"`; None: every assignment runs.
    """

    capacity_factor: PositiveNumber | None = None
    overflow: OverflowPolicy = "drop"

    def of(self, moe: MoeConfig) -> MoeConfig:
        """Returns `moe` with this policy."""
        moe = replace(
            moe, routing=RoutingPolicy(**{f.name: getattr(self, f.name) for f in fields(RoutingPolicy)})
        )
        if (factor := self.capacity_factor) is None:
            return moe
        return replace(moe, execution="capacity", capacity_factor=factor, overflow=self.overflow)


@dataclass(frozen=True)
class PolicySpeed(SpeedSection, section="routing_policies.speed"):
    """`SpeedSection`; the text is predicted by steps of `batch_size` sequences as well."""


@dataclass(frozen=True)
class RoutingPoliciesSection(HeldOutText, section="routing_policies"):
    """Which policies, measured on which text.

    Attributes:
        policies: names among `presets`, in the table's order; none: all.
        presets: name → policy.
        speed: of the decode measurement.
    """

    policies: list[str] = field(default_factory=list)
    presets: dict[str, PolicyPreset] = field(default_factory=dict)
    speed: PolicySpeed = field(default_factory=PolicySpeed)

    @property
    def chosen(self) -> dict[str, PolicyPreset]:
        """The policies to measure."""
        return {name: self.presets[name] for name in self.policies or self.presets}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.policies:
            if name not in self.presets:
                raise ConfigError(
                    f"routing_policies.policies: {unknown('policy', name, sorted(self.presets))}"
                )
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError("routing_policies.policies: a name stands there twice")
        if not self.chosen:
            raise ConfigError("routing_policies.presets is empty: there is nothing to compare")
