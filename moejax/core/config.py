"""The frozen dataclasses that describe a model, its placement and the engine.

They are plain values: they know nothing of Hydra, Hugging Face or JAX devices. A family's file under
`moejax/models/` builds a `ModelConfig` from a Hugging Face `config.json`.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from moejax.core.adapters import AdaptersConfig
from moejax.core.checked import (
    Checked,
    NonNegativeInt,
    NonNegativeNumber,
    PositiveInt,
    PositiveNumber,
    Share,
    TracePath,
)
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.rope import RopeConfig, yarn_mscale
from moejax.core.scheduling import (
    AdaptiveBatchingConfig,
    Buckets,
    KvPolicyConfig,
    PolicyName,
    RebalanceConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from moejax.core.tiers import ExpertsConfig, TiersConfig

QkNorm = Literal["none", "head", "projection", "rotated"]
NormKind = Literal["rms", "rms_unit_offset", "layer"]
RouterScores = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2"]
Batching = Literal["continuous", "static"]
Preemption = Literal["recompute", "swap", "auto"]
DType = Literal["float32", "bfloat16", "float16"]

Platform = Literal["auto", "cpu", "gpu"]
Kernels = Literal["auto", "xla", "pallas_triton"]
CacheKind = Literal["blocks", "window", "state"]

DTYPES: tuple[str, ...] = get_args(DType)
KERNELS = ("xla", "pallas_triton")

LAYER_LISTS = ("moe_layers", "sliding_windows", "linear_layers")
"""Fields of `ModelConfig` with a value for each layer."""


@dataclass(frozen=True)
class LatentConfig(Checked):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what keys and values are made of.

    Attributes:
        kv_rank: numbers of the latent that all heads' keys and values are projected from.
        rope_dim: numbers of the one key with rotary embedding that all heads share.
        nope_dim: numbers of each head's key, and query, without it.
        value_dim: numbers of each head's value.
        q_rank: numbers that queries are projected from; None: from the hidden state itself.
    """

    kv_rank: PositiveInt
    rope_dim: PositiveInt
    nope_dim: PositiveInt
    value_dim: PositiveInt
    q_rank: PositiveInt | None = None


@dataclass(frozen=True)
class RouterConfig(Checked):
    """How a router's scores become experts and weights.

    Attributes:
        scores: of the logits, over all experts.
        correction_bias: a vector is added to the scores where experts are chosen, not where they are weighted
            (arXiv 2408.15664).
        groups, top_groups: the experts lie in so many groups of equal size, and only those of a token's best
            `top_groups` can be chosen (DeepSeek-V2).
        group_score: a group's score: that of its best expert, or the sum of its two best.
        group_gate: groups are chosen by a gate of their own, and an expert's score is its group's probability
            times its own within the group (two levels; arXiv 1701.06538, appendix B).
        norm_min: the least that weights are divided by where they are renormalised.
        scaling: factor on the weights.
        tolerance: of "sparsemixer" (arXiv 2409.12136), which weighs a choice by its share among the experts
            close to it: half of the relative distance of logits that still counts as close.
        bias: a vector is added to the logits.
    """

    scores: RouterScores = "softmax"
    correction_bias: bool = False
    groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    group_score: GroupScore = "max"
    group_gate: bool = False
    norm_min: NonNegativeNumber = 0.0
    scaling: PositiveNumber = 1.0
    tolerance: PositiveNumber = 0.01
    bias: bool = False

    def groups_on(self, nodes: int) -> int | None:
        """Returns the groups of experts that a placement keeps together on a node, None where it need not:
        there are none, or they are not a multiple of the nodes."""
        return None if self.groups == 1 or self.groups % nodes else self.groups

    @property
    def has_kernel(self) -> bool:
        """Whether the GPU kernel for routers has this choice."""
        return not self.group_gate and self.scores != "sparsemixer"


@dataclass(frozen=True)
class NormedResidual(Checked):
    """Residuals taken after the norm (MiniMax-01, arXiv 2501.08313; factors as in arXiv 2203.00555): what
    goes on is alpha times the normed input and beta times the output.

    Attributes:
        attention, linear_attention, feed_forward: alpha and beta of these.
    """

    attention: tuple[float, float] = (1.0, 1.0)
    linear_attention: tuple[float, float] = (1.0, 1.0)
    feed_forward: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class ClampedSwiglu(Checked):
    """What experts make of gate and up: `(up + 1) · gate · sigmoid(alpha · gate)`, gate at most `limit`, up
    between it and its negative (gpt-oss, arXiv 2508.10925)."""

    limit: PositiveNumber = 7.0
    alpha: PositiveNumber = 1.702


def check_shape(
    heads: int, kv_heads: int, head_dim: int, experts: int, experts_per_tok: int, section: str = ""
) -> None:
    """Raises `ConfigError` where a decoder's sizes do not go together; `section` stands before their keys."""
    if heads % kv_heads:
        raise ConfigError(
            f"{section}num_attention_heads {heads} is not a multiple of "
            f"{section}num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"{section}head_dim must be even for rotary embedding, got {head_dim}")
    if experts_per_tok > experts:
        raise ConfigError(
            f"{section}num_experts_per_tok {experts_per_tok} exceeds {section}num_experts {experts}"
        )


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Everything that determines a decoder's computation and parameter shapes.

    `moe_layers[l]` says whether layer l holds experts or a dense MLP; `sliding_windows[l]` is layer l's
    attention window in tokens (a query at position p sees keys in (p - window, p]) or None for full
    causal attention. `norm_topk_prob` renormalises the chosen experts' probabilities to sum to one.
    `shared_expert_gate` scales the shared expert by a sigmoid. `mtp_layers` counts layers of a checkpoint
    after the last one, which predict further tokens (DeepSeek-V3, arXiv 2412.19437, §2.2); no part of it
    (`moejax.models.mtp`).
    A model without experts has a single one, in none of its layers.

    `norm` is the kind of all norms; "rms_unit_offset" scales by one plus its weight (Gemma), "layer"
    subtracts the mean and has a bias (arXiv 1607.06450). With `post_norms` the outputs of attention and
    feed-forward are normalised, too, before they are added.
    `residual_multiplier` scales these outputs, `embedding_multiplier` the embeddings, and
    `attention_multiplier` is the factor on q·k (None: one over the root of `head_dim`). Logits are divided by
    `logits_scaling` and bounded as c·tanh(logits / c) by `logits_softcap`. `local_rope` is for layers with a
    window; None: `rope` is for all.

    With `expert_bias` every expert's three projections have biases; `expert_swiglu` stands in place of
    `hidden_act(gate) · up` in routed experts. With `attention_sinks` every query head has a learned logit in
    the softmax, without a value (arXiv 2309.17453).

    `linear_layers[l]` says whether layer l has linear attention (lightning attention, arXiv 2401.04658), with
    a state of fixed size a sequence, `[num_heads, head_dim, head_dim]`, and no keys and values; () where none
    has. With `normed_residual` residuals are taken after the norm.

    With `latent` attention `num_kv_heads` is 1, the latent's, and `head_dim` is that of a head's query and
    key, with and without rotary embedding.
    """

    family: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    moe_layers: tuple[bool, ...]
    sliding_windows: tuple[PositiveInt | None, ...]
    max_position_embeddings: PositiveInt
    norm_topk_prob: bool = True
    router: RouterConfig = field(default_factory=RouterConfig)
    shared_expert_intermediate_size: NonNegativeInt = 0
    shared_expert_gate: bool = True
    mtp_layers: NonNegativeInt = 0
    expert_bias: bool = False
    expert_swiglu: ClampedSwiglu | None = None
    attention_sinks: bool = False
    latent: LatentConfig | None = None
    linear_layers: tuple[bool, ...] = ()
    normed_residual: NormedResidual | None = None
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    clip_qkv: PositiveNumber | None = None
    attention_multiplier: PositiveNumber | None = None
    embedding_multiplier: PositiveNumber = 1.0
    residual_multiplier: PositiveNumber = 1.0
    logits_scaling: PositiveNumber = 1.0
    logits_softcap: PositiveNumber | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    norm: NormKind = "rms"
    post_norms: bool = False
    rms_norm_eps: PositiveNumber = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: DType = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, kv_heads = self.num_heads, self.num_kv_heads
        check_shape(heads, kv_heads, self.head_dim, self.num_experts, self.num_experts_per_tok)
        for name in LAYER_LISTS:
            if len(getattr(self, name)) != self.num_layers and (
                name != "linear_layers" or self.linear_layers
            ):
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries for num_hidden_layers {self.num_layers}"
                )
        share, rotated = self.rope.partial_rotary_factor, self.rotary_dim
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor {share:g} of head_dim {self.head_dim} rotates {rotated} dimensions "
                "(an even number of them from 2 to head_dim can be)"
            )
        if (factors := len(self.rope.short_factor)) not in (0, rotated // 2):
            raise ConfigError(
                f"short_factor and long_factor have {factors} numbers; {rotated // 2} pairs of a head rotate"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        """Raises `ConfigError` where experts, groups and the choice among them do not go together."""
        experts, groups, top = self.num_experts, self.router.groups, self.router.top_groups
        if experts % groups:
            raise ConfigError(f"num_experts {experts} is not a multiple of n_group {groups}")
        if top > groups:
            raise ConfigError(f"topk_group {top} exceeds n_group {groups}")
        if self.num_experts_per_tok > top * (experts // groups):
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the {top * (experts // groups)} "
                f"experts of topk_group {top} groups"
            )
        if self.router.group_score == "top2" and groups > 1 and experts // groups < 2:
            raise ConfigError(f"n_group {groups} leaves fewer than 2 of num_experts {experts} to a group")

    def replace(self, **changes: object) -> "ModelConfig":
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def attention_scale(self) -> float:
        """Factor on q·k before the softmax."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        scale = 1.0 / math.sqrt(self.head_dim)
        if self.latent is not None and self.rope.kind != "default" and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale

    @property
    def plain_residual(self) -> bool:
        """Whether outputs of attention and feed-forward are added as they are, so that a kernel may do it."""
        return self.residual_multiplier == 1.0 and not self.post_norms and self.normed_residual is None

    @property
    def paged_layers(self) -> tuple[bool, ...]:
        """Whether each layer keeps keys and values in blocks; the others keep a state a sequence."""
        return tuple(not linear for linear in self.linear_layers) or (True,) * self.num_layers

    def cache_kinds(self, window: int | None) -> tuple[CacheKind, ...]:
        """Returns what each layer keeps of a sequence: "blocks" of all its tokens, those of a "window" that
        is at most `window` tokens (None: no layer does), or a "state" of fixed size."""

        def kind(layer: int) -> CacheKind:
            mine = self.sliding_windows[layer]
            if not self.paged_layers[layer]:
                return "state"
            return "window" if window is not None and mine is not None and mine <= window else "blocks"

        return tuple(map(kind, range(self.num_layers)))

    def of_layers(self, layers: Sequence[int]) -> "ModelConfig":
        """Returns the configuration with these layers only."""
        lists = {name: getattr(self, name) for name in LAYER_LISTS}
        kept = {name: tuple(each[layer] for layer in layers) for name, each in lists.items() if each}
        return self.replace(num_layers=len(layers), **kept)

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head's query and key that are rotated, the first ones."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Numbers of a token's key, of one key/value head, in the cache."""
        return self.head_dim if self.latent is None else self.latent.rope_dim + self.latent.kv_rank

    @property
    def kv_vectors(self) -> int:
        """Vectors of a token and key/value head in the cache: a key and a value, or a latent that is both."""
        return 2 if self.latent is None else 1


@dataclass(frozen=True)
class PrefixCacheConfig(Checked, section="engine.prefix_cache"):
    """Memory of the keys and values of prompts, and of outputs, that later requests begin with.

    Attributes:
        enabled: look prompts up, and remember what was computed.
        policy: what is given up first: the least recently used ("lru"), the least often used ("lfu"), as
            "lru" but what was used again after the others ("slru"), the oldest ("fifo"), or the end of the
            longest prefix ("size"). Whatever it is, leaves go before what they continue.
        match: "tokens" finds the longest common prefix in a tree; "blocks", its plain twin, whole blocks by
            their hashes.
        share: who finds a prefix: "all", or requests of the same "tenant" alone, so that no one can tell by
            the time to the first token what another has asked.
        place: where a prefix waits that nobody uses: in blocks of the cache ("device"), or in the host's
            memory ("host"), from where it is copied back. "auto" is "host" on CPU, where a step reads the
            cache up to the highest block in use, and with `disk_gb`, and "device" elsewhere.
        host_memory_gb: memory for "host" in units of 10^9 bytes.
        disk_gb: file below that memory in units of 10^9 bytes, in `engine.tiers.disk_dir`, for what was used
            the longest ago; 0: none.
        load: "always" loads what is found on the host or on disk; "auto" does where that is expected to take
            less time than to compute it, by what steps and reads have taken.
        max_age_s: seconds after which what was not used is not found any more; None: never.
    """

    enabled: bool = False
    policy: Literal["lru", "lfu", "slru", "fifo", "size"] = "lru"
    match: Literal["tokens", "blocks"] = "tokens"
    share: Literal["all", "tenant"] = "all"
    place: Literal["auto", "device", "host"] = "auto"
    host_memory_gb: PositiveNumber = 1.0
    disk_gb: NonNegativeNumber = 0.0
    load: Literal["always", "auto"] = "always"
    max_age_s: PositiveNumber | None = None


@dataclass(frozen=True)
class StaticBatchingConfig(Checked, section="engine.static_batching"):
    """When static batching takes its next batch, once the last one is over.

    Attributes:
        batch_size: samples that it waits for; None: as many as run at a time.
        max_wait_s: seconds that the oldest waits for these at most; 0: it takes whoever is there.
    """

    batch_size: PositiveInt | None = None
    max_wait_s: NonNegativeNumber = 0.0


@dataclass(frozen=True)
class EngineConfig(Checked, section="engine"):
    """Limits and choices of the engine. Lengths in tokens.

    Attributes:
        max_model_len: longest prompt and output together; None takes the model's own.
        batching: "continuous", or "static" as its baseline (padded, waits for the whole batch).
        static_batching: see `StaticBatchingConfig`.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens that one step computes; longer prompts are cut into chunks.
        policy: who is admitted first and preempted last, see `moejax.engine.scheduling.policies`.
        scheduling: what policies go by, see `SchedulingConfig`.
        rebalance: when experts are placed anew while it runs, see `RebalanceConfig`.
        adapters: see `AdaptersConfig`.
        adaptive_batching: limits below these two that follow the steps' time, see `AdaptiveBatchingConfig`.
        speculation: see `SpeculationConfig`.
        experts, tiers: see `ExpertsConfig` and `TiersConfig`.
        preemption: what becomes of a sequence that loses its place: all of it is computed again
            ("recompute"), its blocks wait in the host's memory ("swap"), or what takes less time ("auto").
        swap_memory_gb: host memory for these blocks in units of 10^9 bytes; where it is full, they are given
            up and computed again.
        swap_disk_gb: file below that memory in units of 10^9 bytes, as `prefix_cache.disk_gb`.
        block_size: tokens in a block of the key/value cache.
        num_blocks: blocks of the cache; None: as many as `max_num_seqs` of the longest sequences need, within
            `kv_cache_memory_gb`.
        initial_blocks: the cache begins with these, to the end of a segment (`moejax.cache.segments`), grows
            to the next end instead of having anyone wait or lose its place, and shrinks when nothing runs;
            None: all are there from the start.
        compact_cache: blocks in use move down to free ones, once they lie twice as high as there are of
            them: a step of XLA's reads the cache up to the highest block in use.
        kv_cache_memory_gb: memory for the cache in units of 10^9 bytes; None: 2 on CPU (taken as it is
            needed), elsewhere 80 % of what the device has free after the weights.
        deterministic: "tiles" computes steps in tiles of `tile_tokens` tokens each, all by one program in
            which no token's numbers depend on the others: log-probabilities are equal to the bit however
            requests were batched, chunked, preempted or found computed, on one machine with one layout and
            tile. "verified" does so for requests with `SamplingParams.deterministic` alone, after the others'
            steps have guessed their tokens: those that tiles contradict are dropped (arXiv 2601.17768).
        tile_tokens: tokens of such a tile. Few waste little where few sequences run, many read the weights
            less often.
        verify_every: tokens of a sequence that are verified at a time under "verified", and told then; 1
            guesses none, and computes them in tiles at once.
        verified_share: of the requests that leave `deterministic` open, the share, evenly spread, that
            "verified" verifies all the same.
        overlap: schedule and launch the next step before the tokens of the last are read.
        retries: how often a request of a failed step is computed again, instead of ending with "error".
        strict_compile: a compilation after warm-up fails the step instead of only being recorded.
        seq_buckets, token_buckets, block_buckets: the numbers of sequences, of prompt tokens and of cache
            blocks that steps are compiled for, each padded up to the next; None: powers of two.
        prefix_cache: see `PrefixCacheConfig`.
        kv_policy: see `KvPolicyConfig`.
        window_cache: what layers with a sliding window keep: "window", its tokens only, in blocks of their
            own; "full", all tokens, of which the mask leaves the window. "auto" takes the first where it goes
            with the rest.
        kernels: what attention, norms, router and (where `moe` leaves it open) the experts' products run on:
            "xla", or "pallas_triton", the GPU kernels of `pallas_kernels` (interpreted, and slow, on CPU).
            "auto" takes the kernels on a GPU and XLA elsewhere.
        moe: execution of the expert layers.
        autotune: where `moe` leaves the experts' products and layout open on CPU: "rules", "cached" for what
            was measured on this machine before, else the rules, "measure" to time what was not.
        autotune_budget_s: seconds that measuring may take, compilation included.
        autotune_choices: the folder of a run, whose choices are taken; None: see `autotune`.
        platform: "auto", "cpu" or "gpu".
        memory_check: whether what cannot fit into a device is refused before its weights are read. "auto":
            where the largest step decides, and in dry runs, it is compiled to know what it needs; "formula":
            it never is; "off": nothing is refused.
        compile_cache: keep compiled programs on disk.
        capture_routing: keep every computed token's experts and their weights, see `LLM.routing_capture`.
        replay_routing: a routing trace, or the folder of a run that has one, whose experts and weights are
            forced on the requests, see `LLM.replay_routing`; None: the routers choose.
    """

    max_model_len: PositiveInt | None = None
    batching: Batching = "continuous"
    static_batching: StaticBatchingConfig = field(default_factory=StaticBatchingConfig)
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 2048
    policy: PolicyName = "fcfs"
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    rebalance: RebalanceConfig = field(default_factory=RebalanceConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    adaptive_batching: AdaptiveBatchingConfig = field(default_factory=AdaptiveBatchingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    preemption: Preemption = "recompute"
    swap_memory_gb: PositiveNumber = 1.0
    swap_disk_gb: NonNegativeNumber = 0.0
    block_size: PositiveInt = 32
    num_blocks: PositiveInt | None = None
    initial_blocks: PositiveInt | None = None
    compact_cache: bool = False
    kv_cache_memory_gb: PositiveNumber | None = None
    deterministic: Literal["none", "tiles", "verified"] = "none"
    tile_tokens: PositiveInt = 8
    verify_every: PositiveInt = 16
    verified_share: Share = 0.0
    overlap: bool = True
    retries: NonNegativeInt = 0
    strict_compile: bool = False
    seq_buckets: Buckets | None = None
    token_buckets: Buckets | None = None
    block_buckets: Buckets | None = None
    prefix_cache: PrefixCacheConfig = field(default_factory=PrefixCacheConfig)
    kv_policy: KvPolicyConfig = field(default_factory=KvPolicyConfig)
    window_cache: Literal["auto", "window", "full"] = "auto"
    kernels: Kernels = "auto"
    moe: MoeConfig = field(default_factory=MoeConfig)
    autotune: Literal["rules", "cached", "measure"] = "cached"
    autotune_budget_s: PositiveNumber = 60.0
    autotune_choices: str | None = None
    platform: Platform = "auto"
    memory_check: Literal["auto", "formula", "off"] = "auto"
    compile_cache: bool = True
    capture_routing: bool = False
    replay_routing: TracePath | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.static_batching.batch_size or 0) > self.max_num_seqs:
            raise ConfigError(
                f"engine.static_batching.batch_size {self.static_batching.batch_size} exceeds "
                f"engine.max_num_seqs {self.max_num_seqs}: so many never run at a time"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens {self.max_num_batched_tokens} is below engine.max_num_seqs "
                f"{self.max_num_seqs}: a step must hold one token of every running sequence"
            )
        if self.adaptive_batching.enabled and self.batching == "static":
            raise ConfigError(
                "engine.adaptive_batching.enabled=true does not go with engine.batching=static, whose "
                "batches stay as they are; use engine.batching=continuous"
            )
        if self.speculation.most and (self.batching == "static" or self.adaptive_batching.enabled):
            other = "batching=static" if self.batching == "static" else "adaptive_batching.enabled=true"
            raise ConfigError(
                f"engine.speculation.method={self.speculation.method} does not go with engine.{other}, which "
                "counts one row a sequence; use engine.speculation.method=none"
            )

        if (first := self.initial_blocks or 0) > (self.num_blocks or first):
            raise ConfigError(
                f"engine.initial_blocks={first} exceeds engine.num_blocks={self.num_blocks}, to which the "
                "cache grows; lower it, or raise engine.num_blocks"
            )
        if self.experts.resident is not None and self.tiers.device_gb is not None:
            raise ConfigError(
                "engine.experts.resident and engine.tiers.device_gb both say how many experts have a slot; "
                "leave one of them null"
            )

    @property
    def most_ahead(self) -> int:
        """Counts the most tokens that are computed of a sequence before they are known to be its."""
        return self.verify_every - 1 if self.deterministic == "verified" else self.speculation.most

    @property
    def steps_vary(self) -> bool:
        """Tells whether what is drafted, verified or measured meanwhile decides which steps a batch takes."""
        return self.adaptive_batching.enabled or self.most_ahead > 0 or self.deterministic == "verified"

    @property
    def experts_in_tiers(self) -> bool:
        """Tells whether not all experts, or not all layers, are to have a place on the device."""
        share, tiers = self.experts.resident, self.tiers
        asked = tiers.device_gb is not None or tiers.resident_layers is not None
        return asked or (share is not None and share < 1)

    @property
    def max_rows(self) -> int:
        """Most rows of a step that only decodes: one for each sequence and for each of its drafts."""
        most = self.max_num_seqs * (1 + self.speculation.most)
        return max(self.max_num_seqs, min(most, self.max_num_batched_tokens))
