"""Load of experts over the latest steps, and who is loaded beyond a factor of the mean.

Host only: numpy, no JAX. The counts come from the router's trace (int32 `[L, E]` assignments a step).
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moejax.core.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Beyond:
    """Who is over- or under-loaded, of the experts or the devices of each layer.

    Attributes:
        ratio: float64 `[L, N]`, load over the layer's mean; 1 throughout a layer without load.
        over_factor: beyond this ratio is over-loaded.
        under_factor: below this ratio is under-loaded.
    """

    ratio: NDArray[np.float64]
    over_factor: float
    under_factor: float

    @cached_property
    def over(self) -> NDArray[np.int32]:
        """`[n, 2]`: (layer, expert or device) of each that is over-loaded, by layer."""
        return np.argwhere(self.ratio > self.over_factor).astype(np.int32)

    @cached_property
    def under(self) -> NDArray[np.int32]:
        """`[n, 2]`: (layer, expert or device) of each that is under-loaded, by layer."""
        return np.argwhere(self.ratio < self.under_factor).astype(np.int32)

    def __bool__(self) -> bool:
        return bool(len(self.over) or len(self.under))


def beyond(loads: ArrayLike, factor: float, under: float | None = None) -> Beyond:
    """Which loads `[L, N]` are more than `factor` × their layer's mean, or less than `under` × it.

    Args:
        under: by default 1 / factor. 0 reports none.

    Raises:
        ConfigError: a factor below 1, or `under` not within 0 and 1.
    """
    if not factor >= 1.0:
        raise ConfigError(f"factor={factor}: over-load is relative to the mean, so it is at least 1")
    under = 1.0 / factor if under is None else under
    if not 0.0 <= under <= 1.0:
        raise ConfigError(f"under={under}: under-load is relative to the mean, so it lies within 0 and 1")
    values = np.asarray(loads, np.float64)
    mean = values.mean(axis=1, keepdims=True)
    ratio = np.divide(values, mean, out=np.ones_like(values), where=mean > 0)
    return Beyond(ratio, float(factor), float(under))


class LoadWindow:
    """Counts a layer and expert, over the latest steps or tokens.

    The window is held in at most `parts` + 2 sums, not in single steps: memory is 8 · L · E · (parts + 2)
    bytes however long it is. Once enough was seen it covers at least its length, and less than that plus one
    part and one step; it is exact if `window_steps` <= `parts`.

    Attributes:
        steps: steps that the window holds.
        tokens: tokens that it holds, as far as `add` was told of them.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        window_steps: int | None = None,
        window_tokens: int | None = None,
        parts: int = 32,
    ) -> None:
        """Exactly one of the two lengths is given.

        Raises:
            ConfigError: none or both lengths, or a number below 1.
        """
        if (window_steps is None) == (window_tokens is None):
            raise ConfigError(
                f"a load window has one length: give window_steps={window_steps} or "
                f"window_tokens={window_tokens}"
            )
        length = window_steps if window_tokens is None else window_tokens
        assert length is not None
        for name, value in (
            ("num_layers", num_layers),
            ("num_experts", num_experts),
            ("window", length),
            ("parts", parts),
        ):
            if value < 1:
                raise ConfigError(f"load window: {name}={value} must be at least 1")
        self.shape = (num_layers, num_experts)
        self.length = length
        self._by_tokens = window_tokens is not None
        self._part = -(-length // parts)  # a part is closed when it holds this many steps or tokens
        self.reset()

    def reset(self) -> None:
        """Forget all counts, after a change of placement or workload, say."""
        self.steps = self.tokens = 0
        self._sum = np.zeros(self.shape, np.int64)
        # Counts, steps and tokens of each part, the oldest first.
        self._parts: deque[tuple[NDArray[np.int64], int, int]] = deque()
        self._size = 0  # of all parts, in steps or tokens

    def add(self, counts: ArrayLike, tokens: int | None = None) -> None:
        """One step.

        Args:
            counts: `[L, E]` integers >= 0, assignments of this step. It is copied.
            tokens: how many tokens the step had; needed if the window is that of tokens.

        Raises:
            ConfigError: another shape, negative counts, or no `tokens` for a window of tokens.
        """
        new = np.asarray(counts)
        if new.shape != self.shape or new.dtype.kind not in "iu":
            raise ConfigError(
                f"load window: counts are {new.dtype} {list(new.shape)}, expected integers {list(self.shape)}"
            )
        if new.min() < 0:
            layer, expert = np.argwhere(new < 0)[0]
            raise ConfigError(
                f"load window: layer {layer}, expert {expert} has {new[layer, expert]} assignments"
            )
        if tokens is None and self._by_tokens:
            raise ConfigError(f"load window: its length is {self.length} tokens, so `add` needs `tokens`")
        tokens = tokens or 0
        if tokens < 0:
            raise ConfigError(f"load window: tokens={tokens} must not be negative")
        if not self._parts or self._measure(self._parts[-1]) >= self._part:
            self._parts.append((np.zeros(self.shape, np.int64), 0, 0))
        total, steps, part_tokens = self._parts[-1]
        total += new
        self._parts[-1] = (total, steps + 1, part_tokens + tokens)
        self._sum += new
        self.steps += 1
        self.tokens += tokens
        self._size += tokens if self._by_tokens else 1
        while len(self._parts) > 1 and self._size - self._measure(self._parts[0]) >= self.length:
            old = self._parts.popleft()
            self._sum -= old[0]
            self.steps -= old[1]
            self.tokens -= old[2]
            self._size -= self._measure(old)

    def _measure(self, part: tuple[NDArray[np.int64], int, int]) -> int:
        return part[2] if self._by_tokens else part[1]

    @property
    def full(self) -> bool:
        """Whether the window has seen its whole length: before that, a plan rests on few steps."""
        return self._size >= self.length

    def sum(self) -> NDArray[np.int64]:
        """`[L, E]` assignments in the window."""
        return self._sum.copy()

    def mean(self) -> NDArray[np.float64]:
        """`[L, E]` assignments a step; zeros before the first."""
        return self._sum / max(self.steps, 1)

    def experts_over(self, factor: float, under: float | None = None) -> Beyond:
        """Experts beyond `factor` × the mean of their layer; see `beyond`."""
        return beyond(self._sum, factor, under)
