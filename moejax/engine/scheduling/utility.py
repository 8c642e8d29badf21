"""How many drafts are worth their rows: `engine.speculation.depth=utility`. No JAX here.

    a sequence's tokens/s without     1 / t(overlapped, sequences)
    with                              (1 + its drafts expected to be right) / t(alone, sequences + drafts)

The geometric mean over sequences decides: all wait for the rows of those whose drafts are good, and by their
sum one that repeats itself would slow down all others.

Drafts continue tokens that the host has read, so that a step with drafts cannot be launched before the last
one has ended, and their rows take time: on models with experts each may hit experts that no other row does.
What drafts would get right is known without computing any, since the tokens are those of plain decoding:
proposals are set beside the tokens that come (`Judged`). What steps take is measured while they run
(`StepTimes`), that of sizes and ways not in use anew after a while, so that it is the machine's as it is.
What a model drafts is known only where it is made: a few steps draft all, at first and after each wait.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import exp, log1p
from statistics import median

import numpy as np

TIMED = 2
"""Steps of a kind and size from which its duration is known."""

KEPT = 9
"""Newest durations of a kind and size; their median counts."""

FIRST_WAIT, LONGEST_WAIT = 64, 1024
"""Steps after which what was not run is taken to be faster by `DRIFT`, and is timed anew if that would make
it worth while; the wait doubles each time."""

DRIFT = 1.5
"""Factor by which a machine may have become faster meanwhile."""

GAIN, KEPT_GAIN = 1.15, 1.05
"""Ratios of speeds from which drafts begin, and go on: they are estimates, of which the best are too good."""

PROBES = 4
"""Steps that make all drafts, so that those of a model are judged and timed."""

MEMORY = 8
"""Judged proposals of a sequence that count about as much as all before."""


LONGEST_PAUSE = 15
"""Tokens after which more are proposed for a sequence that does not draft: proposing takes the host's time.
The pause grows with each proposal that was as right or wrong as expected, and ends with another."""

UNCHANGED = 16
"""Steps for which not to draft stays decided while nothing is judged."""


class StepTimes:
    """Durations of steps that only decode, from one step's tokens to the next one's, by rows, of two ways:
    without drafts, and drafting, where a step is launched alone even if nothing was found to be drafted.

    Args:
        padded: returns how many rows are computed for so many.
    """

    def __init__(self, padded: Callable[[int], int] = lambda rows: rows) -> None:
        self.padded = padded
        self._ways = {False: _Way(), True: _Way()}
        self._steps = 0

    def observe(self, rows: int, drafting: bool, seconds: float) -> None:
        """Takes in a step's duration."""
        self._steps += 1
        self._ways[drafting].add(self.padded(rows), seconds, self._steps)
        self._ways[not drafting].age(self._steps)

    def without_drafts(self, sequences: int) -> float | None:
        """Returns the seconds of a step without drafts; None: to be timed first."""
        return self._ways[False].known().get(self.padded(sequences))

    def with_drafts(self, sequences: int, sizes: Sequence[int], plain: float) -> list[float]:
        """Returns the seconds of drafting steps of so many padded rows, where one without drafts takes
        `plain`, the least that they can take. Sizes between two that were timed are taken to lie on a line,
        larger ones to take no longer, whereupon they are timed."""
        least = self.padded(sequences)
        timed = sorted(self._ways[True].known().items())
        known = {least: plain} | {size: max(plain, seconds) for size, seconds in timed if size >= least}
        return list(np.interp(sizes, list(known), list(known.values())))


class _Way:
    """Durations of one way, by padded rows."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._known: dict[int, float] = {}
        self._new = set[int]()  # sizes whose median is to be taken
        self._step, self._wait, self._drift = 0, FIRST_WAIT, 1.0

    def known(self) -> dict[int, float]:
        self._known |= {size: median(self._seconds[size]) for size in self._new}
        self._new.clear()
        return {size: seconds / self._drift for size, seconds in self._known.items()}

    def add(self, size: int, seconds: float, step: int) -> None:
        newest = self._seconds[size]
        newest.append(seconds)
        self._step = step
        if len(newest) < TIMED:
            return
        if self._drift > 1.0 and size in self._known:  # what has changed has done so at all sizes
            change = median(newest) / self._known[size]
            self._known = {each: change * known for each, known in self._known.items()}
            self._drift = 1.0
        self._new.add(size)

    def age(self, step: int) -> None:
        if step - self._step >= self._wait and self.known():
            self._seconds.clear()
            self._step, self._drift = step, DRIFT * self._drift
            self._wait = min(2 * self._wait, LONGEST_WAIT)


class Judged:
    """How often proposals for a sequence were right so far, by place.

    Args:
        most: places.
        prior: that of all sequences, where this one's begins; none: nothing is right.

    Attributes:
        proposed, right: how often a draft was proposed, and was right with all before it, by place.
        rounds: proposals judged.
        next: tokens with which there is something to see, or to propose; sooner while the sequence drafts.
    """

    def __init__(self, most: int, prior: "Judged | None" = None) -> None:
        self.prior = prior
        self.proposed: list[float] = list(prior.proposed) if prior else [0.0] * most
        self.right: list[float] = list(prior.right) if prior else [0.0] * most
        self.rounds = self.next = 0
        self._start = self._pause = self._right = 0
        self._proposal: Sequence[int] | None = None

    @property
    def open(self) -> bool:
        """Tells whether there is a proposal whose end is not known."""
        return self._proposal is not None

    def due(self, tokens: Sequence[int]) -> bool:
        """Tells whether what follows `tokens` should be proposed, only to be judged."""
        return not self.open and len(tokens) >= self.next

    def begin(self, tokens: Sequence[int], proposal: Sequence[int]) -> None:
        """Sets a proposal beside what will follow `tokens`."""
        self._start, self._right, self._proposal = len(tokens), 0, proposal
        self.next = self._start + max(1, len(proposal))

    def take(self, proposed: int, right: int) -> None:
        """Takes in how many drafts of a step were right."""
        self._add(proposed, right)
        if self.prior is not None:
            self.prior._add(proposed, right)

    def see(self, tokens: Sequence[int]) -> None:
        """Takes in a sequence's tokens so far."""
        if self._proposal is None:
            return
        right, known, most = self._right, len(tokens) - self._start, len(self._proposal)
        while right < min(known, most) and tokens[self._start + right] == self._proposal[right]:
            right += 1
        self._right = right
        if right == known and known < max(1, most):
            return  # as far as it is known
        expected = bool(right) == (most > 0 and 2 * self.chances(1)[0] > 1)
        self.take(most, right)
        self._pause = min(2 * self._pause + 1, LONGEST_PAUSE) if expected else 0
        self._proposal, self.next = None, self._start + max(1, right) + self._pause

    def _add(self, proposed: int, right: int) -> None:
        self.rounds += 1
        share = 1 / min(self.rounds + 1, MEMORY)
        for counts, number in ((self.proposed, proposed), (self.right, right)):
            for place in range(len(counts)):
                counts[place] += share * ((place < number) - counts[place])

    def chances(self, drafts: int) -> list[float]:
        """Returns how likely each of so many proposed drafts is right, with all before it."""
        return [r / p if p else 0.0 for r, p in zip(self.right[:drafts], self.proposed, strict=False)]


class Utility:
    """Chooses, for a step of sequences that all decode, the drafts with which they are fastest.

    Args:
        times: of steps; data-parallel groups share them.
        blind: drafts are known only when they are verified.
    """

    def __init__(self, most: int, times: StepTimes, blind: bool = False) -> None:
        self.most, self.times, self.blind = most, times, blind
        self.all = Judged(most)
        self.drafting = False
        self._probes, self._rest, self._wait = PROBES * blind, 0, FIRST_WAIT
        self._decided, self._unchanged = (0, 0), 0

    def stepped(self, drafted: bool) -> None:
        """Takes note of a step, where drafts are blind."""
        self._rest = 0 if drafted else self._rest + 1
        if drafted:
            self._wait = self._wait if self._probes else FIRST_WAIT
            self._probes = max(0, self._probes - 1)
        elif self._rest >= self._wait:
            self._probes, self._rest, self._wait = PROBES, 0, min(2 * self._wait, LONGEST_WAIT)

    def settled(self, sequences: int) -> bool:
        """Tells whether not to draft stays decided for so many sequences: nothing was judged meanwhile."""
        known, self._unchanged = (sequences, self.all.rounds), self._unchanged + 1
        if known == self._decided and self._unchanged < UNCHANGED and not self.blind:
            return not self.drafting
        self._decided, self._unchanged = known, 0
        return False

    def worth(self, accounts: Sequence[Judged]) -> bool:
        """Tells whether steps with drafts of these sequences are faster."""
        plain, sequences = self.times.without_drafts(len(accounts)), len(accounts)
        least = KEPT_GAIN if self.drafting else GAIN
        self.drafting = False
        if self._probes:
            return bool(accounts) and plain is not None
        gains = sorted((gain for account in accounts for gain in _gains(account.right)), reverse=True)
        if accounts and plain is not None and exp(sum(gains) / sequences) > least:
            self.drafting = max(self._speeds(sequences, gains, plain)) * plain > least
        return self.drafting

    def choose(self, chances: Sequence[Sequence[float]], budget: int) -> list[int]:
        """Returns how many of its drafts each sequence gets in a step, of at most `budget` in all."""
        if self._probes:
            return [*map(len, chances)]
        # A draft never gains more than the one before it, so that sorting keeps their order.
        drafts = sorted(
            ((gain, -index) for index, row in enumerate(chances) for gain in _gains(row)), reverse=True
        )[:budget]
        plain = self.times.without_drafts(len(chances))
        assert plain is not None  # or else they would not be worth it
        speeds = self._speeds(len(chances), [gain for gain, _ in drafts], plain)
        counts = [0] * len(chances)
        for _, index in drafts[: speeds.index(max(speeds))]:
            counts[-index] += 1
        return counts

    def _speeds(self, sequences: int, gains: Sequence[float], plain: float) -> list[float]:
        """Returns a sequence's tokens per second, geometric mean, with 0, 1, … drafts of falling gains."""
        sizes = [self.times.padded(sequences + drafts) for drafts in range(len(gains) + 1)]
        seconds = self.times.with_drafts(sequences, sizes, plain)
        logs = accumulate(gains, initial=0.0)
        return [exp(gained / sequences) / each for gained, each in zip(logs, seconds, strict=True)]


def _gains(chances: Sequence[float]) -> Iterator[float]:
    """Yields by how much each draft raises the logarithm of its sequence's expected tokens."""
    tokens = 1.0
    for chance in chances:
        yield log1p(chance / tokens)
        tokens += chance
