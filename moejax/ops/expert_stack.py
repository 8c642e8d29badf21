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
        lora: A `[E, S, r, D]` and B `[E, S, r, F]` of S adapters. To what computes groups of rows the stack
            then has E·S experts, of which e·S + s adds adapter s's products to those of expert e.
    """

    weight: jax.Array | QTensor
    implementation: str = "xla"
    transposed: bool = False
    bias: jax.Array | None = None
    lora: tuple[jax.Array, jax.Array] | None = None

    @property
    def slots(self) -> int:
        """S, 1 without adapters."""
        return 1 if self.lora is None else self.lora[0].shape[1]

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

    def times(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """Computes one expert's `x @ matrix`, x `[M, D]`. Slices first: no stack is transposed or decoded."""

        def slice_of(array: jax.Array, which: jax.Array) -> jax.Array:
            if array.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
                # XLA:CPU slices bfloat16 as float32. Tied to the expert, the conversion stays in a loop over
                # experts, where it is of the slice; otherwise the whole stack is converted before the loop.
                array, which = jax.lax.optimization_barrier((array, which))
            return jax.lax.dynamic_index_in_dim(array, which, 0, keepdims=False)

        own = expert if self.lora is None else expert // self.slots
        y = self.one(x, jax.tree.map(lambda array: slice_of(array, own), (self.weight, self.bias)))
        if self.lora is None:
            return y
        a, b = (slice_of(array.reshape(-1, *array.shape[2:]), expert) for array in self.lora)
        return y + dot(dot_by_rows(x, a), b)

    def added(self, rows: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns what adapters add to the products of rows `[A, D]`, sorted by group with counts `[E·S]`."""
        assert self.lora is not None
        a, b = (array.reshape(-1, *array.shape[2:]) for array in self.lora)
        return jax.lax.ragged_dot(jax.lax.ragged_dot(rows, a.swapaxes(1, 2), counts), b, counts)

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
