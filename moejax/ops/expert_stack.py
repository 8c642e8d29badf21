"""E matrices as one operand: floats in either order, or codes."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moejax.ops.dot import dot, dot_by_rows
from moejax.ops.quantized_matmul import activation_codes, matmul
from moejax.quantization.arithmetic import dequantize, quantize_activations
from moejax.quantization.formats import QTensor
from moejax.sharding.axes import Names


@dataclass(frozen=True)
class Stack:
    """Matrices `[E, D, F]`.

    Attributes:
        weight: an array, or a `QTensor` of a stack.
        bias: `[E, F]`, added to products with rows.
        implementation: of products with a quantized weight, see `moejax.ops.quantized_matmul`.
        transposed: an array is stored `[E, F, D]`. Codes always are.
        lora: A `[E, S, r, D]` and B `[E, S, r, F]` of S adapters. What multiplies rows is then told the slot
            of each as well, from S on of those that have none.
    """

    weight: jax.Array | QTensor
    implementation: str = "xla"
    transposed: bool = False
    bias: jax.Array | None = None
    lora: tuple[jax.Array, jax.Array] | None = None

    @property
    def quantizes_rows(self) -> bool:
        """The products' other operand is rounded, too."""
        return isinstance(self.weight, QTensor) and self.weight.format.activations != "none"

    @property
    def by_rows(self) -> bool:
        """A single row's product reads it without a copy. "dequantize" makes matrices `[D, F]`."""
        return self.transposed or (isinstance(self.weight, QTensor) and self.implementation != "dequantize")

    @property
    def outputs(self) -> int:
        """F."""
        return self.weight.shape[-2 if self.transposed else -1]

    @property
    def elements(self) -> int:
        """Elements of one matrix."""
        return math.prod(self.weight.shape[1:])

    def times(self, x: jax.Array, expert: jax.Array, slots: jax.Array | None = None) -> jax.Array:
        """Computes one expert's `x @ matrix`, x `[M, D]` with slots `[M]`. Slices first: no stack is
        transposed or decoded."""
        parts = jax.tree.map(lambda array: _slice_of(array, expert), (self.weight, self.bias))
        y = self.one(x, parts)
        if self.lora is None or slots is None:
            return y
        S = self.lora[0].shape[1]
        lora = [array.reshape(-1, *array.shape[2:]) for array in self.lora]

        def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            slot, y = state
            a, b = (_slice_of(array, expert * S + slot) for array in lora)
            y = y + dot(dot_by_rows(jnp.where((slots == slot)[:, None], x, 0), a), b)
            return jnp.min(jnp.where(slots > slot, slots, S)), y

        # A turn for each slot that there is: none without adapters.
        return jax.lax.while_loop(lambda state: state[0] < S, turn, (jnp.minimum(jnp.min(slots), S), y))[1]

    def add_each(self, y: jax.Array, x: jax.Array, experts: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns products y `[M, F]` of x `[M, D]` with what adapters add, each row's of an expert and slot
        of its own, `[M]`; nothing is computed where none has an adapter."""
        assert self.lora is not None
        S, lora = self.lora[0].shape[1], [array.reshape(-1, *array.shape[2:]) for array in self.lora]
        has = slots < S
        pairs = jnp.where(has, experts * S + slots, 0)

        def added() -> jax.Array:
            a, b = (_rows_of(array, pairs) for array in lora)
            inner = jnp.einsum("md,mrd->mr", jnp.where(has[:, None], x, 0), a)
            return y + jnp.einsum("mr,mrf->mf", inner, b)

        return jax.lax.cond(jnp.any(has), added, lambda: y)

    def added(self, rows: jax.Array, counts: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns what adapters add to the products of rows `[A, D]`, sorted by expert with counts `[E]`: all
        slots' products, of which those that are not a row's own are set to zero (`moejax.nn.lora.Lora`)."""
        assert self.lora is not None
        _, S, r, _ = self.lora[0].shape
        a, b = (array.reshape(array.shape[0], S * r, -1) for array in self.lora)
        own = (slots[:, None] == jnp.arange(S, dtype=slots.dtype)[None]).repeat(r, axis=1)
        inner = jax.lax.ragged_dot(rows, a.swapaxes(1, 2), counts)
        return jax.lax.ragged_dot(jnp.where(own, inner, 0), b, counts)

    def each(self, x: jax.Array, split: Names = ()) -> jax.Array:
        """Maps x `[E, M, D]` to `[E, M, F]`, expert by expert; `split` as in `matmul`."""
        if isinstance(self.weight, QTensor):
            y = matmul(x, self.weight, self.implementation, split=split)
        else:
            y = jnp.einsum("emd,efd->emf" if self.transposed else "emd,edf->emf", x, self.weight)
        return y if self.bias is None else y + self.bias[:, None]

    def one(self, x: jax.Array, part: Any, split: Names = ()) -> jax.Array:
        """Multiplies x `[M, D]` by a slice of `weight`, with one of `bias`, as a scan gives both."""
        weight, bias = part
        if isinstance(weight, QTensor):
            y = matmul(x, weight, self.implementation, split=split)
        else:
            y = dot_by_rows(x, weight) if self.transposed else dot(x, weight)
        return y if bias is None else y + bias[None]

    def matrix(self, dtype: Any = jnp.float32) -> jax.Array:
        """Returns `[E, D, F]`; a quantized stack whole, in `dtype`."""
        if isinstance(self.weight, QTensor):
            return dequantize(self.weight, dtype)
        return jnp.swapaxes(self.weight, 1, 2) if self.transposed else self.weight

    def codes_of(self, rows: jax.Array, expert: jax.Array, split: Names = ()) -> tuple[jax.Array, jax.Array]:
        """Returns codes `[A, D]` and float32 scales `[A, 1]` of rows, each its expert's, for quantized rows.

        Args:
            expert: int32 `[A]`, below E.
            split: mesh axes that D is split over.
        """
        q = self.weight
        assert isinstance(q, QTensor) and self.quantizes_rows
        if q.format.activations == "dynamic":
            return activation_codes(rows, q, split)
        assert q.input_scale is not None
        return quantize_activations(rows, q.format, q.input_scale[expert])

    def rounded(self, rows: jax.Array, expert: jax.Array, split: Names = ()) -> jax.Array:
        """Returns rows in their dtype as the products see them; arguments as of `codes_of`."""
        if not self.quantizes_rows:
            return rows
        codes, scale = self.codes_of(rows, expert, split)
        return (codes.astype(jnp.float32) * scale).astype(rows.dtype)

    def without_activations(self) -> "Stack":
        """Returns the same for rows that are rounded already."""
        if not isinstance(self.weight, QTensor):
            return self
        fmt = dataclasses.replace(self.weight.format, activations="none")
        return dataclasses.replace(
            self, weight=dataclasses.replace(self.weight, format=fmt, input_scale=None)
        )


def _slice_of(array: jax.Array, which: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(*_tied(array, which), 0, keepdims=False)


def _tied(array: jax.Array, which: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keeps a stack of bfloat16, which XLA:CPU slices as float32, from being converted whole before a loop
    over experts: tied to the expert, the conversion stays in it, where it is of the slice."""
    if array.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        array, which = jax.lax.optimization_barrier((array, which))
    return array, which


def _rows_of(array: jax.Array, which: jax.Array) -> jax.Array:
    array, which = _tied(array, which)
    return array[which]
