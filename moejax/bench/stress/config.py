"""The stress experiment's configuration. Host code on plain values."""

from dataclasses import dataclass
from typing import Annotated

from moejax.core.checked import (
    Among,
    Checked,
    Must,
    NonNegativeInt,
    PositiveInt,
    PositiveNumber,
    Share,
    at_least,
)
from moejax.core.errors import ConfigError

PHASES = ("long", "burst", "abort", "memory", "stream")


@dataclass(frozen=True)
class StressSection(Checked, section="stress"):
    """Phases, sizes and the limits of the checks.

    Attributes:
        phases: of "long" (prompts up to the model's limit), "burst" (twice as many at once as may run, again
            before the first are done), "abort" (requests ended at random moments), "memory" (more long
            outputs than the cache holds, so that sequences are preempted), "stream" (streams left early).
        rounds: how often all phases are gone through; growth is judged from the second on.
        requests: of each phase and round.
        abort_share: of the abort phase's requests.
        probes, probe_tokens: prompts that are completed greedily before, between and after the phases, and
            the tokens of each.
        tpot_band: by what factor the probes' time per output token may have grown after any phase.
        rss_mb_per_round, live_mb_per_round: how much the process and JAX's arrays may grow a round.
        seed: of prompts, lengths and moments.
    """

    phases: tuple[Annotated[str, Among(PHASES, "phase")], ...] = PHASES
    rounds: Annotated[int, at_least(3, "so that growth can be seen")] = 4
    requests: PositiveInt = 32
    abort_share: Share = 0.5
    probes: PositiveInt = 4
    probe_tokens: PositiveInt = 24
    tpot_band: Annotated[float, Must(lambda x: x >= 1, "a factor of at least 1")] = 1.5
    rss_mb_per_round: PositiveNumber = 16.0
    live_mb_per_round: PositiveNumber = 0.1
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.phases:
            raise ConfigError(f"stress.phases is empty (known: {', '.join(PHASES)})")
