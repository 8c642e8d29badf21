"""What a process of its own compiles for a target, and what it answers; both travel pickled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moejax.bench.program.dump import Dump
from moejax.bench.program.process import Target, ask
from moejax.core.config import ModelConfig
from moejax.core.resolve import Resolution
from moejax.perf.sizes import HeldWeights


class Bucket(NamedTuple):
    """A step's shape: rows that decode, and prompt tokens beside them (0: none)."""

    rows: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.rows}+{self.tokens}" if self.tokens else str(self.rows)

    def program_names(self, stages: int) -> list[str]:
        """Returns the names of its programs, one for each pipeline stage."""
        return [self.name] if stages == 1 else [f"{self.name} stage {stage}" for stage in range(stages)]


@dataclass(frozen=True)
class Job:
    """Steps of the first layers of a model, or of each of its pipeline stages.

    Attributes:
        target: the devices.
        source, load_format: the model's.
        options: further ones of `LLM`.
        buckets: the steps.
        layers: how many of each stage; None: all.
        mode: what the sampler does, `moejax.engine.step.sampler.SamplerMode`.
        dumps: the folder that keeps the compiler's dumps; None: they are deleted.
    """

    target: Target
    source: Any
    load_format: str
    options: Mapping[str, Any]
    mode: Any
    dumps: Path | None
    buckets: Sequence[Bucket] = ()
    layers: int | None = None


class Opened(NamedTuple):
    """An engine as it is on the target: its model, its weights as held, its cache's dtype, its choices, and
    the whole model's layers of each pipeline stage."""

    config: ModelConfig
    weights: HeldWeights
    kv_dtype: str
    resolutions: Sequence[Resolution]
    stages: Sequence[range]


class Compiled(NamedTuple):
    """A compiled step: its name (of a bucket and, if there are several, a pipeline stage), its bucket (the
    engine's, which may be larger than what was asked for), its layers and those of the whole model or stage,
    what the compiler says of it, seconds of "trace", "lower" and "compile", bytes of a device's "argument",
    "output", "alias" (donated) and "temp" memory, and what a device sends, see
    `moejax.bench.scaling.measured.step_bytes`."""

    name: str
    bucket: Bucket
    layers: int
    whole: int
    dump: Dump
    seconds: dict[str, float]
    memory: dict[str, int]
    sent: Mapping[str, float]


def compile_job(job: Job, done: Callable[[], None] = lambda: None) -> tuple[Opened, list[Compiled]]:
    """Opens an engine and compiles its buckets, in a process of its own; `done` is called after each.

    Raises:
        MoejaxError: what opening the engine raises there, and `CompileError` if the process dies.
    """
    answers = ask("moejax.bench.program.worker", job.target, job)
    opened: Opened = next(answers)
    compiled: list[Compiled] = []
    for answer in answers:
        compiled.append(answer)
        if len(compiled) % len(opened.stages) == 0:
            done()
    return opened, compiled
