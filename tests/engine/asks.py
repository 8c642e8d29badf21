"""What a `HostEngine` is asked for, and drafts that are right as often as a test wants."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moejax.engine.requests.api import RequestOptions, SamplingParams
from moejax.engine.scheduling.sequence import Sequence, State

VOCAB_SIZE = 1000


@dataclass(frozen=True)
class Ask:
    """A request by its content: the prompt is `first`, `first` + 1, …; a sampled token below `stop_below`
    ends a sample."""

    prompt_len: int
    max_tokens: int = 4
    n: int = 1
    stop_below: int = 0
    score: bool = False
    first: int = 0
    seed: int = 0
    salt: int | None = 0
    looked_up: bool = True
    options: RequestOptions = field(default_factory=RequestOptions)

    def sequence(self, order: int) -> Sequence:
        """The first sample; its forks are the others."""
        prompt = list(range(self.first, self.first + self.prompt_len))
        params = SamplingParams(max_tokens=self.max_tokens, n=self.n)
        samples = [
            Sequence(
                tokens=list(prompt),
                prompt_len=self.prompt_len,
                params=params,
                max_length=self.prompt_len + (0 if self.score else self.max_tokens),
                order=order + index,
                seed=self.seed + index,
                stop_ids=range(self.stop_below),
                score=self.score,
                identity=self.salt,
                not_looked_up=None if self.looked_up and not self.score else "a test's",
                options=self.options,
            )
            for index in range(self.n)
        ]
        samples[0].forks = samples[1:]
        return samples[0]


@dataclass(eq=False)
class Group:
    """A submitted request and its samples."""

    ask: Ask
    samples: list[Sequence]
    aborted: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> list[list[int]]:
        return [sample.tokens for sample in self.samples]

    @property
    def live(self) -> bool:
        return any(sample.state is not State.FINISHED for sample in self.samples)


class Oracle:
    """Drafts the tokens that each sequence gets alone; each is right with a probability, and what follows a
    wrong one may be what follows the right one."""

    def __init__(
        self, groups: list[Group], alone: Callable[[Ask], tuple[tuple[int, ...], ...]], right: float
    ) -> None:
        self.groups, self.alone, self.right, self.chance = groups, alone, right, random.Random(0)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        (group,) = (group for group in self.groups if sequence in group.samples)
        expected = self.alone(group.ask)[group.samples.index(sequence)]
        follow = expected[len(sequence.tokens) : len(sequence.tokens) + most]
        return [t if self.chance.random() < self.right else (t + 1) % VOCAB_SIZE for t in follow]

    def ended(self, sequence: Sequence) -> None: ...
