"""Decoders without experts: Llama (arXiv 2302.13971, 2407.21783) and Qwen3 (per-head query/key norm, arXiv
2505.09388)."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.models.family import Family, common_fields
from moejax.models.hf_config import HfFields, layer_types, layer_windows


def read_dense(fields: HfFields, default_theta: float = 1e4) -> dict[str, Any]:
    """Returns the fields that families without experts share."""
    common = common_fields(fields, default_theta=default_theta, default_eps=1e-6, top_k=1)
    hidden = int(fields.require("intermediate_size"))
    bias = bool(fields.take("attention_bias", default=False))
    return common | {
        "num_experts": 1,
        "intermediate_size": hidden,
        "moe_intermediate_size": hidden,
        "moe_layers": (False,) * common["num_layers"],
        "qkv_bias": bias,
        "attention_out_bias": bias,
    }


def _read_llama(fields: HfFields) -> ModelConfig:
    fields.take("max_sequence_length", "pretraining_tp")  # of training
    fields.only("rope_interleaved", False)
    common = read_dense(fields)
    return ModelConfig(
        family="llama",
        sliding_windows=(None,) * common["num_layers"],
        mlp_bias=bool(fields.take("mlp_bias", default=False)),
        **common,
    )


def _read_qwen3(fields: HfFields) -> ModelConfig:
    common = read_dense(fields)
    use, window = bool(fields.take("use_sliding_window", default=False)), fields.take("sliding_window")
    window, full = int(window) if use and window else None, int(fields.take("max_window_layers", default=28))
    sliding = [window is not None and i >= full for i in range(common["num_layers"])]
    return ModelConfig(
        family="qwen3",
        qk_norm="head",
        sliding_windows=layer_windows(fields, len(sliding), window, sliding),
        **common | {"head_dim": int(fields.take("head_dim", default=128))},
    )


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Returns `sliding_window` and `layer_types`."""
    window = next((w for w in config.sliding_windows if w is not None), None)
    return {"sliding_window": window, "layer_types": layer_types(config.sliding_windows)}


def write_dense(config: ModelConfig) -> dict[str, Any]:
    """Inverts `read_dense`."""
    return {
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "attention_bias": config.qkv_bias,
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return write_dense(config) | {"mlp_bias": config.mlp_bias}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    windows = write_windows(config)
    return write_dense(config) | windows | {"use_sliding_window": windows["sliding_window"] is not None}


LACKS = ("num_experts_per_tok",)
LLAMA = Family("llama", "LlamaForCausalLM", _read_llama, _write_llama, LACKS)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3, LACKS)
