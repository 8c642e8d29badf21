"""Baselines of a kernel: its plain reference, and other libraries' implementations where they import.

A baseline does the same work on the same numbers; what it wants arranged otherwise (rows sorted, heads
repeated) is arranged before the clock starts, in its favour. A library that is missing, or refuses, is a row
that says so.
"""

import functools
import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.op import Op, Spec
from pallas_kernels.qformats import QuantizedTensor, dequantize
from pallas_kernels.tuned import configure

Arrays = dict[str, Any]

BFLOAT16 = "bf16"
"""Name of the baseline that quantized operations are measured against."""


def _same(arrays: Arrays) -> Arrays:
    return arrays


def _all(output: Any, arrays: Arrays) -> Any:
    return output


@dataclass(frozen=True)
class Variant:
    """One implementation of one spec.

    Attributes:
        run: prepared arrays → the operation's result.
        prepare: the spec's arrays → what `run` takes; untimed.
        restrict: result and arrays → the part of the result that the contract defines, for comparing.
        comparable: False where the result has another arrangement, or other rounding than the contract's.
        carries: see `pallas_kernels.op.Op`.
        unavailable: why it cannot run here.
        prepared_bytes: of device memory that `prepare` makes for one call, beyond what it shares with the
            spec's arrays; it limits how many calls have inputs of their own.
        note: what a reader of its time should know.
    """

    name: str
    run: Callable[[Arrays], Any]
    ours: bool
    prepare: Callable[[Arrays], Arrays] = _same
    restrict: Callable[[Any, Arrays], Any] = _all
    comparable: bool = True
    config: str | None = None
    reason: str | None = None
    carries: Mapping[str, int] = field(default_factory=dict)
    unavailable: str | None = None
    prepared_bytes: int = 0
    note: str | None = None


def variants(op: Op, spec: Spec, implementations: Sequence[str], *, baselines: bool) -> list[Variant]:
    """Ours by name; with `baselines` the reference, other libraries', and bfloat16 beside quantized ones."""
    chosen = [_ours(op, spec, name) for name in implementations]
    if baselines:
        run = functools.partial(_call, op.reference, spec.static)
        chosen.append(Variant("xla_reference", run, False, restrict=restriction(op.name), carries=op.carries))
        chosen += [make(spec) for make in _BASELINES.get(op.name, ())]
    return chosen


def _call(function: Callable[..., Any], static: Mapping[str, Any], arrays: Arrays) -> Any:
    return function(**arrays, **static)


def _ours(op: Op, spec: Spec, name: str) -> Variant:
    kind = op.implementations[name]
    reason = kind.supports(spec.problem)
    if reason is not None:
        return Variant(name, _same, True, unavailable=reason)
    chosen = configure(op, name, spec.problem)
    return configured(op, spec, name, chosen.config, reason=chosen.reason)


def configured(
    op: Op, spec: Spec, name: str, config: Any, *, label: str | None = None, reason: str | None = None
) -> Variant:
    """Returns our implementation `name` in a configuration; `reason` says why in this one."""
    return Variant(
        label or name,
        functools.partial(_call, op.implementations[name].run, {**spec.static, "config": config}),
        True,
        restrict=restriction(op.name),
        config=json.dumps(asdict(config)),
        reason=reason,
        carries=op.carries,
    )


def restriction(op: str) -> Callable[[Any, Arrays], Any]:
    """Result and arrays → what the contract defines of the result: padding slots are undefined in products.

    Of `rope_kv_write` all is defined, but a step writes a thousandth of a pool: the slots written are
    compared apart, or the others would hide what is wrong with them.
    """
    return _RESTRICTIONS.get(op, _all)


def _real_slots(output: jax.Array, arrays: Arrays) -> jax.Array:
    rows, x = arrays["rows"], arrays["x"]
    block = rows.shape[0] // arrays["block_expert"].shape[0]
    used = jnp.arange(rows.shape[0]) // block < arrays["num_blocks"][0]
    real = used & (rows >= 0) & (rows < x.shape[0])
    return jnp.where(real[:, None], output, 0)


def _written_slots(output: Any, arrays: Arrays) -> Any:
    """q, then of each pool the rows written and how many elements changed beside them."""
    q, *pools = output
    N, _, bs = arrays["k_pages"].shape[:3]
    # A negative slot stores nothing, and must not count from the end.
    slots = jnp.where(arrays["slot_mapping"] < 0, N * bs, arrays["slot_mapping"])
    page, place = slots // bs, slots % bs
    parts = []
    for name, pool in zip(("k_pages", "v_pages", "k_scale", "v_scale"), pools, strict=True):
        if pool is not None:
            old = arrays[name]
            parts.append(pool.at[page, :, place].get(mode="fill", fill_value=0))
            others = pool.at[page, :, place].set(old.at[page, :, place].get(mode="clip"), mode="drop")
            parts.append(jnp.sum(others != old, dtype=jnp.int32))
    return q, *parts


_RESTRICTIONS: dict[str, Callable[[Any, Arrays], Any]] = {
    "grouped_matmul": _real_slots,
    "grouped_swiglu": _real_slots,
    "quantized_grouped_matmul": _real_slots,
    "quantized_grouped_swiglu": _real_slots,
    "rope_kv_write": _written_slots,
}


# -- grouped products ------------------------------------------------------------------------------------


def _sorted_rows(arrays: Arrays) -> Arrays:
    """The slots' rows without padding, sorted by expert, and the groups' sizes: what `ragged_dot` wants."""
    rows, experts = arrays["rows"], arrays["block_expert"]
    weights = arrays["w"] if "w" in arrays else arrays["gate"]
    block = rows.shape[0] // experts.shape[0]
    expert_of = jnp.repeat(experts, block)
    real = (jnp.arange(rows.shape[0]) // block < arrays["num_blocks"][0]) & (rows >= 0)
    real &= rows < arrays["x"].shape[0]
    keep = jnp.nonzero(real)[0]  # a concrete number of rows: this runs outside any trace
    sizes = jnp.bincount(expert_of[keep], length=weights.shape[0]).astype(jnp.int32)
    prepared = {
        k: v for k, v in arrays.items() if k not in ("rows", "block_expert", "num_blocks", "row_scale")
    }
    return prepared | {"x": arrays["x"][rows[keep]], "sizes": sizes}


def _ragged(name: str, ragged_dot: Callable[..., jax.Array], spec: Spec) -> Variant:
    def run(a: Arrays) -> jax.Array:
        if "w" in a:
            return ragged_dot(a["x"], a["w"], a["sizes"])
        gate, up = (ragged_dot(a["x"], a[part], a["sizes"]) for part in ("gate", "up"))
        return jax.nn.silu(gate) * up

    return Variant(name, run, False, prepare=_sorted_rows, comparable=False)


def _tokamax_ragged(spec: Spec) -> Variant:
    name = "tokamax.ragged_dot"
    missing = _missing("tokamax")
    if missing:
        return Variant(name, _same, False, unavailable=missing)
    import tokamax

    return _ragged(name, tokamax.ragged_dot, spec)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


# -- quantized products: bfloat16 in their place -----------------------------------------------------------


def _bfloat16(spec: Spec) -> Variant:
    """Our bfloat16 kernel, or XLA's product, on weights that were dequantized before the clock starts.

    It is what quantization is to be faster than: the same numbers, in the format they would have without it.
    With `w8a8` activations are quantized in the contract and not here, so results are not compared.
    """
    weights = {name: w for name, w in spec.abstract.items() if isinstance(w, QuantizedTensor)}
    kernel = "grouped_swiglu" if "gate" in weights else "grouped_matmul"
    grouped = "rows" in spec.abstract
    dequantized = jax.jit(functools.partial(dequantize, dtype=jnp.bfloat16))

    def prepare(a: Arrays) -> Arrays:
        return a | {name: dequantized(a[name]) for name in weights}

    def run(a: Arrays) -> jax.Array:
        if not grouped:
            return a["x"] @ a["w"]
        function = getattr(importlib.import_module(f"pallas_kernels.{kernel}"), kernel)
        return function(**a, **spec.static)

    return Variant(
        BFLOAT16,
        run,
        False,
        prepare=prepare,
        restrict=_real_slots if grouped else _all,
        comparable=all(w.format.kind != "w8a8" for w in weights.values()),
        prepared_bytes=sum(2 * math.prod(w.shape) for w in weights.values()),
        note=f"weights dequantized beforehand, by {kernel if grouped else 'XLA'}",
    )


# -- attention -------------------------------------------------------------------------------------------


def _dot_product_attention(implementation: Any, spec: Spec) -> Variant:
    """Causal and windowed; what it has no word for (sinks, soft cap) it cannot run."""
    name = f"jax.nn.dot_product_attention ({implementation})"
    plain = {"scale", "causal", "window"}
    extra = [k for k, v in spec.static.items() if k not in plain and v not in (None, 0)]
    if extra or "sinks" in spec.abstract or "lengths" in spec.abstract:
        return Variant(name, _same, False, unavailable=f"no {', '.join(extra) or 'sinks or lengths'}")
    window = spec.static.get("window")
    local = None if window is None else (window - 1, 0)
    attention = functools.partial(jax.nn.dot_product_attention, local_window_size=local)
    return _attention(name, attention, implementation, spec)


def _attention(name: str, attention: Callable[..., jax.Array], implementation: Any, spec: Spec) -> Variant:
    """Returns a function with the arguments of `jax.nn.dot_product_attention` as a variant."""
    static = {"scale": spec.static["scale"], "is_causal": spec.static.get("causal", True)}

    def run(a: Arrays) -> jax.Array:
        return attention(a["q"], a["k"], a["v"], **static, implementation=implementation)

    return Variant(name, run, False)


def _no_padding(spec: Spec) -> str | None:
    """Why an implementation cannot run a spec that knows only whole sequences and no window."""
    for name in ("sinks", "lengths"):
        if name in spec.abstract:
            return f"no {name}"
    return None if spec.static.get("window") is None else "no window"


def _pallas_mha(spec: Spec) -> Variant:
    """JAX's own Pallas kernel, in the tree; key heads repeated beforehand, since it knows no groups."""
    name = "jax.experimental.pallas mha"
    refused = _no_padding(spec)
    if refused:
        return Variant(name, _same, False, unavailable=refused)

    def prepare(a: Arrays) -> Arrays:
        group = a["q"].shape[2] // a["k"].shape[2]
        return {"q": a["q"], **{n: jnp.repeat(a[n], group, axis=2) for n in ("k", "v")}}

    def run(a: Arrays) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.attention import mha

        causal = spec.static.get("causal", True)
        return mha(a["q"], a["k"], a["v"], None, sm_scale=spec.static["scale"], causal=causal)

    return Variant(name, run, False, prepare=prepare)


def _tokamax_attention(spec: Spec) -> Variant:
    name = "tokamax.dot_product_attention (triton)"
    refused = _missing("tokamax") or _no_padding(spec)
    if refused:
        return Variant(name, _same, False, unavailable=refused)
    import tokamax

    return _attention(name, tokamax.dot_product_attention, "triton", spec)


def _pallas_paged(spec: Spec) -> Variant:
    """JAX's own paged decode kernel, in the tree; decode-only, plain keys and values, no window."""
    name = "jax.experimental.pallas paged_attention"
    fits = spec.static.get("max_q_len") == 1 and spec.static.get("window") is None
    other = "k_scale" in spec.abstract or "v_pages" not in spec.abstract
    if not fits or other or spec.static.get("soft_cap") or "sinks" in spec.abstract:
        return Variant(name, _same, False, unavailable="decode with plain keys only")

    def prepare(a: Arrays) -> Arrays:
        pages = {n: a[n].transpose(1, 0, 2, 3) for n in ("k_pages", "v_pages")}
        return {"q": a["q"] * spec.static["scale"], "table": a["block_table"], "lens": a["kv_lens"], **pages}

    def run(a: Arrays) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        return paged_attention(a["q"], a["k_pages"], a["v_pages"], a["table"], a["lens"])

    return Variant(name, run, False, prepare=prepare)


_BASELINES: dict[str, tuple[Callable[[Spec], Variant], ...]] = {
    "grouped_matmul": (
        functools.partial(_ragged, "jax.lax.ragged_dot", jax.lax.ragged_dot),
        _tokamax_ragged,
    ),
    "grouped_swiglu": (
        functools.partial(_ragged, "2 x jax.lax.ragged_dot", jax.lax.ragged_dot),
        _tokamax_ragged,
    ),
    "flash_attention": (
        functools.partial(_dot_product_attention, "xla"),
        functools.partial(_dot_product_attention, "cudnn"),
        _pallas_mha,
        _tokamax_attention,
    ),
    "ragged_paged_attention": (_pallas_paged,),
    "quantized_grouped_matmul": (_bfloat16,),
    "quantized_grouped_swiglu": (_bfloat16,),
    "quantized_matmul": (_bfloat16,),
}
