"""The configuration of `experiments.profile`. Host code on plain values."""

from dataclasses import dataclass
from typing import Annotated

from moejax.bench.workload import LatencyCase, WorkloadConfig
from moejax.core.checked import Among, Checked, NonNegativeInt, PositiveInt
from moejax.core.errors import ConfigError
from moejax.core.hardware import KNOWN

LEAST_STEPS = 4
"""Decode steps that a generation must have: one or two are no profile."""

DataSheet = Annotated[
    str,
    Among([k for k, h in KNOWN.items() if h.bandwidth is not None], "device with a data sheet"),
]


@dataclass(frozen=True)
class ProfileWorkload(Checked, section="workload"):
    """`batch_size` prompts of `prompt_len` tokens, `output_len` tokens generated for each: one step or more
    of prompts, then `output_len - 1` decode steps, as in the latency experiment.

    Attributes:
        iterations: generations under the profiler, and as many without it.
        warmup: generations before, which compile.
        seed: of the random prompts.
        prompts_file: prompts of a file instead, see `WorkloadConfig`.
    """

    batch_size: PositiveInt = 4
    prompt_len: PositiveInt = 64
    output_len: PositiveInt = 17
    iterations: PositiveInt = 5
    warmup: PositiveInt = 2
    seed: NonNegativeInt = 0
    prompts_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
class ProfileSection(Checked, section="profile"):
    """How the profile is shown.

    Attributes:
        compare: device kinds whose bounds are given beside the measuring device's own.
        top: instructions kept in `profile.json` for each phase, those that took longest.
    """

    compare: tuple[DataSheet, ...] = ("a100_80gb", "h100", "h200")
    top: PositiveInt = 60
