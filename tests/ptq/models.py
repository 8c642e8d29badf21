"""Small models of every family, tokens for them, and what a quantized model computes, in floating point."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from moejax.core.config import ModelConfig, RouterConfig
from moejax.core.moe import MoeConfig
from moejax.core.quant import CalibrationConfig, QuantConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from moejax.nn.quantized import quantized_weights
from moejax.ptq.fold import Folds, store
from moejax.ptq.sites import Stage
from moejax.quantization.arithmetic import dequantize
from tests.model_shapes import GEMMA, GRANITE, LATENT, LINEAR, LLAMA, SINKS, TWO_LAYERS

BASE = TWO_LAYERS.replace(qk_norm="none")
FAMILIES = {
    "mixtral": BASE.replace(family="mixtral", sliding_windows=(5, 5)),
    "qwen2_moe": BASE.replace(
        family="qwen2_moe", shared_expert_intermediate_size=24, qkv_bias=True, norm_topk_prob=False
    ),
    "qwen3_moe": BASE.replace(qk_norm="head", moe_layers=(False, True), tie_word_embeddings=True),
    "olmoe": BASE.replace(
        family="olmoe", qk_norm="projection", qkv_bias=True, attention_out_bias=True, norm_topk_prob=False
    ),
    "deepseek_v3": BASE.replace(**LATENT, moe_layers=(False, True)),
    "llama": BASE.replace(**LLAMA),
    "gemma3_text": BASE.replace(**GEMMA, qk_norm="head"),
    "granitemoe": BASE.replace(**GRANITE),
    "minimax": BASE.replace(**LINEAR),
    "gpt_oss": BASE.replace(**SINKS, sliding_windows=(5, None)),
    "phimoe": BASE.replace(
        family="phimoe",
        norm="layer",
        router=RouterConfig("sparsemixer", tolerance=0.1),
        qkv_bias=True,
        lm_head_bias=True,
        norm_topk_prob=False,
    ),
    "olmoe-clip": BASE.replace(family="olmoe", qk_norm="projection", clip_qkv=0.7),
}


def build(config: ModelConfig, seed: int = 0, layout: str = "edf", execution: str = "grouped") -> Decoder:
    """With biases and norms that are not what they start as."""
    model = Decoder(config, seed=seed, moe=MoeConfig(expert_layout=layout, execution=execution))
    rng = np.random.default_rng(seed)
    for name, param in iter_params(model):
        if len(param.get_metadata("spec").matrix_shape) == 1:
            noise = rng.normal(0, 0.3, param.shape).astype(np.float32)
            param.set_value(jax.numpy.asarray(noise + name.endswith("scale")).astype(param.dtype))
    return model


def tokens(samples: int = 6, length: int = 16, vocab: int = 96, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (samples, length)).astype(np.int32)


def quant(method: str, format: str, *, rules=(), **calibration) -> QuantConfig:
    settings = {"batch_size": 4, "min_tokens": 0} | calibration
    return QuantConfig(
        method=method, format=format, rules=list(rules), calibration=CalibrationConfig(**settings)
    )


def fold(stage: Stage, scales: Mapping[str, jax.Array]) -> list[str]:
    """Folds scales of sites, by name, into a stage of a float model in place; returns what has changed."""
    folds = Folds()
    for site in stage.sites:
        if site.name in scales:
            folds.add(site, scales[site.name])
    return folds.write(stage.params())


def in_float(model: Decoder, config: ModelConfig, layout: str = "edf") -> Decoder:
    """A float model with a quantized one's values."""
    twin = Decoder(config, seed=0, moe=MoeConfig(expert_layout=layout))
    values = {name: param[...] for name, param in iter_params(model)}
    held = {name: dequantize(weight.tensor()) for name, weight in quantized_weights(model)}
    for name, param in iter_params(twin):
        if name in held:
            store(param, held[name])
        else:
            param.set_value(values[name])
    return twin


def logits(model: Decoder, ids: np.ndarray) -> np.ndarray:
    return np.asarray(_forward(*nnx.split(model), ids)[0], np.float64)


def routing(model: Decoder, ids: np.ndarray) -> list[np.ndarray]:
    """Experts chosen, `[B, T, k]` for each layer that has some."""
    return [np.asarray(trace.ids) for trace in _forward(*nnx.split(model), ids)[1] if trace is not None]


@functools.partial(jax.jit, static_argnames=("graph",))
def _forward(graph: Any, state: Any, ids: np.ndarray) -> Any:
    return nnx.merge(graph, state)(ids, return_routing=True)
