"""The table of determinism of an A/B result (`moejax.bench.ab.determinism`). No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from moejax.report.tables import Column, column_table, metric_columns

_NOTE = (
    "beside the same requests alone, where the tokens before are the same; bits equal: log-probabilities, %;"
    "\nflips: a token's layers whose router chose other experts, %"
)


def determinism_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a line for each variant and way to batch: what of its numbers depends on the batch."""
    names = ("equal_requests", "equal_logprobs", "largest_logprob_difference", "router_flips")
    columns = [
        Column("variant", "variant", left=True),
        Column("dtype", "dtype", left=True),
        Column("batching", "batched", left=True),
        *metric_columns("compared_tokens", *names),
    ]
    return column_table("what depends on the batch", columns, rows, _NOTE)
