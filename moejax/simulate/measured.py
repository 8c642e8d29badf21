"""Steps as a machine took them: told again one by one, or learnt by the shapes that they were compiled for.
Host arithmetic.

    turn     host: until the launch | wait for the step before | host: its tokens to their requests
    device                          | step, after the one before

What of the host's work is hidden behind a step is the loop's doing, here as there.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

_LEAST = 4
"""Steps that a mean is of, at least."""


class Turn(NamedTuple):
    """Seconds of a step and of the host's work for it.

    Attributes:
        launch: the host's since the turn began, requests taken, until the step was launched.
        device: from there, or from the end of the step before if that was later, until its tokens were seen.
        after: the host's from there, or from the next step's launch if that was later, until the driver looks
            for requests again.
    """

    launch: float
    device: float
    after: float


class Work(NamedTuple):
    """What a step computes.

    Attributes:
        bucket: the sizes that it was compiled for.
        tokens: those that are no padding to the experts.
    """

    bucket: tuple[int, ...]
    tokens: int


class TimedStep(NamedTuple):
    """A step that was timed."""

    work: Work
    turn: Turn


class Loop(NamedTuple):
    """What was noted in a turn of an engine's loop, instants in seconds.

    Attributes:
        looked: when its driver last looked for requests before it.
        woke: the same where the engine had been idle and was given one; else None.
        submit_s: of taking requests since the turn before.
        launched: when a step's launch had returned; None where none was launched.
        work: of that step.
        delivered: steps whose tokens were brought to their requests.
    """

    looked: float
    woke: float | None
    submit_s: float
    launched: float | None
    work: Work | None
    delivered: int


def timed_steps(turns: Sequence[Loop], ends: Sequence[float], start: float) -> list[TimedStep]:
    """Returns the steps of a run in their order.

    Args:
        ends: when each step's tokens were seen to be there.
        start: the run's first instant.
    """
    steps, flying, clock, last = list[TimedStep](), deque[tuple[Work, float, float]](), start, start
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        began = clock = max(clock, turn.woke or clock) + turn.submit_s
        if turn.launched is not None and turn.work is not None:
            flying.append((turn.work, max(0.0, turn.launched - clock), turn.launched))
            clock = turn.launched
        for left in reversed(range(turn.delivered)):
            work, launch, launched = flying.popleft()
            end = ends[len(steps)]
            # Tokens seen before the launch were there as the turn began: the loop looks then only.
            end = max(end if end >= clock else began, launched, last)
            device, last, clock = end - max(launched, last), end, max(clock, end)
            after = 0.0 if left or following is None else max(0.0, following.looked - clock)
            clock += after
            steps.append(TimedStep(work, Turn(launch, device, after)))
    return steps


def usual_steps(runs: Sequence[Sequence[TimedStep]]) -> list[TimedStep]:
    """Returns the steps of runs that took the same ones: of each part's seconds the mean without the least
    and the most.

    Raises:
        ValueError: the runs' steps differ.
    """
    found = []
    for same in zip(*runs, strict=True):
        if len({step.work for step in same}) > 1:
            raise ValueError("runs of the same requests, all there at once, took different steps")
        parts = [sorted(part) for part in zip(*(step.turn for step in same), strict=True)]
        found.append(TimedStep(same[0].work, Turn(*(fmean(part[1:-1] or part) for part in parts))))
    return found


class StepTable:
    """Seconds of steps by their work, learnt from steps that were timed.

    Within a bucket they are straight lines between means of steps with about as many tokens; of a bucket that
    was not met, a linear function of its sizes and tokens, and no less than the least that was seen.
    """

    def __init__(self, steps: Iterable[TimedStep]) -> None:
        by_bucket: defaultdict[tuple[int, ...], list[tuple[float, ...]]] = defaultdict(list)
        for work, turn in steps:
            by_bucket[work.bucket].append((work.tokens, *turn))
        self.curves = {bucket: _curve(sorted(points)) for bucket, points in by_bucket.items()}
        sizes = [(1.0, *bucket, x[0]) for bucket, curve in self.curves.items() for x in curve]
        seconds = np.concatenate([curve[:, 1:] for curve in self.curves.values()])
        weights = 1 / seconds.sum(axis=1, keepdims=True)  # relative errors count
        self.line = np.linalg.lstsq(np.array(sizes) * weights, seconds * weights, rcond=None)[0]
        self.least = seconds.min(axis=0)

    def __call__(self, work: Work) -> Turn:
        curve = self.curves.get(work.bucket)
        if curve is None:
            line = np.array([1.0, *work.bucket, work.tokens]) @ self.line
            return Turn(*np.maximum(self.least, line).tolist())
        return Turn(*[float(np.interp(work.tokens, curve[:, 0], part)) for part in curve.T[1:]])


def _curve(points: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Returns means over neighbouring numbers of tokens, a row each: tokens, then parts of a turn."""
    parts: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if len(parts[-1]) >= _LEAST and parts[-1][-1][0] != point[0]:
            parts.append([])
        parts[-1].append(point)
    if len(parts) > 1 and len(parts[-1]) < _LEAST:
        last = parts.pop()
        parts[-1] += last
    return np.array([np.mean(part, axis=0) for part in parts])
