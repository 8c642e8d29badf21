"""What a kernel is timed beside: its plain reference, and other libraries' implementations where they import.

A baseline does the same work on the same numbers; what it wants arranged otherwise (rows sorted, heads
repeated) is arranged before the clock starts, in its favour. A library that is missing, or refuses, is a row
that says so.
"""

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.op import Op, Spec
from pallas_kernels.tuned import config_dict, configure

Arrays = dict[str, Any]


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
        comparable: False where the result has another arrangement.
        carries: see `pallas_kernels.op.Op`.
        unavailable: why it cannot run here.
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


def variants(op: Op, spec: Spec, implementations: Sequence[str], *, baselines: bool) -> list[Variant]:
    """Ours by name, then, with `baselines`, the reference and other libraries'."""
    found = [_ours(op, spec, name) for name in implementations]
    if baselines:
        run = functools.partial(_call, op.reference, spec.static)
        restrict = _restrictions().get(op.name, _all)
        found.append(Variant("xla_reference", run, False, restrict=restrict, carries=op.carries))
        found += [make(spec) for make in _BASELINES.get(op.name, ())]
    return found


def _call(function: Callable[..., Any], static: Mapping[str, Any], arrays: Arrays) -> Any:
    return function(**arrays, **static)


def _ours(op: Op, spec: Spec, name: str) -> Variant:
    kind = op.implementations[name]
    reason = kind.supports(spec.problem)
    if reason is not None:
        return Variant(name, _same, True, unavailable=reason)
    chosen = configure(op, name, spec.problem)
    return Variant(
        name,
        functools.partial(_call, kind.run, {**spec.static, "config": chosen.config}),
        True,
        restrict=_restrictions().get(op.name, _all),
        config=json.dumps(config_dict(chosen.config)),
        reason=chosen.reason,
        carries=op.carries,
    )


def _restrictions() -> dict[str, Callable[[Any, Arrays], Any]]:
    """Slots of padding are undefined in the products' results."""
    slots = ("grouped_matmul", "grouped_swiglu", "quantized_grouped_matmul")
    return dict.fromkeys(slots, _real_slots)


def _real_slots(output: jax.Array, arrays: Arrays) -> jax.Array:
    rows, x = arrays["rows"], arrays["x"]
    block = rows.shape[0] // arrays["block_expert"].shape[0]
    used = jnp.arange(rows.shape[0]) // block < arrays["num_blocks"][0]
    real = used & (rows >= 0) & (rows < x.shape[0])
    return jnp.where(real[:, None], output, 0)


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


def _ragged_dot(spec: Spec) -> Variant:
    def run(a: Arrays) -> jax.Array:
        return jax.lax.ragged_dot(a["x"], a["w"], a["sizes"])

    return Variant("jax.lax.ragged_dot", run, False, prepare=_sorted_rows, comparable=False)


def _ragged_swiglu(spec: Spec) -> Variant:
    def run(a: Arrays) -> jax.Array:
        gate, up = (jax.lax.ragged_dot(a["x"], a[name], a["sizes"]) for name in ("gate", "up"))
        return jax.nn.silu(gate) * up

    return Variant("2 x jax.lax.ragged_dot", run, False, prepare=_sorted_rows, comparable=False)


def _tokamax_ragged(spec: Spec) -> Variant:
    name = "tokamax.ragged_dot"
    missing = _missing("tokamax")
    if missing:
        return Variant(name, _same, False, unavailable=missing)
    import tokamax

    def run(a: Arrays) -> jax.Array:
        if "w" in a:
            return tokamax.ragged_dot(a["x"], a["w"], a["sizes"])
        gate, up = (tokamax.ragged_dot(a["x"], a[part], a["sizes"]) for part in ("gate", "up"))
        return jax.nn.silu(gate) * up

    return Variant(name, run, False, prepare=_sorted_rows, comparable=False)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


# -- attention -------------------------------------------------------------------------------------------


def _dot_product_attention(implementation: Any, spec: Spec) -> Variant:
    """Causal and windowed; what it has no word for (sinks, soft cap) it cannot run."""
    name = f"jax.nn.dot_product_attention ({implementation})"
    plain = {"scale", "causal", "window"}
    extra = [k for k, v in spec.static.items() if k not in plain and v not in (None, 0)]
    if extra or "sinks" in spec.abstract or "lengths" in spec.abstract:
        return Variant(name, _same, False, unavailable=f"no {', '.join(extra) or 'sinks or lengths'}")
    window = spec.static.get("window")

    def run(a: Arrays) -> jax.Array:
        return jax.nn.dot_product_attention(
            a["q"],
            a["k"],
            a["v"],
            scale=spec.static["scale"],
            is_causal=spec.static.get("causal", True),
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )

    return Variant(name, run, False)


def _pallas_mha(spec: Spec) -> Variant:
    """JAX's own Pallas kernel, in the tree; key heads repeated beforehand, since it knows no groups."""
    name = "jax.experimental.pallas mha"
    if spec.static.get("window") is not None:
        return Variant(name, _same, False, unavailable="no window")

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
    missing = _missing("tokamax")
    if missing or spec.static.get("window") is not None:
        return Variant(name, _same, False, unavailable=missing or "no window")
    import tokamax

    def run(a: Arrays) -> jax.Array:
        return tokamax.dot_product_attention(
            a["q"],
            a["k"],
            a["v"],
            scale=spec.static["scale"],
            is_causal=spec.static.get("causal", True),
            implementation="triton",
        )

    return Variant(name, run, False)


def _pallas_paged(spec: Spec) -> Variant:
    """JAX's own paged decode kernel, in the tree; decode-only, plain keys, no window."""
    name = "jax.experimental.pallas paged_attention"
    fits = spec.static.get("max_q_len") == 1 and spec.static.get("window") is None
    quantized = "k_scale" in spec.abstract
    if not fits or quantized or spec.static.get("soft_cap") or "sinks" in spec.abstract:
        return Variant(name, _same, False, unavailable="decode with plain keys only")

    def prepare(a: Arrays) -> Arrays:
        pages = {n: a[n].transpose(1, 0, 2, 3) for n in ("k_pages", "v_pages")}
        return {"q": a["q"] * spec.static["scale"], "table": a["block_table"], "lens": a["kv_lens"], **pages}

    def run(a: Arrays) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        return paged_attention(a["q"], a["k_pages"], a["v_pages"], a["table"], a["lens"])

    return Variant(name, run, False, prepare=prepare)


_BASELINES: dict[str, tuple[Callable[[Spec], Variant], ...]] = {
    "grouped_matmul": (_ragged_dot, _tokamax_ragged),
    "grouped_swiglu": (_ragged_swiglu, _tokamax_ragged),
    "flash_attention": (
        functools.partial(_dot_product_attention, "xla"),
        functools.partial(_dot_product_attention, "cudnn"),
        _pallas_mha,
        _tokamax_attention,
    ),
    "ragged_paged_attention": (_pallas_paged,),
}
