"""Which replica a request goes to: pure host functions of the replicas' loads, for simulated and real ones.

`choose` returns a place in the list of loads. All are deterministic.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

RouterName = Literal["round_robin", "least_loaded", "least_cache", "two_choices", "prefix"]


class Load(NamedTuple):
    """What a replica has to do: sequences that run and that wait, and the share of its cache in use."""

    running: int
    waiting: int
    cache_use: float

    @property
    def requests(self) -> int:
        return self.running + self.waiting


class Router(Protocol):
    """Chooses a replica."""

    def choose(self, loads: Sequence[Load], prompt: Sequence[int]) -> int:
        """Returns the place of the replica that a prompt goes to."""
        ...


class RoundRobin:
    """Each replica in its turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, loads: Sequence[Load], prompt: Sequence[int]) -> int:
        self._next += 1
        return (self._next - 1) % len(loads)


class LeastLoaded:
    """The replica with the fewest requests that run or wait, the first of equals."""

    def choose(self, loads: Sequence[Load], prompt: Sequence[int]) -> int:
        return min(range(len(loads)), key=lambda place: loads[place].requests)


class LeastCache:
    """The replica with the least of its cache in use, of equals the one with fewer requests."""

    def choose(self, loads: Sequence[Load], prompt: Sequence[int]) -> int:
        return min(range(len(loads)), key=lambda place: (loads[place].cache_use, loads[place].requests))


class TwoChoices:
    """The less loaded of two replicas drawn at random (Mitzenmacher, 2001, "The power of two choices")."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, loads: Sequence[Load], prompt: Sequence[int]) -> int:
        pair = self._random.sample(range(len(loads)), min(2, len(loads)))
        return min(pair, key=lambda place: loads[place].requests)


class PrefixAffinity:
    """The replica that a prompt's first tokens name, unless it has far more to do than the least loaded one.

    Args:
        tokens: of the prompt's beginning that are looked at.
        slack: requests that it may have more than the least loaded one.
    """

    def __init__(self, tokens: int = 64, slack: int = 16) -> None:
        self.tokens, self.slack = tokens, slack

    def choose(self, loads: Sequence[Load], prompt: Sequence[int]) -> int:
        head = repr(list(prompt[: self.tokens])).encode()
        home = int.from_bytes(hashlib.blake2b(head, digest_size=8).digest(), "big") % len(loads)
        least = LeastLoaded().choose(loads, prompt)
        return least if loads[home].requests > loads[least].requests + self.slack else home


ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "least_cache": LeastCache,
    "two_choices": TwoChoices,
    "prefix": PrefixAffinity,
}
