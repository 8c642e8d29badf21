"""Opens backends by name, each imported only when it is asked for, and helps them share one run."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moejax.bench.backends.adapters import open_ours
from moejax.bench.backends.base import Backend
from moejax.bench.backends.config import BackendOptions, BackendSection
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.engine.opening.resolve import find_model
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.sharding.distributed import process_count


@contextlib.contextmanager
def open_backends(
    section: BackendSection,
    open_llm: Callable[[], LLM],
    *,
    model: Any,
    load_format: str,
    max_num_seqs: int,
    log_dir: Path,
) -> Iterator[list[Backend]]:
    """The section's backends, the first one first; all are closed at the end, whatever happens.

    Peers open before our own engine: what they lack comes to light before weights are read and steps
    compiled.

    Args:
        open_llm: opens our engine; called only where it is measured. Picklable, where a server of ours is.
        model, load_format: as for `LLM`: whose prompts, tokenizer and weights.
        max_num_seqs: how many requests a peer may run at a time.
        log_dir: where the stderr of peers' processes is kept.

    Raises:
        ConfigError, BackendError: one cannot be had. What `open_llm` raises.
    """
    chosen = section.chosen()
    peers = [name for name, options in chosen if options.kind != "moejax"]
    if peers and process_count() > 1:
        raise ConfigError(f"backend {peers[0]} runs on one machine beside one process; start a single one")
    opened: dict[str, Backend] = {}
    with contextlib.ExitStack() as stack:
        for name, options in sorted(chosen, key=lambda item: item[1].kind == "moejax"):
            if options.kind == "moejax":
                opened[name] = open_ours(options, open_llm())
            else:
                opened[name] = _open_peer(name, options, open_llm, model, load_format, max_num_seqs, log_dir)
            stack.callback(opened[name].close)
        yield [opened[name] for name, _ in chosen]


def _open_peer(
    name: str, options: BackendOptions, open_llm: Callable[[], LLM], model: Any, load_format: str,
    max_num_seqs: int, log_dir: Path,
) -> Backend:  # fmt: skip
    directory, config = find_model(model, load_format)
    tokenizer = Tokenizer.load(directory) if directory is not None else None
    encode = tokenizer.encode if tokenizer else None
    weights = directory if load_format != "dummy" else None
    if options.kind in ("openai_endpoint", "moejax_server"):
        from moejax.bench.backends.moejax_server import MoejaxServer
        from moejax.bench.backends.openai_endpoint import OpenAIEndpoint

        endpoint: dict[str, Any] = {
            "vocab_size": config.vocab_size, "max_model_len": config.max_position_embeddings,
            "encode": encode, "decode": tokenizer.decode if tokenizer else None, "checkpoint": weights,
        }  # fmt: skip
        if options.kind == "openai_endpoint":
            return OpenAIEndpoint(name, options, **endpoint)
        return MoejaxServer(name, options, open_llm, log_dir / f"{name}.log", **endpoint)
    from moejax.bench.backends.peer import WorkerBackend

    return WorkerBackend(
        name, options, model_dir=weights, encode=encode, max_num_seqs=max_num_seqs, log_dir=log_dir
    )


def encoder(backends: Sequence[Backend]) -> Callable[[str], Sequence[int]] | None:
    """Returns the encoder of prompts: that of the first backend that has a tokenizer."""
    return next((backend.encode for backend in backends if backend.encode is not None), None)


def without_our_process(metrics: dict[str, Any], first: Backend) -> None:
    """Takes out of a peer's flat metrics what was read of this process: the peer works elsewhere. Its memory
    is what it says itself."""
    if isinstance(first, MoejaxBackend):
        return
    ours = ("mean_cpu_percent", "mean_other_cpu_percent", "mean_process_rss_bytes", "max_process_rss_bytes")
    metrics |= dict.fromkeys(name for name in ours if name in metrics)
    metrics["process_peak_bytes"] = first.memory().get("process_peak_bytes")
