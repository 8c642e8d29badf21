"""A `WorkerBackend` on the fake worker."""

import sys
from pathlib import Path
from typing import Any

from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.peer import WorkerBackend

SCRIPT = Path(__file__).with_name("fake_worker.py")


def open_fake(folder: Path, *, name: str = "fake", timeout_s: float = 60.0, **options: Any) -> WorkerBackend:
    """`options` go to the worker, `python` and `max_num_seqs` elsewhere."""
    python = options.pop("python", sys.executable)
    return WorkerBackend(
        name,
        BackendOptions(kind="hf_transformers", python=python, timeout_s=timeout_s, options=options),
        script=SCRIPT,
        weights=folder,
        encode=None,
        checkpoint=None,
        batching="continuous",
        max_num_seqs=4,
        log_dir=folder,
        facts={"token_instants": "each step"},
    )


def tokens(prompt: list[int], count: int) -> list[int]:
    """What the fake worker generates."""
    return [(sum(prompt) + k) % 100 for k in range(count)]
