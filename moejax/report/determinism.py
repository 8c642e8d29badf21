"""The tables of an A/B result on what numbers depend on: the batch (`moejax.bench.ab.determinism`), whether
they were computed for sampling or for training (`moejax.bench.ab.mismatch`), and what was kept of the keys
(`moejax.bench.ab.eviction`). No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from moejax.report.tables import Column, column_table, metric_columns

_BATCH = (
    "beside the same requests alone, where the tokens before are the same; bits equal: log-probabilities, %;"
    "\nflips: a token's layers whose router chose other experts, %"
)
_TRAINING = (
    "sampled tokens' log-probabilities beside those of a training forward of the first variant's weights,"
    "\nwith its own routing and, replayed, with the engine's; flips: a token's layers, %"
)
_EVICTED = (
    "held-out text, decoded token by token as it is; KL: from the first variant; cache: bytes a sequence;"
    "\nneedle: nats by which a passage is likelier behind itself, and its share of the first variant's"
)
_HEAD = [Column(name, name, left=True) for name in ("variant", "dtype", "batched")]


def determinism_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a line for each variant and way to batch: what of its numbers depends on the batch."""
    names = ("equal_requests", "equal_logprobs", "largest_logprob_difference", "router_flips")
    drafts = ["draft_acceptance"] if any(row["draft_acceptance"] is not None for row in rows) else []
    columns = [*_HEAD, *metric_columns("compared_tokens", *names, *drafts)]
    return column_table("what depends on the batch", columns, rows, _BATCH)


def mismatch_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a line for each variant and batch size: how far training is from what sampled the tokens."""
    names = ("logprob_difference", "sampled_kl", "replayed_logprob_difference", "replayed_sampled_kl")
    columns = [*_HEAD, *metric_columns("compared_tokens", "router_flips", *names)]
    return column_table("sampling beside training", columns, rows, _TRAINING)


def eviction_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a line for each variant: what it keeps of keys and values, and what that costs."""
    names = ("perplexity", "kl", "peak_cache_bytes", "end_cache_bytes", "needle_gain", "needle_recall")
    head = [Column(name, name, left=True) for name in ("variant", "kv_policy", "kv_cache")]
    return column_table(
        "what evicting costs", [*head, *metric_columns("compared_tokens", *names)], rows, _EVICTED
    )
