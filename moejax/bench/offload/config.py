"""The configuration of `experiments.offload`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from moejax.bench.common.held_out import HeldOutText
from moejax.core.checked import Among, NonNegativeNumber, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError
from moejax.core.tiers import A2crConfig
from moejax.routing.residency import POLICIES, ReplayOptions
from moejax.routing.source import check_trace


@dataclass(frozen=True)
class OffloadSection(HeldOutText, section="offload"):
    """Policies of keeping experts resident, replayed on routing traces.

    Attributes:
        mode: "replay", on traces.
        trace: a routing trace or a run's folder; None: the model's own on held-out text, a trace a window.
        batching: "single": every request by itself, a token a step, its prompt too; "recorded": steps as they
            were, in `parts` traces.
        shares: of all experts that have a slot.
        policies: names among `moejax.routing.residency.POLICIES`; Belady's bound comes in any case.
        link_gb_per_s: of the link that experts come over, in 10⁹ bytes/s.
        compute_ms: of one layer of a step.
        a2cr: see `A2crConfig`.
    """

    mode: Literal["replay"] = "replay"
    trace: str | None = None
    batching: Literal["single", "recorded"] = "single"
    parts: PositiveInt = 8
    shares: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.75])
    policies: list[Annotated[str, Among(POLICIES, "policy")]] = field(default_factory=lambda: [*POLICIES])
    link_gb_per_s: PositiveNumber = 1.4
    compute_ms: NonNegativeNumber = 0.1
    a2cr: A2crConfig = field(default_factory=A2crConfig)

    @property
    def options(self) -> ReplayOptions:
        return ReplayOptions(self.a2cr, self.compute_ms / 1e3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is not None:
            check_trace("offload.trace", self.trace)
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ConfigError(f"offload.shares must be numbers above 0 and at most 1, got {self.shares}")
