"""A simulated engine as a member of a fleet, a request that several serve in turn, and what a fleet is of.
No JAX here."""

from collections.abc import Callable
from dataclasses import dataclass, field

from moejax.engine.core import Engine
from moejax.engine.requests.api import FinishReason, Logprob, RequestOutput
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.sequence import Sequence as Sample
from moejax.results.metrics import Slo
from moejax.simulate.fleet import Link
from moejax.simulate.routers import Load
from moejax.simulate.runner import CostModelRunner, VirtualClock


@dataclass(frozen=True)
class Layout:
    """What a replica can be of.

    Attributes:
        make: returns an idle engine of it, with its runner and clock.
        name: of the layout.
        devices: of a replica.
        load_s: seconds until a replica's weights are read.
    """

    make: Callable[[], tuple[Engine, CostModelRunner, VirtualClock]]
    name: str = ""
    devices: int = 1
    load_s: float = 0.0


@dataclass(eq=False)
class Replica:
    """One engine with its runner and clock.

    Attributes:
        layout: what it is of; `successor` what is to take its place.
        part: "prefill", "decode" or "both"; `site` by number.
        since, ready_at, ended: instants from which it is paid for, from which it serves, and when it went.
        draining: it gets no more requests.
        link_free: when it can send the next keys and values.
    """

    engine: Engine
    runner: CostModelRunner
    clock: VirtualClock
    layout: Layout
    part: str = "both"
    site: int = 0
    since: float = 0.0
    ready_at: float = 0.0
    ended: float | None = None
    draining: bool = False
    link_free: float = 0.0
    successor: Layout | None = None

    @property
    def busy(self) -> bool:
        return self.ended is None and not self.engine.scheduler.idle

    def load(self) -> Load:
        """Returns what routers go by."""
        scheduler = self.engine.scheduler
        blocks = scheduler.allocator
        return Load(len(scheduler.running), scheduler.num_waiting, blocks.num_used / blocks.num_blocks)

    def use(self) -> float:
        """Returns the share of its places or of its cache, whichever is more, that is asked for."""
        groups, load = getattr(self.engine.scheduler, "groups", [self.engine.scheduler]), self.load()
        return max(load.requests / sum(group.max_num_seqs for group in groups), load.cache_use)


class FleetRequest(RequestState):
    """A request that one replica after another may serve: the end of a part is not its own.

    Args:
        sample: its tokens and limits.
        site: number of the site that serves it, `back_s` seconds from the users.
    """

    def __init__(
        self, output: RequestOutput, builder: OutputProcessor, sample: Sample, site: int, back_s: float
    ) -> None:
        super().__init__(output, [builder])
        self.attach([sample])
        self.site, self.back_s, self.whole = site, back_s, sample.max_length
        self.replica: Replica | None = None
        self.on_part: Callable[[FleetRequest, float], None] = lambda request, now: None

    def take(
        self, index: int, token: int, logprob: Logprob | None, reason: FinishReason | None, now: float
    ) -> bool:
        part = reason == "length" and self.sequences[index].max_length < self.whole
        ended = super().take(index, token, logprob, None if part else reason, now + self.back_s)
        if part:
            self.on_part(self, now)
        return ended

    def renew(self, imported: int = 0, alone: bool = False) -> Sample:
        """Returns it as a new sequence with the tokens that it has, of which so many come computed; `alone`:
        it ends with the next one."""
        old, output = self.sequences[0], self.output
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        limit = len(tokens) + 1 if alone else self.whole
        sample = Sample(tokens, old.prompt_len, old.params, limit, old.order, imported=imported)
        sample.options, sample.arrival, sample.identity = old.options, old.arrival, old.identity
        sample.preemptions = old.preemptions
        self.attach([sample])
        return sample


@dataclass(frozen=True)
class FleetCosts:
    """What a fleet is of.

    Attributes:
        link: between pools, of each device.
        block_bytes: of a cache block on a device; `senders` devices have a part of each sequence.
        request_s: of each request before any replica sees it: socket and tokenizer.
        slo: objectives that autoscaling aims at.
    """

    link: Link = field(default_factory=Link)
    block_bytes: float = 0.0
    senders: int = 1
    request_s: float = 0.0
    slo: Slo = field(default_factory=Slo)
