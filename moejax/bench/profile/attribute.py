"""Time of each operation: the profile's events laid over the instructions' places.

Every nanosecond of a step is given out once. At any instant the instructions that are running, without those
that only wait for one within them (a loop for its body), share the instant equally; where none runs but a
loop does, it is the loop's own; where none runs at all, it is the program's launch overhead between its first
and its last instruction, and the host's before it. So the parts add up to the step's time on the wall.

A unit is a decode step, or all steps of a generation that compute parts of its prompts. Of a phase's units
the middle half by their time is kept, so that a moment in which the machine did something else does not
become an operation's; means over those still add up.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moejax.bench.profile.program import NOWHERE, Place, Program, match
from moejax.bench.profile.trace import Event, Trace, TraceError

LAUNCH, HOST, UNKNOWN = "launch_overhead", "host_gap", "unattributed"
"""Parts of a step that are no operation: between instructions, before the program, and of no known place."""


@dataclass
class PhaseTimes:
    """Sums over units of a phase, in nanoseconds.

    Attributes:
        units: how many are summed, of `measured` in the trace.
        steps: executions of the engine's step in them.
        wall: their time, with the host's before each.
        instructions: by (program's key, instruction); executions likewise.
        launch, host: see `LAUNCH`, `HOST`.
        places: of each instruction.
    """

    units: int = 0
    measured: int = 0
    steps: int = 0
    wall: float = 0.0
    launch: float = 0.0
    host: float = 0.0
    instructions: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    executions: Counter[tuple[str, str]] = field(default_factory=Counter)
    places: dict[tuple[str, str], Place] = field(default_factory=dict)

    def by_operation(self) -> dict[str, float]:
        """Nanoseconds of each operation, and of `UNKNOWN`, `LAUNCH` and `HOST`; together `wall`."""
        times: dict[str, float] = defaultdict(float)
        for name, spent in self.instructions.items():
            times[self.places[name].operation or UNKNOWN] += spent
        return {**times, LAUNCH: self.launch, HOST: self.host}

    def by_layer(self) -> dict[int, float]:
        """Nanoseconds of the instructions of each layer."""
        times: dict[int, float] = defaultdict(float)
        for name, spent in self.instructions.items():
            layer = self.places[name].layer
            if layer is not None:
                times[layer] += spent
        return dict(sorted(times.items()))

    def add(self, other: "PhaseTimes") -> None:
        """Sums with another one."""
        for name in ("units", "steps", "wall", "launch", "host"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, spent in other.instructions.items():
            self.instructions[key] += spent
        self.executions.update(other.executions)
        self.places |= other.places

    @property
    def inferred(self) -> float:
        """Nanoseconds of the instructions without a scope of their own."""
        return sum(spent for name, spent in self.instructions.items() if self.places[name].inferred)


def attribute_trace(trace: Trace, programs: Sequence[Program]) -> dict[str, PhaseTimes]:
    """Times of the phases "prefill" and "decode", of the programs that were running there.

    Executions of other programs within a generation (a copy of blocks, a conversion) are time of the host
    before the next step.

    Raises:
        TraceError: no execution of any of the programs.
    """
    runs: dict[tuple[int, int], list[Event]] = defaultdict(list)
    names: dict[int, set[str]] = defaultdict(set)
    for event in trace.events:
        runs[event.program, event.run].append(event)
        names[event.program].add(event.instruction)
    known = {number: match(phase_units, programs) for number, phase_units in names.items()}
    units: dict[str, list[PhaseTimes]] = {"prefill": [], "decode": []}
    for first, last in trace.spans:
        before, prompts = first, PhaseTimes(units=1)
        inside = [
            (events, program)
            for (number, _), events in runs.items()
            if (program := known[number]) is not None and first <= events[0].start < last
        ]
        for events, program in sorted(inside, key=lambda run: run[0][0].start):
            events = _whole_loops(events, program)
            start, end = events[0].start, max(event.end for event in events)
            step = prompts if program.prefill else PhaseTimes(units=1)
            step.steps += 1
            step.wall += max(0.0, end - before)
            step.host += max(0.0, start - before)
            step.launch += _share_out(events, program, max(start, before), step)
            if not program.prefill:
                units["decode"].append(step)
            before = max(before, end)
        if prompts.steps:
            units["prefill"].append(prompts)
    if not any(units.values()):
        raise TraceError(
            "the profile has no execution of the engine's steps, or under names that the compiled programs do"
            " not have"
        )
    return {phase: _middle(phase_units) for phase, phase_units in units.items()}


def _middle(units: Sequence[PhaseTimes]) -> PhaseTimes:
    """The sum of the middle half; of three the middle one."""
    cut = 0 if len(units) < 3 else max(1, len(units) // 4)
    total = PhaseTimes(measured=len(units))
    for unit in sorted(units, key=lambda unit: unit.wall)[cut : len(units) - cut]:
        total.add(unit)
    return total


def _whole_loops(events: Sequence[Event], program: Program) -> list[Event]:
    """Loops and conditionals lasting until the last of what runs within them has ended."""
    whole = list(events)
    latest: dict[str, int] = {}
    for i, event in enumerate(events):
        for caller in program.callers.get(event.instruction, ()):
            place = latest.get(caller)
            if place is not None and whole[place].end < event.end:
                whole[place] = replace(whole[place], end=event.end)
        latest[event.instruction] = i
    return whole


def _share_out(events: Iterable[Event], program: Program, begin: float, into: PhaseTimes) -> float:
    """Gives an execution's time from `begin` on to its instructions; returns what none was running in."""
    points: list[tuple[float, int, str]] = []
    for event in events:
        key = program.key, event.instruction
        into.places.setdefault(key, program.places.get(event.instruction, NOWHERE))
        into.executions[key] += 1
        # At the same instant what ends comes before what starts.
        points += [(event.start, 1, event.instruction), (event.end, -1, event.instruction)]
    active: dict[str, int] = {}
    running: tuple[str, ...] = ()
    idle, now = 0.0, begin
    for instant, change, name in sorted(points, key=lambda point: point[:2]):
        if instant > now:
            spent, now = instant - now, instant
            for each in running:
                into.instructions[program.key, each] += spent / len(running)
            idle += 0.0 if running else spent
        count = active.get(name, 0) + change
        if count:
            active[name] = count
        else:
            active.pop(name, None)
        running = _innermost(active, program.callers)
    return idle


def _innermost(active: Mapping[str, int], callers: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Without those that wait for another one."""
    if len(active) < 2:
        return tuple(active)
    waiting = frozenset().union(*(callers.get(name, frozenset()) for name in active))
    return tuple(name for name in active if name not in waiting)
