"""The configuration of `experiments.program`. Host code on plain values."""

from dataclasses import dataclass
from typing import Annotated

from moejax.core.checked import Among, Checked, Must, PositiveInt
from moejax.core.errors import ConfigError
from moejax.engine.step.sampler import SamplerMode

MODES = {
    "greedy": SamplerMode(), "sampled": SamplerMode(greedy=False),
    "filters": SamplerMode(greedy=False, filters=True),
}  # fmt: skip
Microseconds = Annotated[float, Must(lambda x: x >= 0, "at least 0")]


@dataclass(frozen=True)
class ProgramSection(Checked, section="program"):
    """Which steps are compiled, and what a step's modelled time assumes.

    Attributes:
        rows: rows of steps that only decode, a step each; of a data-parallel group, with pipeline stages of a
            microbatch, and so are the other numbers.
        chunks: tokens of prompts in steps that have some, a step each; empty: none.
        chunk_rows: rows that decode in those.
        sampler: "greedy", "sampled" (temperature alone) or "filters" (top-k, top-p, min-p).
        layers: layers to compile, of each pipeline stage, instead of two small numbers of them; their step is
            not extrapolated.
        context_len: tokens of a sequence, in the modelled time and in the cache, which has room for
            `engine.max_num_seqs` of them unless `engine.num_blocks` says otherwise.
        launch_us: microseconds that a launch costs within a command buffer.
        launch_outside_us: outside of one.
        keep_dumps: keep all that XLA dumps, in the run's folder.
        gate: the folder of committed figures that no step may exceed, see `moejax.bench.program.gate`; None:
            nothing is held against any.
        update_baseline: write this run's figures there instead, if no kernel spills and nothing is copied.
    """

    rows: tuple[PositiveInt, ...] = (1, 8, 64)
    chunks: tuple[PositiveInt, ...] = (512,)
    chunk_rows: PositiveInt = 8
    sampler: Annotated[str, Among(MODES, "sampler")] = "greedy"
    layers: PositiveInt | None = None
    context_len: PositiveInt = 1024
    launch_us: Microseconds = 1.5
    launch_outside_us: Microseconds = 4.5
    keep_dumps: bool = False
    gate: str | None = None
    update_baseline: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rows and not self.chunks:
            raise ConfigError("program.rows and program.chunks are both empty: no step to compile")
        if self.update_baseline and self.gate is None:
            raise ConfigError("program.update_baseline writes into program.gate=FOLDER, and none is given")
