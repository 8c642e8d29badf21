"""The frozen dataclasses that describe a model, its placement and the engine.

They are plain values: they know nothing of Hydra, Hugging Face or JAX devices. A family's file under
`moejax/models/` builds a `ModelConfig` from a Hugging Face `config.json`.
"""

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from moejax.core.errors import ConfigError, unknown

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
QkNorm = Literal["none", "head", "projection"]
MoeExecution = Literal["dense", "capacity", "grouped"]
ExpertLayout = Literal["auto", "edf", "efd"]
OverflowPolicy = Literal["drop", "reroute"]
Batching = Literal["continuous", "static"]
DType = Literal["float32", "bfloat16", "float16"]

DTYPES: tuple[str, ...] = get_args(DType)


def check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{key}: {unknown('value', str(value), choices)}")


def check_positive(key: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} must be an integer of at least 1, got {value!r}")


def check_number(key: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is a finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{key} must be a positive number, got {value!r}")


def check_bool(key: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be True or False, got {value!r}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its context extension.

    Sources: RoFormer (arXiv 2104.09864); linear position interpolation (arXiv 2306.15595); dynamic NTK;
    YaRN (arXiv 2309.00071); the Llama 3.1 model card's piecewise scaling. Field names follow
    Hugging Face's `rope_parameters`.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        check_choice("rope_type", self.kind, get_args(RopeKind))
        check_number("rope_theta", self.theta)
        if self.kind != "default":
            check_number("rope factor", self.factor)
        if self.kind in ("yarn", "llama3") and not self.original_max_position_embeddings:
            raise ConfigError(f"rope_type {self.kind!r} needs original_max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a decoder's computation and parameter shapes.

    `moe_layers[l]` says whether layer l holds experts or a dense MLP; `sliding_windows[l]` is layer l's
    attention window in tokens (a query at position p sees keys in (p - window, p]) or None for full
    causal attention. `norm_topk_prob` renormalises the chosen experts' probabilities to sum to one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int
    moe_layers: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]
    max_position_embeddings: int
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int = 0
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    clip_qkv: float | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: DType = "float32"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts",
            "num_experts_per_tok", "moe_intermediate_size", "intermediate_size", "max_position_embeddings",
        ):  # fmt: skip
            check_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}"
            )
        for name in ("moe_layers", "sliding_windows"):
            if len(getattr(self, name)) != self.num_layers:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries for num_hidden_layers {self.num_layers}"
                )
        for window in self.sliding_windows:
            if window is not None:
                check_positive("sliding_window", window)
        if self.shared_expert_intermediate_size != 0:
            check_positive("shared_expert_intermediate_size", self.shared_expert_intermediate_size)
        if self.clip_qkv is not None:
            check_number("clip_qkv", self.clip_qkv)
        check_number("rms_norm_eps", self.rms_norm_eps)
        check_choice("qk_norm", self.qk_norm, get_args(QkNorm))
        check_choice("dtype", self.dtype, DTYPES)

    def replace(self, **changes: object) -> "ModelConfig":
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def attention_scale(self) -> float:
        """Factor on q·k before the softmax."""
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class MoeConfig:
    """How the expert layers are executed; it changes speed, and with `capacity` also the result.

    `capacity_factor` c gives each expert room for ceil(c · T · k / E) of a batch's T·k assignments.
    `grouped_matmul` names the implementation of `grouped`'s products (`moejax.ops.dispatch`); `block_rows`
    fixes the height of "blocks_uniform"'s blocks (None: by the mean rows an expert gets).
    `expert_layout` is how the experts' matrices lie in memory: "edf" (gate and up `[E, D, F]`, down
    `[E, F, D]`) or "efd" (each transposed). "auto" is "edf" for a module of its own; `LLM` takes what is
    faster on its platform.
    """

    execution: MoeExecution = "grouped"
    capacity_factor: float = 1.25
    overflow: OverflowPolicy = "drop"
    block_rows: int | None = None
    grouped_matmul: str = "auto"
    expert_layout: ExpertLayout = "auto"

    def __post_init__(self) -> None:
        known = ("auto", "blocks_mixed", "blocks_uniform", "ragged_dot", "pallas_triton")
        check_choice("engine.moe.grouped_matmul", self.grouped_matmul, known)
        check_choice("engine.moe.expert_layout", self.expert_layout, get_args(ExpertLayout))
        check_choice("engine.moe.execution", self.execution, get_args(MoeExecution))
        check_choice("engine.moe.overflow", self.overflow, get_args(OverflowPolicy))
        check_number("engine.moe.capacity_factor", self.capacity_factor)
        if self.block_rows is not None:
            check_positive("engine.moe.block_rows", self.block_rows)
            if self.grouped_matmul == "blocks_mixed":
                raise ConfigError(
                    "engine.moe.block_rows fixes the height of all blocks, but grouped_matmul 'blocks_mixed' "
                    "takes it from each expert's rows: give one or the other"
                )


KERNELS = ("xla", "pallas_triton")


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of the engine. Lengths in tokens.

    Attributes:
        max_model_len: longest prompt and output together; None takes the model's own.
        batching: "continuous", or "static" as its baseline (padded, waits for the whole batch).
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens that one step computes; longer prompts are cut into chunks.
        policy: who is admitted first and preempted last, see `moejax.engine.scheduling.policy`.
        block_size: tokens in a block of the key/value cache.
        num_blocks: blocks of the cache; None: as many as `max_num_seqs` of the longest sequences need, within
            `kv_cache_memory_gb`.
        kv_cache_memory_gb: memory for the cache in units of 10^9 bytes; None: 2 on CPU (taken as it is
            needed), elsewhere 80 % of what the device has free after the weights.
        overlap: schedule and launch the next step before the tokens of the last are read.
        strict_compile: a compilation after warm-up fails the step instead of only being recorded.
        seq_buckets, token_buckets, block_buckets: the numbers of sequences, of prompt tokens and of cache
            blocks that steps are compiled for, each padded up to the next; None: powers of two.
        kernels: what attention, norms, router and (where `moe` leaves it open) the experts' products run on:
            "xla", or "pallas_triton", the GPU kernels of `pallas_kernels` (interpreted, and slow, on CPU).
            "auto" takes the kernels on a GPU and XLA elsewhere.
        moe: execution of the expert layers.
        platform: "auto", "cpu" or "gpu".
        compile_cache: keep compiled programs on disk.
        capture_routing: keep every computed token's experts and their weights, see `LLM.routing_capture`.
        replay_routing: a routing trace, or the folder of a run that has one, whose experts and weights are
            forced on the requests, see `LLM.replay_routing`; None: the routers choose.
    """

    max_model_len: int | None = None
    batching: Batching = "continuous"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    block_size: int = 32
    num_blocks: int | None = None
    kv_cache_memory_gb: float | None = None
    overlap: bool = True
    strict_compile: bool = False
    seq_buckets: list[int] | None = None
    token_buckets: list[int] | None = None
    block_buckets: list[int] | None = None
    kernels: str = "auto"
    moe: MoeConfig = field(default_factory=MoeConfig)
    platform: str = "auto"
    compile_cache: bool = True
    capture_routing: bool = False
    replay_routing: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "num_blocks"):
            if getattr(self, name) is not None:
                check_positive(f"engine.{name}", getattr(self, name))
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_positive(f"engine.{name}", getattr(self, name))
        if self.kv_cache_memory_gb is not None:
            check_number("engine.kv_cache_memory_gb", self.kv_cache_memory_gb)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens {self.max_num_batched_tokens} is below engine.max_num_seqs "
                f"{self.max_num_seqs}: a step must hold one token of every running sequence"
            )
        check_choice("engine.batching", self.batching, get_args(Batching))
        check_choice("engine.platform", self.platform, ("auto", "cpu", "gpu"))
        check_choice("engine.kernels", self.kernels, ("auto", *KERNELS))
        for name in ("capture_routing", "compile_cache", "overlap", "strict_compile"):
            check_bool(f"engine.{name}", getattr(self, name))
        if self.replay_routing is not None and not _is_path(self.replay_routing):
            raise ConfigError(
                "engine.replay_routing must be the path of a routing trace (.npz) or of a run's folder, got "
                f"{self.replay_routing!r}"
            )
        for name in ("seq_buckets", "token_buckets", "block_buckets"):
            if getattr(self, name) is not None:
                _check_buckets(f"engine.{name}", getattr(self, name))
        if not isinstance(self.moe, MoeConfig):
            raise ConfigError(f"engine.moe must be a MoeConfig, got {self.moe!r}")


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(str(value))


def _check_buckets(key: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is a list of rising positive integers."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(f"{key} must be a list of rising integers, such as [1,8,32], got {value!r}")
    for item in value:
        check_positive(f"{key}: each", item)
    if any(b <= a for a, b in itertools.pairwise(value)):
        raise ConfigError(f"{key} must rise, got {list(value)}")
