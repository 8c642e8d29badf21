"""Each part of a layer against transformers' module with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from moejax.nn.linear_attention import decay_share
from moejax.nn.rope import rope_frequencies, rope_tables
from tests.examples import slow_but
from tests.numerics import UNIT_ROUNDOFF, assert_close, relative_error, tolerance
from tests.oracle import hf
from tests.oracle.cases import CASES, by_name, fast_names

pytestmark = pytest.mark.oracle

NAMES = [case.name for case in CASES]
LENGTH = 40


def activations(pair, batch=2, length=LENGTH, seed=1):
    """Normal rows; every fifth a thousand times smaller, so that a norm's epsilon counts."""
    x = np.random.default_rng(seed).normal(size=(batch, length, pair.ours.config.hidden_size))
    x[:, ::5] *= 1e-3
    return x.astype(np.float32)


def run_theirs(module, *args, **kwargs):
    with torch.no_grad():
        out = module(*args, **kwargs)
    return (out[0] if isinstance(out, tuple) else out).numpy()


@pytest.mark.parametrize("name", slow_but(fast_names(), NAMES))
def test_norms(pair, name):
    both = pair(name)
    x = activations(both)
    last, mine = both.theirs.model.layers[1], both.ours.layers[1]
    pairs = [
        (both.theirs.model.layers[0].input_layernorm, both.ours.layers[0].input_norm),
        (last.post_attention_layernorm, mine.attention_output_norm or mine.post_attention_norm),
        (both.theirs.model.norm, both.ours.norm),
    ]
    if both.ours.config.post_norms:
        pairs.append((last.pre_feedforward_layernorm, mine.post_attention_norm))
        pairs.append((last.post_feedforward_layernorm, mine.feed_forward_output_norm))
    for theirs, ours in pairs:
        expected = run_theirs(theirs, torch.tensor(x))
        assert_close(ours(jnp.asarray(x)), expected, tolerance(x.shape[-1]))


def their_tables(theirs, positions):
    """Tables of a rotary embedding as new: `dynamic` remembers the longest sequence it has seen."""
    rotary = type(theirs.model.rotary_emb)(theirs.config)
    kind = ("full_attention",) if theirs.config.model_type == "gemma3_text" else ()
    with torch.no_grad():
        tables = rotary(torch.zeros(1), torch.tensor(positions, dtype=torch.long), *kind)
    # DeepSeek V2's are complex numbers, one a pair; most others repeat a half's.
    cos, sin = tables if isinstance(tables, tuple) else (tables.real, tables.imag)
    prefix = "".join(f"{name}_" for name in kind)
    freqs, factor = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
    half = len(freqs)
    return freqs.numpy(), factor, cos[..., :half].numpy(), sin[..., :half].numpy()


@pytest.mark.parametrize("longest", [12, 40, 8192])
@pytest.mark.parametrize(
    "name", [n for n in NAMES if by_name(n).fields.get("rope_parameters")] + ["olmoe-plain"]
)
def test_rope_tables(pair, name, longest):
    """Every position of short sequences, and of 8192 the first, the last and 64 between."""
    if name == "phimoe-longrope" and longest > 64:
        pytest.skip("transformers 5.23 keeps the short factors, and goes on to the long one's mscale")
    both = pair(name)
    between = np.random.default_rng(0).choice(longest, min(longest, 64), replace=False)
    positions = np.unique(np.concatenate([[0, longest - 1], between]))[None].astype(np.int32)
    freqs, scaling, cos, sin = their_tables(both.theirs, positions)
    ours = jax.jit(rope_tables, static_argnums=0)(
        both.ours.config, jnp.asarray(positions), jnp.asarray([longest], jnp.int32)
    )
    # A frequency off by two roundings turns the last position by that much times its angle; the table itself
    # is a rounded cosine of a rounded angle.
    attention_factor = max(1.0, float(scaling))
    limit = (4 * longest * float(freqs.max()) + 16) * UNIT_ROUNDOFF["float32"] * attention_factor
    np.testing.assert_allclose(ours[0], cos, rtol=0, atol=limit)
    np.testing.assert_allclose(ours[1], sin, rtol=0, atol=limit)
    if not both.ours.config.rope.by_length:
        mine, factor = rope_frequencies(both.ours.config)
        np.testing.assert_allclose(mine, freqs, rtol=4 * UNIT_ROUNDOFF["float32"], atol=0)
        assert factor == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("name", slow_but(fast_names(), NAMES))
def test_attention_block(pair, name):
    both = pair(name)
    x = activations(both)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), x.shape[:2])
    tables = rope_tables(both.ours.config, jnp.asarray(positions), jnp.full(x.shape[0], LENGTH, jnp.int32))
    query, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    config = both.ours.config
    for i, (theirs, ours) in enumerate(zip(both.theirs.model.layers, both.ours.layers, strict=True)):
        window = config.sliding_windows[i] or LENGTH
        mine = tables[-2:] if config.sliding_windows[i] else tables[:2]
        twice = 1 if both.case.family in ("gpt_oss", "deepseek_v2") else 2
        turns = tuple(torch.tensor(np.concatenate([t] * twice, -1)) for t in map(np.asarray, mine))
        seen = (key <= query) & (key > query - window)
        mask = torch.tensor(np.where(seen, 0.0, np.finfo(np.float32).min).astype(np.float32))[None, None]
        expected = run_theirs(
            theirs.self_attn,
            torch.tensor(x),
            position_embeddings=torch.complex(*turns) if both.case.family == "deepseek_v2" else turns,
            attention_mask=mask if config.paged_layers[i] else None,
        )
        told = mine if config.paged_layers[i] else decay_share(config, i)
        got, _ = jax.jit(ours.attention)(jnp.asarray(x), told, jnp.asarray(positions))
        chain = (config.hidden_size, config.head_dim, LENGTH, config.num_heads * config.head_dim)
        assert_close(got, expected, tolerance(*chain))


@pytest.mark.parametrize("name", slow_but(fast_names(), NAMES))
def test_feed_forward_block(pair, name):
    """Experts with router and shared expert, or the dense MLP of a layer without experts."""
    both = pair(name)
    x = activations(both)
    config = both.ours.config
    for i, (theirs, ours) in enumerate(zip(both.theirs.model.layers, both.ours.layers, strict=True)):
        expected = run_theirs(hf.feed_forward(theirs), torch.tensor(x))
        if config.moe_layers[i]:
            got, _ = jax.jit(ours.moe)(jnp.asarray(x))
            width = max(config.moe_intermediate_size, config.shared_expert_intermediate_size)
        else:
            got, width = jax.jit(ours.mlp)(jnp.asarray(x)), config.intermediate_size
        # Router logits come into the weights, hence the model width twice.
        assert_close(got, expected, tolerance(config.hidden_size, config.hidden_size, width, 2))


@pytest.mark.parametrize("name", ["mixtral-yarn-gelu-mha", "qwen3_moe-dense-layers-bias-tied"])
def test_embedding_and_output(pair, name):
    both = pair(name)
    tokens = np.arange(96, dtype=np.int32)[None]
    embedded = run_theirs(both.theirs.model.embed_tokens, torch.tensor(tokens, dtype=torch.long))
    assert relative_error(both.ours.embedding(jnp.asarray(tokens)), embedded) == 0
    x = activations(both)
    assert_close(
        both.ours.logits(jnp.asarray(x)), run_theirs(both.theirs.lm_head, torch.tensor(x)), tolerance(32)
    )
