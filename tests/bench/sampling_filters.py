"""The sampler's filters by a search for the last score that stays, beside a sort of all scores.

    python -m tests.bench.sampling_filters      # a table on stderr, one line of JSON on stdout

Both take turns on the same scores; compiling is in `first_call_s` and nowhere else.
"""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.requests.api import SamplingParams
from moejax.engine.step.sampler import SamplingArrays, filter_scores, mask_min_p, sampling_values
from moejax.report.tables import rows_table, stderr_console
from tests.bench.turns import timed_rows

FILTERS = {
    "top_k=50": SamplingParams(top_k=50),
    "top_p=0.9": SamplingParams(top_p=0.9),
    "both": SamplingParams(top_k=50, top_p=0.9),
}


def filter_by_sorting(scores: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Returns what `filter_scores` returns: its plain twin."""
    V = scores.shape[-1]
    best = jnp.max(scores, axis=-1, keepdims=True)
    scores = mask_min_p(scores, best, arrays.min_p[:, None])
    ordered = -jnp.sort(-scores, axis=-1)
    k = jnp.where(arrays.top_k > 0, jnp.minimum(arrays.top_k, V), V)
    kth = jnp.take_along_axis(ordered, (k - 1)[:, None], axis=1)
    scores = jnp.where(scores >= kth, scores, -jnp.inf)
    ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = before < arrays.top_p[:, None]
    least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scores >= jnp.where((arrays.top_p < 1.0)[:, None], least, -jnp.inf), scores, -jnp.inf)


def compare(batch: int, vocabulary: int, params: SamplingParams, repeats: int) -> list[dict[str, Any]]:
    """Returns a row for each way: name, median_s, min_s, first_call_s, and time over the search's."""
    logits = 3 * np.random.default_rng(0).normal(size=(batch, vocabulary)).astype(np.float32)
    values = sampling_values([params] * batch, [0] * batch)
    arrays = SamplingArrays(**{name: jnp.asarray(value) for name, value in values.items()})
    ways = {"search": jax.jit(filter_scores), "sort": jax.jit(filter_by_sorting)}
    scores = jnp.asarray(logits - logits.max(axis=1, keepdims=True))
    calls = {name: lambda way=way: way(scores, arrays) for name, way in ways.items()}
    return timed_rows(calls, repeats, "times_search")[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's header."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.sampling_filters", description="Times the sampler's filters."
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    if min(*options.batches, options.vocabulary, options.repeats) < 1:
        parser.error("--batches, --vocabulary and --repeats must be at least 1")
    rows = [
        {"batch": batch, "filters": name} | row
        for batch in options.batches
        for name, params in FILTERS.items()
        for row in compare(batch, options.vocabulary, params, options.repeats)
    ]
    stderr_console().print(rows_table(rows, f"Filters of {options.vocabulary:,} scores a row"))
    device = jax.devices()[0].device_kind
    print(json.dumps({"rows": rows, "load": os.getloadavg()[0], "device": device}))


if __name__ == "__main__":
    main()
