"""Prompts' encoder and memory figures where several backends share one run."""

from collections.abc import Callable, Sequence
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import MoejaxBackend


def encoder(backends: Sequence[Backend]) -> Callable[[str], Sequence[int]] | None:
    """The first one's that has a tokenizer."""
    return next((backend.encode for backend in backends if backend.encode is not None), None)


def without_our_process(metrics: dict[str, Any], first: Backend) -> None:
    """Where the flat metrics are a peer's, takes out of them what was read of this process: the peer works
    elsewhere. Its memory is what it says itself."""
    if isinstance(first, MoejaxBackend):
        return
    for name in ("mean_cpu_percent", "mean_other_cpu_percent", "mean_host_rss_bytes", "max_host_rss_bytes"):
        if name in metrics:
            metrics[name] = None
    metrics["host_peak_bytes"] = first.memory().get("host_peak_bytes")
