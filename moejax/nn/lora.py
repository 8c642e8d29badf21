"""Many LoRA adapters (Hu et al., arXiv 2106.09685) beside one model's weights, each token with its own.

An adapter has a slot; what it adds to a matrix lies side by side with the others' (S-LoRA, arXiv 2311.03285),
so that which token has which adapter is data, and no program's. Slots have one rank: smaller ranks are padded
with zeros, which add nothing, and so are matrices that an adapter leaves as they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.nn.param import ParamSpec
from moejax.ops.dot import dot


class AdapterArray(nnx.Variable):
    """A or B of all slots. No parameter: what reads, writes or counts the model's weights passes it over."""


class TokenSlots(nnx.Variable):
    """Int32 `[N]`, the slot of each token of the call under way, n for none; `[1]` between calls: none."""


class Write(NamedTuple):
    """Values, and the place in an array where they go."""

    array: AdapterArray
    values: np.ndarray
    start: tuple[int, ...]


class Lora(nnx.Module):
    """A `[in, n·r]` and B `[n·r, out]` of n slots beside a matrix `[in, out]`.

    The products of all slots are computed, and in between those that are not a token's own set to zero: for
    few slots two dense products take less time than gathering every token's matrices (docs/log.md).
    """

    def __init__(self, matrix: ParamSpec, slots: int, rank: int, tokens: TokenSlots) -> None:
        (rows, columns), axes = matrix.canonical_shape, matrix.axes
        self.a = _declare((rows, slots * rank), (axes[0], None), matrix.dtype)
        self.b = _declare((slots * rank, columns), (None, axes[1]), matrix.dtype)
        self.slots, self.rank, self.tokens = slots, rank, tokens

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x `[..., in]`, N tokens in all, to what their products get, `[..., out]`."""
        own = jnp.arange(self.slots, dtype=jnp.int32)[None] == self.tokens[...][:, None]
        inner = dot(x, self.a[...])
        mine = inner.reshape(-1, self.slots, self.rank) * own[:, :, None].astype(x.dtype)
        return dot(mine.reshape(inner.shape), self.b[...])

    @property
    def nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B of rank 0."""
        return np.zeros((self.a.shape[0], 0), np.float32), np.zeros((0, self.b.shape[1]), np.float32)

    def write(self, a: np.ndarray, b: np.ndarray, slot: int) -> list[Write]:
        """Returns how an adapter's A `[in, ≤ r]` and B `[≤ r, out]` get into a slot."""
        first, missing = slot * self.rank, self.rank - a.shape[1]
        return [
            Write(self.a, np.pad(a, ((0, 0), (0, missing))), (0, first)),
            Write(self.b, np.pad(b, ((0, missing), (0, 0))), (first, 0)),
        ]


class StackLora(nnx.Module):
    """A `[E, n, r, in]` and B `[E, n, r, out]` of n slots beside a stack `[E, in, out]`."""

    def __init__(self, stack: ParamSpec, slots: int, rank: int) -> None:
        experts, rows, columns = stack.canonical_shape
        row, column = stack.axes[1:][::-1] if stack.transposed else stack.axes[1:]
        self.a = _declare((experts, slots, rank, rows), ("expert", None, None, row), stack.dtype)
        self.b = _declare((experts, slots, rank, columns), ("expert", None, None, column), stack.dtype)
        self.rank = rank

    @property
    def nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B of rank 0."""
        (experts, *_, rows), columns = self.a.shape, self.b.shape[-1]
        return np.zeros((experts, rows, 0), np.float32), np.zeros((experts, 0, columns), np.float32)

    def write(self, a: np.ndarray, b: np.ndarray, slot: int) -> list[Write]:
        """Returns how an adapter's A `[E, in, ≤ r]` and B `[E, ≤ r, out]` get into a slot."""
        pad = ((0, 0), (0, self.rank - b.shape[1]), (0, 0))
        values = (np.pad(x, pad)[:, None] for x in (a.swapaxes(1, 2), b))
        return [Write(into, x, (0, slot, 0, 0)) for into, x in zip((self.a, self.b), values, strict=True)]


def _declare(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any) -> AdapterArray:
    spec = ParamSpec(shape, axes, dtype, "zeros")
    return AdapterArray(spec.struct(), spec=spec)
