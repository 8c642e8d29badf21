"""Hugging Face transformers on the model's own directory."""

from collections.abc import Callable, Sequence
from pathlib import Path

from moejax.bench.backends.base import BackendError
from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.peer import WORKERS, WorkerBackend


def open_hf_transformers(
    name: str,
    options: BackendOptions,
    *,
    model_dir: Path | None,
    encode: Callable[[str], Sequence[int]] | None,
    max_num_seqs: int,
    log_dir: Path,
) -> WorkerBackend:
    """`AutoModelForCausalLM` under greedy or plain sampling, in static batches in order of arrival:
    transformers takes no request into a running batch.

    Raises:
        BackendError: no weights, no interpreter, no package, or a model that does not load.
    """
    weights = Path(options.path) if options.path is not None else model_dir
    if weights is None or not [*weights.glob("*.safetensors"), *weights.glob("*.bin")]:
        raise BackendError(
            f"backend {name} reads weights, and {weights or 'this model'} has none: model=checkpoint"
            " model.path=DIR, or backend.path=DIR"
        )
    return WorkerBackend(
        name,
        options,
        package="transformers",
        extra="hf",
        script=WORKERS / "hf_worker.py",
        weights=weights.resolve(),
        encode=encode,
        checkpoint=weights,
        batching="static",
        max_num_seqs=max_num_seqs,
        log_dir=log_dir,
        facts={"token_instants": "each forward pass"},
    )
