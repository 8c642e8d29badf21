"""What a stress run asks of an engine. Host code on plain values."""

from dataclasses import dataclass

from moejax.core.config import check_number, check_positive
from moejax.core.errors import ConfigError, unknown

PHASES = ("long", "burst", "abort", "memory", "stream")


@dataclass(frozen=True)
class StressSection:
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

    phases: tuple[str, ...] = PHASES
    rounds: int = 4
    requests: int = 32
    abort_share: float = 0.5
    probes: int = 4
    probe_tokens: int = 24
    tpot_band: float = 1.5
    rss_mb_per_round: float = 16.0
    live_mb_per_round: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.phases, str):
            raise ConfigError(f"stress.phases must be a list: stress.phases=[{self.phases}]")
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases:
            raise ConfigError(f"stress.phases is empty (known: {', '.join(PHASES)})")
        for name in self.phases:
            if name not in PHASES:
                raise ConfigError(f"stress.phases: {unknown('phase', str(name), PHASES)}")
        for name in ("rounds", "requests", "probes", "probe_tokens"):
            check_positive(f"stress.{name}", getattr(self, name))
        if self.rounds < 3:
            raise ConfigError(
                f"stress.rounds must be at least 3, so that growth can be seen; got {self.rounds}"
            )
        if not 0 <= self.abort_share <= 1:
            raise ConfigError(f"stress.abort_share is a share in [0, 1], got {self.abort_share:g}")
        if not self.tpot_band >= 1:
            raise ConfigError(f"stress.tpot_band is a factor of at least 1, got {self.tpot_band:g}")
        for name in ("rss_mb_per_round", "live_mb_per_round"):
            check_number(f"stress.{name}", getattr(self, name))
        if self.seed < 0:
            raise ConfigError(f"stress.seed must be at least 0, got {self.seed}")
