"""Numbers of a layer's matrices, and bytes as they are held: dtypes, cache entries, a model's weights."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moejax.core.config import LatentConfig, ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_CODE_BYTES = {"int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int4": 0.5}
KV_SCALE_BYTES = STATE_BYTES = 4

HeldWeights = Mapping[tuple[int | None, str], float]
"""Bytes of a model's matrices as they are held, codes and scales of quantized ones, by (layer or None,
operation): None is outside of the layers, operations are those of `moejax.perf.operation_costs`. Of
"experts_gate_up" and "experts_down" they are one expert's; the embedding counts only as output."""


PLAIN_KEYS = 256
"""Keys that a chunk attends to at a time in the plain form of latent attention."""
MAKING = 1.5
"""What a FLOP of making earlier keys and values counts there, as measured at long contexts (docs/log.md)."""


class AttentionSizes(NamedTuple):
    """Numbers of one layer's attention.

    Attributes:
        qkv_params: of the projections before it; of latent attention also those to and from the latent.
        queries, stored: of a token's queries, and of its keys and values as a cache holds them.
        outputs: of a token, before the output projection.
        pair_flops: of a query and a key, over all heads.
        made_params: of what makes keys and values of latents, or brings queries and outputs to them.
        plain_pair_flops: `pair_flops` of latent attention's plain form.
        token_flops: of a token, besides: with linear attention of its product into the state and out of it.
    """

    qkv_params: int
    queries: int
    stored: int
    outputs: int
    pair_flops: int
    made_params: int = 0
    plain_pair_flops: int = 0
    token_flops: int = 0


def attention_sizes(config: ModelConfig, linear: bool = False) -> AttentionSizes:
    """Counts one layer's attention, of latent attention the absorbed form, of `linear` attention that of one
    token after another."""
    D, H, Dh = config.hidden_size, config.num_heads, config.head_dim
    if linear:  # queries, keys and values, and a gate
        return AttentionSizes(4 * D * H * Dh, 4 * H * Dh, 0, H * Dh, 0, token_flops=4 * H * Dh * Dh)
    stored = config.kv_vectors * config.num_kv_heads * config.key_dim
    if (latent := config.latent) is None:
        return AttentionSizes(D * (H * Dh + stored), H * Dh, stored, H * Dh, 4 * H * Dh)
    rank = latent.q_rank
    queries = D * H * Dh if rank is None else rank * (D + H * Dh)
    made = H * latent.kv_rank * (latent.nope_dim + latent.value_dim)
    pair, plain = 2 * H * (config.key_dim + latent.kv_rank), 2 * H * (Dh + latent.value_dim)
    qkv = queries + D * stored + made
    return AttentionSizes(qkv, H * config.key_dim, stored, H * latent.value_dim, pair, made, plain)


def takes_plain_form(latent: LatentConfig, new: int | np.ndarray, context: int | np.ndarray) -> np.ndarray:
    """Tells of chunks of so many tokens, whose last one sees `context` keys, whether the plain form of latent
    attention costs less than the absorbed one.

    A pair of query and key costs every head `rope_dim + nope_dim + value_dim` multiply-adds in the plain form
    and `rope_dim + 2 · kv_rank` in the absorbed one. Bringing a token's query and output to the latents costs
    what making a key and a value of a latent does, `kv_rank · (nope_dim + value_dim)`: the one is done for
    each new token, the other for each key in sight, in turns of `PLAIN_KEYS`. With `MAKING` the two are level
    at about 256 tokens of DeepSeek-V2 and V3 on a long context, with fewer at a prompt's beginning. A token
    alone is absorbed.
    """
    pairs = new * context - new * (new - 1) / 2
    saved = pairs * (2 * latent.kv_rank - latent.nope_dim - latent.value_dim)
    made = np.ceil(context / PLAIN_KEYS) * PLAIN_KEYS - new
    return (new > 1) & (saved > MAKING * made * latent.kv_rank * (latent.nope_dim + latent.value_dim))


def kv_token_bytes(config: ModelConfig, dtype: str, split: int = 1) -> int:
    """Returns the bytes of a token in one layer's cache, scales included; `split` devices share the heads."""
    heads = config.num_kv_heads // split
    return config.kv_vectors * heads * kv_vector_bytes(config.key_dim, dtype)


def state_bytes(config: ModelConfig, split: int = 1) -> int:
    """Returns the bytes of a sequence's state in one layer with linear attention; `split` devices share the
    heads."""
    return config.num_heads // split * config.head_dim**2 * STATE_BYTES


def attention_params(config: ModelConfig, linear: bool = False) -> int:
    """Counts the projection weights of one layer, with linear attention or without."""
    sizes = attention_sizes(config, linear)
    return sizes.qkv_params + sizes.outputs * config.hidden_size


def expert_params(config: ModelConfig) -> int:
    """Counts the weights of one expert of one layer."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def kv_vector_bytes(numbers: int, dtype: str) -> int:
    """Returns the bytes of a token's key, or value, of one head in a cache of that dtype, scale included."""
    if dtype in KV_CODE_BYTES:
        return int(numbers * KV_CODE_BYTES[dtype]) + KV_SCALE_BYTES
    return numbers * DTYPE_BYTES[dtype]
