"""A `WorkerBackend` on the fake worker."""

import sys
from pathlib import Path
from typing import Any, ClassVar

from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.peer import WorkerBackend
from moejax.checkpoint.directory import resolve_model_dir

SCRIPT, TINY = Path(__file__).with_name("fake_worker.py"), resolve_model_dir("tiny")


class FakeBackend(WorkerBackend):
    workers: ClassVar = {"hf_transformers": (SCRIPT, "continuous", "each step")}


def open_fake(folder: Path, *, name: str = "fake", timeout_s: float = 60.0, **options: Any) -> WorkerBackend:
    """`options` go to the worker, `python` elsewhere."""
    python = options.pop("python", sys.executable)
    return FakeBackend(
        name,
        BackendOptions(kind="hf_transformers", python=python, timeout_s=timeout_s, options=options),
        model_dir=TINY,
        encode=None,
        max_num_seqs=4,
        log_dir=folder,
    )


def tokens(prompt: list[int], count: int) -> list[int]:
    """What the fake worker generates."""
    return [(sum(prompt) + k) % 100 for k in range(count)]
