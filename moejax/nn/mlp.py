"""The gated MLP of dense layers and shared experts (SwiGLU, Shazeer, arXiv 2002.05202)."""

from typing import Any

import jax
from flax import nnx

from moejax.nn.activation import activation
from moejax.nn.linear import Linear
from moejax.sharding.axes import Names


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`.

    `split` names mesh axes that the hidden dimension is split over: each device gives a part of the sum, and
    the caller adds them. With `reduce` in its place they are added here.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        act: str,
        dtype: Any,
        scale: float,
        reduce: Names = (),
        split: Names = (),
        bias: bool = False,
    ) -> None:
        self.gate_proj = Linear((dim, hidden), ("embed", "mlp"), dtype, bias=bias, scale=scale)
        self.up_proj = Linear((dim, hidden), ("embed", "mlp"), dtype, bias=bias, scale=scale)
        down: dict[str, Any] = {"bias": bias, "scale": scale, "reduce": reduce, "split": split}
        self.down_proj = Linear((hidden, dim), ("mlp", "embed"), dtype, **down)
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., D]` to `[..., D]`."""
        return self.down_proj(activation(self.act)(self.gate_proj(x)) * self.up_proj(x))
