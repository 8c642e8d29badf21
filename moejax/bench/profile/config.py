"""What a profile runs. Host code on plain values."""

from dataclasses import dataclass

from moejax.bench.workload import LatencyCase, WorkloadConfig, check_not_negative
from moejax.core.config import check_positive
from moejax.core.errors import ConfigError, unknown
from moejax.core.hardware import KNOWN

LEAST_STEPS = 4
"""Decode steps that a generation must have: one or two are no profile."""


@dataclass(frozen=True)
class ProfileWorkload:
    """`batch_size` prompts of `prompt_len` tokens, `output_len` tokens generated for each: one step or more
    of prompts, then `output_len - 1` decode steps, as in the latency experiment.

    Attributes:
        iterations: generations under the profiler, and as many without it.
        warmup: generations before, which compile.
        seed: of the random prompts.
        prompts_file: prompts of a file instead, see `WorkloadConfig`.
    """

    batch_size: int = 4
    prompt_len: int = 64
    output_len: int = 17
    iterations: int = 5
    warmup: int = 2
    seed: int = 0
    prompts_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "prompt_len", "output_len", "iterations", "warmup"):
            check_positive(f"workload.{name}", getattr(self, name))
        check_not_negative("workload.seed", self.seed)
        if self.output_len <= LEAST_STEPS:
            raise ConfigError(
                f"workload.output_len={self.output_len} gives {self.output_len - 1} decode steps, too few for"
                f" a profile; take at least {LEAST_STEPS + 1}"
            )
        self.as_latency()

    @property
    def case(self) -> LatencyCase:
        return LatencyCase(self.batch_size, self.prompt_len, self.output_len)

    def as_latency(self) -> WorkloadConfig:
        """The same as a latency workload, whose prompts these are."""
        return WorkloadConfig(
            self.batch_size, self.prompt_len, self.output_len,
            seed=self.seed, prompts_file=self.prompts_file,
        )  # fmt: skip


@dataclass(frozen=True)
class ProfileSection:
    """How the profile is shown.

    Attributes:
        compare: device kinds whose bounds are given beside the measuring device's own.
        top: instructions kept in `profile.json` for each phase, those that took longest.
    """

    compare: tuple[str, ...] = ("a100_80gb", "h100", "h200")
    top: int = 60

    def __post_init__(self) -> None:
        check_positive("profile.top", self.top)
        for kind in self.compare:
            if kind not in KNOWN or KNOWN[kind].bandwidth is None:
                known = [name for name, found in KNOWN.items() if found.bandwidth is not None]
                raise ConfigError(f"profile.compare: {unknown('device with a data sheet', str(kind), known)}")
