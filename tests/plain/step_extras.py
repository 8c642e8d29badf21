"""The collectives of a step that few steps have, beside `moejax.perf.comm.step_comm`'s: by hand."""

from collections.abc import Sequence

from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.perf.comm import CommTerm, Exchange, role_sizes


def extra_terms(
    model: ModelConfig,
    parallel: ParallelConfig,
    exchange: Exchange,
    layers: Sequence[int],
    *,
    tokens: int,
    rows: int,
    logprobs: int,
    prompt_logprobs: int,
    scored: tuple[int, int],
    record: bool,
) -> list[CommTerm]:
    """Log-probabilities, scores and recorded routing.

    Args:
        logprobs: likeliest tokens that are reported of each row, -1 for no log-probabilities.
        prompt_logprobs: the same of each chunk token, where chunks are scored.
        scored: where chunks are scored, the parts that this is done in, and the rows of each.
        record: routing is recorded.
    """
    sizes, terms = role_sizes(model, parallel), []

    def add(operation: str, kind: str, role: str, operand_bytes: float, count: int = 1) -> None:
        if sizes[role] > 1 and count:
            terms.append(CommTerm(operation, kind, role, sizes[role], count, operand_bytes))

    if layers[-1] == model.num_layers - 1:
        assert model.dtype in ("float32", "float16")
        itemsize = {"float32": 4, "float16": 2}[model.dtype]
        parts, part_rows = scored
        logits = parallel.padded_vocab(model.vocab_size) // sizes["tensor"] * itemsize
        add("scores", "all-gather", "tensor", part_rows * logits, parts)
        # Log-probability and rank of each row's token; and of the likeliest.
        add("sampling", "all-gather", "data", rows * 4, 2 if logprobs >= 0 else 0)
        add("sampling", "all-gather", "data", rows * logprobs * 4, 2 if logprobs > 0 else 0)
        # The prompt's token, its log-probability and rank; and those of the likeliest.
        add("scores", "all-gather", "data", (tokens - rows) * 4, 3 if parts else 0)
        add("scores", "all-gather", "data", (tokens - rows) * prompt_logprobs * 4, 2 if parts else 0)
    if record:
        # Each layer's assignments to each expert; and how many were dropped or rerouted, where that is not
        # known to be 0 when the program is compiled.
        overflow = 2 if exchange.lossy or exchange.choices > 1 else 0
        add("routing", "all-reduce", "data", (len(layers) * model.num_experts + overflow) * 4)
    return terms
