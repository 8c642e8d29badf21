"""`ragged_paged_attention` in Pallas: `decode.py` for sequences of few queries, `chunk.py` for others."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels._compat import next_power_of_2
from pallas_kernels.errors import check_that
from pallas_kernels.kv import check_pool_size, is_quantized
from pallas_kernels.op import Problem
from pallas_kernels.ragged_paged_attention.chunk import chunks
from pallas_kernels.ragged_paged_attention.decode import decode
from pallas_kernels.ragged_paged_attention.tiles import Attention, Config
from pallas_kernels.work_list import LATENT_HEADS, MOST_QUERIES, latent_queries

_MOST_ROWS = 128


def heuristic(problem: Problem) -> Config:
    """Takes for decode 16 KB of keys a turn, else 128 rows.

    Five stages are two tiles in flight: Triton keeps half of the others for the page numbers, which must have
    come before their pages can be asked for. In bfloat16 that is 64 KB a program.
    """
    if "latent" in problem:
        return _of_latents(problem)
    Dp, kv_bytes = max(16, next_power_of_2(int(problem["Dh"]))), _itemsize(problem["kv_dtype"])
    context = next_power_of_2(_context(problem))
    # Exact float32 products run outside the tensor cores, operands in registers. Where pages have to be
    # widened first, 4 warps or a second stage would spill.
    wide = kv_bytes > 1 and (problem["dtype"] != problem["kv_dtype"] or kv_bytes == 4)
    widened = wide and kv_bytes == 2
    decode_tile = 16 if wide else max(16, min(128, 8192 // Dp, context))
    group = next_power_of_2(int(problem["H"]) // int(problem["K"]))
    # Decoding fp8 takes more registers than int8, and so do a window's masks and a token of its own in each
    # row (XLA's own compiler, sm_80).
    int8, fp8 = problem["kv_dtype"] == "int8", kv_bytes == 1 and problem["kv_dtype"] != "int8"
    # 128 rows of 128 numbers and 64 keys fit 8 warps' registers; keys that are decoded take more, and with
    # sinks as well 64 rows of 256 spill on sm_90.
    rows = max(group, 16 if wide else 128 if Dp <= 128 else 32 if fp8 and problem["sinks"] else 64)
    many = Dp > 128 or int8 or problem["window"] or group == 1
    tile = min(16 if wide or fp8 else 32 if many else 64, context)
    # Sinks take two registers too many for five stages of 64 keys. In int8 four stages take 80 fewer.
    fewer = int8 or (problem["sinks"] and tile == 64)
    if problem["sinks"] and Dp > 128 and int8:
        tile = 16
    return Config(
        decode_tile=decode_tile,
        decode_warps=8 if widened else 4,
        decode_stages=1 if widened else 5,
        rows=max(16, rows),
        tile=max(16, tile),
        num_warps=4 if wide and not widened else 8,
        num_stages=1 if widened else 3 if wide else 4 if fewer else 5,
    )


def _of_latents(problem: Problem) -> Config:
    """Takes 64 heads a program, or as many as there are, and 16 keys a turn where heads are few.

    A page is read by a program for each 64 heads, from memory once. 64 rows of 576 bfloat16 numbers, their
    sums and two tiles of keys fill an A100's multiprocessor, and 64 rows are the least of a wgmma. With
    16 heads reading bounds: two programs fit, with three tiles in flight each. Decoding takes registers.
    """
    few, size = int(problem["H"]) <= 16, _itemsize(problem["kv_dtype"])
    tile, stages = (16, 3) if size == 4 else (32, 5)
    return Config(
        decode_tile=16 if few else tile,
        decode_warps=4 if few else 8,
        decode_stages=7 if few and size == 2 else stages,
        rows=LATENT_HEADS if size == 2 else 32,
        tile=tile,
        num_warps=8,
        num_stages=stages,
    )


def space(problem: Problem) -> Iterable[Config]:
    """Varies the decode kernel's fields for a decode-only problem, else the chunk kernel's."""
    base = heuristic(problem)
    if problem["decode"]:
        tiles = [t for t in (base.decode_tile // 2, base.decode_tile, base.decode_tile * 2) if 16 <= t <= 128]
        decodes = itertools.product(tiles, (4, 8), (3, 5, 7))
        configs = {replace(base, decode_tile=t, decode_warps=w, decode_stages=s) for t, w, s in decodes}
    else:
        least = next_power_of_2(int(problem["H"]) // int(problem["K"]))
        rows = [16, 32, 64] if "latent" in problem else [r for r in (64, 128) if r >= least]
        tiles = [16, 32, 64] if "latent" in problem else [32, 64, 128]
        choices = itertools.product(rows, tiles, (4, 8), (3, 5))
        configs = {replace(base, rows=r, tile=t, num_warps=w, num_stages=s) for r, t, w, s in choices}
    return sorted(configs | {base}, key=lambda c: tuple(vars(c).values()))


def supports(problem: Problem) -> str | None:
    """Requires that the query heads of a KV head fit a tile; those of latents are cut into tiles, and latents
    are not widened to float32, which would spill."""
    if "latent" in problem:
        own = problem["dtype"] == problem["kv_dtype"] or is_quantized(problem["kv_dtype"])
        return None if own else "latents in the dtype of q, or quantized"
    if int(problem["H"]) // int(problem["K"]) > _MOST_ROWS:
        return f"at most {_MOST_ROWS} query heads for each KV head"
    return None


def _context(problem: Problem) -> int:
    """Returns the most keys that one query reads."""
    window = int(problem["window"])
    return min(int(problem["context"]), window) if window else int(problem["context"])


def _itemsize(dtype: int | str) -> int:
    return jnp.dtype(str(dtype)).itemsize


def ragged_paged_attention_pallas(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    value_dim: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    max_q_len: int | None = None,
    work_list: jax.Array,
    config: Config,
    interpret: bool | None = None,
    decode: Callable[..., jax.Array] = decode,
) -> jax.Array:
    """See `ragged_paged_attention_reference`. `decode`: also the twin's."""
    a = attention(q, k_pages, block_table, work_list, scale, window, soft_cap, sinks, max_q_len)
    if v_pages is None:
        # As many heads a program as divide all.
        heads = max(n for n in range(1, min(a.H, config.rows) + 1) if a.H % n == 0)
        queries = min(a.queries, latent_queries(a.H))
        a = replace(a, K=a.H // heads, latent=value_dim, queries=queries)
        v_pages, v_scale = k_pages, k_scale
    check_that(
        "ragged_paged_attention", "config.rows", config.rows >= a.G, config.rows, f"at least H/K={a.G}"
    )
    check_pool_size("ragged_paged_attention", k_pages)
    arrays = (q, (k_pages, v_pages), block_table, kv_lens, cu_q_lens)
    scales = () if k_scale is None or v_scale is None else (k_scale, v_scale)
    extra = () if sinks is None else (sinks,)
    out = decode(a, config, *arrays, work_list, scales, extra, interpret)
    return out if max_q_len == 1 else chunks(a, config, *arrays, work_list, scales, extra, out, interpret)


def attention(
    q: jax.Array,
    k_pages: jax.Array,
    block_table: jax.Array,
    work_list: jax.Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    max_q_len: int | None,
) -> Attention:
    """Returns the static facts of a call."""
    (T, H, Dh), (_, K, bs, _), (S, M) = q.shape, k_pages.shape, block_table.shape
    sizes = {"T": T, "S": S, "H": H, "K": K, "Dh": Dh, "bs": bs, "M": M}
    return Attention(
        **sizes,
        q_dtype=q.dtype,
        kv_dtype=k_pages.dtype,
        scale=float(scale),
        window=None if window is None else int(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=sinks is not None,
        splits=work_list.shape[0] - 2 * S,
        queries=1 if max_q_len == 1 else MOST_QUERIES,
    )
