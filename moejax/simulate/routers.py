"""Which replica or site a request goes to, and how many replicas there should be: host functions of what is
observed, for simulated and real ones.

`choose` returns a place in the list of loads. All are deterministic.
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


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


class SiteLoad(NamedTuple):
    """A place with replicas: seconds one way to it, a device's price, and requests that it has a replica."""

    latency_s: float
    price: float
    requests: float


def nearest(sites: Sequence[SiteLoad], request_s: float) -> int:
    """Returns the place of the site with the least latency, of equals the cheapest."""
    return min(range(len(sites)), key=lambda place: (sites[place].latency_s, sites[place].price))


def cheapest(sites: Sequence[SiteLoad], request_s: float) -> int:
    """Returns the place of the site with the least price, of equals the nearest, whatever it has to do."""
    return min(range(len(sites)), key=lambda place: (sites[place].price, sites[place].latency_s))


def least_loaded(sites: Sequence[SiteLoad], request_s: float) -> int:
    """Returns the place of the site from which an answer is expected first: there and back, and what it has
    to do at `request_s` seconds of a replica a request."""
    return min(
        range(len(sites)), key=lambda place: 2 * sites[place].latency_s + sites[place].requests * request_s
    )


DISPATCHES: dict[str, Callable[[Sequence[SiteLoad], float], int]] = {
    "nearest": nearest,
    "cheapest": cheapest,
    "least_loaded": least_loaded,
}


def desired_size(size: int, pressure: float, use: float, *, smaller: int, larger: int) -> int:
    """Returns how many devices or replicas of three numbers there should be: the larger where more was
    observed than is allowed, the smaller where that is under a half and they would be less than four fifths
    full.

    Args:
        size: those that there are.
        pressure, use: see `desired_replicas`.
    """
    if pressure > 1:
        return larger
    return smaller if pressure < 0.5 and use * size < 0.8 * smaller else size


def desired_replicas(replicas: int, pressure: float, use: float, *, least: int, most: int) -> int:
    """Returns how many replicas there should be, within `least` and `most`.

    They grow by what was observed over what is allowed, as Kubernetes' HorizontalPodAutoscaler does, at most
    twofold; one goes where that is under a half and the others would be less than four fifths full.

    Args:
        replicas: those that there are, or are being started.
        pressure: a queueing time over the one aimed at, or the share of requests that missed their
            objectives over the share that may.
        use: mean share of their places or of their cache, whichever is more, that is taken.
    """
    larger = math.ceil(replicas * min(pressure, 2.0))
    wanted = desired_size(replicas, pressure, use, smaller=replicas - 1, larger=larger)
    return min(max(wanted, least), most)
