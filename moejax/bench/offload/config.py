"""The configuration of `experiments.offload`."""

import itertools
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from moejax.bench.common.held_out import HeldOutText
from moejax.core.checked import Among, NonNegativeNumber, PositiveInt, PositiveNumber, at_least
from moejax.core.errors import ConfigError
from moejax.core.tiers import A2crConfig, ResidentPolicy
from moejax.routing.residency import POLICIES, ReplayOptions
from moejax.routing.source import check_trace

MEASURED = ("layer_lru", "lru", "a2cr")
"""Policies that engines run unless others are asked for."""


@dataclass(frozen=True)
class OffloadSection(HeldOutText, section="offload"):
    """Policies of keeping experts resident, replayed on routing traces or run by engines.

    Attributes:
        mode: "replay", on traces; "measured": an engine for each share, policy, tier and way to prefetch.
        trace: a routing trace or a run's folder; None: the model's own on held-out text, a trace a window.
        batching: "single": every request by itself, a token a step, its prompt too; "recorded": steps as they
            were, in `parts` traces.
        shares: of all experts that have a slot.
        policies: names among `moejax.routing.residency.POLICIES`; None: all, or where engines run `MEASURED`.
            Belady's bound comes in any case.
        tiers, prefetch: where experts lie, and how they are foreseen (on disk), where engines run.
        rounds: how often each engine answers all prompts, from empty slots each time.
        output_len: tokens that engines put out, after as many tokens of a window as then are left.
        link_gb_per_s: of the link that experts come over, in 10⁹ bytes/s.
        compute_ms: of one layer of a step.
        a2cr: see `A2crConfig`.
    """

    mode: Literal["replay", "measured"] = "replay"
    trace: str | None = None
    batching: Literal["single", "recorded"] = "single"
    parts: PositiveInt = 8
    shares: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.75])
    policies: list[Annotated[str, Among(POLICIES, "policy")]] | None = None
    tiers: list[Literal["host", "disk"]] = field(default_factory=lambda: ["host", "disk"])
    prefetch: list[Literal["none", "next_router"]] = field(default_factory=lambda: ["none", "next_router"])
    rounds: PositiveInt = 3
    output_len: Annotated[int, at_least(2)] = 64
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
        if self.mode == "measured":
            self._check_measured()

    def _check_measured(self) -> None:
        if self.trace is not None:
            raise ConfigError(
                "offload.trace: engines make their own routing; leave it out, or offload.mode=replay"
            )
        if unknown := sorted({*self.chosen} - {*get_args(ResidentPolicy)}):
            raise ConfigError(
                f"offload.policies: {', '.join(unknown)} needs the future, which no engine has; choose"
                f" among {', '.join(get_args(ResidentPolicy))}, or offload.mode=replay"
            )
        if not self.ways or min(self.shares) >= 1:
            raise ConfigError(
                "offload.tiers, offload.prefetch, offload.shares: no engine has experts in tiers; name "
                "a share below 1, host or disk, and none, or next_router for disk"
            )
        if self.output_len >= self.seq_len:
            raise ConfigError(
                f"offload.output_len={self.output_len} leaves no prompt of offload.seq_len={self.seq_len};"
                " lower it"
            )

    @property
    def ways(self) -> list[tuple[str, str]]:
        """Where experts lie, and how they are foreseen: in the host's memory there is nothing to fetch."""
        every = itertools.product(self.tiers, self.prefetch)
        return [(tier, how) for tier, how in every if tier == "disk" or how == "none"]

    @property
    def chosen(self) -> list[str]:
        """The policies, in order."""
        return self.policies or [*(POLICIES if self.mode == "replay" else MEASURED)]
