"""Records of the engine's steps, one by one and in sum. No JAX here."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RebalanceEvent:
    """One decision of whether experts move (`engine.rebalance`).

    Attributes:
        step, time: the step that it followed, and when it began, `time.perf_counter()` seconds.
        reason: "moved", or why nothing was.
        before, after: load of the heaviest device over the mean, mean over layers; None: not looked at.
        replicated, removed: replicas that experts got and lost, over all layers.
        bytes_moved, seconds: weights that went to other devices, and the time that all of it took.
    """

    step: int
    time: float
    reason: str
    before: float | None = None
    after: float | None = None
    replicated: int = 0
    removed: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step.

    Attributes:
        time: instant at which its tokens were seen to be there, `time.perf_counter()` seconds.
        seconds: since the previous step's tokens were there, or since this one was scheduled, if later.
        prefill_tokens, decode_tokens: real tokens in the batch; together what the step had to compute.
        padded_tokens: the bucket's tokens, what the step did compute (experts excepted: padding visits none).
        sequences: sequences in the batch.
        running: sequences admitted once it was scheduled.
        waiting: sequences queued when its scheduling began, those that it admits included.
        left_waiting: sequences still queued after it.
        compiled: something was compiled in its seconds.
        most_running, most_prefill: adaptive batching's limits when it was scheduled; 0 without.
        used_blocks, num_blocks: of the cache, when it was scheduled.
        stored_tokens: tokens whose keys and values the used blocks hold; a shared token counts once.
        drafted, accepted: draft tokens among the decode tokens, and those of them that were right and kept.
        preempted: sequences that lost their blocks while it was scheduled.
        rebalance: what was decided after it, if anything was to be.
    """

    time: float
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    padded_tokens: int
    sequences: int
    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    stored_tokens: int
    preempted: int
    left_waiting: int = 0
    rebalance: RebalanceEvent | None = None
    compiled: bool = False
    most_running: int = 0
    most_prefill: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return self.prefill_tokens + self.decode_tokens


@dataclass
class EngineStats:
    """Sums over all steps since the start or the last `reset`; `retried_requests` counts how often a request
    of a failed step was computed again (`engine.retries`), `rebalances` how often experts moved,
    `nonfinite_tokens` sampled tokens whose log-probability, where it was asked for, is none (NaN logits)."""

    steps: int = 0
    seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    padded_tokens: int = 0
    preemptions: int = 0
    max_running: int = 0
    max_waiting: int = 0
    max_used_blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    failed_steps: int = 0
    nonfinite_tokens: int = 0
    retried_requests: int = 0
    rebalances: int = 0
    rebalance_bytes: int = 0
    rebalance_seconds: float = 0.0
    last_rebalance: RebalanceEvent | None = field(default=None, repr=False)
    last: StepRecord | None = field(default=None, repr=False)

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.seconds += record.seconds
        self.prefill_tokens += record.prefill_tokens
        self.decode_tokens += record.decode_tokens
        self.padded_tokens += record.padded_tokens
        self.preemptions += record.preempted
        self.drafted += record.drafted
        self.accepted += record.accepted
        self.max_running = max(self.max_running, record.running)
        self.max_waiting = max(self.max_waiting, record.waiting)
        self.max_used_blocks = max(self.max_used_blocks, record.used_blocks)
        self.last = record
        if (event := record.rebalance) is not None:
            self.rebalances += event.reason == "moved"
            self.rebalance_bytes += event.bytes_moved
            self.rebalance_seconds += event.seconds
            self.last_rebalance = event

    @property
    def padding_waste(self) -> float:
        """Share of computed tokens that were padding, in [0, 1)."""
        real = self.prefill_tokens + self.decode_tokens
        return 1.0 - real / self.padded_tokens if self.padded_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for `LLM.stats()` and result files."""
        values = {name: value for name, value in asdict(self).items() if name != "last"}
        return {**values, "padding_waste": self.padding_waste}
