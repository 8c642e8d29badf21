"""Quantization sites: which weights share an input, what precedes it, and which statistics they need.

A SITE is an activation that one or more weights read. Scaling its channels by 1/s and the rows of all its
readers by s leaves the model as it is; 1/s goes into what makes the activation, the site's SOURCE:

    site                             readers                                     source
    attention                        q, k, v, linear attention's gate            input norm
    attention.o_proj                 o                                           v (tied over grouped heads)
    attention.out_proj               linear attention's output                   linear attention's norm
    mlp                              gate, up                                    post-attention norm
    mlp.down_proj                    down                                        up
    moe                              router, experts' gate and up, shared        post-attention norm
                                     expert's gate and up, shared gate
    moe.shared_expert.down_proj      down                                        up
    moe.experts.down_proj            each expert's down                          the same expert's up
    lm_head                          output projection (untied)                  final norm

Down projections read act(gate(x)) · up(x), which is linear in up. Between v and o stands the attention,
which mixes tokens and not channels, and in OLMoE `clip_qkv`, through which nothing can be folded, nor through
experts' biases and clamped SwiGLU. A norm whose output is the residual, too (`normed_residual`), stays.

Paths here are relative to the STAGE, a decoder layer or the head.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.models.decoder import Decoder, DecoderLayer
from moejax.nn.latent_attention import LatentAttention
from moejax.nn.linear import Linear
from moejax.nn.linear_attention import LinearAttention, decay_share
from moejax.nn.norm import RMSNorm
from moejax.nn.param import iter_params

EXPERTS_IN, EXPERTS_HIDDEN = "moe.experts", "moe.experts.down_proj"
"""Statistics with an expert axis: of what gate and up read, and of what down reads."""


@dataclass(frozen=True)
class QuantizationSite:
    """One activation that weights read; see the module.

    Attributes:
        name: also of its statistics over all tokens.
        observed: module whose input it is.
        readers: parameters.
        source: parameter that 1/s goes into: a norm's vector, or a weight whose outputs make the activation.
        group: query heads that share an output head of the source, and so a scale.
        head_dim: of those heads.
        blocked: why nothing can be folded; None where it can.
        offset: added to the source, a norm's vector, before it scales.
    """

    name: str
    observed: str
    readers: tuple[str, ...]
    source: str
    group: int = 1
    head_dim: int = 0
    blocked: str | None = None
    offset: float = 0.0


class Head(nnx.Module):
    """The final norm and the output projection, sharing the model's parameters."""

    def __init__(self, norm: RMSNorm, lm_head: Linear) -> None:
        self.norm, self.lm_head = norm, lm_head

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, T, D]` to `[B, T, V]`."""
        return self.lm_head(self.norm(x))


@dataclass(frozen=True)
class Stage:
    """A part of the model that is calibrated at a time; `prefix` + a path in `module` is a path in the
    model. `share` is the `decay_share` of a layer with linear attention."""

    name: str
    prefix: str
    module: nnx.Module
    sites: tuple[QuantizationSite, ...]
    share: jax.Array | None = None

    def params(self) -> dict[str, nnx.Param]:
        """Returns the parameters by their path in the stage."""
        return dict(iter_params(self.module))


def statistics_of(reader: str, site: QuantizationSite) -> str:
    """Returns the name of the statistics that a weight is calibrated with."""
    if reader in ("moe.experts.gate_proj", "moe.experts.up_proj"):
        return EXPERTS_IN
    return site.name


def stages_of(model: Decoder) -> list[Stage]:
    """Returns the decoder layers in order, and the head where the output projection is the model's own."""
    stages = []
    for i, layer in zip(model.stage, model.in_order(), strict=True):
        sites = _with_offsets(layer_sites(layer), layer.input_norm)
        if layer.attention.config.normed_residual is not None:
            sites = tuple(replace(s, blocked=_BLOCKED) if s.source in _NORMS else s for s in sites)
        share = decay_share(model.config, i) if layer.is_linear else None
        stages.append(Stage(f"layer {i}", f"layers.{i}.", layer, sites, share))
    if model.lm_head is not None and model.norm is not None:
        site = QuantizationSite("lm_head", "lm_head", ("lm_head.kernel",), "norm.scale")
        sites = _with_offsets((site,), model.norm)
        stages.append(Stage("lm_head", "", Head(model.norm, model.lm_head), sites))
    return stages


_NORMS, _BLOCKED = ("input_norm.scale", "post_attention_norm.scale"), "the residual comes after the norm"


def _with_offsets(sites: Iterable[QuantizationSite], norm: RMSNorm) -> tuple[QuantizationSite, ...]:
    """Returns the sites of a model with such norms."""
    offset = float(norm.unit_offset)
    return tuple(
        replace(site, offset=offset) if site.source.endswith("norm.scale") else site for site in sites
    )


def layer_sites(layer: DecoderLayer) -> tuple[QuantizationSite, ...]:
    """Returns the quantization sites of one decoder layer."""
    config, attention = layer.attention.config, _attention_of(layer)
    norm = "post_attention_norm.scale"
    if layer.moe is None:
        gated = ("mlp.gate_proj.kernel", "mlp.up_proj.kernel")
        return (*attention, QuantizationSite("mlp", "mlp.gate_proj", gated, norm), _down("mlp"))
    sites = list(attention)
    readers = ["moe.router.kernel", "moe.experts.gate_proj", "moe.experts.up_proj"]
    readers += ["moe.router.group_kernel"] if config.router.group_gate else []
    if layer.moe.shared_expert is not None:
        readers += [f"moe.shared_expert.{name}_proj.kernel" for name in ("gate", "up")]
        readers += [] if layer.moe.shared_gate is None else ["moe.shared_gate.kernel"]
        sites.append(_down("moe.shared_expert"))
    read = ("moe.experts.down_proj",)
    unfit = config.expert_bias or config.expert_swiglu is not None
    blocked = "experts' biases and clamped SwiGLU stand between up_proj and it" if unfit else None
    experts = QuantizationSite(EXPERTS_HIDDEN, "moe.experts", read, "moe.experts.up_proj", blocked=blocked)
    return (*sites, QuantizationSite("moe", "moe.router", tuple(readers), norm), experts)


def _attention_of(layer: DecoderLayer) -> tuple[QuantizationSite, ...]:
    if isinstance(layer.attention, LatentAttention):
        return _latent_sites(layer.attention)
    if not isinstance(layer.attention, LinearAttention):
        return _attention_sites(layer.attention.config)
    qkv, gate, out = (f"attention.{name}" for name in ("qkv_proj", "output_gate", "out_proj"))
    return (
        QuantizationSite("attention", qkv, (f"{qkv}.kernel", f"{gate}.kernel"), "input_norm.scale"),
        QuantizationSite(out, out, (f"{out}.kernel",), "attention.norm.scale"),
    )


def _latent_sites(attention: LatentAttention) -> tuple[QuantizationSite, ...]:
    """Returns those of latent attention, whose output nothing is folded into: a column of `kv_b_proj` makes
    a part of a value by way of the latents that keys are made of, too."""
    first = "q_proj" if attention.q_a_proj is None else "q_a_proj"
    readers = tuple(f"attention.{name}.kernel" for name in (first, "kv_a_proj"))
    sites = [QuantizationSite("attention", f"attention.{first}", readers, "input_norm.scale")]
    for name, norm in (("q_b_proj", "q_a_norm"), ("kv_b_proj", "kv_a_norm"), ("o_proj", "")):
        if getattr(attention, name) is not None:
            path = f"attention.{name}"
            source = f"attention.{norm}.scale" if norm else "attention.kv_b_proj.kernel"
            blocked = None if norm else "keys and values are of one projection, kv_b_proj"
            sites.append(QuantizationSite(path, path, (f"{path}.kernel",), source, blocked=blocked))
    return tuple(sites)


def _attention_sites(config: ModelConfig) -> tuple[QuantizationSite, ...]:
    """Returns those of grouped-query attention."""
    qkv = tuple(f"attention.{name}_proj.kernel" for name in "qkv")
    clip = None
    if config.clip_qkv is not None:
        clip = f"clip_qkv={config.clip_qkv:g} stands between v_proj and it"
    return (
        QuantizationSite("attention", "attention.q_proj", qkv, "input_norm.scale"),
        QuantizationSite(
            "attention.o_proj",
            "attention.o_proj",
            ("attention.o_proj.kernel",),
            "attention.v_proj.kernel",
            config.num_heads // config.num_kv_heads,
            config.head_dim,
            clip,
        ),
    )


def _down(mlp: str) -> QuantizationSite:
    down = f"{mlp}.down_proj"
    return QuantizationSite(down, down, (f"{down}.kernel",), f"{mlp}.up_proj.kernel")
