"""Paged decode as `@triton.jit` kernels through jax-triton: the twin of `decode.py`, without prompt chunks.

Pallas's Triton backend is on its way out (docs/decisions.md); this path does not need it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, next_power_of_2, triton_call
from pallas_kernels.op import TRITON_TYPES, Problem, Spec, TritonSource
from pallas_kernels.ragged_paged_attention import pallas_triton
from pallas_kernels.ragged_paged_attention.decode import PADDING_ROWS, reduce_warps
from pallas_kernels.ragged_paged_attention.pallas_triton import Config
from pallas_kernels.ragged_paged_attention.tiles import Attention

_MODULE = "pallas_kernels.ragged_paged_attention.triton_kernel"


def supports(problem: Problem) -> str | None:
    """Supports decode alone, no e4m3, and else what the Pallas kernels support."""
    if not problem["decode"]:
        return "max_q_len=1: this implementation has no kernel for prompt chunks"
    if "latent" in problem:
        return "implementation pallas_triton for latents"
    if problem["kv_dtype"] == "float8_e4m3fn":
        # An argument of that type cannot even be declared, though it is only taken apart as bits.
        return "pages of another dtype: Triton's language has no float8_e4m3fn on sm_80"
    return pallas_triton.supports(problem)


def passes(a: Attention, config: Config) -> list[TritonSource]:
    """Returns both kernels as they are compiled and launched: a context's splits, and their parts' sum."""
    q, kv = (TRITON_TYPES[str(jnp.dtype(dtype))] for dtype in (a.q_dtype, a.kv_dtype))
    scales = "*fp32" if a.quantized else "*i32"
    lengths = {"lens_ptr": "*i32", "cu_ptr": "*i32", "work_ptr": "*i32"}
    parts = {"part_ptr": "*fp32", "lse_ptr": "*fp32"}
    pages = {"q_ptr": q, "k_ptr": kv, "v_ptr": kv, "table_ptr": "*i32", **lengths}
    shared = {
        "H": a.H,
        "DH": a.Dh,
        "DP": a.Dp,
        "TILE": config.decode_tile,
        "S": a.S,
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
        num_warps=config.decode_warps,
        num_stages=config.decode_stages,
        grid=(a.S - 1 + a.splits, a.K),
    )
    reduce = TritonSource(
        name="paged_decode_reduce_kernel",
        module=_MODULE,
        signature={**parts, **lengths, "sinks_ptr": "*fp32" if a.sinks else "*i32", "out_ptr": q},
        constants={
            **shared,
            "T": a.T,
            "SPLITS_P": max(2, next_power_of_2(a.splits)),
            "SINKS": a.sinks,
            "PADDING": PADDING_ROWS,
        },
        num_warps=reduce_warps(a),
        num_stages=1,
        grid=(a.S + cdiv(a.T, PADDING_ROWS), a.H),
    )
    return [split, reduce]


def decode(
    a: Attention,
    config: Config,
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    work_list: jax.Array,
    scales: tuple[jax.Array, ...],
    sinks: tuple[jax.Array, ...],
    interpret: bool | None,
) -> jax.Array:
    """See `decode.decode`; `interpret` is not possible.

    Raises:
        KernelError: there is no GPU, jax-triton is not installed, or interpretation is asked for.
    """
    op, (split, reduce) = "ragged_paged_attention", passes(a, config)
    # Where there are no scales or sinks, some other array takes their place and is not read.
    scales, sinks = scales or (kv_lens, kv_lens), tuple(s.astype(jnp.float32) for s in sinks) or (kv_lens,)
    part, lse = triton_call(
        op,
        split,
        (q, *pages, block_table, kv_lens, cu_q_lens, work_list, *scales),
        out_shape=[
            jax.ShapeDtypeStruct((a.S - 1 + a.splits, a.H, a.Dh), jnp.float32),
            jax.ShapeDtypeStruct((a.S - 1 + a.splits, a.H), jnp.float32),
        ],
        interpret=interpret,
    )
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    arrays = (part, lse, kv_lens, cu_q_lens, work_list, *sinks)
    return triton_call(op, reduce, arrays, out_shape=out_shape, interpret=interpret)


def sources(spec: Spec, config: Config) -> list[TritonSource]:
    """Returns both kernels of a spec, for the static report."""
    arrays: dict[str, Any] = dict(spec.abstract)
    static, sinks = spec.static, arrays.get("sinks")
    pages = (arrays["q"], arrays["k_pages"], arrays["block_table"], arrays["work_list"])
    return passes(pallas_triton.attention(*pages, static["scale"], static["window"], None, sinks, 1), config)
