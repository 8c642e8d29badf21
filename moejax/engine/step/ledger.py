"""The compile ledger: every compilation the engine makes, with its cause and cost.

Steps are compiled ahead of time, once per shape bucket, so a compilation can only happen here.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

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


class CompileLedger:
    """Compiled functions by (name, key), and the record of how they came about.

    Args:
        strict: a compilation after `warmed_up` was set raises.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.entries: list[CompileEntry] = []
        self.warmed_up = False
        self._compiled: dict[tuple[str, Any], Callable[..., Any]] = {}

    def get(
        self, function: str, key: Any, build: Callable[[], Any], args: Callable[[], tuple[Any, ...]]
    ) -> Callable[..., Any]:
        """The compiled `function` for `key`; compiled now if it is new.

        Args:
            key: hashable; describes the bucket (a NamedTuple reads well in the ledger).
            build: makes the jitted function.
            args: example arguments (arrays or `jax.ShapeDtypeStruct`) to compile for.

        Raises:
            CompileError: the key is new after warm-up, and the ledger is strict.
        """
        found = self._compiled.get((function, key))
        if found is not None:
            return found
        others = [k for name, k in self._compiled if name == function]
        if self.strict and self.warmed_up:
            raise CompileError(
                f"{function} {key} is not compiled ({_cause(key, others)}), and engine.strict_compile "
                "forbids compiling after warm-up; widen the warm-up or the engine's buckets"
            )
        start = time.perf_counter()
        compiled = build().lower(*args()).compile()
        seconds = time.perf_counter() - start
        self.entries.append(
            CompileEntry(function, str(key), _cause(key, others), round(seconds, 4), self.warmed_up)
        )
        self._compiled[function, key] = compiled
        return compiled

    def programs(self, function: str) -> list[tuple[Any, Any]]:
        """(key, `jax.stages.Compiled`) of each bucket of `function`, in the order of their compilation."""
        return [(key, compiled) for (name, key), compiled in self._compiled.items() if name == function]

    @property
    def seconds(self) -> float:
        """Total time spent compiling."""
        return sum(entry.seconds for entry in self.entries)

    @property
    def recompiles(self) -> list[CompileEntry]:
        """Compilations after warm-up."""
        return [entry for entry in self.entries if entry.after_warmup]

    def rows(self) -> list[dict[str, Any]]:
        """The entries as dictionaries, for a result file."""
        return [asdict(entry) for entry in self.entries]


def _cause(key: Any, others: list[Any]) -> str:
    """What is new about a key, compared with the nearest one already compiled."""
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
