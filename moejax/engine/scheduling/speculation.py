"""Speculative decoding as the host sees it: drafts, their rows of a step, and which were right. No JAX here.

    tokens       p p o o                 known on the host
    rows               o d d d           one computes the newest token, one each of its drafts
    sampled            d d x .           kept while the row before sampled the draft: here three tokens
    tokens       p p o o d d x           and the fourth row's key and value are written over by the next step

The sampler's noise depends on a request's seed and number of tokens alone, so that a row whose draft is right
samples what plain decoding would (Gumbel coupling, arXiv 2408.07978): tokens are the same at every
temperature, however many drafts were right. With `acceptance=rejection` a row samples
the next row's draft with the probability that the model gives it (`moejax.engine.step.sampler.draw_or_keep`);
what is kept is decided in the same way.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import cycle, islice, takewhile
from typing import Protocol

from moejax.cache.allocator import BlockAllocator, OutOfBlocks, WindowAllocator
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError, refuse
from moejax.core.parallel import ParallelConfig
from moejax.core.scheduling import MTP_FAMILIES, SpeculationConfig
from moejax.engine.scheduling.plan import UNKNOWN, Draft, StepPlan
from moejax.engine.scheduling.sequence import Sequence, State
from moejax.engine.scheduling.utility import LONGEST_PAUSE, Judged, Utility

PLACES = 32
"""Earlier places of a sequence's newest tokens that a proposer looks at, the newest ones."""

LONGEST_MATCH = 32
"""Tokens before two places that "suffix" compares at most."""

REMEMBERED = 1 << 18
"""Output tokens after which "suffix" begins to forget the oldest."""

LEAST_SHARE = 0.1
"""Share of a match's places whose next tokens must agree, for "suffix" to draft them (arXiv 2411.04975)."""


class Proposer(Protocol):
    """Drafts the continuation of sequences."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Returns at most `most` tokens that may follow the sequence's, which are all known."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Takes note that a sequence has ended."""
        return

    def forget(self) -> None:
        """Forgets the sequences that have ended."""
        return


class History:
    """Tokens, and where each run of `least` of them ended, so that the newest are found among the others."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.tokens: list[int] = []
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) >= self.least:
                self._ends[tuple(self.tokens[-self.least :])].append(len(self.tokens))

    def matches(self, newest: Items[int], longest: int) -> tuple[int, list[int]]:
        """Returns how many of the `newest` tokens stood together before, up to `longest`, and the places
        after those of them that some token follows, the oldest first."""
        best, places = 0, list[int]()
        last = list(newest[-longest:])
        for end in self._ends.get(tuple(newest[-self.least :]), ())[-PLACES - 1 :]:
            if end == len(self.tokens):
                continue
            length, most = self.least, min(longest, end, len(newest))
            if self.tokens[end - most : end] == last[-most:]:  # at once: a text that repeats itself
                length = most
            while length < most and self.tokens[end - length - 1] == newest[-length - 1]:
                length += 1
            if length > best:
                best, places = length, []
            if length == best:
                places.append(end)
        return best, places


class NgramProposer(Proposer):
    """Repeats what followed the longest run of the newest tokens where it stood last (prompt lookup decoding,
    Saxena 2023; in transformers and vLLM under that name)."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.least, self.longest = config.min_ngram, config.max_ngram
        self._histories: dict[Sequence, History] = {}

    def history(self, sequence: Sequence) -> History:
        """Returns a sequence's tokens as far as they are known."""
        history = self._histories.setdefault(sequence, History(self.least))
        history.extend(sequence.tokens[len(history.tokens) :])
        return history

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        _, places = self.history(sequence).matches(sequence.tokens, self.longest)
        # What overlaps the newest tokens is taken to go on repeating itself.
        return list(islice(cycle(sequence.tokens[places[-1] :]), most)) if places else []

    def ended(self, sequence: Sequence) -> None:
        self._histories.pop(sequence, None)


class SuffixProposer(NgramProposer):
    """Continues with the likeliest of what followed the longest run of the newest tokens, in the sequence and
    in outputs that have ended (SuffixDecoding, arXiv 2411.04975; lists of places stand for its trees)."""

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self.forget()

    def forget(self) -> None:
        self._outputs = [History(self.least), History(self.least)]  # the older ones, the newer ones

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        sources = [self.history(sequence), *self._outputs]
        found = [source.matches(sequence.tokens, LONGEST_MATCH) for source in sources]
        best = max(length for length, _ in found)
        follow = [
            source.tokens[place : place + most]
            for source, (length, places) in zip(sources, found, strict=True)
            for place in places
            if length == best
        ]
        least = LEAST_SHARE * len(follow)
        longest = max(follow, key=len, default=[])
        if all(longest[: len(tokens)] == tokens for tokens in follow):  # nothing to choose
            depth = sum(sum(len(tokens) > n for tokens in follow) >= least for n in range(len(longest)))
            return list(takewhile(_END.__ne__, longest[:depth]))
        drafts: list[int] = []
        while len(drafts) < most:
            counts = Counter(tokens[len(drafts)] for tokens in follow if len(tokens) > len(drafts))
            token, count = max(counts.items(), key=lambda item: item[1], default=(_END, 0))
            if token == _END or count < least:
                break
            drafts.append(token)
            follow = [tokens for tokens in follow if tokens[: len(drafts)] == drafts]
        return drafts

    def ended(self, sequence: Sequence) -> None:
        super().ended(sequence)
        if len(self._outputs[1].tokens) > REMEMBERED // 2:
            self._outputs = [self._outputs[1], History(self.least)]
        self._outputs[1].extend([*sequence.tokens[sequence.prompt_len :], _END])


class OnDevice(Proposer):
    """Leaves it to the runner to draft."""

    def __init__(self, config: SpeculationConfig) -> None: ...

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        # Of what must stand before a biased token the device compares the newest alone.
        if sequence.constraint is not None and sequence.constraint.needs_host:
            return []
        return [] if any(len(bias.after) > 1 for bias in sequence.biases) else [UNKNOWN] * most


class AfterHidden(OnDevice):
    """Leaves it to the runner, which needs what the model computed last of the sequence, in its slot."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        fresh = sequence.computed - 1 <= sequence.cached  # what it has was moved here
        return [] if fresh else super().propose(sequence, most)


class ForcedProposer(Proposer):
    """Drafts what a grammar leaves no choice of (`moejax.engine.grammar`)."""

    def __init__(self, config: SpeculationConfig) -> None: ...

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        output = sequence.tokens[sequence.prompt_len :]
        return sequence.constraint.forced(output, most) if sequence.constraint is not None else []


_END = -1  # no token: what follows it is another output

PROPOSERS: dict[str, Callable[[SpeculationConfig], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "forced": ForcedProposer,
    "self_experts": OnDevice,
    "self_layers": OnDevice,
    "draft": OnDevice,
    "mtp": AfterHidden,
}


class Speculation:
    """Drafts for the sequences of a scheduler, which asks it in each step.

    Args:
        proposer: where drafts come from; None: what `config` names.

    Drafts stand beside prompts where `beside_prompts`. With `utility` drafts are judged whether they are
    computed or not, and are computed where that pays.
    """

    beside_prompts = False  # they would cost more, and steps in as many more shapes
    overlaps = False  # they continue what the host has read

    def __init__(self, config: SpeculationConfig, proposer: Proposer | None = None) -> None:
        self.config = config
        self.proposer = proposer or PROPOSERS[config.method](config)
        self.utility: Utility | None = None
        self._accounts: dict[Sequence, Judged] = {}
        self._rest = 0  # steps without drafts in which there is nothing to judge

    def depth(self, sequence: Sequence) -> int:
        """Returns how many drafts a sequence may have; none where its logits depend on its outputs' counts,
        which a step knows of one token a sequence."""
        most = sequence.max_length - len(sequence.tokens) - 1  # the last token that it samples is not stored
        return 0 if sequence.params.penalized or sequence.score else max(0, min(self.config.k, most))

    def wanted(self, running: Iterable[Sequence]) -> bool:
        """Tells whether the next step may have drafts: not if it computes prompts."""
        sequences, utility = list(running), self.utility
        if utility is not None and (
            utility.settled(len(sequences)) or not utility.worth([*map(self._account, sequences)])
        ):
            return False
        decode = all(s.length - s.computed == 1 and not s.forks for s in sequences)
        return decode and any(map(self.depth, sequences))

    def tentative(self, sequence: Sequence) -> Draft | None:
        """Returns what the next row of a sequence decodes if what it samples is to be verified, else None."""
        return None

    def waits(self, sequence: Sequence) -> bool:
        """Tells whether a sequence's next row is to be verified, and must be read before."""
        return False

    def draft(
        self, plan: StepPlan, budget: int, allocator: BlockAllocator, windows: WindowAllocator | None
    ) -> None:
        """Adds at most `budget` rows of drafts to a plan of decodes, within the blocks that are free."""
        found = self._proposals(plan.decodes, budget)
        if not any(found):
            return
        decodes = list(zip(plan.decodes, plan.positions, strict=True))
        for row, ((sequence, position), drafts) in enumerate(zip(decodes, found, strict=True)):
            for number in range(1, min(len(drafts), budget) + 1):
                position += 1
                try:
                    allocator.append(sequence.blocks, position)
                except OutOfBlocks:
                    break
                if windows is not None:
                    windows.grow(sequence.window_blocks, position + 1)
                plan.judged[row] = draft = Draft(drafts[:number])
                row = len(plan.decodes)
                plan.drafts[row] = draft
                plan.decodes.append(sequence)
                plan.positions.append(position)
                sequence.computed += 1
                sequence.pending += 1
                budget -= 1

    def _proposals(self, sequences: Items[Sequence], budget: int) -> list[tuple[int, ...]]:
        """Returns the drafts of each sequence; none where its newest token is on the device alone."""
        if self.utility is None:
            return [self._propose(s) if s.pending == 1 else () for s in sequences]
        if any(s.pending > 1 for s in sequences):
            return [()] * len(sequences)
        accounts = [*map(self._account, sequences)]
        if not self.utility.worth(accounts):
            return [()] * len(sequences)
        found = [*map(self._propose, sequences)]
        for sequence, account, drafts in zip(sequences, accounts, found, strict=True):
            if not account.open and not self.utility.blind:
                account.begin(sequence.tokens, drafts)
        chances = [account.chances(len(drafts)) for account, drafts in zip(accounts, found, strict=True)]
        counts = self.utility.choose(chances, budget)
        return [drafts[:count] for drafts, count in zip(found, counts, strict=True)]

    def _propose(self, sequence: Sequence) -> tuple[int, ...]:
        most = self.depth(sequence)
        return tuple(self.proposer.propose(sequence, most)) if most else ()

    def _account(self, sequence: Sequence) -> Judged:
        account = self._accounts.get(sequence)
        if account is None:
            assert self.utility is not None
            account = self._accounts[sequence] = Judged(self.config.k, self.utility.all)
        return account

    def judge(self, sequences: Iterable[Sequence]) -> None:
        """Sets what was proposed for sequences beside the tokens that they have now."""
        self._rest -= 1
        if self.utility is None or self.utility.blind or (self._rest > 0 and not self.utility.drafting):
            return
        drafting, rest = self.utility.drafting, LONGEST_PAUSE
        for sequence in sequences:
            if sequence.state is not State.FINISHED:
                account = self._account(sequence)
                if drafting or len(sequence.tokens) >= account.next:
                    account.see(sequence.tokens)
                    if not drafting and account.due(sequence.tokens) and self.depth(sequence):
                        account.begin(sequence.tokens, self._propose(sequence))
                rest = min(rest, account.next - len(sequence.tokens))
        self._rest = rest  # without drafts a step has a token of each at most

    def learn(self, plan: StepPlan) -> None:
        """Takes note of which drafts of a plan were right, where it shows in that alone."""
        if self.utility is None or not self.utility.blind or plan.chunks:
            return
        self.utility.stepped(bool(plan.drafts))
        right: dict[Sequence, list[bool]] = {}
        for row, draft in plan.drafts.items():
            right.setdefault(plan.decodes[row], []).append(draft.accepted)
        for sequence, accepted in right.items():
            if sequence.state is not State.FINISHED:
                self._account(sequence).take(len(accepted), sum(accepted))

    def ended(self, sequence: Sequence) -> None:
        """Takes note that a sequence has ended."""
        self.proposer.ended(sequence)
        self._accounts.pop(sequence, None)

    def take_back(self, plan: StepPlan) -> None:
        """Has a plan's drafts count as neither computed nor sampled, until they are found to be right."""
        for row in filter(plan.tells, plan.drafts):
            if plan.decodes[row].state is not State.FINISHED:
                # Of who has been preempted meanwhile nothing is computed.
                plan.decodes[row].computed -= plan.decodes[row].state is State.RUNNING
                plan.decodes[row].pending -= 1

    def accept(self, plan: StepPlan, row: int) -> bool:
        """Tells whether a row computes what the sequence's tokens turned out to be, and counts it then."""
        draft, sequence = plan.drafts[row], plan.decodes[row]
        draft.accepted = sequence.tokens[plan.positions[row] :] == [draft.token]
        sequence.computed += draft.accepted and sequence.state is State.RUNNING
        return draft.accepted

    def give_back(self, plan: StepPlan, allocator: BlockAllocator) -> None:
        """Frees the blocks that drafts took and no token needs."""
        for row in plan.drafts:
            if plan.decodes[row].state is State.RUNNING and not plan.decodes[row].tentative:
                allocator.shrink(plan.decodes[row].blocks, plan.decodes[row].computed)


def check_speculation(engine: EngineConfig, parallel: ParallelConfig, config: ModelConfig) -> None:
    """Raises `ConfigError` where drafts would leave their traces, or change what others get, and for what
    the model has too few of to draft."""
    speculation = engine.speculation
    counts = {
        "experts": config.num_experts_per_tok if any(config.moe_layers) else 0,
        "layers": config.num_layers,
    }
    for name, count in counts.items():
        if speculation.method == f"self_{name}" and (asked := getattr(speculation, name) or 1) > count:
            raise ConfigError(
                f"engine.speculation.{name}={asked}: a token of the model goes through {count} {name}; lower "
                "it, or use another engine.speculation.method"
            )
    refusals = {
        f"parallel.pp={parallel.pp}, whose stages would draft one after another": (
            speculation.on_device and parallel.pp > 1
        ),
        "linear attention, whose states cannot be taken back": any(config.linear_layers),
        f"{engine.moe.by_batch} depends on the batch": engine.moe.by_batch and any(config.moe_layers),
        "parallel.exchange_capacity: what is dropped depends on the batch": (
            parallel.exchange_capacity is not None
        ),
        "engine.adapters.slots, of which the drafting model has none": (
            speculation.method in ("draft", "mtp") and engine.adapters.slots > 0
        ),
        "several devices (parallel)": speculation.method == "mtp" and not parallel.is_single,
        "a checkpoint without MTP layers (config.json: num_nextn_predict_layers)": (
            speculation.method == "mtp" and not config.mtp_layers
        ),
        f"the MTP layers of {config.family}; known are those of {', '.join(MTP_FAMILIES)}": (
            speculation.method == "mtp" and config.family not in MTP_FAMILIES
        ),
    }
    asked = speculation.most > 0
    refuse(f"engine.speculation.method={speculation.method}", asked, refusals, "; use none")
