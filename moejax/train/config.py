"""A training run's configuration: model shape, optimiser schedule, checkpoints. No JAX, no Hydra."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from moejax.core.adapters import AdaptedMatrices
from moejax.core.checked import (
    Checked,
    Must,
    Name,
    NonNegativeInt,
    NonNegativeNumber,
    OpenShare,
    PositiveInt,
    PositiveNumber,
    Share,
    at_least,
)
from moejax.core.config import check_shape
from moejax.core.errors import ConfigError
from moejax.text.corpus import HELD_OUT_FRACTION

WEIGHT_DTYPE = "bfloat16"
"""Dtype of the exported weights."""

MIN_VOCAB_SIZE = 259
"""256 bytes and three special tokens."""

ShareBelowOne = Annotated[float, Must(lambda x: 0 <= x < 1, "a number in [0, 1)")]


@dataclass(frozen=True)
class TrainModelConfig(Checked, section="model"):
    """Shape of the decoder to train, in Qwen3-MoE's terms (Hugging Face field names).

    The defaults make 4.4 M parameters with a vocabulary of 2048, 8.9 MB in bfloat16. Widths are powers of
    two, so that quantization groups of up to 128 and GPU tiles divide them.
    """

    hidden_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 5
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    num_experts: PositiveInt = 16
    num_experts_per_tok: PositiveInt = 4
    moe_intermediate_size: PositiveInt = 128
    max_position_embeddings: PositiveInt = 2048
    rope_theta: PositiveNumber = 10_000.0
    rms_norm_eps: PositiveNumber = 1e-6
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = True
    initializer_range: PositiveNumber = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        check_shape(heads, kv_heads, self.head_dim, self.num_experts, self.num_experts_per_tok, "model.")


@dataclass(frozen=True)
class TrainAdapterConfig(Checked, section="adapter"):
    """A LoRA adapter (Hu et al., arXiv 2106.09685) to be trained beside a model's frozen weights.

    Attributes:
        rank: of all its matrices; 0: no adapter, but a whole model is trained.
        base: a shipped model's name, or a Hugging Face directory; its shape and tokenizer count, and neither
            `model` nor `vocab_size`.
        targets: the matrices that it changes, as in `engine.adapters.targets`.
    """

    rank: NonNegativeInt = 0
    base: Name = "tiny"
    targets: list[AdaptedMatrices] = field(default_factory=lambda: ["attention", "mlp", "router", "experts"])


@dataclass(frozen=True)
class TrainConfig(Checked):
    """A training run: AdamW, linear warm-up, then cosine decay to `min_lr_ratio` of the peak at the last
    step.

    Attributes:
        model: shape of the decoder.
        adapter: trained instead of a model, where it has a rank.
        documents: regular expression; only documents whose names have it count, such as `^topic:`.
        vocab_size: entries of the byte-level BPE that is trained on the text.
        held_out_fraction: share of the documents that are never trained on.
        steps: optimiser steps; each sees batch_size sequences of seq_len tokens.
        learning_rate: peak, reached in step warmup_steps.
        weight_decay: of matrices, not of norms (AdamW, arXiv 1711.05101).
        load_balance_coef: weight of the load-balance loss (Switch Transformer, arXiv 2101.03961, eq. 4).
        router_z_coef: weight of the router z-loss (ST-MoE, arXiv 2202.08906, eq. 5).
        capacity_factor: room of each expert while training, in even shares; what overflows is dropped, and
            counted. Evaluation drops nothing.
        token_noise: share of the input tokens that are replaced by random ones while training: a
            regulariser for text that is seen many times (arXiv 1703.02573).
        grad_clip: largest global norm of the gradient.
        log_every, eval_every, checkpoint_every: in steps.
        keep: newest checkpoints kept.
        checkpoint_dir: where checkpoints go; a fixed place, so that a second start finds the first one's.
        resume: go on from the newest checkpoint in checkpoint_dir; False starts afresh.
        export_dir: Hugging Face directory written at the end; None takes `model/` in the run's output folder.
        seed: of the initial weights and the order of the text.
    """

    model: TrainModelConfig = field(default_factory=TrainModelConfig)
    adapter: TrainAdapterConfig = field(default_factory=TrainAdapterConfig)
    documents: str = ""
    vocab_size: Annotated[int, at_least(MIN_VOCAB_SIZE, "a byte-level BPE's bytes and special tokens")] = 2048
    held_out_fraction: OpenShare = HELD_OUT_FRACTION
    steps: PositiveInt = 2400
    batch_size: PositiveInt = 16
    seq_len: PositiveInt = 256
    learning_rate: PositiveNumber = 3e-3
    warmup_steps: NonNegativeInt = 100
    min_lr_ratio: Share = 0.1
    weight_decay: NonNegativeNumber = 0.5
    beta1: ShareBelowOne = 0.9
    beta2: ShareBelowOne = 0.95
    grad_clip: PositiveNumber = 1.0
    load_balance_coef: NonNegativeNumber = 0.01
    router_z_coef: NonNegativeNumber = 0.001
    capacity_factor: PositiveNumber = 1.25
    token_noise: ShareBelowOne = 0.1
    log_every: PositiveInt = 10
    eval_every: PositiveInt = 200
    checkpoint_every: PositiveInt = 200
    keep: PositiveInt = 2
    checkpoint_dir: str = "outputs/checkpoints/train"
    resume: bool = True
    export_dir: str | None = None
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                f"warmup_steps must be at least 0 and below steps ({self.steps}), got {self.warmup_steps}"
            )
        try:
            re.compile(self.documents)
        except re.error as error:
            raise ConfigError(f"documents: {self.documents!r} is no regular expression: {error}") from None
        if self.seq_len > self.model.max_position_embeddings:
            raise ConfigError(
                f"seq_len {self.seq_len} exceeds"
                f" model.max_position_embeddings {self.model.max_position_embeddings}"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len
