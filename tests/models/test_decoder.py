"""The decoder against itself: cached, padded, batched and routed every way, the answers are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.config import RopeConfig
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from tests.decoding import cached_logits, forward, random_model
from tests.examples import slow_but
from tests.model_shapes import ONE_LAYER
from tests.numerics import UNIT_ROUNDOFF, assert_close, relative_error, tolerance
from tests.plain.contiguous_cache import ContiguousView, empty_cache

VARIANTS = {
    "window, dense layer, shared expert": {
        "moe_layers": (False, True), "sliding_windows": (3, None), "shared_expert_intermediate_size": 12,
    },
    "tied, k=1, one kv head, projection norm": {
        "tie_word_embeddings": True, "num_experts_per_tok": 1, "num_kv_heads": 1, "qk_norm": "projection",
        "norm_topk_prob": False,
    },
}  # fmt: skip


DYNAMIC = RopeConfig(kind="dynamic", factor=4.0)


def random_tokens(config, batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), dtype=np.int32)


def model_tolerance(config, length):
    """Each layer's chain of reductions; a residual stream of L layers adds up L of them, and the head one."""
    D, F = config.hidden_size, max(config.moe_intermediate_size, config.intermediate_size)
    layer = (
        D,
        D,
        config.head_dim,
        length,
        config.num_heads * config.head_dim,
        D,
        D,
        F,
        config.num_experts_per_tok,
    )
    return tolerance(*layer * config.num_layers, D, D)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_prefill_and_decode_equal_one_forward_pass(tiny_config, changes):
    config = tiny_config.replace(**changes)
    model, tokens = random_model(config, seed=0), random_tokens(config, 2, 12)
    whole, traces = forward(model, tokens)
    assert whole.shape == (2, 12, 96) and whole.dtype == jnp.float32
    assert [t is not None for t in traces] == list(config.moe_layers)
    assert np.std(whole) > 0.3
    assert_close(cached_logits(model, tokens, 5), whole, model_tolerance(config, 12))


@pytest.mark.parametrize("rope", slow_but([DYNAMIC], [RopeConfig(), DYNAMIC]), ids=lambda r: r.kind)
def test_right_padding_changes_nothing(tiny_config, rope):
    """A padded batch gives each sequence the logits and experts that it has alone."""
    config = tiny_config.replace(rope=rope, max_position_embeddings=8, sliding_windows=(None, 4))
    model = random_model(config, seed=1)
    lengths = [14, 5]
    tokens = random_tokens(config, 2, 14)
    valid = np.arange(14)[None] < np.array(lengths)[:, None]
    logits, traces = forward(model, tokens, valid)
    other, _ = forward(model, np.where(valid, tokens, 95), valid)
    for b, length in enumerate(lengths):
        # What the padding says is never read.
        np.testing.assert_array_equal(logits[b, :length], other[b, :length])
        alone, alone_traces = forward(model, tokens[b : b + 1, :length])
        assert_close(logits[b, :length], alone[0], model_tolerance(config, 14))
        for trace, single in zip(traces, alone_traces, strict=True):
            np.testing.assert_array_equal(trace.ids[b, :length], single.ids[0])
            assert (np.asarray(trace.ids[b, length:]) == config.num_experts).all()
    for trace in traces:
        assert int(trace.counts.sum()) == sum(lengths) * config.num_experts_per_tok


def test_sequences_of_a_batch_decode_at_their_own_positions(tiny_config):
    """Prompts of different lengths, right-padded in one prefill; then each continues at its own place."""
    config = tiny_config.replace(sliding_windows=(4, None))
    model = random_model(config, seed=2)
    lengths, steps = np.array([3, 7, 5]), 4
    tokens = random_tokens(config, 3, 7 + steps)
    graph, state = nnx.split(model)

    @jax.jit
    def prefill(state, tokens, valid, cache):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        view = ContiguousView(cache, "prefill")
        model = nnx.merge(graph, state)
        return model.run(model.embed(tokens), positions, valid=valid, cache=view)[1].cache

    @jax.jit
    def decode(state, tokens, positions, cache):
        model = nnx.merge(graph, state)
        x, view, _ = model.run(model.embed(tokens), positions, cache=ContiguousView(cache, "decode"))
        return model.logits(x)[:, 0], view.cache

    valid = np.arange(7)[None] < lengths[:, None]
    cache = prefill(state, tokens[:, :7], valid, empty_cache(config, 3, 7 + steps, jnp.float32))
    got = []
    for s in range(steps):
        at = (lengths + s).astype(np.int32)
        logits, cache = decode(state, tokens[np.arange(3), at][:, None], at[:, None], cache)
        got.append(np.asarray(logits))
    whole, _ = forward(model, tokens)
    for b, length in enumerate(lengths):
        expected = np.asarray(whole[b, length : length + steps])
        assert_close(np.stack([g[b] for g in got]), expected, model_tolerance(config, 11))


@pytest.mark.parametrize(
    "moe",
    [MoeConfig("dense"), MoeConfig("capacity", capacity_factor=8.0)],
    ids=lambda moe: moe.execution,
)
def test_other_executions_give_the_same_logits(tiny_config, moe):
    """`tests/moe` compares them all on the experts alone."""
    tokens = random_tokens(tiny_config, 2, 9)
    expected, traces = forward(random_model(tiny_config, seed=0), tokens)
    got, other = forward(random_model(tiny_config, moe, seed=0), tokens)
    assert_close(got, expected, model_tolerance(tiny_config, 9))
    for a, b in zip(traces, other, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)


def test_tight_capacity_changes_the_logits_and_says_so(tiny_config):
    tokens = random_tokens(tiny_config, 2, 9)
    expected, _ = forward(random_model(tiny_config, seed=0), tokens)
    got, traces = forward(
        random_model(tiny_config, MoeConfig("capacity", capacity_factor=0.5), seed=0), tokens
    )
    assert relative_error(got, expected) > 0.01
    assert all(int(trace.dropped) > 0 for trace in traces)


def test_later_tokens_do_not_change_earlier_logits(tiny_config):
    """Causality, through attention and through the experts' grouping."""
    model, tokens = random_model(tiny_config, seed=0), random_tokens(tiny_config, 2, 10)
    changed = tokens.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % 96
    first, _ = forward(model, tokens)
    second, _ = forward(model, changed)
    limit = model_tolerance(tiny_config, 10)
    assert_close(second[:, :6], np.asarray(first[:, :6]), limit)
    assert relative_error(second[:, 6:], first[:, 6:]) > 0.05


def test_the_same_call_twice_is_equal_bit_for_bit(tiny_config):
    tokens = random_tokens(tiny_config, 2, 10)
    first, _ = forward(random_model(tiny_config, seed=4), tokens)
    again, _ = forward(random_model(tiny_config, seed=4), tokens)
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_model(dtype):
    """It runs in its dtype, answers in float32, and lies as near to the float32 model as its roundings allow.

    All experts are chosen, because a rounding that swaps two experts is no rounding error any more.
    """
    config = ONE_LAYER.replace(dtype=dtype, num_experts=4, num_experts_per_tok=4)
    model = random_model(config, seed=0)
    exact = Decoder(config.replace(dtype="float32"))
    for (_, param), (_, half) in zip(
        nnx.to_flat_state(nnx.state(exact)), nnx.to_flat_state(nnx.state(model)), strict=True
    ):
        param.set_value(half[...].astype(jnp.float32))
    tokens = random_tokens(config, 2, 10)
    logits, traces = forward(model, tokens)
    assert logits.dtype == jnp.float32 and traces[0].logits.dtype == jnp.float32
    expected, _ = forward(exact, tokens)
    # Errors of roundings to storage (one an operation, about 20 a layer) dominate those within reductions,
    # which accumulate in float32.
    limit = tolerance(*[20] * config.num_layers, 20, dtype=dtype)
    assert relative_error(logits, expected) < limit
    assert relative_error(logits, expected) > UNIT_ROUNDOFF[dtype] / 8, "it computed in float32 after all"
    one, _ = forward(random_model(config.replace(num_experts_per_tok=1), seed=0), tokens)
    assert np.isfinite(one).all()
