"""The compile ledger: every compilation the engine makes, with its cause and cost.

Steps are compiled ahead of time, once per shape bucket, so a compilation can only happen here.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax

from moejax.core.errors import CompileError


@dataclass(frozen=True)
class CompileEntry:
    """One compilation: which function, for which bucket, why, and how long it took in seconds.

    `after_warmup` marks those that happened once `CompileLedger.warmed_up` was set: each is a defect of the
    warm-up or of the buckets.
    """

    function: str
    key: str
    cause: str
    seconds: float
    after_warmup: bool


class Program(NamedTuple):
    """A program that may have to be compiled.

    Attributes:
        function: its name in the ledger.
        key: hashable; describes the bucket (a NamedTuple reads well in the ledger).
        build: makes the jitted function.
        args: example arguments (arrays or `jax.ShapeDtypeStruct`) to compile for.
    """

    function: str
    key: Any
    build: Callable[[], Any]
    args: Callable[[], tuple[Any, ...]]


class CompileLedger:
    """Compiled functions by (name, key), and the record of how they came about.

    Args:
        strict: a compilation after `warmed_up` was set raises.
        overlap: work is to run beside collectives, see `compiler_options`.

    `seconds` is the time spent compiling. `on_progress` is told how many of how many programs are compiled
    while `compile_all` is at work.
    """

    def __init__(self, strict: bool = False, overlap: bool = False) -> None:
        self.strict, self.overlap = strict, overlap
        self.entries: list[CompileEntry] = []
        self.seconds = 0.0
        self.warmed_up = False
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self._compiled: dict[tuple[str, Any], Callable[..., Any]] = {}

    def get(
        self, function: str, key: Any, build: Callable[[], Any], args: Callable[[], tuple[Any, ...]]
    ) -> Callable[..., Any]:
        """Returns the compiled `function` for `key`; compiled now if it is new.

        Args:
            key: hashable; describes the bucket (a NamedTuple reads well in the ledger).
            build: makes the jitted function.
            args: example arguments (arrays or `jax.ShapeDtypeStruct`) to compile for.

        Raises:
            CompileError: the key is new after warm-up, and the ledger is strict.
        """
        if (function, key) not in self._compiled:
            self.compile_all([Program(function, key, build, args)])
        return self._compiled[function, key]

    def compile_all(self, programs: Sequence[Program]) -> None:
        """Compiles those that are new, side by side: one is traced while others are being compiled.

        Raises:
            CompileError: as for `get`.
        """
        new = {(p.function, p.key): p for p in programs if (p.function, p.key) not in self._compiled}
        if not new:
            return
        begin = time.perf_counter()
        known, causes = list(self._compiled), []
        for function, key in new:
            cause = _cause(key, [other for name, other in known if name == function])
            if self.strict and self.warmed_up:
                raise CompileError(
                    f"{function} {key} is not compiled ({cause}), and engine.strict_compile "
                    "forbids compiling after warm-up; widen the warm-up or the engine's buckets"
                )
            known.append((function, key))
            causes.append(cause)
        with ThreadPoolExecutor(min(len(new), _threads())) as pool:
            compiling = []
            for program in new.values():
                start = time.perf_counter()
                lowered = program.build().lower(*program.args())
                compiling.append(pool.submit(_compile, lowered, self.overlap, time.perf_counter() - start))
                self.on_progress(sum(future.done() for future in compiling), len(new))
            for place, ((function, key), cause) in enumerate(zip(new, causes, strict=True), 1):
                compiled, seconds = compiling[place - 1].result()
                entry = CompileEntry(function, str(key), cause, round(seconds, 4), self.warmed_up)
                self.entries.append(entry)
                self._compiled[function, key] = compiled
                self.on_progress(place, len(new))
        self.seconds += entry.seconds if len(new) == 1 else time.perf_counter() - begin

    def share(self, other: "CompileLedger") -> None:
        """Uses the programs that `other` has compiled or will compile. Both must mean the same by a key."""
        self._compiled = other._compiled

    def programs(self, function: str) -> list[tuple[Any, Any]]:
        """Returns (key, `jax.stages.Compiled`) of each bucket of `function`, in the order of compilation."""
        return [(key, compiled) for (name, key), compiled in self._compiled.items() if name == function]

    @property
    def recompiles(self) -> list[CompileEntry]:
        """Compilations after warm-up."""
        return [entry for entry in self.entries if entry.after_warmup]

    def rows(self) -> list[dict[str, Any]]:
        """Returns the entries as dictionaries, for a result file."""
        return [asdict(entry) for entry in self.entries]


class PartLedger(CompileLedger):
    """Puts a part's programs into the ledger of all, under names of its own that begin with `part`."""

    def __init__(self, whole: CompileLedger, part: str) -> None:
        super().__init__(whole.strict)
        self._whole, self._part = whole, part

    def get(
        self, function: str, key: Any, build: Callable[[], Any], args: Callable[[], tuple[Any, ...]]
    ) -> Callable[..., Any]:
        return self._whole.get(f"{self._part} {function}", key, build, args)

    def compile_all(self, programs: Sequence[Program]) -> None:
        self._whole.compile_all([p._replace(function=f"{self._part} {p.function}") for p in programs])


def compiler_options(platform: str, overlap: bool = False) -> dict[str, str | bool]:
    """Returns XLA's options for steps that run on `platform`, "cpu" or "gpu".

    On a GPU a product of one row by a matrix stays a product. XLA would make it a multiplication and a sum
    over columns, in 16 to 32 blocks, and write float32 copies of the K, V and router weights on the way
    (docs/log.md): steps of one row would be slower than those of two.

    With `overlap` the scheduler puts work between a collective's start and its end; else XLA has most of them
    wait at once. Collectives stay out of CUDA graphs, as XLA has it (docs/experiments/program.md says why).
    """
    if platform != "gpu":
        return {}
    return {
        "xla_disable_hlo_passes": "dot-strength-reduction",
        "xla_gpu_enable_latency_hiding_scheduler": overlap,
    }


def _threads() -> int:
    """Programs to compile at a time. Several processes may have to meet while they compile: one by one."""
    return min(4, os.cpu_count() or 1) if jax.process_count() == 1 else 1


def _compile(lowered: jax.stages.Lowered, overlap: bool, before: float) -> tuple[Any, float]:
    """Returns the compiled program, and the seconds it took beside those of `before`."""
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=compiler_options(jax.default_backend(), overlap))
    return compiled, before + time.perf_counter() - start


def _cause(key: Any, others: list[Any]) -> str:
    """Says what is new about a key, compared with the nearest one already compiled."""
    if not others:
        return "first use"
    if not hasattr(key, "_asdict"):
        return f"new key {key}"
    mine = key._asdict()
    changes = []
    for other in others:
        theirs = other._asdict()
        changes.append({name: (theirs[name], mine[name]) for name in mine if theirs[name] != mine[name]})
    least = min(changes, key=len)
    return "new " + ", ".join(f"{name} {old} -> {new}" for name, (old, new) in least.items())


def enable_compile_cache(directory: str) -> None:
    """Keeps compiled programs in `directory` across processes, unless the user has set a place already."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
