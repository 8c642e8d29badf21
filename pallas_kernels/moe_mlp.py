"""An expert layer from the kernels: permute, gate and up, down, combine; experts in floats or quantized."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_swiglu import grouped_swiglu
from pallas_kernels.groups import Activation, block_m_for, gated
from pallas_kernels.moe_combine import moe_combine
from pallas_kernels.moe_permute import moe_permute
from pallas_kernels.qformats import QuantizedTensor, quantize_rows
from pallas_kernels.quantized_grouped_matmul import quantized_grouped_matmul
from pallas_kernels.quantized_grouped_swiglu import quantized_grouped_swiglu

Rounding = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]
"""Rows `[P, ·]` of slots and each one's expert, int32 `[P]` → rows for the product and their scales: int8 and
float32 `[P]` for w8a8, floats and None for any other weight."""


def moe_mlp(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array | QuantizedTensor,
    up: jax.Array | QuantizedTensor,
    down: jax.Array | QuantizedTensor,
    *,
    block_m: int | None = None,
    activation: Activation = "silu",
    biases: Mapping[str, jax.Array] | None = None,
    total_experts: int | None = None,
    rounding: Mapping[str, Rounding | None] | None = None,
    summed: bool = True,
    implementation: str = "pallas_triton",
    interpret: bool | None = None,
) -> Any:
    """Computes `Σ_j weights[t, j] · (act(x[t] @ gate[e]) · (x[t] @ up[e])) @ down[e]`, e = ids[t, j].

    The hidden activations are rounded to x's dtype, and so is each expert's output, after its weight. Nothing
    is dropped; the sum over j is in float32 and in order, so that results are the same bits every time.

    Gate and up of one format are one kernel, which keeps both products in registers; of two formats they are
    two, and their results meet in x's dtype.

    Args:
        x: `[T, D]`, bfloat16, float16 or float32.
        ids: int32 `[T, k]`; one outside `[0, E)` is another device's expert and contributes nothing here.
        weights: float32 `[T, k]`.
        gate, up: `[E, D, F]`; down: `[E, F, D]`; each quantized, in a format of its own, or of x's dtype.
        block_m: height of blocks (`pallas_kernels.groups`); None: `block_m_for`.
        activation: see `pallas_kernels.groups.Activation`.
        biases: of "gate" and "up", `[E, F]`, added before the activation; of "down", `[E, D]`, before the
            weight.
        total_experts: of all devices, where these E are a part of them: what `block_m` is chosen by.
        rounding: of "gate", "up" or "down": how rows are rounded before that product, for scales that are
            the experts' own, or found together with other devices. Otherwise a token's row is rounded once
            for all its experts, as `quantize_rows` does it, for w8a8 alone.
        summed: if False, the sum is left to the caller: the result is `moe_combine`'s two arguments.
        implementation: of all operations, "pallas_triton" or "reference".
        interpret: None: on CPU only.

    Raises:
        KernelError: see the operations.
    """
    options: dict[str, Any] = {"implementation": implementation, "interpret": interpret}
    rounded = {name: function for name, function in (rounding or {}).items() if function is not None}
    layer = _sort(ids, weights, gate.shape[0], block_m, total_experts, rounded, biases or {}, options)
    hidden = layer.hidden(x, gate, up, activation)
    out = layer.product("down", hidden, down, layer.rows, row_scale=layer.scale)
    return moe_combine(out, layer.slot_of, **options) if summed else (out, layer.slot_of)


class _Layer(NamedTuple):
    """Assignments sorted by expert, in blocks, and their products; P slots, padding among them.

    Attributes:
        tokens: int32 `[P]`, the token of each slot, T in padding.
        rows: int32 `[P]`, each slot itself, P in padding.
        scale: float32 `[P]`, the assignment's weight.
        table: `block_expert` and `num_blocks`, see `pallas_kernels.groups`.
        slot_of: int32 `[T, k]`.
        block_m: height of the blocks.
        rounding, biases, options: as of `moe_mlp`.
    """

    tokens: jax.Array
    rows: jax.Array
    scale: jax.Array
    table: tuple[jax.Array, jax.Array]
    slot_of: jax.Array
    block_m: int
    rounding: Mapping[str, Rounding]
    biases: Mapping[str, jax.Array]
    options: Mapping[str, Any]

    def hidden(
        self,
        x: jax.Array,
        gate: jax.Array | QuantizedTensor,
        up: jax.Array | QuantizedTensor,
        activation: Activation,
    ) -> jax.Array:
        """Returns `[P, F]` in x's dtype."""
        rounded = "gate" in self.rounding or "up" in self.rounding
        both: dict[str, Any] = {"block_m": self.block_m, "activation": activation, **self.options}
        both |= {"gate_bias": self.biases.get("gate"), "up_bias": self.biases.get("up")}
        if not rounded and isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor):
            if gate.format == up.format:
                rows, scale = quantize_rows(x) if gate.format.kind == "w8a8" else (x, None)
                both |= {"x_scale": scale, "out_dtype": x.dtype}
                return quantized_grouped_swiglu(rows, gate, up, self.tokens, *self.table, **both)
        elif not rounded and not isinstance(gate, QuantizedTensor) and not isinstance(up, QuantizedTensor):
            return grouped_swiglu(x, gate, up, self.tokens, *self.table, **both)
        pair = {"gate": gate, "up": up}
        first, second = (self.product(name, x, w, self.tokens) for name, w in pair.items())
        return gated(activation)(first, second)

    def product(
        self,
        name: str,
        x: jax.Array,
        w: jax.Array | QuantizedTensor,
        rows: jax.Array,
        row_scale: jax.Array | None = None,
    ) -> jax.Array:
        """Returns `[P, ·]` in x's dtype: row `rows[p]` of x by the matrix of slot p's expert."""
        scale, out_dtype = None, x.dtype
        if name in self.rounding:
            expert = jnp.repeat(self.table[0], self.block_m, total_repeat_length=self.rows.shape[0])
            x, scale = self.rounding[name](x[jnp.minimum(rows, x.shape[0] - 1)], expert)
            rows = self.rows
        elif isinstance(w, QuantizedTensor) and w.format.kind == "w8a8":
            x, scale = quantize_rows(x)
        arguments: dict[str, Any] = {"block_m": self.block_m, "row_scale": row_scale, **self.options}
        arguments["bias"] = self.biases.get(name)
        if not isinstance(w, QuantizedTensor):
            return grouped_matmul(x, w, rows, *self.table, **arguments)
        arguments |= {"x_scale": scale, "out_dtype": out_dtype}
        return quantized_grouped_matmul(x, w, rows, *self.table, **arguments)


def _sort(
    ids: jax.Array,
    weights: jax.Array,
    num_experts: int,
    block_m: int | None,
    total_experts: int | None,
    rounding: Mapping[str, Rounding],
    biases: Mapping[str, jax.Array],
    options: Mapping[str, Any],
) -> _Layer:
    """Sorts assignments into slots, an expert layer's first step; arguments as of `moe_mlp`."""
    (T, k), E = ids.shape, num_experts
    A = T * k
    if block_m is None:
        block_m = block_m_for(max(1, A * E // (total_experts or E)), E)
    groups = moe_permute(ids, num_experts=E, block_m=block_m, weights=weights, **options)
    assert groups.weights is not None
    table, rest = (groups.block_expert, groups.num_blocks), (groups.slot_of, block_m)
    return _Layer(groups.tokens, groups.slots, groups.weights, table, *rest, rounding, biases, options)
