"""What the fast lane (`-m "not slow"`) runs of a property or a product of cases; the slow one runs all."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

LEAST = 10


def examples(count: int) -> int:
    """Returns how many of a property's `count` examples are drawn: all, or a fourth (at least `LEAST`)."""
    return min(count, max(LEAST, count * settings().max_examples // 100))


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns cases (values, or tuples of values) as parameters of a test: those in `fast` as they are, the
    others marked `slow`."""
    cases = list(cases)
    assert all(case in cases for case in fast), "a fast case is none of the cases"
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [[] if case in fast else [pytest.mark.slow] for case in cases]
    return [pytest.param(*case, marks=mark) for case, mark in zip(given, marks, strict=True)]


def in_turns(cases: Iterable[tuple[Any, ...]], options: Sequence[Any]) -> list[Any]:
    """Returns every case with every option (a value, or a tuple of them) at its end; `slow` are all but each
    case with one of the options, in turns."""
    ends = [option if isinstance(option, tuple) else (option,) for option in options]
    cases = list(cases)
    fast = [(*case, *ends[i % len(ends)]) for i, case in enumerate(cases)]
    return slow_but(fast, [(*case, *end) for case in cases for end in ends])
