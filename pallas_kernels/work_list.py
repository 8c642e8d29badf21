"""Decode attention's work list: which program reads which part of which context, from the real lengths.

FlashInfer's plan (`DecodePlan` and `PartitionPagedKVCacheBinarySearchMinNumPagePerBatch` of
include/flashinfer/attention/scheduler.cuh), made once a step for all of its layers: contexts are cut into
parts of one length, which follows from all keys together and from how many programs run at a time. The number
of parts is bounded whatever the lengths, so that a compiled step's grid is static.
"""

from typing import Any

import numpy as np

LEAST_KEYS = 64
"""Fewest keys of a part: fewer cost more to start and to put together than they save."""

MOST_QUERIES = 8
"""Most queries of a sequence whose context is cut: each part has room for the results of so many."""

LATENT_HEADS = 64
"""Most query heads of a program over latents: 512 sums for each are what the registers of eight warps hold.
More heads are other programs', which find the pages in the cache."""

# Programs that an A100 runs at a time, two on each multiprocessor. An H100 could hold 396, and its memory is
# busy with these: 64 KB are under way in each.
_SLOTS = 216


def latent_heads(heads: int) -> int:
    """Returns what counts as `kv_heads` below where so many query heads share latents: a part's programs,
    twice where they have many heads, as one then takes a multiprocessor for itself."""
    return -(-heads // LATENT_HEADS) * (1 if heads <= 16 else 2)


def latent_queries(heads: int) -> int:
    """Returns what takes the place of `MOST_QUERIES` where so many query heads share latents: more queries of
    many heads, each with 512 float32 numbers a part, would be hundreds of megabytes."""
    return MOST_QUERIES if heads <= 16 else 1


def most_splits(sequences: int, kv_heads: int, context: int) -> int:
    """Returns into how many parts one context may be cut, at most, in a step of so many sequences.

    1 if the sequences' heads alone fill the device and no context is so long that one program would hold up
    all others, or where contexts are too short: then no kernel has to put parts together.

    Args:
        kv_heads: of the device. context: the most keys that a query reads.
    """
    pairs = sequences * kv_heads
    if pairs >= _SLOTS and context <= 4096:
        return 1
    wave = _SLOTS // kv_heads
    # With the sequences' last parts no more than a wave; three where they alone would nearly be one.
    splits = wave - (sequences - 1) if 2 * sequences <= wave else 3 * wave
    return max(1, min(128, splits, context // max(LEAST_KEYS, min(4 * LEAST_KEYS, 8 * pairs))))


def decoded_keys(
    q_lens: Any, kv_lens: Any, kv_heads: int, context: int, xp: Any = np, queries: int = MOST_QUERIES
) -> Any:
    """Returns int `[S]`, what `make_work_list` takes: keys, at most `context`, of sequences with one query;
    also of those with up to `queries` if chunk attention, which does not cut contexts, would leave
    multiprocessors idle with them; and 0 for others."""
    few = (q_lens > 1) & (q_lens <= queries)
    few = few & (few.sum() * kv_heads < _SLOTS // 2)
    return xp.where((q_lens == 1) | few, xp.minimum(kv_lens, context), 0)


def fixed_parts(sequences: int, context: int) -> tuple[int, int]:
    """Returns `splits` and `each` of `make_work_list` for parts whose length, and so the order of sums, does
    not depend on other sequences: at least 256 keys, of one context at most 64 parts."""
    each = max(4 * LEAST_KEYS, -(-context // (64 * LEAST_KEYS)) * LEAST_KEYS)
    return sequences * (-(-context // each) - 1) + 1, each


def make_work_list(keys: Any, splits: int, xp: Any = np, each: int | None = None) -> Any:
    """Returns int32 `[2·S + splits]`: `[S + 1]` numbers of the sequences' first parts, one past the last at
    the end, then the sequence of each of `S - 1 + splits` parts; places past the last part have none.

    A sequence's parts share evenly the keys that a layer's window leaves.

    Args:
        keys: int `[S]`, keys that each sequence's last query reads, see `decoded_keys`.
        splits: see `most_splits`. A part has a `splits`th of all keys, so that no context has more parts.
        xp: numpy, or jax.numpy inside a trace.
        each: keys of a part; `fixed_parts` says how many parts there are room for then.
    """
    S = keys.shape[0]
    if each is None:
        each = xp.maximum(-(-keys.sum() // splits), 1)
        each = -(-each // LEAST_KEYS) * LEAST_KEYS
    first = xp.pad(xp.cumsum(-(-keys // each)), (1, 0))
    sequence = xp.searchsorted(first[1:], xp.arange(S - 1 + splits), side="right")
    return xp.concatenate([first, xp.minimum(sequence, S - 1)]).astype(xp.int32)
