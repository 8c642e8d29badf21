"""What one process compiles for a target, and what it says of each program; passed pickled to and fro."""

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moejax.bench.program.compiler import environment
from moejax.bench.program.dump import Dump
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import CompileError, MoejaxError
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.core.resolve import Resolution
from moejax.perf.sizes import HeldWeights


@dataclass(frozen=True)
class Bucket:
    """A step to compile: rows that decode, and prompt tokens beside them (0: none)."""

    rows: int
    tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.rows}+{self.tokens}" if self.tokens else str(self.rows)


@dataclass(frozen=True)
class Job:
    """Steps of a model's first layers, for devices of a target.

    Attributes:
        source, load_format, dtype, engine, parallel, quant, seed: what `LLM` takes.
        layers: how many of the model's; None: all.
        context_len: tokens of a sequence that the cache has room for, where `engine.num_blocks` is open.
        sampler: "greedy", "sampled" or "filters".
        dumps: the folder that keeps the compiler's dumps; None: they are deleted.
    """

    folder: Path
    description: str
    source: Any
    load_format: str
    dtype: str
    engine: EngineConfig
    parallel: ParallelConfig
    quant: QuantConfig
    seed: int
    buckets: Sequence[Bucket]
    layers: int | None
    context_len: int
    sampler: str
    dumps: Path | None = None


@dataclass(frozen=True)
class Opened:
    """An engine as it is on the target: its model, its weights as held, its cache's dtype, its choices."""

    config: ModelConfig
    weights: HeldWeights
    kv_dtype: str
    resolutions: Sequence[Resolution]


@dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
        bucket: as compiled: the engine's buckets may be larger than what was asked for.
        layers: that it has.
        dump: what the compiler says of it.
        seconds: of tracing, lowering and compiling.
        memory: bytes of "argument", "output", "alias" (donated) and "temp" memory on a device.
    """

    bucket: Bucket
    layers: int
    dump: Dump
    seconds: dict[str, float]
    memory: dict[str, int]


def cache_blocks(engine: EngineConfig, context_len: int) -> int:
    """Returns the blocks of as many sequences of that many tokens as the engine runs at a time."""
    return engine.max_num_seqs * -(-context_len // engine.block_size)


def run(job: Job, done: Callable[[], None] = lambda: None) -> tuple[Opened, list[Compiled]]:
    """Opens an engine, and compiles its buckets, in a process of its own.

    Args:
        done: called after each bucket.

    Raises:
        MoejaxError: what opening the engine raises there, and `CompileError` if the process dies.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "moejax.bench.program.worker"],
            env=environment(job.folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin:
                pickle.dump(job, process.stdin)
            opened, compiled = _answer(process.stdout), []
            for _ in job.buckets:
                compiled.append(_answer(process.stdout))
                done()
            return opened, compiled
        except (EOFError, BrokenPipeError):
            errors.seek(0)
            lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
            last = lines[-1][:300] if lines else "it says nothing"
            raise CompileError(f"the compiler's process ended with {process.wait()}: {last}") from None
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _answer(stream: IO[bytes]) -> Any:
    answer = pickle.load(stream)
    if isinstance(answer, MoejaxError):
        raise answer
    return answer
