"""llama.cpp on a GGUF file of the model's weights."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.peer import WORKERS, WorkerBackend


def open_llama_cpp(
    name: str,
    options: BackendOptions,
    *,
    model_dir: Path | None,
    encode: Callable[[str], Sequence[int]] | None,
    max_num_seqs: int,
    log_dir: Path,
) -> WorkerBackend:
    """llama.cpp's own functions, all sequences in one context: prompts join the running sequences' decode
    step.

    Raises:
        BackendError: no interpreter, no package, or a file that does not load.
    """
    assert options.path is not None  # BackendOptions.check
    weights = Path(options.path).resolve()
    with open(weights, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return WorkerBackend(
        name,
        options,
        package="llama_cpp",
        extra="llama_cpp",
        script=WORKERS / "llama_worker.py",
        weights=weights,
        encode=encode,
        checkpoint=model_dir,
        batching="continuous",
        max_num_seqs=max_num_seqs,
        log_dir=log_dir,
        facts={"token_instants": "each decode call", "weights_sha256": digest},
    )
