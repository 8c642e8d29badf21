"""Who goes first. A policy ranks sequences; the scheduler does the rest. No JAX here."""

from typing import Any, Protocol

from moejax.core.errors import ConfigError, unknown
from moejax.engine.scheduling.sequence import Sequence


class Policy(Protocol):
    """Ranks sequences, smallest key first.

    The smallest waiting key is admitted next; the largest running key is preempted first. The key must not
    change while a sequence lives, and must be total (end it with `sequence.order`).
    """

    def key(self, sequence: Sequence) -> Any: ...


class FirstComeFirstServed:
    """By arrival. The oldest sequence is never preempted for another, so nothing starves."""

    def key(self, sequence: Sequence) -> int:
        return sequence.order


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed}


def make_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"engine.policy: {unknown('policy', name, tuple(POLICIES))}")
    return POLICIES[name]()
