"""An expert layer with quantized experts: permute, gate and up, down, combine."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_swiglu import grouped_swiglu
from pallas_kernels.groups import ACTIVATIONS
from pallas_kernels.moe_combine import moe_combine
from pallas_kernels.moe_mlp import Slots, sort_into_slots
from pallas_kernels.qformats import QuantizedTensor, quantize_rows
from pallas_kernels.quantized_grouped_matmul import quantized_grouped_matmul
from pallas_kernels.quantized_grouped_swiglu import quantized_grouped_swiglu

Rounding = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]
"""Rows `[P, ·]` of slots and each one's expert, int32 `[P]` → rows for the product and their scales: int8 and
float32 `[P]` for w8a8, floats and None for any other weight."""


def quantized_moe_mlp(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array | QuantizedTensor,
    up: jax.Array | QuantizedTensor,
    down: jax.Array | QuantizedTensor,
    *,
    block_m: int | None = None,
    activation: str = "silu",
    total_experts: int | None = None,
    rounding: Mapping[str, Rounding | None] | None = None,
    implementation: str = "pallas_triton",
    interpret: bool | None = None,
) -> jax.Array:
    """Computes `moe_mlp` with any of the three stacks quantized, each in a format of its own.

    Gate and up of one format are one kernel, which keeps both products in registers; of two formats they are
    two, and their results meet in x's dtype.

    Args:
        gate, up: `[E, D, F]`; down: `[E, F, D]`; arrays are of x's dtype.
        rounding: of "gate", "up" or "down": how rows are rounded before that product, for scales that are
            the experts' own, or found together with other devices. Otherwise a token's row is rounded once
            for all its experts, as `quantize_rows` does it, for w8a8 alone.
        others: as of `moe_mlp`.

    Raises:
        KernelError: see the operations.
    """
    options: dict[str, Any] = {"implementation": implementation, "interpret": interpret}
    rounded = {name: function for name, function in (rounding or {}).items() if function is not None}
    slots = sort_into_slots(ids, weights, gate.shape[0], block_m, total_experts, options)
    layer = _Layer(slots, rounded, options)
    hidden = layer.hidden(x, gate, up, activation)
    out = layer.product("down", hidden, down, slots.rows, row_scale=slots.scale)
    return moe_combine(out, slots.slot_of, **options)


class _Layer(NamedTuple):
    """Arguments that the products of one layer share."""

    slots: Slots
    rounding: Mapping[str, Rounding]
    options: Mapping[str, Any]

    def hidden(
        self,
        x: jax.Array,
        gate: jax.Array | QuantizedTensor,
        up: jax.Array | QuantizedTensor,
        activation: str,
    ) -> jax.Array:
        """Returns `[P, F]` in x's dtype."""
        slots, rounded = self.slots, "gate" in self.rounding or "up" in self.rounding
        both: dict[str, Any] = {"block_m": slots.block_m, "activation": activation, **self.options}
        if not rounded and isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor):
            if gate.format == up.format:
                rows, scale = quantize_rows(x) if gate.format.kind == "w8a8" else (x, None)
                both |= {"x_scale": scale, "out_dtype": x.dtype}
                return quantized_grouped_swiglu(rows, gate, up, slots.tokens, *slots.table, **both)
        elif not rounded and not isinstance(gate, QuantizedTensor) and not isinstance(up, QuantizedTensor):
            return grouped_swiglu(x, gate, up, slots.tokens, *slots.table, **both)
        pair = {"gate": gate, "up": up}
        first, second = (self.product(name, x, w, slots.tokens) for name, w in pair.items())
        return ACTIVATIONS[activation](first) * second

    def product(
        self,
        name: str,
        x: jax.Array,
        w: jax.Array | QuantizedTensor,
        rows: jax.Array,
        row_scale: jax.Array | None = None,
    ) -> jax.Array:
        """Returns `[P, ·]` in x's dtype: row `rows[p]` of x by the matrix of slot p's expert."""
        slots, scale, out_dtype = self.slots, None, x.dtype
        if name in self.rounding:
            expert = jnp.repeat(slots.table[0], slots.block_m, total_repeat_length=slots.rows.shape[0])
            x, scale = self.rounding[name](x[jnp.minimum(rows, x.shape[0] - 1)], expert)
            rows = slots.rows
        elif isinstance(w, QuantizedTensor) and w.format.kind == "w8a8":
            x, scale = quantize_rows(x)
        given: dict[str, Any] = {"block_m": slots.block_m, "row_scale": row_scale, **self.options}
        if not isinstance(w, QuantizedTensor):
            return grouped_matmul(x, w, rows, *slots.table, **given)
        given |= {"x_scale": scale, "out_dtype": out_dtype}
        return quantized_grouped_matmul(x, w, rows, *slots.table, **given)
