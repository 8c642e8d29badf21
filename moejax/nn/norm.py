"""Root-mean-square (Zhang and Sennrich, arXiv 1910.07467) and layer normalisation (arXiv 1607.06450)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.nn.param import ParamSpec, declare
from moejax.ops.row_sums import Residual, RowSums
from moejax.sharding.axes import Names, psum


class RMSNorm(nnx.Module):
    """Normalises the last axis; statistics in float32, result in x's dtype.

    `kernels` names the implementation of a GPU kernel to do it with, "xla" for none; `split` mesh axes that
    the normalised axis is split over, in which case the kernel, which sees a part only, is not used.
    `unit_offset` scales by 1 + scale, and rounds after it.
    """

    def __init__(
        self,
        dim: int,
        axis: str | None,
        dtype: Any,
        eps: float,
        kernels: str = "xla",
        split: Names = (),
        unit_offset: bool = False,
    ) -> None:
        self.scale = declare(ParamSpec((dim,), (axis,), dtype, "zeros" if unit_offset else "ones"))
        self.unit_offset = unit_offset
        self.dim = dim
        self.eps = eps
        self.kernels = kernels if not split else "xla"
        self.split = split

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., dim]`."""
        return self.add(x, None)[0]

    @jax.named_scope("norm")
    def add(self, x: jax.Array, residual: Residual) -> tuple[jax.Array, jax.Array]:
        """Adds x and residual `[..., dim]`; returns (the normalised sum, the sum). A kernel also takes a
        residual whose sums are still to be made, a row of x each."""
        if self.kernels != "xla":
            return self._kernel(x, residual)
        assert not isinstance(residual, RowSums)
        total = x if residual is None else x + residual
        return self._normalize(total.astype(jnp.float32), x.dtype), total

    def _normalize(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Normalises float32 `[..., dim]`; the result is in `dtype`."""
        if self.split:
            total_square = psum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), self.split)
            variance = total_square / self.dim
        else:
            variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normed, scale = x * jax.lax.rsqrt(variance + self.eps), jnp.broadcast_to(self.scale[...], x.shape)
        if self.unit_offset:
            return (normed * (1.0 + scale.astype(jnp.float32))).astype(dtype)
        # Rounded to x's dtype before the scale, as Hugging Face does it.
        return scale * normed.astype(dtype)

    def _kernel(self, x: jax.Array, residual: Residual) -> tuple[jax.Array, jax.Array]:
        from pallas_kernels.rms_norm import rms_norm

        flat = x.reshape(-1, self.dim)
        rows, slot_of = residual if isinstance(residual, RowSums) else (residual, None)
        if isinstance(residual, jax.Array):
            rows = residual.reshape(flat.shape)
        how: dict[str, Any] = {"eps": self.eps, "implementation": self.kernels, **self._kind()}
        normed, total = rms_norm(flat, self.scale[...], rows, slot_of, **how)
        return normed.reshape(x.shape), total.reshape(x.shape)

    def _kind(self) -> dict[str, Any]:
        """Returns what the kernel must be told of this kind of norm."""
        return {"kind": "rms_unit_offset"} if self.unit_offset else {}


class LayerNorm(RMSNorm):
    """Brings the last axis to mean 0 and variance 1, then scales and shifts it; all in float32, result in x's
    dtype."""

    def __init__(self, dim: int, axis: str | None, dtype: Any, eps: float, kernels: str = "xla") -> None:
        super().__init__(dim, axis, dtype, eps, kernels)
        self.bias = declare(ParamSpec((dim,), (axis,), dtype, "zeros"))

    def _normalize(self, x: jax.Array, dtype: Any) -> jax.Array:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        scale, bias = (jnp.broadcast_to(v[...].astype(jnp.float32), x.shape) for v in (self.scale, self.bias))
        return (normed * scale + bias).astype(dtype)

    def _kind(self) -> dict[str, Any]:
        return {"kind": "layer", "bias": self.bias[...]}


def norm_of(config: ModelConfig, dtype: Any, kernels: str = "xla") -> RMSNorm:
    """Returns a model's norm of its hidden states `[..., D]`."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, "embed", dtype, config.rms_norm_eps, kernels)
    offset = config.norm == "rms_unit_offset"
    return RMSNorm(config.hidden_size, "embed", dtype, config.rms_norm_eps, kernels, unit_offset=offset)
