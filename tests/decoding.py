"""The plainest generation from a Decoder: what the engine's answers are compared with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from tests.plain.contiguous_cache import ContiguousView, empty_cache


def random_model(config: ModelConfig, moe: MoeConfig | None = None, seed: int = 0) -> Decoder:
    """A Decoder with normal weights, norm scales around 1, drawn by numpy in canonical layout.

    `Decoder(config, seed=...)` compiles a generator per shape, which takes longer than most tests.
    """
    model = Decoder(config, moe=moe)
    rng = np.random.default_rng(seed)
    for name, param in iter_params(model):
        spec = param.get_metadata("spec")
        value = rng.normal(size=spec.canonical_shape) * config.initializer_range
        value = 1.0 + value if name.endswith("scale") else value
        value = value.swapaxes(-1, -2) if spec.transposed else value
        param.set_value(jnp.asarray(value.astype(np.float32)).astype(spec.dtype))
    return model


@functools.partial(jax.jit, static_argnums=(0, 5))
def _step(graph: Any, state: Any, cache: Any, tokens: jax.Array, positions: jax.Array, phase: Any) -> Any:
    model = nnx.merge(graph, state)
    x, view, _ = model.run(model.embed(tokens), positions, cache=ContiguousView(cache, phase))
    return model.logits(x), view.cache


def cached_logits(model: Decoder, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Logits `[B, T, V]` of given tokens: the first `prompt` in one prefill, the rest one by one."""
    graph, state = nnx.split(model)
    batch, length = tokens.shape
    cache = empty_cache(model.config, batch, length, model.embedding.table[...].dtype)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    out, cache = _step(graph, state, cache, tokens[:, :prompt], positions[:, :prompt], "prefill")
    parts = [np.asarray(out)]
    for t in range(prompt, length):
        part, cache = _step(graph, state, cache, tokens[:, t : t + 1], positions[:, t : t + 1], "decode")
        parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1)


def prefill_and_greedy(model: Decoder, tokens: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[B, T, V]` of the prompt and int32 `[B, steps]`, the likeliest token each step."""
    graph, state = nnx.split(model)
    batch, length = tokens.shape
    cache = empty_cache(model.config, batch, length + steps, model.embedding.table[...].dtype)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    logits, cache = _step(graph, state, cache, jnp.asarray(tokens, jnp.int32), positions, "prefill")
    last, chosen = logits[:, -1], []
    for t in range(length, length + steps):
        chosen.append(np.asarray(last.argmax(-1), np.int32))
        if t + 1 == length + steps:
            break
        positions = jnp.full((batch, 1), t, jnp.int32)
        out, cache = _step(graph, state, cache, jnp.asarray(chosen[-1])[:, None], positions, "decode")
        last = out[:, 0]
    return np.asarray(logits), np.stack(chosen, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: Any, state: Any, tokens: jax.Array, valid: jax.Array | None) -> Any:
    return nnx.merge(graph, state)(tokens, valid=valid, return_routing=True)


def forward(model: Decoder, tokens: np.ndarray, valid: np.ndarray | None = None) -> Any:
    """Compiled `model(tokens, valid=valid, return_routing=True)`."""
    return _forward(*nnx.split(model), jnp.asarray(tokens, jnp.int32), valid)
