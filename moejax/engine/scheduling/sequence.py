"""One sample of one request as the scheduler sees it: tokens, progress, blocks. No JAX here."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from moejax.engine.requests.api import FinishReason, RequestOptions, SamplingParams


class State(Enum):
    """waiting: queued, owns nothing. promised: a fork whose root has not computed the prompt yet. running:
    owns a slot and blocks. finished: owns nothing, never again."""

    WAITING = "waiting"
    PROMISED = "promised"
    RUNNING = "running"
    FINISHED = "finished"


class Bias(NamedTuple):
    """A `value` to add to a token's logit: where the output ends with the tokens `after`, and while it has
    fewer than `until` tokens (None: always)."""

    token: int
    value: float
    after: tuple[int, ...] = ()
    until: int | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one sample. The scheduler alone changes it.

        tokens      p p p p p o o o          prompt and outputs known on the host
        pending                   1          sampled on the device, not read yet (overlapped loop)
        computed    |---------|              keys and values stored, or scheduled to be
        blocks      [ 0 ][ 7 ][ 3 ]          the cache blocks of positions 0, 1, …

    Attributes:
        order: rank by arrival; ties in a policy are broken by it.
        max_length: tokens at which it ends, prompt included, and `limit_reason` why there: "error" where the
            routing trace that it replays ends before its `max_tokens`.
        stop_ids: tokens that end it.
        seed: of its own random stream.
        forks: samples of the same prompt that share its blocks once the prompt is computed.
        score: whether it ends with its prompt, and no token is sampled.
        prompt_logprobs: likeliest tokens that steps report of each prompt token but the first; -1 where its
            log-probability is not wanted either.
        record: whether its steps should record expert counts.
        window_blocks: of layers with a sliding window, where these have their own; `cache.allocator.GONE` for
            those that the window has left behind.
        kept: what its attention says of its blocks (`moejax.engine.scheduling.eviction`); None: nobody asks.
        slot: row of the per-sequence device state, -1 while it does not run.
        group: data-parallel group that it belongs to.
        biases: what is added to its logits.
        mode: what its sampling needs of a step (`moejax.engine.step.sampler.SamplerMode`).
        verified: its tokens are told once tiles have computed them (`moejax.engine.scheduling.verification`).
        tentative: tokens that follow its own, to be verified, and whose keys and values, but for the last's,
            lie in its blocks; `guessed` more of them are on the device alone.
        constraint: what its tokens must be of (`moejax.engine.grammar`); None: anything.
        adapter: its LoRA adapter, which has a `slot` (`moejax.engine.adapters`); None: the model as it is.
        identity: what its keys and values depend on besides its tokens; None: they are its own, and neither
            remembered nor looked up (`moejax.cache.prefix`).
        not_looked_up: why it computes its whole prompt all the same; None: it need not.
        cached: tokens that it found computed when it was admitted last.
        options: what policies go by, with `arrival`, an instant of the policy's clock.
        charged: its tenant has been charged for the prompt.
        resumed: tokens that it had when it was admitted last.
        preempted_at: tokens that it had computed when it was preempted last.
        imported: its first tokens whose keys and values come with it from another engine, and are put into
            the blocks that it gets when it is admitted: `blocks_of_host`, an array `[n, …]` for each array of
            each layer's segments; None: whoever simulates computes nothing.
        on_release: called with it before its blocks are given up.
        swapped: slots of the host's store that have its blocks since (`moejax.engine.scheduling.swap`).
        routing: int64, of each position the row of the trace that is replayed; None where none is.
        finish_reason: why its last token ended it; None while it goes on, or if it was ended from outside.
        owner: whatever the engine wants to find again; the scheduler does not look at it.
    """

    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    max_length: int
    order: int
    seed: int = 0
    stop_ids: Collection[int] = frozenset()
    limit_reason: FinishReason = "length"
    forks: list["Sequence"] = field(default_factory=list)
    score: bool = False
    prompt_logprobs: int = -1
    record: bool = False
    biases: Collection[Bias] = ()
    mode: Any = None
    constraint: Any = None
    verified: bool = False
    tentative: list[int] = field(default_factory=list)
    guessed: int = 0
    adapter: Any = None
    identity: Hashable | None = None
    not_looked_up: str | None = None
    cached: int = 0
    options: RequestOptions = field(default_factory=RequestOptions)
    arrival: float = 0.0
    charged: bool = False
    resumed: int = 0
    preempted_at: int = 0
    imported: int = 0
    blocks_of_host: Any = None
    on_release: Any = None
    swapped: list[int] = field(default_factory=list)
    routing: Any = None
    owner: Any = None
    finish_reason: FinishReason | None = None
    state: State = State.WAITING
    pending: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    kept: Any = None
    slot: int = -1
    group: int = 0
    preemptions: int = 0

    @property
    def length(self) -> int:
        """Tokens it has, on host or device."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        """Output tokens it has, on host or device."""
        return len(self.tokens) + self.pending - self.prompt_len

    @property
    def samples(self) -> int:
        """Slots it needs to run: one for itself, one for each fork still to come."""
        return 1 + len(self.forks)

    def append(self, token: int) -> None:
        """Takes a token that was sampled. Tentative ones stay as long as they agree."""
        self.tokens.append(token)
        if self.tentative:
            self.tentative = self.tentative[1:] if self.tentative[0] == token else []

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.order} {self.state.value} {self.computed}/{self.length} of {self.max_length}>"
        )


def end_reason(sequence: Sequence) -> FinishReason | None:
    """Returns why a sequence ends with its newest token; None if it goes on."""
    if sequence.tokens[-1] in sequence.stop_ids:
        return "stop"
    return sequence.limit_reason if len(sequence.tokens) >= sequence.max_length else None


def needs_host(sequence: Sequence) -> bool:
    """Tells whether the host must read its newest token before another can be sampled."""
    if sequence.constraint is not None and sequence.constraint.needs_host:
        return sequence.pending + sequence.guessed > 0
    return sequence.verified and sequence.pending > 0


def decodes_next(sequence: Sequence) -> bool:
    """Tells whether one token is all it needs to sample the next. A prompt's last token alone counts too."""
    length = len(sequence.tokens) + sequence.pending
    if length - sequence.computed != 1 or sequence.computed == 0:
        return False
    return length < sequence.max_length and not sequence.forks and not sequence.score
