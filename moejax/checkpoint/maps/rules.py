"""Declarative key tables: which checkpoint key fills which parameter, and how.

`{l}` stands for a layer, `{e}` for an expert, `{rest}` for anything. A rule reads, and writes if `canonical`.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Transform = Literal[
    "same", "row", "transpose", "fused_gate", "fused_up", "fused_down",
    "stacked", "stacked_even", "stacked_odd",
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A parameter path (`layers.{l}.…`) and how a checkpoint tensor becomes (a part of) it.

    `row` fills a vector of C from `[1, C]`.
    `same` and `transpose` (PyTorch's `[out, in]` → `[in, out]`) fill one whole matrix or, where the key has
    `{e}`, one expert of a stack. `fused_gate`/`fused_up` take the halves of a stacked `[E, 2F, D]`,
    `fused_down` a stacked `[E, D, F]`, each transposed per expert. `stacked` takes a stack in the parameter's
    order, and `stacked_even`, `stacked_odd` every other number of its last axis, from 0 or 1 on.
    """

    param: str
    transform: Transform = "same"


@dataclass(frozen=True)
class Rule:
    """A checkpoint key and its targets; none means that the tensor is known and derived, not loaded."""

    key: str
    targets: tuple[Target, ...]
    canonical: bool = True
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        regex = re.escape(self.key).replace(r"\{l\}", r"(?P<l>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
        object.__setattr__(self, "pattern", re.compile(regex.replace(r"\{rest\}", ".*")))

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.key


Index = tuple[slice, ...]


def source_shape(transform: Transform, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """Returns the checkpoint tensor's shape for a parameter, or one expert's matrix, of `shape`."""
    if transform in ("fused_gate", "fused_up"):
        return (num_experts, 2 * shape[1], shape[0])
    if transform == "fused_down":
        return (num_experts, shape[1], shape[0])
    if transform == "row":
        return (1, *shape)
    if transform.startswith("stacked"):
        return (num_experts, *shape[:-1], shape[-1] * (1 if transform == "stacked" else 2))
    return shape[::-1] if transform == "transpose" else shape


def source_index(transform: Transform, index: Index, shape: tuple[int, ...], expert: int | None) -> Index:
    """Returns the checkpoint tensor's index for `index` of a parameter of `shape`, or of one expert's matrix.

    Args:
        index: a slice with start and stop for each dimension.
        expert: whose matrix it is, for a stacked tensor.
    """
    if transform.startswith("fused"):
        assert expert is not None
        rows, columns = index
        shift = shape[1] if transform == "fused_up" else 0
        return (slice(expert, expert + 1), slice(columns.start + shift, columns.stop + shift), rows)
    if transform == "row":
        return (slice(0, 1), *index)
    if transform.startswith("stacked"):
        assert expert is not None
        *lead, last = index
        if transform != "stacked":
            last = slice(2 * last.start + (transform == "stacked_odd"), 2 * last.stop, 2)
        return (slice(expert, expert + 1), *lead, last)
    return index[::-1] if transform == "transpose" else index


def apply_transform(transform: Transform, value: np.ndarray) -> np.ndarray:
    """Returns a view in the parameter's (or one expert's) layout of the part that `source_index` selects."""
    if transform.startswith("fused"):
        return value[0].T
    if transform == "row":
        return value[0] if value.ndim == 2 else value[None]
    if transform.startswith("stacked"):
        return value[0]
    return value.T if transform == "transpose" else value


def tensor(key: str, param: str, transform: Transform = "same", canonical: bool = True) -> Rule:
    """Returns the rule of a tensor that is one parameter."""
    return Rule(key, (Target(param, transform),), canonical)


def linear(key: str, param: str, *, bias: bool = False) -> tuple[Rule, ...]:
    """Returns a projection's weight and, for families that can have one, its bias."""
    weight = tensor(f"{key}.weight", f"{param}.kernel", "transpose")
    return (weight, tensor(f"{key}.bias", f"{param}.bias")) if bias else (weight,)


_LAYER = "model.layers.{l}"

BACKBONE: tuple[Rule, ...] = (
    tensor("model.embed_tokens.weight", "embedding.table"),
    tensor("model.norm.weight", "norm.scale"),
    *linear("lm_head", "lm_head"),
    tensor(f"{_LAYER}.input_layernorm.weight", "layers.{l}.input_norm.scale"),
    tensor(f"{_LAYER}.post_attention_layernorm.weight", "layers.{l}.post_attention_norm.scale"),
    # Old checkpoints store the rotary frequencies, which follow from the configuration.
    Rule(f"{_LAYER}.self_attn.rotary_emb.inv_freq", (), canonical=False),
)

COMMON: tuple[Rule, ...] = (
    *BACKBONE,
    *linear(f"{_LAYER}.self_attn.q_proj", "layers.{l}.attention.q_proj", bias=True),
    *linear(f"{_LAYER}.self_attn.k_proj", "layers.{l}.attention.k_proj", bias=True),
    *linear(f"{_LAYER}.self_attn.v_proj", "layers.{l}.attention.v_proj", bias=True),
    *linear(f"{_LAYER}.self_attn.o_proj", "layers.{l}.attention.o_proj", bias=True),
)

QK_NORM: tuple[Rule, ...] = (
    tensor(f"{_LAYER}.self_attn.q_norm.weight", "layers.{l}.attention.q_norm.scale"),
    tensor(f"{_LAYER}.self_attn.k_norm.weight", "layers.{l}.attention.k_norm.scale"),
)


_GATED = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(key: str, param: str, *, bias: bool = False) -> tuple[Rule, ...]:
    """Returns the three projections of a gated MLP."""
    return tuple(rule for name in _GATED for rule in linear(f"{key}.{name}", f"{param}.{name}", bias=bias))


DENSE_MLP = gated_mlp(f"{_LAYER}.mlp", "layers.{l}.mlp")


def routed(block: str, names: tuple[str, str, str] = _GATED, *, canonical: bool = True) -> tuple[Rule, ...]:
    """Returns router and experts under `model.layers.{l}.<block>`, one tensor per expert and projection."""
    parts = {f"experts.{{e}}.{name}": f"experts.{ours}" for name, ours in zip(names, _GATED, strict=True)}
    return tuple(
        tensor(f"{_LAYER}.{block}.{name}.weight", f"layers.{{l}}.moe.{ours}", "transpose", canonical)
        for name, ours in {"gate": "router.kernel", **parts}.items()
    )


def fused_experts(block: str) -> tuple[Rule, ...]:
    """Returns rules of transformers 5's stacked layout in memory and files: gate and up in one tensor."""
    experts = "layers.{l}.moe.experts"
    halves = (Target(f"{experts}.gate_proj", "fused_gate"), Target(f"{experts}.up_proj", "fused_up"))
    return (
        Rule(f"{_LAYER}.{block}.experts.gate_up_proj", halves, canonical=False),
        tensor(f"{_LAYER}.{block}.experts.down_proj", f"{experts}.down_proj", "fused_down", canonical=False),
    )
