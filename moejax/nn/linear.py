"""Affine projection."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.nn.lora import Lora
from moejax.nn.param import ParamSpec, declare
from moejax.nn.quantized import Weight, matmul_of
from moejax.sharding.axes import Names, psum


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`; kernel is stored `[in, out]`, the transpose of PyTorch's layout, or quantized
    (`moejax.nn.quantized`).

    `split` names mesh axes that the input dimension is split over: each device's product is then a part of
    the sum (row-parallel, Megatron-LM, arXiv 1909.08053). `reduce` names them where the sum is made here.
    `padding` is for an axis "vocab" (`ParamSpec.padding`). `lora` is what adapters add, where there are any.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str | None, str | None],
        dtype: Any,
        *,
        bias: bool = False,
        scale: float = 0.02,
        reduce: Names = (),
        split: Names = (),
        padding: int = 0,
    ) -> None:
        self.kernel: Weight = declare(ParamSpec(shape, axes, dtype, "normal", scale).padded(padding))
        self.bias = declare(ParamSpec(shape[1:], axes[1:], dtype, "zeros").padded(padding)) if bias else None
        self.lora: Lora | None = nnx.data(None)
        self.reduce = reduce
        self.split = split or reduce

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies `[..., in]` to `[..., out]`, in x's dtype."""
        y = matmul_of(x, self.kernel, split=self.split)
        y = psum(y if self.lora is None else y + self.lora(x), self.reduce)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)
