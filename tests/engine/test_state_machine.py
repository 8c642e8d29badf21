"""Random workloads on the host side of the engine: after every step nothing is lost, shared in error or
stuck, and every request gets the tokens that it would get alone. `test_state_defects.py` puts defects in."""

import dataclasses
from collections import Counter
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moejax.cache.allocator import BlockAllocator, WindowAllocator
from moejax.cache.prefix import POLICIES, make_prefixes
from moejax.core.config import Preemption, PrefixCacheConfig
from moejax.core.errors import RequestError
from moejax.core.scheduling import SchedulingConfig, Tenant
from moejax.engine.requests.api import RequestOptions
from moejax.engine.requests.builder import roots_of
from moejax.engine.scheduling import policies
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import State
from moejax.engine.scheduling.speculation import Speculation
from moejax.engine.scheduling.static import StaticScheduler
from moejax.engine.scheduling.swap import SwapSpace
from tests.engine.asks import Ask
from tests.engine.host_engine import HostEngine, Limits

CACHE_EVENTS = (
    "blocks shared in the step that writes them",
    "hits",
    "hits within a block",
    "loads",
    "readmission hits",
    "saves",
    "saves when idle",
)
SWAP_EVENTS = (
    "abort swapped",
    "failures while swapped",
    "swaps",
    "swaps back in mid-prompt",
    "swaps back that decode",
    "swaps with a token not read",
    "swaps with forks to come",
    "swaps without room",
)
EVENTS = (
    "abort in flight",
    "abort mid-prompt",
    "abort preempted",
    "abort running",
    "abort waiting",
    "abort with unstarted forks",
    "blocks left behind",
    "chunked prompts",
    "copies",
    "copies in windows",
    "displaced for a better class",
    "failures",
    "forks",
    "interruptions of which some have ended",
    "interruptions with tokens",
    "limits below who runs",
    "mixed steps",
    "padding rows",
    "pauses that keep",
    "pauses that wait",
    "preemptions",
    "preemptions before forking",
    "readmissions",
    "refused requests",
    "resumptions",
    "resumptions with forks",
    "scores",
    "stops",
    "tokens of ended sequences",
)

DRAFT_EVENTS = (
    "abort with drafts in flight",
    "drafts dropped",
    "drafts kept",
    "ends within drafts",
    "hits",
    "preemptions",
    "swaps",
    "without drafts, as is faster",
)

RARE = "swaps with forks to come"

LONGEST_PROMPT, MOST_TOKENS = 24, 40
MODES = get_args(Preemption)


options = st.builds(
    RequestOptions,
    priority=st.integers(-1, 1),
    deadline_ms=st.sampled_from((None, 3e3, 30e3)),
    tenant=st.sampled_from(("", "few", "small", "slow")),
    slo_class=st.sampled_from((None, "interactive", "standard", "batch")),
)
# None has a quota in most runs.
quotas = {
    "few": Tenant(max_seqs=4),
    "small": Tenant(max_blocks=64),
    "slow": Tenant(tokens_per_s=1.5, burst_tokens=9),
}
schedulings = st.builds(
    SchedulingConfig,
    ageing_s=st.sampled_from((5.0, 100.0)),
    quantum_tokens=st.integers(1, 4),
    tenants=st.sampled_from(({}, {}, quotas)),
)


def asks(**fixed: st.SearchStrategy) -> st.SearchStrategy[Ask]:
    shape = {
        "prompt_len": st.integers(1, LONGEST_PROMPT),
        "max_tokens": st.integers(1, MOST_TOKENS),
        "n": st.sampled_from((1, 1, 1, 2, 3, 4)),
        "stop_below": st.sampled_from((0, 0, 40, 300)),
        "first": st.integers(0, 2),
        "seed": st.integers(0, 1),
        "salt": st.sampled_from((0, 0, 0, 1, None)),
        "looked_up": st.sampled_from((True, True, True, False)),
        "options": options,
    }
    return st.builds(Ask, **(shape | fixed))


# Many samples of short prompts, which grow until memory is short, long prompts, and all kinds.
kinds = st.one_of(
    asks(prompt_len=st.integers(1, 6), max_tokens=st.integers(20, MOST_TOKENS), stop_below=st.just(0)),
    asks(prompt_len=st.integers(12, LONGEST_PROMPT), n=st.integers(2, 3)),
    asks(),
    asks(score=st.just(True), n=st.just(1), stop_below=st.just(0)),
)


BELOW_EVENTS = ("blocks written", "blocks read", "blocks lost", "blocks refused", "swaps", "hits")

caches = st.builds(
    PrefixCacheConfig,
    enabled=st.just(True),
    policy=st.sampled_from(tuple(POLICIES)),
    match=st.sampled_from(("tokens", "tokens", "blocks")),
    place=st.sampled_from(("device", "host")),
)


@st.composite
def limits(draw: st.DrawFn, prefixes: st.SearchStrategy[PrefixCacheConfig | None] | None = None) -> Limits:
    """From an engine that holds one sequence, or not even each one, to one where memory is never short.
    With `prefixes` what is preempted may be swapped, too."""
    caches = None if prefixes is None else draw(prefixes)
    seqs = draw(st.integers(1 if prefixes is None or caches else 3, 8))
    size = draw(st.integers(1, 8))
    longest = -(-(LONGEST_PROMPT + MOST_TOKENS) // size)
    scarce = st.integers(longest, longest + 6)
    swaps, alone = prefixes is not None, prefixes is not None and caches is None
    return Limits(
        num_blocks=draw(
            scarce
            if alone
            else st.one_of(scarce, scarce, st.integers(2, longest), st.integers(longest, 6 * longest))
        ),
        block_size=size,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw(st.one_of(st.integers(0, 3), st.integers(0, 20))),
        overlap=draw(st.booleans()),
        static=prefixes is None and draw(st.sampled_from((False, False, True))),
        policy=draw(st.sampled_from(("fcfs", "priority", "edf", "slo", *policies.POLICIES))),
        scheduling=draw(schedulings),
        prefixes=caches,
        slots=draw(st.sampled_from((3, 20, 200, 1))) if caches else 0,
        window=None if caches or swaps else draw(st.sampled_from((None, 1, 5, 12))),
        shared=caches is None or draw(st.booleans()),
        fail_at=frozenset(draw(st.lists(st.integers(0, 200), max_size=2))),
        preemption=draw(st.sampled_from(MODES[1 if alone else 0 :])) if swaps else "recompute",
        swap_slots=draw(st.sampled_from((40, 200, 3))) if swaps else 0,
        compacts=caches is None and draw(st.booleans()),
    )


class Machine(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order. Subclasses count events, or put defects in."""

    events: ClassVar[Counter[str]] = Counter()
    scheduler: tuple[type[Scheduler], type[Scheduler]] = (Scheduler, StaticScheduler)
    allocator: type[BlockAllocator] = BlockAllocator
    prefixes: ClassVar[Any] = staticmethod(make_prefixes)
    roots: ClassVar[Any] = staticmethod(roots_of)
    windows: type[WindowAllocator] = WindowAllocator
    swap: type[SwapSpace] = SwapSpace
    speculation: type[Speculation] = Speculation

    @initialize(limits=limits())
    def start(self, limits: Limits) -> None:
        kinds = self.scheduler[limits.static], self.allocator, self.prefixes
        spaces = self.windows, self.swap, self.speculation
        self.engine = HostEngine(limits, *kinds, self.events, self.roots, *spaces)

    @rule(batch=st.lists(kinds, min_size=1, max_size=6))
    def arrive(self, batch: list[Ask]) -> None:
        for ask in batch:
            self._submit(ask)

    @rule(n=st.integers(1, 3), short=st.integers(0, 4), max_tokens=st.integers(1, 5), empty=st.booleans())
    def fill(self, n: int, short: int, max_tokens: int, empty: bool) -> None:
        """A prompt for which there is just room, so that whoever runs soon wants for blocks."""
        scheduler, allocator = self.engine.scheduler, self.engine.allocator
        reserve = 0 if empty else scheduler.watermark + n - 1
        room = (allocator.num_free - reserve) * allocator.block_size - short
        if 0 < room <= 2 * (LONGEST_PROMPT + MOST_TOKENS):
            self._submit(Ask(room, max_tokens, n))

    @rule(n=st.integers(2, 3), max_tokens=st.integers(1, 5))
    def crowd(self, n: int, max_tokens: int) -> None:
        """Two that grow and behind them a group: its prompt takes long, and often memory is short before."""
        for _ in range(2):
            self._submit(Ask(1, MOST_TOKENS))
        self.steps(2)
        self.fill(n, 0, max_tokens, False)

    @precondition(lambda self: self.engine.idle)
    @rule(n=st.integers(1, 2), prompt_len=st.integers(1, LONGEST_PROMPT))
    def hurry(self, n: int, prompt_len: int) -> None:
        """One of the best class, when as many as can run have been at it for a while."""
        urgent = RequestOptions(priority=-2, deadline_ms=1e3, slo_class="interactive")
        for _ in range(self.engine.limits.max_num_seqs):
            self._submit(Ask(1, 12))
        self.steps(6)
        self._submit(Ask(prompt_len, 4, n, options=urgent))

    def _submit(self, ask: Ask) -> None:
        """It is refused exactly if it could not run on the empty engine."""
        limits, waiting = self.engine.limits, self.engine.scheduler.num_waiting
        length = ask.prompt_len + (0 if ask.score else ask.max_tokens - 1)
        need = -(-length // limits.block_size) * (ask.n if limits.static else 1)
        fits = need <= limits.num_blocks and ask.n <= limits.max_num_seqs
        quota = limits.scheduling.tenants.get(ask.options.tenant)
        if quota is not None and quota.max_blocks is not None:
            fits &= -(-length // limits.block_size) * ask.n <= quota.max_blocks
        try:
            self.engine.submit(ask)
        except RequestError:
            assert not fits and self.engine.scheduler.num_waiting == waiting
            self.events["refused requests"] += 1
        else:
            assert fits and self.engine.scheduler.num_waiting == waiting + ask.n

    @rule(count=st.integers(1, 24))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: any(group.live for group in self.engine.groups))
    @rule(data=st.data(), started=st.booleans())
    def abort(self, data: st.DataObject, started: bool) -> None:
        live = [group for group in self.engine.groups if group.live]
        if started:
            running = [g for g in live if any(s.state is State.RUNNING for s in g.samples)]
            live = running or live
        self.engine.abort(live[data.draw(st.integers(0, len(live) - 1))])

    @precondition(lambda self: any(len(group.samples) > 1 and group.live for group in self.engine.groups))
    @rule(data=st.data(), interrupted=st.booleans())
    def stop_one_sample(self, data: st.DataObject, interrupted: bool) -> None:
        """As a stop string does that the engine found in one sample's text."""
        live = [group for group in self.engine.groups if group.live and not group.samples[0].forks]
        if live:
            group = live[data.draw(st.integers(0, len(live) - 1))]
            self.engine.abort(group, [data.draw(st.integers(0, len(group.samples) - 1))])
            if interrupted and group.live:
                self.engine.interrupt(group)

    @precondition(lambda self: any(group.live and not group.ask.score for group in self.engine.groups))
    @rule(data=st.data(), at_once=st.booleans(), ended=st.booleans())
    def interrupt(self, data: st.DataObject, at_once: bool, ended: bool) -> None:
        live = [group for group in self.engine.groups if group.live and not group.ask.score]
        if ended:
            live = [g for g in live if any(s.state is State.FINISHED for s in g.samples)] or live
        self.engine.interrupt(live[data.draw(st.integers(0, len(live) - 1))])
        if at_once:
            self.engine.resume(self.engine.kept.pop())

    @precondition(lambda self: self.engine.kept)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        kept = self.engine.kept
        self.engine.resume(kept.pop(data.draw(st.integers(0, len(kept) - 1))))

    @rule(running=st.integers(1, 8), prefill=st.integers(1, 12))
    def limit(self, running: int, prefill: int) -> None:
        """As adaptive batching does between steps."""
        scheduler, limits = self.engine.scheduler, self.engine.limits
        if not limits.static:
            self.events["limits below who runs"] += running < len(scheduler.running)
            scheduler.most_running = min(running, limits.max_num_seqs)
            scheduler.most_prefill = prefill

    @rule(wait=st.booleans())
    def pause(self, wait: bool) -> None:
        self.engine.paused = False
        self.engine.pause(wait)

    @precondition(lambda self: self.engine.paused)
    @rule()
    def unpause(self) -> None:
        self.engine.paused = False

    @invariant()
    def intact(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            while self.engine.kept:
                self.engine.resume(self.engine.kept.pop())
            self.engine.drain()
            assert all(s.state is State.FINISHED for g in self.engine.groups for s in g.samples)


class Remembering(Machine):
    """The same with a memory of prefixes, and perhaps one of what is preempted."""

    @initialize(limits=limits(caches))
    def start(self, limits: Limits) -> None:
        super().start(limits)


class Swapping(Machine):
    """The same with a memory of what is preempted alone."""

    @initialize(limits=limits(st.none()))
    def start(self, limits: Limits) -> None:
        super().start(limits)


class Speculating(Machine):
    """The same with drafts that are right always, never or now and then, all of them or those that steps of
    random durations make worth while, with a memory or without."""

    @initialize(
        limits=st.one_of(limits(), limits(caches), limits(st.none())),
        k=st.integers(1, 5),
        right=st.sampled_from((0.0, 0.5, 1.0)),
        utility=st.booleans(),
    )
    def start(self, limits: Limits, k: int, right: float, utility: bool) -> None:
        super().start(dataclasses.replace(limits, static=False, k=k, right=right, utility=utility))


class Growing(Machine):
    """The same with a cache that grows and shrinks, with a memory or without."""

    @initialize(
        limits=st.one_of(limits(), limits(caches), limits(st.none())), initial=st.sampled_from((1, 2, 5))
    )
    def start(self, limits: Limits, initial: int) -> None:
        super().start(dataclasses.replace(limits, static=False, initial=min(initial, limits.num_blocks)))


class Below(Machine):
    """The same with few blocks in the host's memory, and the others on a disk that fails now and then."""

    @initialize(
        limits=st.one_of(limits(caches), limits(st.none())),
        rows=st.integers(1, 9),
        load=st.sampled_from(("always", "auto")),
    )
    def start(self, limits: Limits, rows: int, load: Any) -> None:
        caches = limits.prefixes and dataclasses.replace(limits.prefixes, place="host", load=load)
        slots = max(2, limits.slots) if caches else 0
        rows = min(rows, slots + limits.swap_slots - 1)
        super().start(dataclasses.replace(limits, prefixes=caches, slots=slots, rows=rows))


def explore(machine: type[Machine], examples: int, **options: Any) -> Counter[str]:
    """Runs the machine; returns what happened. Nothing is timed: a loaded machine must not fail a test."""
    machine.events = Counter()
    defaults = {"derandomize": True, "database": None, "deadline": None}
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
            **(defaults | options),
        ),
    )
    return machine.events


@pytest.mark.parametrize("machine", [Machine, Remembering, Swapping, Speculating])
def test_some_random_workloads(machine: type[Machine]):
    assert explore(machine, 25)["steps"] >= 800


@pytest.mark.slow
@pytest.mark.parametrize("examples", [100, 250])
def test_random_workloads(examples: int):
    """As few examples as still come by every event, with a memory or without."""
    every = [explore(machine, examples) for machine in (Machine, Remembering)]
    assert all(events["steps"] >= 5_000 for events in every)
    every.append(explore(Swapping, examples // 4))
    drafting = explore(Speculating, examples // 2)
    assert not [event for event in DRAFT_EVENTS if not drafting[event]], drafting
    growing = explore(Growing, examples // 4)
    assert growing["grown"] and growing["shrinks"] and growing["preemptions"], growing
    below = explore(Below, examples // 4)
    assert not [event for event in BELOW_EVENTS if not below[event]], below
    wanted = {*EVENTS, *CACHE_EVENTS, *SWAP_EVENTS} - ({RARE} if examples < 250 else set())
    assert not [event for event in wanted if not sum(every, Counter())[event]], every


LONG = {
    Machine: EVENTS,
    Remembering: (*EVENTS, *CACHE_EVENTS, *SWAP_EVENTS),
    Swapping: (*EVENTS, *SWAP_EVENTS),
    Speculating: DRAFT_EVENTS,
    Below: BELOW_EVENTS,
    Growing: ("grown", "shrinks", "preemptions"),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", LONG)
def test_random_workloads_for_long(machine: type[Machine]) -> None:
    events = explore(machine, 1_000, derandomize=False)
    assert events["steps"] >= 100_000
    # Those with a memory, or what swaps, have no windows of their own.
    windows = {"blocks left behind", "copies in windows"}
    never = {"padding rows", *windows} if machine is not Machine else set()
    assert not [event for event in LONG[machine] if not events[event] and event not in never], events
