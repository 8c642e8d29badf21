"""Tiny random models of every family that between them turn on every field the families share.

No torch here: the golden files and the oracle tests build from the same tables. Sequences in the tests are
longer than `max_position_embeddings` wherever a rotary kind depends on it.
"""

from typing import Any, NamedTuple

# The oracle's models are wide enough for a norm or bias error to show; the golden ones are small files.
SIZES: dict[str, dict[str, int]] = {
    "oracle": {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 28,
    },
    "golden": {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 10,
    },
}  # fmt: skip


class Case(NamedTuple):
    """One configuration: fields of `config.json` over the family's base; `dtype` is what is stored."""

    name: str
    family: str
    fields: dict[str, Any]
    dtype: str = "float32"


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **fields}


# Of heads of 8.
LONGROPE = rope("longrope", short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[1.0, 2.0, 4.0, 8.0])


def local_and_full(full: dict[str, Any]) -> dict[str, Any]:
    """Rotary embedding by kind of layer, those with a window with another base."""
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}


CASES = (
    Case("mixtral-plain", "mixtral", {}),
    Case("mixtral-window-k1-wide-head", "mixtral", {
        "sliding_window": 5, "num_experts_per_tok": 1, "head_dim": 12,
    }),
    Case("mixtral-all-experts-mqa-tied-linear", "mixtral", {
        "num_local_experts": 4, "num_experts_per_tok": 4, "num_key_value_heads": 1,
        "tie_word_embeddings": True, "rope_parameters": rope("linear", factor=4.0),
    }, "bfloat16"),
    Case("mixtral-yarn-gelu-mha", "mixtral", {
        "hidden_act": "gelu", "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }),
    Case("mixtral-dynamic", "mixtral", {
        "max_position_embeddings": 16, "rope_parameters": rope("dynamic", factor=2.0), "head_dim": 6,
    }),
    Case("qwen2_moe-dense-layer", "qwen2_moe", {"mlp_only_layers": [0]}),
    Case("qwen2_moe-window-sparse-step", "qwen2_moe", {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "qkv_bias": False, "norm_topk_prob": True,
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2,
    }),
    Case("qwen2_moe-tied-k1-mqa-dynamic", "qwen2_moe", {
        "tie_word_embeddings": True, "head_dim": 16, "num_experts_per_tok": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 16, "rope_parameters": rope("dynamic", factor=2.0),
    }, "float16"),
    Case("qwen2_moe-all-experts-llama3-layer-types", "qwen2_moe", {
        "num_experts": 4, "num_experts_per_tok": 4, "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True,
        "sliding_window": 7, "head_dim": 16, "max_position_embeddings": 64,
        "rope_parameters": rope("llama3", factor=4.0, original_max_position_embeddings=16,
                                low_freq_factor=1.0, high_freq_factor=4.0),
    }, "bfloat16"),
    Case("qwen2_moe-yarn-attention-factor", "qwen2_moe", {
        "head_dim": 16, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=0.8,
                                beta_fast=8.0, beta_slow=2.0),
    }),
    Case("qwen3_moe-plain", "qwen3_moe", {"norm_topk_prob": True, "head_dim": 16}),
    Case("qwen3_moe-dense-layers-bias-tied", "qwen3_moe", {
        "num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2, "attention_bias": True,
        "tie_word_embeddings": True, "norm_topk_prob": True,
    }, "bfloat16"),
    Case("qwen3_moe-window-k1-mqa", "qwen3_moe", {
        "use_sliding_window": True, "sliding_window": 4, "num_experts_per_tok": 1, "num_key_value_heads": 1,
        "norm_topk_prob": True, "head_dim": 16,
    }),
    Case("qwen3_moe-all-experts-yarn-no-norm", "qwen3_moe", {
        "num_experts": 4, "num_experts_per_tok": 4, "head_dim": 16, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False,
                                mscale=0.707, mscale_all_dim=0.5),
    }),
    Case("qwen3_moe-dynamic-gelu", "qwen3_moe", {
        "hidden_act": "gelu", "max_position_embeddings": 16, "rope_parameters": rope("dynamic", factor=4.0),
        "head_dim": 8,
    }),
    Case("olmoe-plain", "olmoe", {"num_key_value_heads": 4}),
    Case("olmoe-clip-bias-gqa", "olmoe", {
        "clip_qkv": 0.6, "attention_bias": True, "num_key_value_heads": 2, "rms_norm_eps": 1e-3,
    }, "float16"),
    Case("olmoe-tied-k1-mqa-norm-linear", "olmoe", {
        "tie_word_embeddings": True, "num_experts_per_tok": 1, "num_key_value_heads": 1,
        "norm_topk_prob": True, "rope_parameters": rope("linear", factor=2.0),
    }),
    Case("olmoe-all-experts-llama3", "olmoe", {
        "num_experts": 4, "num_experts_per_tok": 4, "max_position_embeddings": 64, "norm_topk_prob": True,
        "rope_parameters": rope("llama3", factor=8.0, original_max_position_embeddings=16,
                                low_freq_factor=1.0, high_freq_factor=4.0),
    }),
    Case("deepseek_v2-plain-no-q-rank", "deepseek_v2", {"q_lora_rank": None}),
    Case("deepseek_v2-groups-yarn-scaling-dense-layer", "deepseek_v2", {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.707,
                                mscale_all_dim=0.9),
    }, "bfloat16"),
    Case("deepseek_v3-groups", "deepseek_v3", {}),
    Case("deepseek_v3-k1-bias-no-q-rank-half-pairs-yarn", "deepseek_v3", {
        "q_lora_rank": None, "attention_bias": True, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
        "rope_interleave": False, "norm_topk_prob": False, "tie_word_embeddings": True, "v_head_dim": 20,
        "n_shared_experts": 2, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0,
                                mscale_all_dim=1.0),
    }, "float16"),
    Case("deepseek_v3-all-experts-one-head", "deepseek_v3", {
        "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 2, "v_head_dim": 8,
        "num_attention_heads": 1, "num_key_value_heads": 1, "first_k_dense_replace": 1,
        "num_hidden_layers": 3, "rms_norm_eps": 1e-3,
    }),
    Case("glm4_moe-plain", "glm4_moe", {}),
    Case("glm4_moe-groups-qk-norm-bias-dense-layer-yarn", "glm4_moe", {
        "use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2, "head_dim": 16,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }, "bfloat16"),
    Case("glm4_moe-k1-mqa-tied-quarter-rotated-llama3", "glm4_moe", {
        "num_experts_per_tok": 1, "num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 24,
        "n_shared_experts": 2, "norm_topk_prob": False, "max_position_embeddings": 64,
        "rope_parameters": rope("llama3", factor=4.0, original_max_position_embeddings=16,
                                low_freq_factor=1.0, high_freq_factor=4.0, partial_rotary_factor=0.25),
    }, "float16"),
    Case("glm4_moe-all-experts-whole-heads-rotated-dynamic", "glm4_moe", {
        "n_routed_experts": 4, "num_experts_per_tok": 4, "use_qk_norm": True, "max_position_embeddings": 16,
        "rope_parameters": rope("dynamic", factor=2.0, partial_rotary_factor=1.0), "n_group": 2,
        "topk_group": 2,
    }),
    Case("dots1-plain", "dots1", {"sliding_window": None, "norm_topk_prob": True}),
    Case("dots1-window-layer-types-groups-bias-dense-layer", "dots1", {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "attention_bias": True, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "head_dim": 16,
    }, "bfloat16"),
    Case("dots1-window-k1-mqa-tied-dynamic", "dots1", {
        "sliding_window": 5, "max_window_layers": 1, "num_experts_per_tok": 1, "num_key_value_heads": 1,
        "tie_word_embeddings": True, "norm_topk_prob": True, "max_position_embeddings": 16,
        "rope_parameters": rope("dynamic", factor=2.0),
    }, "float16"),
    Case("dots1-all-experts-yarn-gelu", "dots1", {
        "n_routed_experts": 4, "num_experts_per_tok": 4, "sliding_window": None, "hidden_act": "gelu",
        "head_dim": 16, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }),
    Case("minimax_m2-plain", "minimax_m2", {"rope_parameters": rope("default", partial_rotary_factor=0.5)}),
    Case("minimax_m2-k1-mqa-tied-whole-heads-rotated-yarn", "minimax_m2", {
        "num_experts_per_tok": 1, "num_key_value_heads": 1, "tie_word_embeddings": True,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }, "bfloat16"),
    Case("minimax_m2-all-experts-mha-quarter-rotated-linear", "minimax_m2", {
        "num_local_experts": 4, "num_experts_per_tok": 4, "num_key_value_heads": 4, "head_dim": 24,
        "rope_parameters": rope("linear", factor=2.0, partial_rotary_factor=0.25), "hidden_act": "gelu",
    }, "float16"),
    Case("ernie4_5_moe-plain", "ernie4_5_moe", {}),
    Case("ernie4_5_moe-every-second-layer-no-shared-norm-min-yarn", "ernie4_5_moe", {
        "num_hidden_layers": 5, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "head_dim": 16,
        "moe_layer_interval": 2, "moe_num_shared_experts": 0, "moe_norm_min": 0.4,
        "tie_word_embeddings": False, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }, "bfloat16"),
    Case("ernie4_5_moe-k1-mqa-one-shared-linear", "ernie4_5_moe", {
        "moe_k": 1, "num_key_value_heads": 1, "moe_num_shared_experts": 1, "head_dim": 10,
        "rope_parameters": rope("linear", factor=2.0),
    }, "float16"),
    Case("ernie4_5_moe-all-experts-mha-dynamic", "ernie4_5_moe", {
        "moe_num_experts": 4, "moe_k": 4, "num_key_value_heads": 4, "max_position_embeddings": 16,
        "rope_parameters": rope("dynamic", factor=2.0), "moe_layer_start_index": 0,
    }),
    Case("hunyuan_v1_moe-plain", "hunyuan_v1_moe", {}),
    Case("hunyuan_v1_moe-lists-alpha-bias", "hunyuan_v1_moe", {
        "moe_topk": [2, 2], "attention_bias": True, "head_dim": 16,
        "rope_parameters": rope("dynamic", factor=1.0, alpha=50.0),
    }, "bfloat16"),
    Case("hunyuan_v1_moe-k1-mqa-tied-dynamic", "hunyuan_v1_moe", {
        "moe_topk": 1, "num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 16,
        "rope_parameters": rope("dynamic", factor=2.0),
    }, "float16"),
    Case("hunyuan_v1_moe-all-experts-mha-yarn", "hunyuan_v1_moe", {
        "num_experts": 4, "moe_topk": 4, "num_key_value_heads": 4, "head_dim": 6,
        "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }),
    Case("llama-plain", "llama", {}),
    Case("llama-biases-mqa-tied-llama3", "llama", {
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "rope_parameters": rope("llama3", factor=8.0, original_max_position_embeddings=16,
                                low_freq_factor=1.0, high_freq_factor=4.0),
    }, "bfloat16"),
    Case("llama-one-head-wide-linear", "llama", {
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 12, "hidden_act": "gelu",
        "rope_parameters": rope("linear", factor=2.0), "rms_norm_eps": 1e-3,
    }, "float16"),
    Case("llama-mha-dynamic", "llama", {
        "num_key_value_heads": 4, "max_position_embeddings": 16,
        "rope_parameters": rope("dynamic", factor=2.0),
    }),
    Case("qwen3-plain", "qwen3", {"head_dim": 16}),
    Case("qwen3-window-biases-tied", "qwen3", {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "attention_bias": True,
        "tie_word_embeddings": True, "head_dim": 16, "num_hidden_layers": 3,
    }, "bfloat16"),
    Case("qwen3-layer-types-mqa-yarn", "qwen3", {
        "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True,
        "sliding_window": 7, "num_key_value_heads": 1, "head_dim": 10, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }),
    Case("granitemoe-factors", "granitemoe", {}, "bfloat16"),
    Case("granitemoe-k1-mqa-biases-tied", "granitemoe", {
        "num_experts_per_tok": 1, "num_key_value_heads": 1, "attention_bias": True,
        "tie_word_embeddings": True, "attention_multiplier": 0.5, "logits_scaling": 1.3,
    }),
    Case("granitemoe-all-experts-gelu-mha-yarn", "granitemoe", {
        "num_local_experts": 4, "num_experts_per_tok": 4, "num_key_value_heads": 4, "hidden_act": "gelu",
        "residual_multiplier": 1.0, "max_position_embeddings": 64, "head_dim": 10,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }, "float16"),
    Case("gemma3_text-windows-linear", "gemma3_text", {
        "num_hidden_layers": 5, "sliding_window_pattern": 3, "sliding_window": 5,
        "rope_parameters": local_and_full(rope("linear", factor=4.0)),
    }, "bfloat16"),
    Case("gemma3_text-layer-types-mqa-biases-untied", "gemma3_text", {
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7, "attention_bias": True,
        "num_key_value_heads": 1, "tie_word_embeddings": False, "query_pre_attn_scalar": 11,
        "hidden_activation": "silu", "final_logit_softcapping": 2.0,
    }, "float16"),
    Case("gemma3_text-all-full-mha", "gemma3_text", {
        "layer_types": ["full_attention"] * 3, "num_key_value_heads": 4, "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False, "num_hidden_layers": 3, "head_dim": 16,
    }),
    Case("gpt_oss-published", "gpt_oss", {}),
    Case("gpt_oss-k1-mqa-tied-windows-limit", "gpt_oss", {
        "num_experts_per_tok": 1, "num_key_value_heads": 1, "tie_word_embeddings": True, "swiglu_limit": 1.5,
        "swiglu_alpha": 1.1, "num_hidden_layers": 3, "sliding_window": 4, "rope_parameters": rope("default"),
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }, "bfloat16"),
    Case("gpt_oss-all-experts-mha-no-bias-yarn", "gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 4, "num_key_value_heads": 4, "attention_bias": False,
        "layer_types": ["full_attention", "full_attention"], "sliding_window": 128, "head_dim": 10,
        "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0),
    }, "float16"),
    Case("gpt_oss-narrow-window-two", "gpt_oss", {
        "sliding_window": 2, "intermediate_size": 28, "num_attention_heads": 6, "num_key_value_heads": 3,
        "swiglu_limit": 0.8, "max_position_embeddings": 16, "rope_parameters": rope("linear", factor=2.0),
    }),
    Case("minimax-factors", "minimax", {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 7, "linear_attn_alpha_factor": 0.7, "linear_attn_beta_factor": 1.3,
        "full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.6, "mlp_alpha_factor": 0.8,
        "mlp_beta_factor": 1.1,
    }),
    Case("minimax-default-layers-mqa-tied-wide-head-window", "minimax", {
        "num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 12, "sliding_window": 5,
        "num_hidden_layers": 4, "mlp_alpha_factor": 3.5, "rms_norm_eps": 1e-3,
    }, "bfloat16"),
    Case("minimax-all-linear-k1-gelu-three-heads", "minimax", {
        "layer_types": ["linear_attention"] * 2, "num_attention_heads": 3, "num_key_value_heads": 3,
        "head_dim": 10, "num_experts_per_tok": 1, "hidden_act": "gelu", "block_size": 64,
    }, "float16"),
    Case("minimax-all-full-all-experts-yarn", "minimax", {
        "layer_types": ["full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 4,
        "full_attn_alpha_factor": 2, "head_dim": 16, "max_position_embeddings": 64,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    }),
    Case("phimoe-plain", "phimoe", {}),
    # Transformers 5.23 takes the short factors whatever the length, so only short sequences are compared.
    Case("phimoe-longrope", "phimoe", {
        "max_position_embeddings": 128, "rope_parameters": LONGROPE | {
            "factor": 2.0,
            "original_max_position_embeddings": 64, "short_mscale": 1.1, "long_mscale": 1.2,
        },
    }),
    Case("qwen3_moe-longrope-past-its-original-length", "qwen3_moe", {
        "max_position_embeddings": 64, "head_dim": 8, "rope_parameters": LONGROPE | {
            "factor": 4.0, "original_max_position_embeddings": 12,
        },
    }),
    Case("phimoe-biases-window-mqa", "phimoe", {
        "attention_bias": True, "lm_head_bias": True, "sliding_window": 6, "num_key_value_heads": 1,
        "router_jitter_noise": 0.2,
    }, "bfloat16"),
    Case("phimoe-all-experts-mha-tied", "phimoe", {
        "num_local_experts": 2, "num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
    }, "float16"),
    Case("olmoe-dynamic-gelu", "olmoe", {
        "hidden_act": "gelu", "max_position_embeddings": 16, "rope_parameters": rope("dynamic", factor=2.0),
        "clip_qkv": 1.0,
    }),
)  # fmt: skip

# Two a family, one of each pair stored in half precision; between them every rotary kind but linear.
GOLDEN = (
    "mixtral-window-k1-wide-head",
    "mixtral-all-experts-mqa-tied-linear",
    "qwen2_moe-window-sparse-step",
    "qwen2_moe-tied-k1-mqa-dynamic",
    "qwen3_moe-dense-layers-bias-tied",
    "qwen3_moe-all-experts-yarn-no-norm",
    "olmoe-clip-bias-gqa",
    "olmoe-all-experts-llama3",
    "deepseek_v2-groups-yarn-scaling-dense-layer",
    "deepseek_v3-groups",
    "llama-biases-mqa-tied-llama3",
    "qwen3-window-biases-tied",
    "granitemoe-factors",
    "gemma3_text-windows-linear",
    "phimoe-biases-window-mqa",
    "glm4_moe-k1-mqa-tied-quarter-rotated-llama3",
    "dots1-window-layer-types-groups-bias-dense-layer",
    "minimax_m2-plain",
    "minimax-factors",
    "ernie4_5_moe-all-experts-mha-dynamic",
    "hunyuan_v1_moe-lists-alpha-bias",
    "gpt_oss-published",
)

_LATENT = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 0, "num_key_value_heads": 4,
    "kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14,
}  # fmt: skip

_V3_EXPERTS = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 0, "first_k_dense_replace": 0,
}  # fmt: skip

FAMILY_BASE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 0, "shared_expert_intermediate_size": 0},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 0},
    "olmoe": {"num_experts": 8},
    "deepseek_v2": _LATENT,
    "gpt_oss": {
        "num_local_experts": 8,
        "head_dim": 12,
        "sliding_window": 7,
        "max_position_embeddings": 128,
        "rope_parameters": rope("yarn", factor=8.0, original_max_position_embeddings=16, truncate=False),
    },
    "deepseek_v3": {**_LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    "glm4_moe": _V3_EXPERTS,
    "dots1": _V3_EXPERTS,
    "minimax": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_intermediate_size": 0, "moe_k": 2},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "llama": {},
    "phimoe": {"num_local_experts": 8, "router_jitter_noise": 0.05},
    "qwen3": {},
    "gemma3_text": {
        "head_dim": 12,
        "query_pre_attn_scalar": 16,
        "initializer_range": 0.15,  # else the embeddings, times a root of D, are nearly all of the stream
        "rope_parameters": local_and_full(rope("default")),
    },
    # As large as the published ones, but for logits that are not nearly 0.
    "granitemoe": {
        "num_local_experts": 8,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.8,
    },
}

DENSE = ("llama", "qwen3", "gemma3_text")
"""Families without experts."""


def fast_names() -> list[str]:
    """Returns the cases of the four oldest families, and the first one of each other. Of the rest the parts
    are compared in `make test-oracle SLOW=1`, whole models always."""
    oldest = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
    first = {case.family: case.name for case in reversed(CASES)}
    return [case.name for case in CASES if case.family in oldest or first[case.family] == case.name]


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def hf_fields(case: Case, size: str = "oracle") -> dict[str, Any]:
    """Keyword arguments of the family's transformers configuration."""
    sizes, base = SIZES[size], FAMILY_BASE[case.family]
    common = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 48,
        "rope_parameters": rope("default"),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # Large enough that the residual stream is the layers' work and no logit is near zero.
        "initializer_range": 0.3 if size == "oracle" else 0.5,
    }
    sized = {
        name: value
        for name, value in sizes.items()
        if name in base or not name.startswith(("moe_", "shared_"))
    }
    if case.family in DENSE:
        del common["num_experts_per_tok"]
    return {**common, **base, **sized, **case.fields}
