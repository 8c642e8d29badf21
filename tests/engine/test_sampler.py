"""The device sampler against float64 references, and what a row's draw may depend on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from moejax.engine.requests.api import SamplingParams
from moejax.engine.step import sampler
from moejax.engine.step.sampler import (
    Sampled,
    SamplerMode,
    SamplingArrays,
    draw,
    draw_or_keep,
    filter_scores,
    penalize,
    sample,
    sampler_mode,
)
from tests.bench.sampling_filters import filter_by_sorting
from tests.engine.tiny import PROPERTY, log_softmax
from tests.plain.contiguous import sampling_arrays

V = 13
FULL = SamplerMode(greedy=False, filters=True, penalty=True, logprobs=5)
# Multiples of an eighth are exact in float32 and often tie; the large ones overflow when exponentiated.
MILD = st.integers(-16, 16).map(lambda i: i / 8)
WILD = st.one_of(st.integers(-64, 64).map(float), st.sampled_from([-1e30, -1e4, 0.0, 1e4, 1e30, -3e38, 3e38]))
LOGITS = st.one_of(*(st.lists(logit, min_size=V, max_size=V) for logit in (MILD, WILD))).map(
    lambda row: np.array(row, np.float32)
)

_filter = jax.jit(filter_scores)
_penalize = jax.jit(penalize)
_sample = jax.jit(sample, static_argnames="mode")


def arrays_of(*params: SamplingParams, seeds: Any = None) -> SamplingArrays:
    return sampling_arrays(params, [0] * len(params) if seeds is None else seeds)


def run(
    logits: np.ndarray,
    params: list[SamplingParams],
    *,
    mode: SamplerMode | None = None,
    seeds: Any = None,
    steps: Any = None,
    seen: np.ndarray | None = None,
    draft: np.ndarray | None = None,
) -> Sampled:
    """`sample` on rows `[B, V]`, in the mode that the engine would choose unless one is given."""
    rows = len(params)
    mode = sampler_mode(params, V) if mode is None else mode
    steps = jnp.asarray(np.zeros(rows, np.int32) if steps is None else np.asarray(steps, np.int32))
    if mode.penalty:
        seen_array = jnp.asarray(np.zeros((rows, V)) if seen is None else seen, jnp.int32)
    else:
        seen_array = None
    arrays, mode = arrays_of(*params, seeds=seeds), mode._replace(rejection=draft is not None)
    return _sample(jnp.asarray(logits), arrays, steps, seen_array, mode=mode, draft=draft)


# -- float64 references --------------------------------------------------------------------------------


def reference_kept(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, bool]:
    """bool `[V]`: what min-p, top-k and top-p leave, by their definitions. Ties with the last stay.

    And whether no decision is so close that float32 may make it otherwise.
    """
    x = scores.astype(np.float64)
    kept, clear = np.ones(V, bool), True
    if params.min_p > 0:
        margin = x - (x.max() + np.log(params.min_p))
        clear &= bool(np.abs(margin).min() > 1e-4)
        kept &= margin >= 0
    if params.top_k:
        place = min(params.top_k, kept.sum()) - 1
        kept &= x >= np.sort(x[kept])[::-1][place]
    if params.top_p < 1.0:
        order = [i for i in np.argsort(-x, kind="stable") if kept[i]]
        p = np.exp(x[order] - x.max())
        reached = np.cumsum(p / p.sum())
        clear &= bool(np.abs(reached - params.top_p).min() > 1e-4)
        last = order[int(np.argmax(reached >= params.top_p))]
        kept &= x >= x[last]
    return kept, clear


def reference_penalized(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    x = logits.astype(np.float64)
    return np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)


def reference_probabilities(logits: np.ndarray, seen: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 `[V]`: the distribution that `sample` draws from."""
    x = reference_penalized(logits, seen, params.repetition_penalty) / params.temperature
    kept, clear = reference_kept(x, params)
    assert clear
    p = np.where(kept, np.exp(x - x.max()), 0.0)
    return p / p.sum()


def survivors(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """bool `[V]`: what the device leaves; what it leaves must be unchanged."""
    out = np.asarray(_filter(jnp.asarray(logits)[None], arrays_of(params)))[0]
    kept = out > -np.inf
    np.testing.assert_array_equal(out[kept], logits[kept])
    return kept


def agree(logits: np.ndarray, params: SamplingParams) -> None:
    """Device and reference leave the same tokens."""
    want, clear = reference_kept(logits, params)
    assume(clear)
    np.testing.assert_array_equal(survivors(logits, params), want)


# -- each parameter ------------------------------------------------------------------------------------


@PROPERTY
@given(LOGITS, st.integers(1, V + 3))
def test_top_k(logits: np.ndarray, k: int) -> None:
    params = SamplingParams(top_k=k)
    agree(logits, params)


@PROPERTY
@given(LOGITS, st.floats(0.01, 0.999))
def test_top_p(logits: np.ndarray, p: float) -> None:
    params = SamplingParams(top_p=p)
    agree(logits, params)


@PROPERTY
@given(LOGITS, st.floats(0.001, 1.0))
def test_min_p(logits: np.ndarray, p: float) -> None:
    params = SamplingParams(min_p=p)
    agree(logits, params)


@PROPERTY
@given(LOGITS, st.integers(0, V), st.floats(0.1, 1.0), st.sampled_from([0.0, 0.003, 0.02, 0.1, 0.4]))
def test_filters_together(logits: np.ndarray, k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(top_k=k, top_p=top_p, min_p=min_p)
    agree(logits, params)


def test_each_filter_works_on_what_the_one_before_left() -> None:
    """Of 13 nearly equal tokens top-k leaves 5, and half of those is 3; half of all would be 7."""
    logits = (-0.01 * np.arange(V)).astype(np.float32)
    kept = survivors(logits, SamplingParams(top_k=5, top_p=0.5))
    assert np.flatnonzero(kept).tolist() == [0, 1, 2]
    # min-p leaves 2 of them, and half of those is 1.
    kept = survivors(logits, SamplingParams(min_p=0.985, top_k=5, top_p=0.5))
    assert np.flatnonzero(kept).tolist() == [0]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_search_leaves_what_sorting_leaves(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1,003 scores: many ties, hardly any, all equal, most at -inf, above 0 and far below."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    smooth = 3 * rng.normal(size=1003)
    shapes = [
        np.round(smooth),
        smooth,
        np.zeros(1003),
        np.where(smooth > 6, smooth, -np.inf),
        smooth * 1e6 + 1e7,
    ]
    values: list[dict[str, Any]] = [
        {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 1003}, {"top_k": 5000}, {"top_p": 0.7}, {"top_p": 1e-40},
        {"top_k": 40, "top_p": 0.55}, {"min_p": 0.07}, {"min_p": 0.01, "top_k": 90, "top_p": 0.83},
    ]  # fmt: skip
    params = [SamplingParams(**value) for value in values]
    for row in shapes:
        scores = jnp.asarray(np.tile(row.astype(np.float32), (len(params), 1)))
        want, got = (jax.jit(way)(scores, arrays_of(*params)) for way in (filter_by_sorting, filter_scores))
        np.testing.assert_array_equal(got, want)


@PROPERTY
@given(LOGITS, st.integers(0, 2**V - 1), st.floats(0.1, 10.0))
def test_repetition_penalty(logits: np.ndarray, bits: int, penalty: float) -> None:
    seen = np.array([bits >> i & 1 for i in range(V)], bool)
    got = np.asarray(_penalize(jnp.asarray(logits)[None], jnp.asarray(seen)[None], jnp.float32([penalty])))[0]
    limit = float(np.finfo(np.float32).max)
    want = np.clip(reference_penalized(logits, seen, penalty), -limit, limit)
    np.testing.assert_allclose(got, want, rtol=3e-7)
    np.testing.assert_array_equal(got[~seen], logits[~seen])


@PROPERTY
@given(
    LOGITS,
    st.floats(0.0, 1e300),
    st.integers(0, 2**62),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1e300, exclude_min=True),
)
def test_no_parameters_leave_nothing_to_draw(
    logits: np.ndarray, temperature: float, k: int, top_p: float, min_p: float, penalty: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=1
    )
    seen = np.arange(V) % 3 == 0
    kept = survivors(logits, params)
    assert kept[logits.argmax()]
    token = int(run(logits[None], [params], mode=FULL, seeds=[1], seen=seen[None]).tokens[0])
    assert 0 <= token < V


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 2e-38, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Divided by it, these logits are all below float32's range."""
    logits = np.array([[-30.0] * 5 + [-20.0] + [-30.0] * 7], np.float32)
    for extra in ({}, {"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 3}):
        tokens = run(logits, [SamplingParams(temperature=temperature, **extra)]).tokens
        assert tokens.tolist() == [5]


def test_a_huge_temperature_is_uniform() -> None:
    rows = 4000
    logits = np.tile(np.arange(V, dtype=np.float32) * 10, (rows, 1))
    tokens = run(logits, [SamplingParams(temperature=1e300)] * rows, seeds=range(rows)).tokens
    counts = np.bincount(np.asarray(tokens), minlength=V)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-40, 1e-30])
def test_a_tiny_top_p_keeps_the_likeliest(top_p: float) -> None:
    logits = np.zeros(V, np.float32)
    logits[4] = 1.0
    assert np.flatnonzero(survivors(logits, SamplingParams(top_p=top_p))).tolist() == [4]


@PROPERTY
@given(LOGITS)
def test_greedy_is_argmax(logits: np.ndarray) -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, top_k=3, top_p=0.5)):
        for mode in (None, FULL):
            assert int(run(logits[None], [params], mode=mode).tokens[0]) == logits.argmax()


@PROPERTY
@given(LOGITS, st.integers(0, 2**32 - 1), st.floats(0.1, 5.0))
def test_top_k_of_one_is_greedy_up_to_ties(logits: np.ndarray, seed: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=1)
    token = int(run(logits[None], [params], seeds=[seed]).tokens[0])
    assert logits[token] == logits.max()


@PROPERTY
@given(LOGITS, st.integers(0, 2**V - 1))
def test_greedy_heeds_the_penalty(logits: np.ndarray, bits: int) -> None:
    logits = np.where(np.abs(logits) > 1e20, 0.0, logits).astype(np.float32)
    seen = np.array([bits >> i & 1 for i in range(V)], bool)
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    want = reference_penalized(logits, seen, 2.0).argmax()
    assert int(run(logits[None], [params], seen=seen[None]).tokens[0]) == want


# -- distribution --------------------------------------------------------------------------------------

CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=4),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.15),
    "penalty": SamplingParams(repetition_penalty=2.5),
    "all": SamplingParams(temperature=1.7, top_k=7, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
}


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of draws under a distribution; what has probability 0 must not have been drawn."""
    counts = np.bincount(tokens, minlength=V)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    return float(stats.chisquare(counts[possible], len(tokens) * probabilities[possible]).pvalue)


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name: str) -> None:
    """Over seeds at one step, and over the steps of one seed."""
    rows, params = 8000, CASES[name]
    logits = np.random.default_rng(3).uniform(-1.2, 1.2, V).astype(np.float32)
    seen = np.arange(V) % 2 == 0
    want = reference_probabilities(logits, seen, params)
    batch, seens = np.tile(logits, (rows, 1)), np.tile(seen, (rows, 1))
    count = np.arange(rows)
    for seeds, steps in ((count, np.full(rows, 3)), (np.full(rows, 7), count)):
        got = run(batch, [params] * rows, mode=FULL, seeds=seeds.tolist(), steps=steps, seen=seens)
        assert chi_square(np.asarray(got.tokens), want) > 1e-4


DRAFTS = {
    "right": lambda p: np.full(8000, p.argmax()),
    "wrong": lambda p: np.full(8000, p.argmin()),
    "mixed": lambda p: np.arange(8000) % (V + 1) - 1,  # one row in so many has none
}


def judged(params: SamplingParams, drafts: str) -> tuple[np.ndarray, Sampled, np.ndarray]:
    """Drafts, what rows of the same logits make of them, and the probabilities of tokens without drafts."""
    logits, rows = np.random.default_rng(4).uniform(-1.2, 1.2, V).astype(np.float32), 8000
    want = reference_probabilities(logits, np.zeros(V, bool), params)
    draft = DRAFTS[drafts](want).astype(np.int32)
    mode = SamplerMode(greedy=False, filters=True, logprobs=0)
    got = run(np.tile(logits, (rows, 1)), [params] * rows, mode=mode, seeds=range(rows), draft=draft)
    np.testing.assert_allclose(got.logprob, log_softmax(logits)[np.asarray(got.tokens)], atol=1e-5)
    return draft, got, want


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", ["plain", "hot", "top_k", "top_p", "min_p"])
def test_tokens_judged_by_rejection_follow_the_distribution(name: str, drafts: str) -> None:
    """Whatever is drafted; and a draft is kept as often as it is sampled."""
    draft, got, want = judged(CASES[name], drafts)
    tokens = np.asarray(got.tokens)
    assert chi_square(tokens, want) > 1e-4
    for token in np.unique(draft) if drafts == "mixed" else ():
        assert chi_square(tokens[draft == token], want) > 1e-4


def test_a_greedy_row_and_one_without_a_draft_draw_as_ever() -> None:
    rows = np.random.default_rng(5).uniform(-1, 1, (64, V)).astype(np.float32)
    for params, draft in ((SamplingParams(temperature=0.0), 3), (SamplingParams(), -1)):
        ask = {"mode": SamplerMode(greedy=False), "seeds": range(64)}
        judges = run(rows, [params] * 64, draft=np.full(64, draft, np.int32), **ask)
        np.testing.assert_array_equal(judges.tokens, run(rows, [params] * 64, **ask).tokens)


def forgets_to_remove_it(scores: jax.Array, draft: jax.Array, *row: jax.Array) -> jax.Array:
    return jnp.where(draw_or_keep(scores, draft, *row) == draft, draft, draw(scores, *row))


def judges_by_what_it_draws_with(scores: jax.Array, draft: jax.Array, *row: jax.Array) -> jax.Array:
    with pytest.MonkeyPatch.context() as patch:
        key = sampler._row_key
        patch.setattr(sampler, "_row_key", lambda stream, *row: key(0, *row))
        return draw_or_keep(scores, draft, *row)


@pytest.mark.parametrize("defect", [forgets_to_remove_it, judges_by_what_it_draws_with])
def test_a_defect_of_rejection_is_found(defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "draw_or_keep", defect)
    monkeypatch.setitem(
        globals(), "_sample", jax.jit(lambda *a, **k: sample(*a, **k), static_argnames="mode")
    )
    _, got, want = judged(CASES["cold"], "right")
    assert chi_square(np.asarray(got.tokens), want) < 1e-6


def test_neighbouring_seeds_and_steps_draw_independently() -> None:
    rows = 8000
    logits = np.where(np.arange(V) < 4, 0.0, -1e9).astype(np.float32)
    batch, params = np.tile(logits, (rows, 1)), [SamplingParams()] * rows
    count = np.arange(rows)

    def draws(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
        return np.asarray(run(batch, params, seeds=seeds.tolist(), steps=steps).tokens)

    here, next_seed, next_step = (
        draws(count, count * 0), draws(count + 1, count * 0), draws(count, count * 0 + 1),
    )  # fmt: skip
    # The last pair would be equal if seed and step were only added.
    for a, b in (
        (here, next_seed),
        (here, next_step),
        (here, draws(count * 0 + 1, count)),
        (next_seed, next_step),
    ):
        assert stats.chisquare(np.bincount(a * 4 + b, minlength=16)).pvalue > 1e-4


# -- what a draw depends on ----------------------------------------------------------------------------


@pytest.mark.optimized
@PROPERTY
@given(st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_a_row_draws_the_same_wherever_it_stands(seed: int, step: int) -> None:
    """Alone in the least mode, and anywhere among seven others in the fullest: the same bits."""
    rng = np.random.default_rng([seed, step])
    params = list(CASES.values())
    logits = rng.normal(0, 2, (len(params), V)).astype(np.float32)
    seen = rng.random((len(params), V)) < 0.5
    seeds = [(seed + 17 * i) % 2**32 for i in range(len(params))]
    steps = np.arange(len(params)) + step
    order = rng.permutation(len(params))
    together = run(
        logits[order], [params[i] for i in order], mode=FULL, seeds=[seeds[i] for i in order],
        steps=steps[order], seen=seen[order],
    )  # fmt: skip
    place = int(rng.integers(len(params)))
    i = int(order[place])
    alone = run(
        logits[i : i + 1], [params[i]], seeds=[seeds[i]], steps=steps[i : i + 1], seen=seen[i : i + 1]
    )
    assert int(alone.tokens[0]) == int(together.tokens[place])


def test_the_same_seed_draws_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    logits, params = rng.normal(0, 2, (64, V)).astype(np.float32), [CASES["all"]] * 64
    first, again = (run(logits, params, mode=FULL, seeds=range(64)) for _ in range(2))
    other = run(logits, params, mode=FULL, seeds=range(64, 128))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (np.asarray(first.tokens) != np.asarray(other.tokens)).any()


# -- log-probabilities ---------------------------------------------------------------------------------


@PROPERTY
@given(LOGITS, st.integers(0, 100))
def test_logprobs_are_those_of_the_raw_logits(logits: np.ndarray, seed: int) -> None:
    """Whatever temperature, filters and penalty do to the draw."""
    seen = np.arange(V) % 2 == 0
    got = run(logits[None], [CASES["all"]], mode=FULL, seeds=[seed], seen=seen[None])
    assert got.logprob is not None and got.rank is not None
    assert got.top_ids is not None and got.top_logprobs is not None
    token, want = int(got.tokens[0]), log_softmax(logits)
    np.testing.assert_allclose(got.logprob[0], want[token], rtol=1e-5, atol=1e-5)
    assert int(got.rank[0]) == 1 + (logits > logits[token]).sum()
    top = np.asarray(got.top_ids[0])
    np.testing.assert_array_equal(top, np.argsort(-logits, kind="stable")[: FULL.logprobs])
    np.testing.assert_allclose(got.top_logprobs[0], want[top], rtol=1e-5, atol=1e-5)


def test_ranks_tell_apart_what_rounds_to_one_logprob() -> None:
    """20 and 20 + 2^-19 differ in float32; less their logsumexp they may not."""
    logits = np.full(V, 20.0, np.float32)
    logits[9] = np.nextafter(np.float32(20), np.float32(21))
    got = run(logits[None], [SamplingParams(temperature=0.0, logprobs=3)])
    assert got.rank is not None and got.top_ids is not None
    assert int(got.tokens[0]) == 9 and int(got.rank[0]) == 1
    assert got.top_ids[0].tolist() == [9, 0, 1]


def test_no_likeliest_tokens_asked_for() -> None:
    got = run(np.zeros((1, V), np.float32), [SamplingParams(temperature=0.0, logprobs=0)])
    assert got.logprob is not None and got.top_ids is not None
    np.testing.assert_allclose(got.logprob[0], -np.log(V), rtol=1e-6)
    assert got.top_ids.shape == (1, 0)


# -- the mode ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ([SamplingParams(temperature=0.0)], SamplerMode()),
        ([SamplingParams(temperature=0.0, top_k=4, top_p=0.5, min_p=0.1)], SamplerMode()),
        ([SamplingParams()], SamplerMode(greedy=False)),
        ([SamplingParams(top_k=4)], SamplerMode(greedy=False, filters=True)),
        ([SamplingParams(top_p=0.5)], SamplerMode(greedy=False, filters=True)),
        ([SamplingParams(min_p=0.1)], SamplerMode(greedy=False, filters=True)),
        ([SamplingParams(temperature=0.0, repetition_penalty=0.9)], SamplerMode(penalty=True)),
        ([SamplingParams(temperature=0.0, logprobs=0)], SamplerMode(logprobs=0)),
        ([SamplingParams(temperature=0.0, logprobs=1000)], SamplerMode(logprobs=V)),
        (
            [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(logprobs=4)],
            SamplerMode(greedy=False, logprobs=4),
        ),
    ],
)  # fmt: skip
def test_mode_is_the_least_that_serves_all(params: list[SamplingParams], want: SamplerMode) -> None:
    assert sampler_mode(params, V) == want
