"""MiniMax-Text-01 (MiniMax-01, arXiv 2501.08313): linear attention in most layers, Mixtral's experts, residuals
taken after the norm."""

from typing import Any

from moejax.core.config import ModelConfig, NormedResidual
from moejax.core.errors import ConfigError
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields

_FACTORS = {"attention": "full_attn", "linear_attention": "linear_attn", "feed_forward": "mlp"}
_KINDS = ("full_attention", "linear_attention")


def _read(fields: HfFields) -> ModelConfig:
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
    fields.take("block_size")  # how transformers cuts a prompt, of which only rounding depends
    return ModelConfig(
        family="minimax",
        norm_topk_prob=True,
        normed_residual=NormedResidual(**{name: _factors(fields, key) for name, key in _FACTORS.items()}),
        linear_layers=linear if any(linear) else (),
        **all_routed(fields, common) | {"sliding_windows": tuple(None if own else window for own in linear)},
    )


def _factors(fields: HfFields, key: str) -> tuple[float, float]:
    """Returns alpha and beta of one kind of residual."""
    alpha, beta = (fields.take(f"{key}_{name}_factor", default=1.0) for name in ("alpha", "beta"))
    return float(alpha), float(beta)


def _write(config: ModelConfig) -> dict[str, Any]:
    residual = config.normed_residual or NormedResidual()
    factors = {
        f"{key}_{name}_factor": value
        for field, key in _FACTORS.items()
        for name, value in zip(("alpha", "beta"), getattr(residual, field), strict=True)
    }
    return factors | {
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "head_dim": config.head_dim,
        "sliding_window": next((w for w in config.sliding_windows if w is not None), None),
        "layer_types": [_KINDS[not paged] for paged in config.paged_layers],
    }


MINIMAX = Family("minimax", "MiniMaxForCausalLM", _read, _write)
