"""Prefill and decode over the cache against the model's whole forward pass, and what must not change it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.config import ModelConfig
from moejax.core.moe import MoeConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.step import functions as steps
from moejax.engine.step.ledger import CompileLedger
from moejax.engine.step.sampler import SamplerMode, sample
from moejax.models.decoder import Decoder
from tests.engine.conftest import ENGINE
from tests.engine.tiny import (
    PROPERTY,
    VOCAB,
    FullForward,
    log_softmax,
    small_config,
    windowed_config,
    write_model,
)
from tests.examples import examples
from tests.numerics import relative_error, tolerance
from tests.plain.contiguous import (
    ContiguousEngine,
    Row,
    batch_bucket,
    sampling_arrays,
    slot_bucket,
    token_bucket,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, VOCAB, length).tolist()


def logits_tolerance(config: ModelConfig) -> float:
    """Of two orders of summation through all layers: projections, attention, output, experts, vocabulary."""
    layer = (config.hidden_size, config.head_dim, 32, config.num_heads * config.head_dim)
    layer += (config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok)
    return tolerance(*(layer * config.num_layers), config.hidden_size, dtype=config.dtype)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Multi-query attention, window 5, a dense and a routed layer; read from a directory."""
    return LLM(write_model(tmp_path_factory.mktemp("windowed"), windowed_config()), engine=ENGINE)


@pytest.fixture(scope="module")
def windowed_oracle(windowed: LLM) -> FullForward:
    return FullForward(windowed.model)


# -- the cache changes nothing -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["main", "windowed"])
def test_every_step_equals_the_whole_forward_pass(
    name: str, llm: LLM, oracle: FullForward, request: pytest.FixtureRequest
) -> None:
    """Tokens equal, and the whole distribution close, at every step of prompts around a bucket's edge."""
    engine = llm if name == "main" else request.getfixturevalue("windowed")
    whole = oracle if name == "main" else request.getfixturevalue("windowed_oracle")
    prompts = [prompt(n) for n in (1, 3, 15, 16, 17, 20)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=VOCAB)
    for ids, out in zip(prompts, engine.generate(prompts, params), strict=True):
        sample = out.outputs[0]
        assert sample.token_ids == whole.greedy(ids, 8)
        reference = log_softmax(whole.logits([*ids, *sample.token_ids]))[len(ids) - 1 : -1]
        assert sample.logprobs is not None
        ours = np.array([[entry.top[token] for token in range(VOCAB)] for entry in sample.logprobs])
        assert relative_error(ours, reference) < logits_tolerance(engine.config)
        chosen = [entry.logprob for entry in sample.logprobs]
        np.testing.assert_array_equal(chosen, ours[np.arange(8), sample.token_ids])
        assert [entry.rank for entry in sample.logprobs] == [1] * 8


def test_the_window_matters(windowed: LLM, windowed_oracle: FullForward) -> None:
    """Else the test above would say nothing about it. It spans 5 tokens, the query's own included, so through
    two layers the token at p sees back to p - 8."""
    full = FullForward(Decoder(windowed_config().replace(sliding_windows=(None, None)), seed=0))
    ids = prompt(20)
    ours, theirs = windowed_oracle.logits(ids), full.logits(ids)
    assert relative_error(theirs[:5], ours[:5]) < logits_tolerance(windowed.config)
    assert relative_error(theirs, ours) > 1e-2
    changed = {place: windowed_oracle.logits([*ids[:place], 1, *ids[place + 1 :]]) for place in (10, 11)}
    assert ids[10] != 1 != ids[11]
    np.testing.assert_array_equal(changed[10][19], ours[19])
    assert (changed[11][19] != ours[19]).any()


@settings(PROPERTY, max_examples=examples(25))
@given(
    st.sampled_from([1, 3, 8]).flatmap(
        lambda n: st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=n, max_size=n)
    ),
    st.integers(0, 3),
)
def test_any_batch_gives_each_prompt_its_own_tokens(
    llm: LLM, oracle: FullForward, rows: list[tuple[int, int]], seed: int
) -> None:
    """Whatever stands beside it, however far it is padded, and however long the others go on."""
    prompts = [prompt(length, seed) for length, _ in rows]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in rows]
    outs = llm.generate(prompts, params)
    for ids, p, out in zip(prompts, params, outs, strict=True):
        assert out.outputs[0].token_ids == oracle.greedy(ids, p.max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("moe", [MoeConfig(execution="dense"), MoeConfig(grouped_matmul="ragged_dot")])
def test_executions_agree(moe: MoeConfig, llm: LLM) -> None:
    engine = ContiguousEngine(Decoder(llm.config, moe=moe, seed=0), CompileLedger())
    sequences = [prompt(9), prompt(12)]
    for ours, theirs in zip(engine.score(sequences), llm.score(sequences), strict=True):
        assert relative_error(ours, theirs) < logits_tolerance(llm.config)


@settings(PROPERTY, max_examples=examples(300))
@given(st.integers(1, 5000))
def test_buckets_hold_what_they_are_for(n: int) -> None:
    for bucket in (token_bucket, slot_bucket, batch_bucket):
        assert bucket(n) >= n
        assert bucket(bucket(n)) == bucket(n)
        assert bucket(n + 1) >= bucket(n)
    assert batch_bucket(n) < 2 * n or n == 1
    assert token_bucket(n) - n < max(16, n)


# -- mixed batches -------------------------------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0.0, max_tokens=6),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=6, max_tokens=6, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.8, max_tokens=6, logprobs=0),
]


def test_a_mixed_batch_equals_each_row_alone(llm: LLM) -> None:
    prompts = [prompt(n) for n in (4, 9, 12)]
    together = llm.generate(prompts, MIXED)
    for ids, params, out in zip(prompts, MIXED, together, strict=True):
        (alone,) = llm.generate([ids], params)
        for mine, theirs in zip(out.outputs, alone.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert (mine.logprobs is None) == (theirs.logprobs is None) == (params.logprobs is None)
            for a, b in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert a.rank == b.rank and list(a.top) == list(b.top) and len(a.top) == params.logprobs
                np.testing.assert_allclose(a.logprob, b.logprob, rtol=1e-4)
                np.testing.assert_allclose(list(a.top.values()), list(b.top.values()), rtol=1e-4)


@pytest.mark.parametrize("penalty", [3.0, 0.2])
def test_the_penalty_counts_prompt_and_output(penalty: float, llm: LLM, oracle: FullForward) -> None:
    """Against the penalty applied by hand to the whole forward pass's logits."""
    ids = prompt(10)
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, repetition_penalty=penalty, logprobs=0
    )
    got = llm.generate([ids], params)[0].outputs[0].token_ids
    tokens = list(ids)
    for _ in range(8):
        logits = oracle.logits(tokens)[-1].astype(np.float64)
        seen = np.isin(np.arange(VOCAB), tokens)
        penalized = np.where(logits > 0, logits / penalty, logits * penalty)
        tokens.append(int(np.where(seen, penalized, logits).argmax()))
    assert got == tokens[10:]
    assert got != oracle.greedy(ids, 8)
    assert (got[0] in ids) == (penalty < 1)
    assert len(set(got)) == 8 or penalty < 1


def test_the_ith_token_draws_with_seed_and_i(llm: LLM, oracle: FullForward) -> None:
    """Against the sampler on the whole forward pass's logits."""
    ids, seed = prompt(7), 11
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=seed)
    tokens = list(ids)
    for i in range(8):
        logits = jnp.asarray(oracle.logits(tokens)[-1:])
        arrays, step = sampling_arrays([params], [seed]), jnp.array([i], jnp.int32)
        tokens.append(int(sample(logits, arrays, step, None, SamplerMode(greedy=False)).tokens[0]))
    assert llm.generate([ids], params)[0].outputs[0].token_ids == tokens[7:]


# -- scoring -------------------------------------------------------------------------------------------


def check_scores(scores: Sequence[np.ndarray], sequences: list[list[int]], oracle: FullForward) -> None:
    for got, ids in zip(scores, sequences, strict=True):
        want = log_softmax(oracle.logits(ids))[np.arange(len(ids) - 1), ids[1:]]
        assert got.dtype == np.float32 and got.shape == (len(ids) - 1,)
        assert relative_error(got, want) < logits_tolerance(small_config())


def test_score_is_the_log_softmax_of_the_models_logits(llm: LLM, oracle: FullForward) -> None:
    sequences = [prompt(n) for n in (2, 16)]
    check_scores(llm.score(sequences), sequences, oracle)


@pytest.mark.parametrize("elements", [1, 7 * VOCAB + 5])
def test_scoring_the_vocabulary_in_parts(
    elements: int, llm: LLM, oracle: FullForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_LOGIT_ELEMENTS", elements)
    sequences = [prompt(5), prompt(14)]
    engine = ContiguousEngine(llm.model, CompileLedger())
    check_scores(engine.score(sequences), sequences, oracle)


def test_scoring_in_chunks(llm: LLM, oracle: FullForward) -> None:
    """Prompts cut by the token budget, several in a step, scores put together again."""
    small = llm.variant(dataclasses.replace(ENGINE, max_num_seqs=4, max_num_batched_tokens=12, block_size=4))
    sequences = [prompt(n) for n in (16, 5, 2, 9, 13)]
    check_scores(small.score(sequences), sequences, oracle)
    assert small.stats()["steps"] >= 4


def test_score_agrees_with_the_logprobs_of_generation(llm: LLM) -> None:
    ids = prompt(17)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=VOCAB)
    out = llm.generate([ids] * 5, params)[2].outputs[0]
    assert out.logprobs is not None
    (scores,) = llm.score([[*ids, *out.token_ids]])
    np.testing.assert_allclose(scores[16:], [entry.logprob for entry in out.logprobs], rtol=1e-4, atol=1e-5)


# -- the plain loop's cache is updated in place ----------------------------------------------------------


def test_the_contiguous_cache_stays_where_it_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pointers: list[list[int]] = []
    engine = ContiguousEngine(llm.model, CompileLedger())
    for name in ("_prefill", "_decode"):
        run = getattr(engine, name)

        def spy(*args: Any, run: Any = run) -> Any:
            out = run(*args)
            jax.block_until_ready(out)
            pointers.append([leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(out[0])])
            return out

        monkeypatch.setattr(engine, name, spy)
    for _ in engine.run([Row(prompt(4), GREEDY, 0, 8)]):
        pass
    assert len(pointers) == 8 and len(pointers[0]) == 2 * llm.config.num_layers
    assert all(step == pointers[0] for step in pointers[1:])


# -- routing -------------------------------------------------------------------------------------------


def test_recorded_routing_is_the_models_own(windowed: LLM, windowed_oracle: FullForward) -> None:
    """Per phase, layer and expert: what the whole forward pass says. Padding and ended rows add nothing."""
    prompts, lengths = [prompt(n) for n in (3, 16, 7)], (5, 1, 3)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    before = {phase: counts.copy() for phase, counts in windowed.routing.counts.items()}
    windowed.generate(prompts, params)
    for phase in before:
        np.testing.assert_array_equal(windowed.routing.counts[phase], before[phase])
    outs = windowed.generate(prompts, params, record_routing=True)
    got = {phase: windowed.routing.counts[phase] - before[phase] for phase in before}

    want = {phase: np.zeros_like(counts) for phase, counts in before.items()}
    for ids, out in zip(prompts, outs, strict=True):
        fed = [*ids, *out.outputs[0].token_ids[:-1]]
        for layer, chosen in enumerate(windowed_oracle.experts(fed)):
            if chosen is not None:
                np.add.at(want["prefill"][layer], chosen[: len(ids)].reshape(-1), 1)
                np.add.at(want["decode"][layer], chosen[len(ids) :].reshape(-1), 1)
    k = windowed.config.num_experts_per_tok
    assert got["prefill"].sum(axis=1).tolist() == [0, sum(map(len, prompts)) * k]
    assert got["decode"].sum(axis=1).tolist() == [0, sum(n - 1 for n in lengths) * k]
    for phase in want:
        np.testing.assert_array_equal(got[phase], want[phase])


# -- dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision(dtype: str, llm: LLM) -> None:
    """Weights and cache in the dtype, on a CPU bfloat16 as its bits, results in float32, scores near those of
    float32."""
    half = LLM(small_config(), dtype=dtype, load_format="dummy", engine=ENGINE)
    assert half.config.dtype == dtype and half.model.embedding.table[...].dtype == jnp.dtype(dtype)
    out = half.generate([prompt(5)], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    stored = jnp.dtype("uint16" if dtype == "bfloat16" else dtype)
    assert all(leaf.dtype == stored for leaf in jax.tree.leaves(half.runner.pool.take(1)))
    assert len(out.outputs[0].token_ids) == 4
    (ours,), (exact,) = half.score([prompt(12)]), llm.score([prompt(12)])
    assert ours.dtype == np.float32
    assert relative_error(ours, exact) < 8 * float(jnp.finfo(dtype).eps)  # measured: half of one


def test_a_directory_in_bfloat16_runs_in_float32_on_cpu(tmp_path: Path) -> None:
    directory = write_model(tmp_path, small_config(dtype="bfloat16"), tokenizer=False)
    engine = LLM(directory, engine=ENGINE)
    assert engine.config.dtype == "float32"
    assert LLM(directory, dtype="bfloat16", engine=ENGINE).config.dtype == "bfloat16"
    reasons = {r.key: str(r) for r in engine.resolutions}
    assert "checkpoint is bfloat16" in reasons["model.dtype"]
