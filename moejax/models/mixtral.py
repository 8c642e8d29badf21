"""Mixtral (Jiang et al., arXiv 2401.04088): every layer routed, top-k renormalised, one window. MiniMax-M2
(its model page): no window, norms over all of q and k, part of a head rotated, sigmoid router.
MiniMax-Text-01 (arXiv 2501.08313): linear attention in most layers, residuals taken after the norm."""

from typing import Any

from moejax.core.config import ModelConfig, NormedResidual, RouterConfig
from moejax.core.errors import ConfigError
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields


def _read(fields: HfFields) -> ModelConfig:
    common = common_fields(fields, default_theta=1e6, default_eps=1e-5)
    windows = (fields.take("sliding_window"),) * common["num_layers"]
    return ModelConfig(
        family="mixtral",
        norm_topk_prob=True,
        **all_routed(fields, common) | {"sliding_windows": windows},
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_windows[0],
    }


def _read_minimax(fields: HfFields) -> ModelConfig:
    head = int(fields.take("head_dim", default=128))
    share = fields.take("rotary_dim", default=head) / head
    common = common_fields(fields, default_theta=5e6, default_eps=1e-6, partial_rotary_factor=share)
    # Which of the published variants it is; transformers has this one.
    fields.only_at(
        use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, scoring_func="sigmoid",
        shared_intermediate_size=0, sliding_window=None, layernorm_full_attention_beta=1.0,
        layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0,
        attn_type_list=[1] * common["num_layers"],
    )  # fmt: skip
    # Of an MLP that no layer has, and of layers for further tokens.
    fields.take("mlp_intermediate_size", "shared_moe_mode", "use_mtp", "mtp_transformer_layers")
    return ModelConfig(
        family="minimax_m2",
        router=RouterConfig(scores="sigmoid", correction_bias=True),
        mtp_layers=int(fields.take("num_mtp_modules", default=0)),
        qk_norm="projection",
        **all_routed(fields, common) | {"head_dim": head},
    )


def _write_minimax(config: ModelConfig) -> dict[str, Any]:
    fields = {
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "head_dim": config.head_dim,
    }
    return fields | ({"num_mtp_modules": config.mtp_layers} if config.mtp_layers else {})


_FACTORS = {"attention": "full_attn", "linear_attention": "linear_attn", "feed_forward": "mlp"}
_KINDS = ("full_attention", "linear_attention")


def _read_lightning(fields: HfFields) -> ModelConfig:
    # MiniMax's name for the rotated part of a head, 64 of 128; transformers rotates whole heads.
    rotary = fields.take("rotary_dim")
    share = 1.0 if rotary is None else rotary / int(fields.require("head_dim"))
    common = common_fields(fields, default_theta=1e6, default_eps=1e-5, partial_rotary_factor=share)
    layers, window = common["num_layers"], fields.take("sliding_window")
    kinds = fields.take("layer_types") or [_KINDS[layer % 2] for layer in range(layers)]
    if len(kinds) != layers or set(kinds) - set(_KINDS):
        raise ConfigError(
            f"{fields.source}: layer_types must name 'full_attention' or 'linear_attention' for each of "
            f"{layers} layers, got {kinds!r}"
        )
    linear = tuple(kind == _KINDS[1] for kind in kinds)
    factors: dict[str, Any] = {
        name: tuple(float(fields.take(f"{key}_{which}_factor", default=1.0)) for which in ("alpha", "beta"))
        for name, key in _FACTORS.items()
    }
    fields.take("block_size")  # how transformers cuts a prompt, of which only rounding depends
    return ModelConfig(
        family="minimax",
        norm_topk_prob=True,
        normed_residual=NormedResidual(**factors),
        linear_layers=linear if any(linear) else (),
        **all_routed(fields, common) | {"sliding_windows": tuple(None if own else window for own in linear)},
    )


def _write_lightning(config: ModelConfig) -> dict[str, Any]:
    residual = config.normed_residual or NormedResidual()
    factors: dict[str, Any] = {
        f"{key}_{name}_factor": value
        for field, key in _FACTORS.items()
        for name, value in zip(("alpha", "beta"), getattr(residual, field), strict=True)
    }
    factors["sliding_window"] = next((w for w in config.sliding_windows if w is not None), None)
    factors["layer_types"] = [_KINDS[not paged] for paged in config.paged_layers]
    return _write(config) | factors


MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read, _write)
MINIMAX_M2 = Family("minimax_m2", "MiniMaxM2ForCausalLM", _read_minimax, _write_minimax)
MINIMAX = Family("minimax", "MiniMaxForCausalLM", _read_lightning, _write_lightning)
