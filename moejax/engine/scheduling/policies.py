"""Who is admitted first, decodes first and is preempted last. No JAX here.

fcfs       by arrival
priority   by class of priority, which waiting raises
sjf        fewest tokens still to compute first, outputs taken at their longest
edf        earliest deadline first (Liu and Layland, 1973)
slo        least slack against the objectives of the request's class
fair       the tenant with the least service first, by weighted tokens (VTC, arXiv 2401.00588)
lpm        longest prefix in the prefix cache first (SGLang, arXiv 2312.07104)

Quotas of tenants hold under each of them: a request over its tenant's quota lets the others pass.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from typing import Any

from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError, RequestError, unknown
from moejax.core.scheduling import SchedulingConfig, SloClass, Tenant
from moejax.engine.scheduling.sequence import Sequence

_SMOOTHING = 0.1  # weight of the newest step in the measured time a token
_LOOKED_UP = 64  # requests of a queue whose prefixes "lpm" compares; the ones behind them go by arrival

Match = Callable[[Sequence], Any]


@dataclass(slots=True)
class Account:
    """A tenant's service so far.

    Attributes:
        served: weighted tokens over the tenant's weight.
        queued: its sequences that wait.
        level: tokens that its rate allows it still, at the instant `at`; below 0 it has had more.
    """

    served: float = 0.0
    queued: int = 0
    level: float = 0.0
    at: float | None = None


class Policy:
    """First come, first served, and the base of the others.

    One object serves all data-parallel groups: a tenant is the same tenant in each.

    Args:
        config: ageing, quantum, classes and tenants.
        clock: seconds; requests' arrivals are instants of it.

    Attributes:
        moves: keys change while a sequence lives, so queue and order are ranked anew in each step.
        timed: keys depend on the clock, which differs between processes.
        preempts: one that waits may displace one that runs.
        by_service: keys change with each admission, too.
        limited: some tenant has a quota.
        charges: tenants' tokens are counted.
        now: the instant of the step that is being scheduled.
        seconds_per_token: measured over the last steps; 0 before the first.
    """

    moves = False
    timed = False
    preempts = False
    by_service = False

    def __init__(
        self, config: SchedulingConfig | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.config, self.clock = config or SchedulingConfig(), clock
        self.now, self.seconds_per_token = clock(), 0.0
        quotas = self.config.tenants.values()
        self.limited = any(quota.limited for quota in quotas)
        self.charges = self.by_service or any(quota.tokens_per_s is not None for quota in quotas)
        self._accounts: dict[str, Account] = defaultdict(Account)
        self._last_served = 0.0  # of the tenant that was the last to have anything queued

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        """Returns the rank of a sequence that runs: the smallest goes first, the largest is preempted. Total:
        it ends with `sequence.order`."""
        return (sequence.order,)

    def ranks(self, waiting: Items[Sequence], match: Match) -> list[tuple[Any, ...]]:
        """Returns the rank of each sequence that waits; `match` finds what is computed of it."""
        return [self.key(sequence) for sequence in waiting]

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        """Tells whether one that waits may take the place of one that runs and has had its quantum."""
        return False

    # -- time --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Says that a step is about to be scheduled."""
        self.now = self.clock()

    def observe(self, seconds: float, tokens: int) -> None:
        """Says how long a step took that computed so many tokens."""
        new = seconds / tokens
        old = self.seconds_per_token or new
        self.seconds_per_token = old + _SMOOTHING * (new - old)

    def waited(self, sequence: Sequence) -> bool:
        """Tells whether it is so old that it goes before all that are not."""
        return self.now - sequence.arrival > self.config.ageing_s

    def slo(self, sequence: Sequence) -> SloClass:
        """Returns the objectives of its class; of none nothing is asked."""
        return self.config.slo_classes.get(sequence.options.slo_class or "", _NOTHING_ASKED)

    def first_token_due(self, sequence: Sequence) -> float:
        """Returns seconds after its arrival; where nothing is asked those of `ageing_s`."""
        asked = [ms for ms in (sequence.options.deadline_ms, self.slo(sequence).ttft_ms) if ms is not None]
        return min(asked) / 1e3 if asked else self.config.ageing_s

    # -- tenants -----------------------------------------------------------------------------------------

    def check_fits(self, sequence: Sequence, blocks: int) -> None:
        """Raises `RequestError` for what its tenant's quota can never hold; it may come to need `blocks`."""
        name, tenant = sequence.options.tenant, self._tenant(sequence)
        for key, most, need in (
            ("max_seqs", tenant.max_seqs, sequence.samples),
            ("max_blocks", tenant.max_blocks, blocks),
        ):
            if most is not None and need > most:
                raise RequestError(
                    f"a request of {need} {'sequences' if key == 'max_seqs' else 'cache blocks'} exceeds "
                    f"engine.scheduling.tenants.{name}.{key}={most}; raise it, or lower n or max_tokens"
                )

    def check_on_time(self, sequence: Sequence, queue: Iterable[Sequence]) -> None:
        """Raises `RequestError` for what would come too late behind the queue, where that is refused."""
        asked = self.slo(sequence).ttft_ms or sequence.options.deadline_ms
        if self.config.admission == "refuse" and asked:
            rank = self.key(sequence)
            ahead = sum(other.length for other in queue if self.key(other) < rank)
            predicted = (ahead + sequence.length) * self.seconds_per_token
            if predicted > self.first_token_due(sequence):
                raise RequestError(
                    f"refused: its first token is expected after {1e3 * predicted:.0f} ms and wanted after "
                    f"{1e3 * self.first_token_due(sequence):.0f}; engine.scheduling.admission=queue takes it"
                )

    def queued(self, sequence: Sequence) -> None:
        """Says that a sequence waits. A tenant that had nothing queued has no credit of the time before."""
        account = self._accounts[sequence.options.tenant]
        if not account.queued:
            others = [each.served for each in self._accounts.values() if each.queued]
            account.served = max(account.served, min(others, default=self._last_served))
        account.queued += 1

    def left(self, sequence: Sequence) -> None:
        """Says that a sequence waits no more."""
        account = self._accounts[sequence.options.tenant]
        account.queued -= 1
        if not any(each.queued for each in self._accounts.values()):
            self._last_served = account.served

    def admitted(self, sequence: Sequence) -> None:
        """Charges a prompt, but for what was found computed, once."""
        if not sequence.charged:
            sequence.charged = True
            tokens = sequence.prompt_len - sequence.cached
            self._charge(sequence, tokens, self.config.prompt_weight * tokens)

    def sampled(self, sequence: Sequence) -> None:
        """Charges a token of output."""
        self._charge(sequence, 1, self.config.output_weight)

    def _charge(self, sequence: Sequence, tokens: int, service: float) -> None:
        account, tenant = self._accounts[sequence.options.tenant], self._tenant(sequence)
        account.served += service / tenant.weight
        if tenant.tokens_per_s is not None:
            account.level, account.at = self._level(account, tenant) - tokens, self.now

    def over_quota(
        self, sequence: Sequence, seqs: Mapping[str, int], blocks: Mapping[str, int], need: int
    ) -> bool:
        """Tells whether a sequence has to wait for its tenant's others, or for its tenant's rate.

        Args:
            seqs, blocks: each tenant's running sequences, and the blocks that they may come to need.
            need: blocks that it may come to need itself.
        """
        name, tenant = sequence.options.tenant, self._tenant(sequence)
        many = tenant.max_seqs is not None and seqs[name] + sequence.samples > tenant.max_seqs
        large = tenant.max_blocks is not None and blocks[name] + need > tenant.max_blocks
        return many or large or self.rate_wait_s(sequence) > 0

    def rate_wait_s(self, sequence: Sequence) -> float:
        """Returns seconds until its tenant's rate allows it more tokens; 0 where it does."""
        tenant = self._tenant(sequence)
        if tenant.tokens_per_s is None:
            return 0.0
        return max(0.0, -self._level(self._accounts[sequence.options.tenant], tenant) / tenant.tokens_per_s)

    def service(self) -> dict[str, float]:
        """Returns each tenant's service so far, weighted tokens over its weight."""
        return {name: account.served for name, account in sorted(self._accounts.items())}

    def _level(self, account: Account, tenant: Tenant) -> float:
        """Returns tokens that its rate allows now; it starts with a whole burst."""
        assert tenant.tokens_per_s is not None
        if account.at is None:
            return tenant.burst_tokens
        return min(tenant.burst_tokens, account.level + (self.now - account.at) * tenant.tokens_per_s)

    def _tenant(self, sequence: Sequence) -> Tenant:
        return self.config.tenants.get(sequence.options.tenant, _ANYBODY)


_ANYBODY, _NOTHING_ASKED = Tenant(), SloClass()


class HighestPriority(Policy):
    """By class of priority, small numbers first; `ageing_s` seconds of waiting make up for one class."""

    timed = preempts = True

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        # What has waited since makes the same difference to all: only the arrivals differ.
        return sequence.options.priority + sequence.arrival / self.config.ageing_s, sequence.order

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        better = waiting.options.priority < running.options.priority
        return better and self.key(waiting) < self.key(running)


class ShortestJob(Policy):
    """Fewest tokens still to compute first, outputs taken at their longest."""

    moves = timed = True

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        waited = self.waited(sequence)
        return not waited, 0 if waited else sequence.max_length - sequence.computed, sequence.order


class EarliestDeadline(Policy):
    """Earliest deadline first. Beyond saturation it serves those that are late already, and all are late."""

    timed = preempts = True

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        deadline = sequence.options.deadline_ms
        due = self.config.ageing_s if deadline is None else deadline / 1e3
        return sequence.arrival + due, sequence.order

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        return self.key(waiting)[0] < self.key(running)[0]


class LeastSlack(Policy):
    """Least slack first: seconds until the next token is due, less those that its prompt still takes."""

    moves = timed = preempts = True

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        due = self.first_token_due(sequence) + sequence.generated * (self.slo(sequence).tpot_ms or 0.0) / 1e3
        prompt = max(0, sequence.prompt_len - sequence.computed) * self.seconds_per_token
        return sequence.arrival + due - prompt, sequence.order

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        return self._rank(waiting) < self._rank(running) and not self.waited(running)

    def _rank(self, sequence: Sequence) -> int:
        names = list(self.config.slo_classes)
        name = sequence.options.slo_class
        return names.index(name) if name in names else len(names)


class Fair(Policy):
    """The tenant first that has had the least service, its own requests by arrival. Of two tenants that
    always have something queued none gets more than the other, over any time, by more than twice the larger
    of what one prompt and what all tokens in the cache count (VTC's bound)."""

    moves = by_service = True

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        return self._accounts[sequence.options.tenant].served, sequence.order


class LongestPrefix(Policy):
    """The request first of which the prefix cache has the most tokens; who runs goes by arrival."""

    moves = timed = True

    def ranks(self, waiting: Items[Sequence], match: Match) -> list[tuple[Any, ...]]:
        first = sorted(waiting, key=lambda sequence: sequence.order)
        found = {id(s): match(s).tokens for s in islice(first, _LOOKED_UP)}
        return [(not self.waited(s), 0 if self.waited(s) else -found.get(id(s), 0), s.order) for s in waiting]


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Policy,
    "priority": HighestPriority,
    "sjf": ShortestJob,
    "edf": EarliestDeadline,
    "slo": LeastSlack,
    "fair": Fair,
    "lpm": LongestPrefix,
}


def make_policy(
    engine: EngineConfig, processes: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Policy:
    """Returns the policy that a configuration asks for; `clock` is the engine's.

    Raises:
        ConfigError: there is none of that name, or it does not go with the rest.
    """
    name, limits = engine.policy, engine.scheduling
    if name not in POLICIES:
        raise ConfigError(f"engine.policy: {unknown('policy', name, tuple(POLICIES))}")
    policy = POLICIES[name](limits, clock)
    if name == "lpm" and not engine.prefix_cache.enabled:
        raise ConfigError("engine.policy=lpm needs engine.prefix_cache.enabled=true")
    rates = [tenant for tenant, quota in limits.tenants.items() if quota.tokens_per_s is not None]
    timed = {
        f"engine.policy={name}": policy.timed,
        f"engine.scheduling.tenants.{''.join(rates[:1])}.tokens_per_s": bool(rates),
        "engine.scheduling.admission=refuse": limits.admission == "refuse",
        "engine.static_batching.max_wait_s": engine.batching == "static"
        and engine.static_batching.max_wait_s,
    }
    for key, holds in timed.items():
        if holds and processes > 1:
            raise ConfigError(
                f"{key} goes by the clock, which differs between {processes} processes, and all must "
                "schedule alike; use engine.policy=fcfs or fair"
            )
    return policy
