"""Bytes that lie on a device: its part of the weights and of the key/value cache. Host arithmetic."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.perf.sizes import DTYPE_BYTES, HeldWeights, kv_token_bytes, state_bytes


class Declared(Protocol):
    """A tensor's shape, a logical name for each dimension, and its dtype (`moejax.nn.param.ParamSpec`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str | None, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of a pipeline stage.

    Attributes:
        layers: the stage's layers.
        expert_weights: experts' matrices.
        other_weights: everything else: attention, norms, routers, shared experts, embedding, output.
        cache: keys and values, and the states of linear attention.
        attention_weights, embedding_weights: of `other_weights` attention's, and embedding's and output's.
        window_cache, states: of `cache` the blocks of layers with a window of their own, and the states.
    """

    layers: tuple[int, ...]
    expert_weights: int
    other_weights: int
    cache: int
    attention_weights: int = 0
    embedding_weights: int = 0
    window_cache: int = 0
    states: int = 0

    @property
    def weights(self) -> int:
        return self.expert_weights + self.other_weights

    @property
    def total(self) -> int:
        return self.weights + self.cache


def device_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    specs: Mapping[str, Declared],
    *,
    num_blocks: int,
    block_size: int,
    sequences: int = 0,
    window: int | None = None,
    window_blocks: int = 0,
    dtype: str | None = None,
    stages: Sequence[Sequence[int]] | None = None,
) -> list[StageMemory]:
    """Returns the bytes that each device of each pipeline stage holds between steps.

    Activations, the step's buffers and the sampler's state are not counted.

    Args:
        specs: dotted path → declaration of every tensor (`moejax.nn.param.specs`; an abstract model will do).
        num_blocks: cache blocks of each data group.
        block_size: tokens in a block.
        sequences: whose states are held, of each data group; an engine's are one more than run at a time.
        window: tokens that layers with a sliding window keep, in `window_blocks` blocks of their own, of each
            data group; None: all.
        dtype: of the cache, integers and 8-bit floats with their scales; None is the configuration's.
        stages: layers of each stage; None: all in one stage.

    Raises:
        ConfigError: a tensor does not divide, or the stages are not given or do not fit.
    """
    parts = [tuple(stage) for stage in stages or [range(model.num_layers)]]
    in_order = [layer for part in parts for layer in part]
    if len(parts) != parallel.pp or in_order != list(range(model.num_layers)):
        raise ConfigError(
            f"parallel.pp={parallel.pp}: stages {parts} do not hold the {model.num_layers} layers in order"
        )
    token_bytes = kv_token_bytes(model, dtype or model.dtype, parallel.kv_split(model.num_kv_heads))
    pages, of_window = num_blocks * block_size * token_bytes, window_blocks * block_size * token_bytes
    state = sequences * state_bytes(model, parallel.tensor_size)
    each = {"blocks": pages, "window": of_window, "state": state}
    kinds = model.cache_kinds(window)
    held = [Counter[str]() for _ in parts]
    for name, spec in specs.items():
        size = tensor_bytes(name, spec, model, parallel)
        place = "embedding" if name.startswith(("embedding.", "lm_head.")) else "other"
        place = "attention" if ".attention." in name else "expert" if "expert" in spec.axes else place
        for stage in _places(name, model, parts):
            held[stage][place] += size
    for one, part in zip(held, parts, strict=True):
        for layer in part:
            one[kinds[layer]] += each[kinds[layer]]
    return [
        StageMemory(
            tuple(part), one["expert"], one["attention"] + one["embedding"] + one["other"],
            one["blocks"] + one["window"] + one["state"], one["attention"], one["embedding"], one["window"],
            one["state"],
        )
        for part, one in zip(parts, held, strict=True)
    ]  # fmt: skip


def held_weights(model: ModelConfig, specs: Mapping[str, Declared]) -> HeldWeights:
    """Returns the bytes that a decode step reads, from declarations with quantized weights or without.

    Args:
        specs: dotted path → declaration of every tensor of the whole model. Vectors and norms are left out;
            scales are not.
    """
    parts: dict[tuple[int | None, str], float] = {}
    for name, spec in specs.items():
        size: float = math.prod(spec.shape) * _itemsize(spec.dtype)
        dimensions = len(spec.shape) - ("expert" in spec.axes)
        if dimensions < 2 and name.rpartition(".")[2] not in ("input_scale", "group_index"):
            continue
        pieces = name.split(".")
        if pieces[0] == "embedding" and not model.tie_word_embeddings:
            continue
        if "expert" in spec.axes and "experts" in pieces:
            size /= spec.shape[0]
        layer = int(pieces[1]) if pieces[0] == "layers" else None
        operation = next((_OPERATIONS[piece] for piece in pieces if piece in _OPERATIONS), "other")
        if "experts" in pieces:
            operation = "experts_down" if "down_proj" in pieces else "experts_gate_up"
        key = layer, operation
        parts[key] = parts.get(key, 0.0) + size
    return parts


_OPERATIONS = {
    "qkv_proj": "qkv_projection",
    "output_gate": "qkv_projection",
    "q_proj": "qkv_projection",
    "q_a_proj": "qkv_projection",
    "q_b_proj": "qkv_projection",
    "kv_a_proj": "qkv_projection",
    "kv_b_proj": "qkv_projection",
    "k_proj": "qkv_projection",
    "v_proj": "qkv_projection",
    "o_proj": "output_projection",
    "out_proj": "output_projection",
    "router": "router",
    "shared_expert": "shared_expert",
    "shared_gate": "shared_expert",
    "mlp": "mlp",
    "lm_head": "lm_head",
    "embedding": "lm_head",
}
"""Part of a tensor's path → which of `moejax.perf.operation_costs.OPERATIONS` reads it."""


def tensor_bytes(name: str, spec: Declared, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Returns the bytes of a tensor on each device, by the rules of `moejax.sharding.rules`.

    Experts count with the redundant ones, and a vocabulary with its padding, whether or not the declaration
    has them.

    Raises:
        ConfigError: a dimension does not divide.
    """
    splits = {
        "vocab": parallel.tensor_size,
        "heads": parallel.tensor_size,
        "kv_heads": parallel.kv_split(model.num_kv_heads),
        "mlp": parallel.tensor_size,
        "expert": parallel.ep,
        "expert_mlp": parallel.tp,
    }
    size = 1
    for axis, length in zip(spec.axes, spec.shape, strict=True):
        if axis == "expert" and length == model.num_experts:
            length += parallel.redundant_experts
        elif axis == "vocab":
            length = parallel.padded_vocab(length)
        ways = splits.get(axis or "", 1)
        if length % ways:
            raise ConfigError(f"{name}: axis {axis!r} of {length} does not divide over {ways} devices")
        size *= length // ways
    return size * _itemsize(spec.dtype)


def _itemsize(dtype: Any) -> int:
    """Returns the bytes of an element of a NumPy-like dtype, or of its name."""
    itemsize = getattr(dtype, "itemsize", None)
    return itemsize if isinstance(itemsize, int) else DTYPE_BYTES.get(dtype) or np.dtype(dtype).itemsize


def _places(name: str, model: ModelConfig, parts: Sequence[Sequence[int]]) -> list[int]:
    """Stages that hold a tensor: its layer's; the first for the embedding; the last for the norm and the
    output, and for the embedding too where it is the output."""
    pieces = name.split(".")
    if pieces[0] == "layers":
        return [number for number, part in enumerate(parts) if int(pieces[1]) in part]
    last = len(parts) - 1
    if pieces[0] != "embedding":
        return [last]
    return sorted({0, last}) if model.tie_word_embeddings else [0]


def largest(stages: Sequence[StageMemory]) -> StageMemory:
    """Returns the stage whose devices hold the most."""
    return max(stages, key=lambda stage: stage.total)
