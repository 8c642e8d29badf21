"""What the engine goes by as it runs: classes of service, tenants, quotas; limits that move, and experts."""

import itertools
from dataclasses import dataclass, field
from typing import Annotated, Literal

from moejax.core.checked import (
    Checked,
    Must,
    NonNegativeInt,
    NonNegativeNumber,
    OpenShare,
    PositiveInt,
    PositiveNumber,
)
from moejax.core.errors import ConfigError

PolicyName = Literal["fcfs", "priority", "sjf", "edf", "slo", "fair", "lpm"]
Admission = Literal["queue", "refuse"]
Drafts = Literal["none", "ngram", "suffix", "forced", "self_experts", "self_layers", "draft", "mtp"]
MTP_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Families whose MTP layers are known (`moejax.models.mtp`)."""
Depth = Literal["fixed", "utility"]
Acceptance = Literal["coupled", "rejection"]
KvMethod = Literal["none", "window", "h2o", "snapkv"]
Buckets = Annotated[
    list[PositiveInt],
    Must(
        lambda sizes: sizes and all(b > a for a, b in itertools.pairwise(sizes)),
        "a list of rising integers, such as [1,8,32]",
    ),
]
AtLeastOne = Annotated[float, Must(lambda x: x >= 1, "a number of at least 1")]


@dataclass(frozen=True)
class SloClass(Checked, section="engine.scheduling.slo_classes"):
    """Objectives of a class of requests, in milliseconds; None asks nothing."""

    ttft_ms: PositiveNumber | None = None
    tpot_ms: PositiveNumber | None = None


@dataclass(frozen=True)
class Tenant(Checked, section="engine.scheduling.tenants"):
    """A tenant's share and quotas; limits are each data-parallel group's, as the engine's own are.

    Attributes:
        weight: share of the service under the policy "fair", relative to the other tenants'.
        tokens_per_s: prompt and output tokens a second, over time; None: any number.
        burst_tokens: tokens that it may be ahead of that rate.
        max_seqs: its sequences that run at a time; None: as many as the engine's.
        max_blocks: cache blocks that its running sequences may come to need; None: all.
        isolated: only its own requests find what the prefix cache has of its, whatever
            `engine.prefix_cache.share` says.
    """

    weight: PositiveNumber = 1.0
    tokens_per_s: PositiveNumber | None = None
    burst_tokens: PositiveInt = 4096
    max_seqs: PositiveInt | None = None
    max_blocks: PositiveInt | None = None
    isolated: bool = False

    @property
    def limited(self) -> bool:
        """Tells whether it has any quota."""
        return any(x is not None for x in (self.tokens_per_s, self.max_seqs, self.max_blocks))


def _classes() -> dict[str, SloClass]:
    return {
        "interactive": SloClass(ttft_ms=500.0, tpot_ms=50.0),
        "standard": SloClass(ttft_ms=2000.0, tpot_ms=100.0),
        "batch": SloClass(),
    }


@dataclass(frozen=True)
class SchedulingConfig(Checked, section="engine.scheduling"):
    """What policies go by, see `moejax.engine.scheduling.policies`.

    Attributes:
        ageing_s: seconds of waiting that make up for one class of priority, and after which "sjf" and "lpm"
            let a request go first; "edf" and "slo" take them as the deadline of requests that have none.
        quantum_tokens: output tokens that a sequence has had, since it was admitted, before another of a
            better class, or with an earlier deadline, may take its place.
        prompt_weight, output_weight: what a token counts as service under "fair".
        slo_classes: name → objectives; better classes first.
        tenants: name → weight and quotas. Tenants that are not named have weight 1 and no quota.
        admission: "queue" takes every request in; "refuse" turns one away whose class's time to the first
            token, or whose deadline, is earlier than its prompt is likely to be computed.
    """

    ageing_s: PositiveNumber = 30.0
    quantum_tokens: PositiveInt = 16
    prompt_weight: NonNegativeNumber = 1.0
    output_weight: PositiveNumber = 2.0
    slo_classes: dict[str, SloClass] = field(default_factory=_classes)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    admission: Admission = "queue"


@dataclass(frozen=True)
class RebalanceConfig(Checked, section="engine.rebalance"):
    """When a running engine moves experts by itself, see `moejax.moe.placement.adjust_placement`.

    Attributes:
        every_steps: steps from one decision to the next, and whose load it goes by; 0: none is taken.
        replicate_above: an expert gets a replica while each of its own has more than this times the mean load
            of its layer's experts.
        remove_below: the replica takes the slot of one with less than this times the mean. At most half of
            `replicate_above`, or what is left of two would be as loaded as one that gets another.
        min_gain: a layer is left as it is unless its heaviest device gets lighter by this share, and worked
            on until that device is within this share of the mean.
        cooldown_steps: steps after a move in which no other is made.
    """

    every_steps: NonNegativeInt = 0
    replicate_above: PositiveNumber = 1.5
    remove_below: PositiveNumber = 0.7
    min_gain: NonNegativeNumber = 0.1
    cooldown_steps: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.remove_below > self.replicate_above:
            raise ConfigError(
                f"{self._section}remove_below={self.remove_below:g} is more than half of "
                f"replicate_above={self.replicate_above:g}: replicas would come and go"
            )


@dataclass(frozen=True)
class AdaptiveBatchingConfig(Checked, section="engine.adaptive_batching"):
    """Live limits, see `moejax.engine.scheduling.adaptive`: how many sequences run, and how many prompt
    tokens a step computes beside their decodes, follow `target_itl_ms`. Off, both are fixed.

    Attributes:
        method: "buckets" goes to the next bucket; "aimd" increases by an addend and decreases by a factor;
            "fitted" predicts a step's time from its size and takes the largest within the target.
        target_itl_ms: mean inter-token latency in milliseconds that running requests should see: of the
            steps that compute the next token of any.
        slack: a step that computes prompts beside them may take so many times the target.
        sizes: numbers of sequences that steps are compiled for where `seq_buckets` does not say.
        start, start_tokens: sequences and prompt tokens at first, down to a bucket.
        history: steps, the newest, whose mean is compared with the target.
        least: steps in a limit's own bucket before it moves.
        upper, lower: a limit goes down above so many times the target, and up below.
        longest: a step counts as at most so many times the target, lest one slow moment decide.
        increase: what "aimd" adds, as a share of the largest bucket.
        decrease: by what "aimd" multiplies.
        forgetting: weight of the step before, relative to the newest one's, under "fitted".
    """

    enabled: bool = False
    method: Literal["buckets", "aimd", "fitted"] = "fitted"
    target_itl_ms: PositiveNumber = 50.0
    slack: AtLeastOne = 2.0
    sizes: Buckets = field(default_factory=lambda: [1, 4, 16, 64, 256])
    start: PositiveInt = 16
    start_tokens: PositiveInt = 128
    history: PositiveInt = 100
    least: PositiveInt = 10
    upper: AtLeastOne = 1.2
    lower: OpenShare = 0.8
    longest: AtLeastOne = 3.0
    increase: OpenShare = 0.1
    decrease: OpenShare = 0.5
    forgetting: OpenShare = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("history", "least"), ("longest", "upper")):
            if (value := getattr(self, name)) < (other := getattr(self, least)):
                text = f"{name}={value} is below {least}={other}; raise it or lower {least}"
                raise ConfigError(f"engine.adaptive_batching.{text}")


@dataclass(frozen=True)
class KvPolicyConfig(Checked, section="engine.kv_policy"):
    """What a sequence keeps of its keys and values, see `moejax.engine.scheduling.eviction`; lengths in
    tokens.

    Attributes:
        method: "none" keeps all. "window" the first `sinks` and the last `recent` (StreamingLLM, arXiv
            2309.17453). "h2o" frees the block that got the least attention so far whenever a sequence has
            more than `budget` (arXiv 2306.14048). "snapkv" has each head of each layer keep, once the prompt
            is computed, the keys that its last `observe` tokens attended to most, so that `budget` tokens are
            left of it (arXiv 2404.14469).
        sinks: first tokens that are kept; under "h2o" and "snapkv" the blocks that hold them.
        recent: last tokens that are kept, likewise.
        budget: what "h2o" and "snapkv" keep in whole blocks, `sinks` and `recent` included.
        observe: last tokens of a prompt whose attention "snapkv" goes by.
        pooling: keys side by side that "snapkv" judges by the most that one of them got.
    """

    method: KvMethod = "none"
    sinks: NonNegativeInt = 4
    recent: PositiveInt = 256
    budget: PositiveInt = 512
    observe: PositiveInt = 32
    pooling: PositiveInt = 7

    @property
    def weighs(self) -> bool:
        """Tells whether the host judges blocks by the attention that they get."""
        return self.method == "h2o"

    @property
    def by_head(self) -> bool:
        """Tells whether heads keep keys of their own, which the device chooses."""
        return self.method == "snapkv"

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last tokens that a query of "window" sees; None under other methods."""
        return (self.sinks, self.recent) if self.method == "window" else None


@dataclass(frozen=True)
class SpeculationConfig(Checked, section="engine.speculation"):
    """Speculative decoding (arXiv 2211.17192): drafted tokens are computed in the step that verifies them,
    and those that the model samples itself are kept; see `moejax.engine.scheduling.speculation`.

    Attributes:
        method: where drafts come from. "ngram" repeats what followed the newest tokens where the same
            sequence had them before (prompt lookup decoding); "suffix" what followed them most often, in the
            sequence and in what the engine has put out (SuffixDecoding, arXiv 2411.04975); "forced" what the
            request's grammar leaves no choice of (`SamplingParams.structured_outputs`). The model itself
            drafts token by token on its own cache with "self_experts", sending each to fewer experts, and
            with "self_layers", leaving out its last layers (LayerSkip, arXiv 2404.16710). With "draft"
            another model does, whose cache follows the model's, and with "mtp" the layer that the checkpoint
            has for it after its last one, see `moejax.models.mtp`; "none" drafts nothing.
        k: most draft tokens of a sequence in a step.
        depth: how many of them are computed: "fixed" all, "utility" as many as make decoding fastest, none at
            all where that is faster, by what was right before and by what steps take; see
            `moejax.engine.scheduling.utility`.
        acceptance: "coupled" keeps a draft that is the token that the engine would sample without drafts, so
            that tokens are the same at every temperature; "rejection" keeps one with the probability that
            the model gives it, and else samples one of the others: tokens of the same law, and more drafts
            are kept where the temperature is high. Greedy requests are the same under both.
        min_ngram, max_ngram: newest tokens that must have stood together before, and the most that "ngram"
            compares.
        experts: experts that "self_experts" sends a token to; None: half of the model's.
        layers: first layers that "self_layers" runs; None: half of the model's.
        draft: the model of "draft", a folder or a shipped model's name, of any family with the same
            vocabulary. It has the model's dtype, devices and blocks, and random weights where the model has.
    """

    method: Drafts = "none"
    k: PositiveInt = 4
    depth: Depth = "fixed"
    acceptance: Acceptance = "coupled"
    min_ngram: PositiveInt = 2
    max_ngram: PositiveInt = 4
    experts: PositiveInt | None = None
    layers: PositiveInt | None = None
    draft: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_ngram < self.min_ngram:
            raise ConfigError(
                f"{self._section}max_ngram={self.max_ngram} is below min_ngram={self.min_ngram}; raise it"
            )
        if self.method == "draft" and not self.draft:
            raise ConfigError(
                f"{self._section}method=draft needs a model; name its folder, or a shipped one, in "
                f"{self._section}draft"
            )

    @property
    def most(self) -> int:
        """Most draft tokens of a sequence in a step; 0 without a method."""
        return 0 if self.method == "none" else self.k

    @property
    def on_device(self) -> bool:
        """Tells whether a model drafts, and the host learns of its drafts when they are verified."""
        return self.method in ("self_experts", "self_layers", "draft", "mtp")
