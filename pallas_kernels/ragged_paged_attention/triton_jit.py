"""Paged decode as `@triton.jit` kernels through jax-triton: the twin of `decode.py`, without prompt chunks.

Pallas's Triton backend is on its way out (docs/decisions.md); this path does not need it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, next_power_of_2, triton_call
from pallas_kernels.errors import check_that
from pallas_kernels.op import TRITON_TYPES, Problem, Spec, TritonSource
from pallas_kernels.ragged_paged_attention import pallas_triton
from pallas_kernels.ragged_paged_attention.decode import PADDING_ROWS, least_keys, reduce_warps
from pallas_kernels.ragged_paged_attention.tiles import Attention

_MODULE = "pallas_kernels.ragged_paged_attention.triton_kernel"


@dataclass(frozen=True)
class Config:
    """Decode fields of `pallas_triton.Config`."""

    splits: int
    tile: int
    num_warps: int
    num_stages: int


def heuristic(problem: Problem) -> Config:
    """Returns the decode fields of the Pallas kernel's heuristic."""
    return _decode_fields(pallas_triton.heuristic(problem))


def space(problem: Problem) -> Iterable[Config]:
    """Returns the distinct decode fields of the Pallas kernel's space."""
    configs = {_decode_fields(config) for config in pallas_triton.space({**problem, "decode": 1})}
    return sorted(configs, key=lambda c: tuple(vars(c).values()))


def _decode_fields(config: pallas_triton.Config) -> Config:
    return Config(config.splits, config.decode_tile, config.decode_warps, config.decode_stages)


def supports(problem: Problem) -> str | None:
    """Supports decode alone, no e4m3, and else what the Pallas kernels support."""
    if not problem["decode"]:
        return "max_q_len=1: this implementation has no kernel for prompt chunks"
    if problem["kv_dtype"] == "float8_e4m3fn":
        # An argument of that type cannot even be declared, though it is only taken apart as bits.
        return "pages of another dtype: Triton's language has no float8_e4m3fn on sm_80"
    return pallas_triton.supports(problem)


def passes(a: Attention, config: Config) -> list[TritonSource]:
    """Returns both kernels as they are compiled and launched: a context's splits, and their parts' sum."""
    q, kv = (TRITON_TYPES[str(jnp.dtype(dtype))] for dtype in (a.q_dtype, a.kv_dtype))
    scales = "*fp32" if a.quantized else "*i32"
    lengths = {"lens_ptr": "*i32", "cu_ptr": "*i32"}
    parts = {"part_ptr": "*fp32", "lse_ptr": "*fp32"}
    pages = {"q_ptr": q, "k_ptr": kv, "v_ptr": kv, "table_ptr": "*i32", **lengths}
    shared = {
        "H": a.H,
        "DH": a.Dh,
        "DP": a.Dp,
        "TILE": config.tile,
        "SPLITS": config.splits,
        "LEAST": max(1, least_keys(a.S * a.K) // config.tile),
        "WINDOW": a.window or 0,
    }
    split = TritonSource(
        name="paged_decode_kernel",
        module=_MODULE,
        signature={**pages, "k_scale_ptr": scales, "v_scale_ptr": scales, **parts},
        constants={
            **shared,
            "K": a.K,
            "BS": a.bs,
            "M": a.M,
            "ROWS": max(16, next_power_of_2(a.G)),
            "FACTOR": a.score_factor,
            "SOFT_CAP": a.soft_cap or 0.0,
            "KV": str(jnp.dtype(a.kv_dtype)) if a.quantized else "float",
            "F32": a.product == jnp.float32,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        grid=(config.splits, a.K, a.S),
    )
    reduce = TritonSource(
        name="paged_decode_reduce_kernel",
        module=_MODULE,
        signature={**parts, **lengths, "sinks_ptr": "*fp32" if a.sinks else "*i32", "out_ptr": q},
        constants={
            **shared,
            "T": a.T,
            "S": a.S,
            "SPLITS_P": max(2, next_power_of_2(config.splits)),
            "SINKS": a.sinks,
            "PADDING": PADDING_ROWS,
        },
        num_warps=reduce_warps(a, config.splits),
        num_stages=1,
        grid=(a.S + cdiv(a.T, PADDING_ROWS), a.H),
    )
    return [split, reduce]


def ragged_paged_attention_triton(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    max_q_len: int | None = None,
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `ragged_paged_attention_reference`, where `max_q_len` is 1. `interpret` is not possible.

    Raises:
        KernelError: jax-triton or a CUDA jaxlib is not installed, or interpretation is asked for.
    """
    op = "ragged_paged_attention"
    check_that(op, "max_q_len", max_q_len == 1, max_q_len, "1")
    a = pallas_triton.attention(q, k_pages, block_table, scale, window, soft_cap, sinks)
    split, reduce = passes(a, config)
    # Where there are no scales or sinks, some other array takes their place and is not read.
    k_scale, v_scale, sinks = (kv_lens if array is None else array for array in (k_scale, v_scale, sinks))
    part, lse = triton_call(
        op,
        split,
        (q, k_pages, v_pages, block_table, kv_lens, cu_q_lens, k_scale, v_scale),
        out_shape=[
            jax.ShapeDtypeStruct((a.S, a.H, config.splits, a.Dh), jnp.float32),
            jax.ShapeDtypeStruct((a.S, a.H, config.splits), jnp.float32),
        ],
        interpret=interpret,
    )
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return triton_call(
        op, reduce, (part, lse, kv_lens, cu_q_lens, sinks), out_shape=out_shape, interpret=interpret
    )


def sources(spec: Spec, config: Config) -> list[TritonSource]:
    """Returns both kernels of a spec, for the static report."""
    arrays: dict[str, Any] = dict(spec.abstract)
    static, sinks = spec.static, arrays.get("sinks")
    pages = (arrays["q"], arrays["k_pages"], arrays["block_table"])
    return passes(pallas_triton.attention(*pages, static["scale"], static["window"], None, sinks), config)
