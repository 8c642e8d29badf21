"""The points that no other point beats."""

from collections.abc import Sequence


def pareto(costs: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Returns the indices of the points that none beats in both figures, nor equals in one and beats in the
    other, by rising cost. Both are better lower; negate what is better higher."""
    front: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], losses[i])):
        if not front or losses[i] < losses[front[-1]]:
            front.append(i)
    return front
