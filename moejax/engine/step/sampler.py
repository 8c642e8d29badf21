"""From logits to tokens on the device. Every row has its own parameters and random stream.

Order of operations, as in vLLM: biases, penalties, temperature, min-p, top-k, top-p, then a draw by the
Gumbel-max trick. A row's random key depends on its seed and the number of its tokens alone, so neighbours
in the batch do not change what it draws.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.requests.api import Logprob, SamplingParams


class SamplerMode(NamedTuple):
    """The sampler's work for a batch: part of a step's compile key, so that greedy decoding pays for nothing
    else. `logprobs` is the number of likeliest tokens to report, -1 for no log-probabilities; `biases` the
    most entries that a row has; with `rejection` rows judge drafts, see `draw_or_keep`; with `masked` there
    are tokens that they may not sample."""

    greedy: bool = True
    filters: bool = False
    penalty: bool = False
    logprobs: int = -1
    biases: int = 0
    rejection: bool = False
    masked: bool = False


class SamplingArrays(NamedTuple):
    """Per-row parameters, each `[B]`: see `moejax.engine.requests.api.SamplingParams`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array


class Sampled(NamedTuple):
    """tokens int32 `[B]`; where asked for, the chosen token's log-probability and rank `[B]` and the
    likeliest tokens' ids and log-probabilities `[B, n]` (else None)."""

    tokens: jax.Array
    logprob: jax.Array | None
    rank: jax.Array | None
    top_ids: jax.Array | None
    top_logprobs: jax.Array | None


def sampler_mode(params: Sequence[SamplingParams], vocab_size: int) -> SamplerMode:
    """Returns the least mode that serves all of `params`."""
    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    return SamplerMode(
        greedy=all(p.greedy for p in params),
        filters=any(not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params),
        penalty=any(p.penalized for p in params),
        logprobs=min(max(logprobs), vocab_size) if logprobs else -1,
    )


def common_mode(modes: Iterable[SamplerMode]) -> SamplerMode:
    """Returns the least mode that does what all of `modes` do."""
    distinct = set(modes) or {SamplerMode()}
    if len(distinct) == 1:
        return distinct.pop()
    greedy, *rest = zip(*distinct, strict=True)
    return SamplerMode(all(greedy), *map(max, rest))


def sampling_values(params: Sequence[SamplingParams], seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns per-row parameters by name; what float32 or int32 cannot hold becomes the nearest number."""
    int32, f32 = np.iinfo(np.int32), np.finfo(np.float32)
    values = {
        "top_k": np.array([min(p.top_k, int32.max) for p in params], np.int32),
        "seed": np.array([s % 2**32 for s in seeds], np.uint32),
    }
    for name in set(SamplingArrays._fields) - values.keys():
        numbers = np.array([getattr(p, name) for p in params], np.float64)
        least = f32.tiny if name in ("top_p", "repetition_penalty") else f32.min  # those two stay above 0
        values[name] = np.clip(numbers, least, f32.max).astype(np.float32)
    return values


@jax.named_scope("sampling")
def sample(
    logits: jax.Array,
    arrays: SamplingArrays | None,
    step: jax.Array,
    seen: jax.Array | None,
    mode: SamplerMode,
    biased: jax.Array | None = None,
    draft: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> Sampled:
    """Chooses one token a row.

    Args:
        logits: float32 `[B, V]`.
        arrays: the rows' parameters; None is enough where the mode is greedy without penalty.
        step: int32 `[B]`, tokens that the row has generated so far.
        seen: int32 `[B, V]`, see `DeviceState`; needed only under `mode.penalty`.
        biased: float32 `[B, V]`, logits to choose by; None: `logits`, of which log-probabilities are told.
        draft: int32 `[B]`, the token that the next row of the same sequence decodes, -1 for none; needed only
            under `mode.rejection`.
        mask: int32 `[B, ceil(V / 32)]`, a bit for each token that may be chosen; only under `mode.masked`.
    """
    scores = logits if biased is None else biased
    if mode.penalty:
        assert seen is not None and arrays is not None
        scores = penalize(scores, seen > 0, arrays.repetition_penalty)
        times = seen // 2
        scores -= times.astype(scores.dtype) * arrays.frequency_penalty[:, None]
        scores -= jnp.where(times > 0, arrays.presence_penalty[:, None], 0.0)
    if mode.masked:
        assert mask is not None
        bits = mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None] & 1
        scores = jnp.where(bits.reshape(len(mask), -1)[:, : scores.shape[-1]] != 0, scores, -jnp.inf)
    tokens = first_argmax(scores)
    if not mode.greedy:
        assert arrays is not None
        hot = arrays.temperature > 0
        # Relative to the likeliest token, so that no temperature is too small to divide by.
        scaled = scores - jnp.max(scores, axis=-1, keepdims=True)
        scaled = scaled / jnp.where(hot, arrays.temperature, 1.0)[:, None]
        if mode.filters:
            scaled = filter_scores(scaled, arrays)
        if mode.rejection:
            assert draft is not None
            drawn = draw_or_keep(scaled, draft, arrays.seed, step)
        else:
            drawn = draw(scaled, arrays.seed, step)
        tokens = jnp.where(hot, drawn, tokens)
    if mode.logprobs < 0:
        return Sampled(tokens, None, None, None, None)
    return with_logprobs(logits, tokens, mode.logprobs)


def add_biases(
    logits: jax.Array, tokens: jax.Array, values: jax.Array, if_newest: jax.Array, newest: jax.Array
) -> jax.Array:
    """Adds `values` `[B, N]` (float32, as int32's bits) to the logits `[B, V]` of `tokens` `[B, N]`, where a
    row's `newest` token `[B]` is `if_newest` `[B, N]` or that is -1."""
    holds = (if_newest < 0) | (if_newest == newest[:, None])
    added = jnp.where(holds, jax.lax.bitcast_convert_type(values, jnp.float32), 0.0)
    return logits.at[jnp.arange(len(logits))[:, None], tokens].add(added)


def first_argmax(scores: jax.Array) -> jax.Array:
    """Returns int32 `[B]`: the first index of each row's maximum.

    Equals `jnp.argmax`, which XLA:CPU computes element by element: four times slower (docs/log.md).
    """
    V = scores.shape[-1]
    best = jnp.max(scores, axis=-1, keepdims=True)
    index = jnp.where(scores >= best, jnp.arange(V, dtype=jnp.int32)[None, :], V)
    return jnp.minimum(jnp.min(index, axis=-1), V - 1)


def with_logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> Sampled:
    """Returns tokens `[B]` with theirs and the `count` likeliest's log-probabilities, by logits `[B, V]`."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)
    # Ranked by logits: two that differ may round to one log-probability.
    rank = 1 + jnp.sum(logits > jnp.take_along_axis(logits, tokens[:, None], axis=1), axis=1, dtype=jnp.int32)
    if count:
        ids = jax.lax.top_k(logits, count)[1]
        top = jnp.take_along_axis(logprobs, ids, axis=1)
    else:
        top, ids = jnp.zeros((tokens.shape[0], 0)), jnp.zeros((tokens.shape[0], 0), jnp.int32)
    return Sampled(tokens, chosen[:, 0], rank, ids, top)


def penalize(scores: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divides positive and multiplies negative scores of seen tokens by the penalty (arXiv 1909.05858)."""
    factor = penalty[:, None]
    penalized = jnp.where(scores > 0, scores / factor, scores * factor)
    limits = jnp.finfo(scores.dtype)
    return jnp.where(seen, jnp.clip(penalized, limits.min, limits.max), scores)


def filter_scores(scores: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Returns scores `[B, V]` with the tokens that min-p, top-k and top-p exclude at -inf.

    At least the likeliest token always stays. Ties with the last token kept by top-k or top-p are kept too.
    The last score that stays is searched for, which is several times faster than to sort a row
    (`tests/bench/sampling_filters.py`, which has the sort as the plain twin).
    """
    V = scores.shape[-1]
    best = jnp.max(scores, axis=-1, keepdims=True)
    scores = mask_min_p(scores, best, arrays.min_p[:, None])
    k = jnp.where(arrays.top_k > 0, jnp.minimum(arrays.top_k, V), V)[:, None]

    def holds_k(least: jax.Array) -> jax.Array:
        return jnp.sum(scores[..., None] >= least[:, None], axis=1, dtype=jnp.int32) >= k

    kth, _ = _last_that_holds(holds_k, k < V)
    kept = jnp.where(scores >= kth, scores, -jnp.inf)
    weights, top_p = jnp.exp(kept - best), arrays.top_p[:, None]
    goal = jnp.where(top_p < 1.0, top_p * jnp.sum(weights, axis=-1, keepdims=True), jnp.inf)

    def reach_top_p(below: jax.Array) -> jax.Array:
        likelier = jnp.where(kept[..., None] > below[:, None], weights[..., None], 0.0)
        return jnp.sum(likelier, axis=1) >= goal

    # A token stays while the likelier ones together have not reached top_p.
    _, least = _last_that_holds(reach_top_p, top_p < 1.0)
    return jnp.where(kept >= least, kept, -jnp.inf)


def mask_min_p(scores: jax.Array, best: jax.Array, min_p: jax.Array) -> jax.Array:
    """Returns scores `[B, V]` with those below min_p `[B, 1]` times the likeliest's, `best`, at -inf."""
    log_min = jnp.log(jnp.maximum(min_p, jnp.finfo(jnp.float32).tiny))
    return jnp.where((scores >= best + log_min) | (min_p <= 0), scores, -jnp.inf)


def _last_that_holds(
    holds: Callable[[jax.Array], jax.Array], wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns each row's greatest number for which `holds`, and the next greater one, float32 `[B, 1]`; -inf
    twice where there is none, or where no row's is `wanted`, bool `[B, 1]`.

    A digit of the number's bits at a time, the highest first: on a GPU four bits, for which a turn compares
    with 15 numbers and reads the scores once, and turns that are laid out one after another, since a loop
    would cut a step's graph; on CPU, where comparing is what takes the time, one bit.

    Args:
        holds: maps numbers `[B, n]` to bool; true up to some number of a row, false above it.
    """
    bits = 1 if jax.default_backend() == "cpu" else 4

    def number(order: jax.Array) -> jax.Array:
        # Floats are ordered as these integers: all bits turned over if negative, else the sign's. NaNs lie
        # below -inf, too.
        order = jnp.maximum(order, jnp.uint32(0x007FFFFF))
        order = jnp.where(order >> 31, order ^ jnp.uint32(1 << 31), ~order)
        return jax.lax.bitcast_convert_type(order, jnp.float32)

    def turn(i: Any, low: jax.Array) -> jax.Array:
        shift = jnp.asarray(32 - bits * (i + 1), jnp.uint32)
        digits = jnp.arange(1, 1 << bits, dtype=jnp.uint32)[None]
        held = holds(number(low + (digits << shift)))
        return low + (jnp.sum(held, axis=-1, keepdims=True, dtype=jnp.uint32) << shift)

    low = jnp.zeros(wanted.shape, jnp.uint32)
    if bits == 1:
        low = jax.lax.fori_loop(0, jnp.where(jnp.any(wanted), 32, 0), turn, low)
    else:
        low = functools.reduce(lambda low, i: turn(i, low), range(32 // bits), low)
    return number(low), number(low + 1)


def draw(scores: jax.Array, seed: jax.Array, step: jax.Array) -> jax.Array:
    """Draws one sample a row from softmax(scores), by row keys (seed, step): int32 `[B]`."""

    def one(row: jax.Array, row_seed: jax.Array, row_step: jax.Array) -> jax.Array:
        return row + jax.random.gumbel(_row_key(0, row_seed, row_step), row.shape, row.dtype)

    return first_argmax(jax.vmap(one)(scores, seed, step))


def draw_or_keep(scores: jax.Array, draft: jax.Array, seed: jax.Array, step: jax.Array) -> jax.Array:
    """Draws as `draw` does, by rejection (arXiv 2211.17192, for drafts that are not drawn themselves): keeps
    a row's `draft` `[B]` (-1: none) with its probability, and draws one of the other tokens otherwise.

    The law is softmax(scores) for any draft that does not depend on this step's noise. Whether a draft is
    kept must not depend on what is drawn otherwise: it has noise of its own.
    """
    drafted = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None] == draft[:, None]
    probability = jnp.sum(jnp.where(drafted, jax.nn.softmax(scores, axis=-1), 0.0), axis=-1)
    noise = jax.vmap(lambda *row: jax.random.uniform(_row_key(1, *row)))(seed, step)
    other = draw(jnp.where(drafted, -jnp.inf, scores), seed, step)
    return jnp.where(noise < probability, draft, other)


def _row_key(stream: int, seed: jax.Array, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(stream), seed), step)


def read_logprobs(sampled: Sampled, counts: Sequence[int | None]) -> list[Logprob | None]:
    """Reads the first rows' log-probabilities to the host, of `counts[i]` likeliest tokens, None for none."""
    chosen, rank = np.asarray(sampled.logprob).tolist(), np.asarray(sampled.rank).tolist()
    ids, top = np.asarray(sampled.top_ids), np.asarray(sampled.top_logprobs)
    logprobs: list[Logprob | None] = []
    for i, count in enumerate(counts):
        if count is None:
            logprobs.append(None)
            continue
        likeliest = dict(zip(ids[i, :count].tolist(), top[i, :count].tolist(), strict=True)) if count else {}
        logprobs.append(Logprob(chosen[i], rank[i], likeliest))
    return logprobs
