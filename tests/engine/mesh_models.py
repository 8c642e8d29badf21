"""Small models of every family whose dimensions divide by eight devices, and checkpoints of them.

Vocabularies do not, but for one: they are padded."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import EngineConfig, ModelConfig, MoeConfig, save_pretrained
from moejax.core.config import LatentConfig, RopeConfig, RouterConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from tests.model_shapes import DENSE, EIGHT_WAY, GEMMA, GRANITE, LATENT, LINEAR, LLAMA, SINKS

BASE = EIGHT_WAY
ROUTED_BY_BIAS: dict[str, Any] = {
    "router": RouterConfig("sigmoid", True, groups=4, top_groups=2, group_score="top2", scaling=2.5),
    "shared_expert_intermediate_size": 16, "shared_expert_gate": False,
}  # fmt: skip
"""DeepSeek-V3's router and shared expert, with other attention."""

FAMILIES = {
    # Fewer key/value heads than devices, and a dense layer among the others.
    "qwen3_moe": BASE.replace(
        vocab_size=97, head_dim=16, num_layers=3, moe_layers=(True, False, True), sliding_windows=(None,) * 3
    ),
    "mixtral": BASE.replace(
        family="mixtral", qk_norm="none", num_kv_heads=8, num_experts=8, num_experts_per_tok=2,
        sliding_windows=(12, 12), intermediate_size=16,
    ),
    "olmoe": BASE.replace(
        family="olmoe", vocab_size=99, qk_norm="projection", num_kv_heads=4, norm_topk_prob=False,
        intermediate_size=16,
    ),
    "qwen2_moe": BASE.replace(
        family="qwen2_moe", vocab_size=101, qk_norm="none", qkv_bias=True,
        shared_expert_intermediate_size=24, tie_word_embeddings=True,
    ),
    "deepseek_v2": BASE.replace(
        family="deepseek_v2", qk_norm="none", num_kv_heads=1, head_dim=14, norm_topk_prob=False,
        latent=LatentConfig(kv_rank=16, rope_dim=6, nope_dim=8, value_dim=12),
        rope=RopeConfig(interleaved=True), router=RouterConfig(groups=4, top_groups=2, scaling=1.5),
        shared_expert_intermediate_size=32, shared_expert_gate=False, moe_layers=(False, True),
    ),
    "deepseek_v3": BASE.replace(**LATENT, vocab_size=103),
    "minimax_m2": BASE.replace(
        family="minimax_m2", vocab_size=99, qk_norm="projection", num_kv_heads=4, intermediate_size=16,
        router=RouterConfig("sigmoid", True), rope=RopeConfig(partial_rotary_factor=0.5),
    ),
    "glm4_moe": BASE.replace(
        **ROUTED_BY_BIAS, family="glm4_moe", vocab_size=97, qkv_bias=True, moe_layers=(False, True),
        rope=RopeConfig(partial_rotary_factor=0.5),
    ),
    "dots1": BASE.replace(
        **ROUTED_BY_BIAS, family="dots1", vocab_size=99, sliding_windows=(None, 9), attention_out_bias=True,
        qkv_bias=True,
    ),
    "ernie4_5_moe": BASE.replace(
        family="ernie4_5_moe", vocab_size=101, qk_norm="none", num_kv_heads=1, moe_layers=(False, True),
        rope=RopeConfig(interleaved=True), router=RouterConfig(correction_bias=True, norm_min=1e-12),
        shared_expert_intermediate_size=32, shared_expert_gate=False, tie_word_embeddings=True,
    ),
    "two_level_moe": BASE.replace(
        family="two_level_moe", router=RouterConfig(groups=4, top_groups=2, group_gate=True)
    ),
    "qwen3": BASE.replace(**DENSE, family="qwen3", vocab_size=97),
    "hunyuan_v1_moe": BASE.replace(
        family="hunyuan_v1_moe", vocab_size=101, qk_norm="rotated", qkv_bias=True, attention_out_bias=True,
        shared_expert_intermediate_size=16, shared_expert_gate=False, intermediate_size=16,
    ),
    "llama": BASE.replace(**LLAMA, vocab_size=97, num_kv_heads=1),
    "gemma3_text": BASE.replace(**GEMMA | {"embedding_multiplier": 8.0}, tie_word_embeddings=True),
    "phimoe": BASE.replace(
        family="phimoe", vocab_size=99, qk_norm="none", norm="layer", num_experts_per_tok=2, qkv_bias=True,
        attention_out_bias=True, lm_head_bias=True, norm_topk_prob=False, intermediate_size=16,
        router=RouterConfig("sparsemixer", tolerance=0.1),
    ),
    # Linear attention before the other and after it, so that a pipeline's stages hold different things.
    "minimax": BASE.replace(
        **LINEAR | {"linear_layers": (True, False, True)}, vocab_size=97, num_layers=3, num_experts_per_tok=2,
        moe_layers=(True,) * 3, sliding_windows=(None,) * 3, intermediate_size=16,
    ),
    "granitemoe": BASE.replace(**GRANITE, intermediate_size=16),
    "gpt_oss": BASE.replace(**SINKS, vocab_size=98, sliding_windows=(7, None), intermediate_size=16),
}  # fmt: skip

# One bucket an axis: each further one is a program of eight devices to compile.
ENGINE = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    block_size=8,
    num_blocks=24,
    seq_buckets=[4],
    token_buckets=[32],
    block_buckets=[24],
    # Compiles fastest; what runs on a device makes no difference to what goes between them.
    moe=MoeConfig(grouped_matmul="ragged_dot"),
)


def checkpoint(config: ModelConfig, directory: Path, *, skewed: bool = False) -> Path:
    """Random weights on disk. `skewed`: a router that sends every token to the experts 0 to k - 1."""
    model = Decoder(config, seed=3)
    for name, param in iter_params(model):
        if skewed and name.endswith("router.kernel"):
            param.set_value(jnp.zeros_like(param[...]))
        if ".experts." in name and name.endswith("_bias"):  # which begin as zeros
            param.set_value(jax.random.normal(jax.random.key(len(name)), param.shape))
    save_pretrained(model, directory)
    return directory


def prompts(count: int, vocab: int = 96) -> list[list[int]]:
    draw = np.random.default_rng(count)
    return [draw.integers(0, vocab, size=int(n)).tolist() for n in draw.integers(1, 20, size=count)]
