"""Folding: a scale of a site's channels, multiplied into its readers and divided out of its source.

The float model computes the same afterwards, up to the rounding of the stored weights. So AWQ (Lin et al.,
arXiv 2306.00978) and SmoothQuant (Xiao et al., arXiv 2211.10438) cost nothing at run time: there is no scale
left to apply. Router and shared gate read the same input as the experts, so their rows are multiplied too,
and the choice of experts stays what it was; in bfloat16 it stays so up to the rounding of the products.

`Folds` holds the scales and computes folded weights when they are asked for, in float32 and an expert chunk
at a time, so that no second copy of a layer is held. It changes the model in `write`.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.nn.param import ParamSpec
from moejax.ptq.sites import QuantizationSite

BIASED = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.up_proj")
"""Projections whose bias is scaled with their outputs where they are a source."""


def canonical(param: nnx.Param) -> jax.Array:
    """Returns a parameter's value in the order `[..., inputs, outputs]`, whichever way it is stored."""
    spec: ParamSpec = param.get_metadata("spec")
    return spec.canonical(param[...])


def store(param: nnx.Param, value: jax.Array) -> None:
    """Gives a parameter a value in canonical order, in its own dtype and layout."""
    spec = param.get_metadata("spec")
    assert value.shape == spec.canonical_shape, (value.shape, spec.canonical_shape)
    param.set_value(spec.stored(value))


def tie(values: jax.Array, site: QuantizationSite, reduction: str) -> jax.Array:
    """Makes a site's channels equal that must share a scale.

    Args:
        values: float32 `[..., C]`.
        reduction: "mean" or "max" over the query heads that read one head of the source.
    """
    if site.group == 1:
        return values
    *lead, C = values.shape
    heads = values.reshape(*lead, C // (site.group * site.head_dim), site.group, site.head_dim)
    reduced = (jnp.mean if reduction == "mean" else jnp.max)(heads, axis=-2, keepdims=True)
    return jnp.broadcast_to(reduced, heads.shape).reshape(*lead, C)


class Folds:
    """Scales of a stage's sites.

    Attributes:
        rows: reader → scales of its inputs, float32 `[C]` or, for experts' own, `[E, C]`.
        outputs: source → divisors of its outputs (of a norm's vector, its elements).
        offsets: source → what is added to its elements before they scale.
    """

    def __init__(self) -> None:
        self.rows: dict[str, jax.Array] = {}
        self.offsets: dict[str, float] = {}
        self.outputs: dict[str, jax.Array] = {}

    def add(self, site: QuantizationSite, scales: jax.Array) -> None:
        """Adds a site's scales: float32 `[C]`; `[E, C]` for what the experts' down projections read."""
        assert site.blocked is None, site
        for reader in site.readers:
            self.rows[reader] = scales
        if site.group > 1:
            *_, C = scales.shape
            heads = scales.reshape(C // (site.group * site.head_dim), site.group, site.head_dim)
            scales = heads[:, 0].reshape(-1)
        self.outputs[site.source], self.offsets[site.source] = scales, site.offset
        module, _, name = site.source.rpartition(".")
        if name == "scale" or module in BIASED:  # a layer norm has one, too
            self.outputs[f"{module}.bias"] = scales

    def apply(self, name: str, value: jax.Array, part: slice = slice(None)) -> jax.Array:
        """Returns the folded parameter in float32.

        Args:
            value: in canonical order; of the experts in `part` where it has an expert axis.
        """
        value = value.astype(jnp.float32)
        if name in self.rows:
            rows = self.rows[name]
            rows = rows[part] if rows.ndim == 2 else rows
            value = value * _broadcast(rows[..., :, None], value)
        if name in self.outputs:
            outputs = self.outputs[name]
            outputs = outputs[part] if outputs.ndim == 2 else outputs
            outputs = outputs if value.ndim == 1 else outputs[..., None, :]
            offset = self.offsets.get(name, 0.0)
            value = (value + offset) / _broadcast(outputs, value) - offset
        return value

    def write(self, params: Mapping[str, nnx.Param], leave: Iterable[str] = ()) -> list[str]:
        """Folds into a stage's parameters in place, but for those in `leave`; returns which were changed."""
        folded = {*self.rows, *self.outputs}.difference(leave)
        changed = [name for name in params if name in folded]
        for name in changed:
            store(params[name], self.apply(name, canonical(params[name])))
        return changed


def _broadcast(scales: jax.Array, value: jax.Array) -> jax.Array:
    scales = scales.reshape(*(1,) * (value.ndim - scales.ndim), *scales.shape)
    return jnp.broadcast_to(scales, value.shape)
