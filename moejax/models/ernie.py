"""ERNIE 4.5 (its technical report by Baidu, 2025): softmax with a correction bias, interleaved pairs."""

from typing import Any

from moejax.core.checked import PositiveInt, check
from moejax.core.config import ModelConfig, RouterConfig
from moejax.models.family import Family, common_fields
from moejax.models.hf_config import HfFields


def _read(fields: HfFields) -> ModelConfig:
    top_k = int(fields.take("moe_k", "num_experts_per_tok", default=6))
    common = common_fields(fields, default_theta=5e5, default_eps=1e-5, top_k=top_k, interleaved=True)
    fields.only_at(use_bias=False, use_rmsnorm=True, moe_gate_act="softmax", moe_use_aux_free=True)
    fields.only("moe_norm_gate_logits", True)
    fields.take("moe_capacity", "moe_gate")  # of training
    layers, hidden = common["num_layers"], int(fields.require("moe_intermediate_size"))
    step, first = (int(fields.take(f"moe_layer_{name}", default=1)) for name in ("interval", "start_index"))
    check("moe_layer_interval", step, PositiveInt)
    last = int(fields.take("moe_layer_end_index", default=-1))
    last = layers - 1 if last == -1 else last
    return ModelConfig(
        family="ernie4_5_moe",
        num_experts=int(fields.take("moe_num_experts", "num_experts", default=64)),
        moe_intermediate_size=hidden,
        intermediate_size=int(fields.require("intermediate_size")),
        moe_layers=tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers)),
        sliding_windows=(None,) * layers,
        shared_expert_intermediate_size=hidden * int(fields.take("moe_num_shared_experts", default=2)),
        shared_expert_gate=False,
        router=RouterConfig(correction_bias=True, norm_min=float(fields.take("moe_norm_min", default=1e-12))),
        mtp_layers=int(fields.take("num_nextn_predict_layers", default=0)),
        **common | {"tie_word_embeddings": bool(fields.take("tie_word_embeddings", default=True))},
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    sparse = [i for i, has_experts in enumerate(config.moe_layers) if has_experts]
    first, last = (sparse[0], sparse[-1]) if sparse else (config.num_layers, config.num_layers)
    fields = {
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_num_experts": config.num_experts,
        "moe_k": config.num_experts_per_tok,
        "moe_num_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": sparse[1] - first if len(sparse) > 1 else 1,
        "moe_norm_min": config.router.norm_min,
    }
    return fields | ({"num_nextn_predict_layers": config.mtp_layers} if config.mtp_layers else {})


ERNIE4_5_MOE = Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _read, _write)
