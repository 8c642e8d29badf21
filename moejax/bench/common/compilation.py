"""Compilation as a run shows it: while it lasts, and its share of the run at the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from moejax.engine.llm import LLM
from moejax.report.progress import Task


@contextmanager
def shown_compilation(llm: LLM | None, task: Task) -> Iterator[None]:
    """Has a progress bar say how many of the engine's programs are compiled, while the body runs. None, for a
    backend of others, shows nothing."""
    if llm is None:
        yield
        return
    ledger = llm.ledger
    before = ledger.on_progress
    ledger.on_progress = lambda done, total: task.describe(
        f"compiling {min(done + 1, total)} of {total} programs"
    )
    try:
        yield
    finally:
        ledger.on_progress = before


def compilation_line(seconds: float) -> str:
    """Says what compilation took of the process's life so far, for the end of a run."""
    whole = time.time() - psutil.Process().create_time()
    return f"compilation: {seconds:.0f} of the {whole:.0f} s since the start"
