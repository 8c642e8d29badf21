"""What a training run is: the model's shape, the optimiser's schedule, the checkpoints. No JAX, no Hydra."""

from dataclasses import dataclass, field

from moejax.core.config import check_positive
from moejax.core.errors import ConfigError
from moejax.text.corpus import HELD_OUT_FRACTION

MIN_VOCAB_SIZE = 259
"""256 bytes and three special tokens."""


@dataclass(frozen=True)
class TrainModelConfig:
    """Shape of the decoder to train, in Qwen3-MoE's terms (Hugging Face field names).

    The defaults make 4.4 M parameters with a vocabulary of 2048, 8.9 MB in bfloat16. Widths are powers of
    two, so that quantization groups of up to 128 and GPU tiles divide them.
    """

    hidden_size: int = 128
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings",
        ):  # fmt: skip
            check_positive(f"model.{name}", getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" model.num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"model.num_experts_per_tok {self.num_experts_per_tok} exceeds"
                f" model.num_experts {self.num_experts}"
            )
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"model.{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class TrainConfig:
    """A training run: AdamW, linear warm-up, then cosine decay to `min_lr_ratio` of the peak at the last
    step.

    Attributes:
        model: shape of the decoder.
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
    vocab_size: int = 2048
    held_out_fraction: float = HELD_OUT_FRACTION
    steps: int = 2400
    batch_size: int = 16
    seq_len: int = 256
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.5
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    load_balance_coef: float = 0.01
    router_z_coef: float = 0.001
    capacity_factor: float = 1.25
    token_noise: float = 0.1
    log_every: int = 10
    eval_every: int = 200
    checkpoint_every: int = 200
    keep: int = 2
    checkpoint_dir: str = "outputs/checkpoints/train"
    resume: bool = True
    export_dir: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "log_every", "eval_every", "checkpoint_every", "keep"):
            check_positive(name, getattr(self, name))
        if self.vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size must be at least {MIN_VOCAB_SIZE}, a byte-level BPE's bytes and special tokens,"
                f" got {self.vocab_size}"
            )
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigError(
                f"warmup_steps must be at least 0 and below steps ({self.steps}), got {self.warmup_steps}"
            )
        if self.seq_len > self.model.max_position_embeddings:
            raise ConfigError(
                f"seq_len {self.seq_len} exceeds"
                f" model.max_position_embeddings {self.model.max_position_embeddings}"
            )
        for name in ("learning_rate", "grad_clip", "capacity_factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("weight_decay", "load_balance_coef", "router_z_coef", "seed"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio must be between 0 and 1, got {self.min_lr_ratio}")
        for name in ("beta1", "beta2", "token_noise"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 < self.held_out_fraction < 1:
            raise ConfigError(
                f"held_out_fraction must be between 0 and 1, exclusive, got {self.held_out_fraction}"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len
