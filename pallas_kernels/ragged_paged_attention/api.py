"""`ragged_paged_attention`: checks its arguments and runs an implementation by name."""

import functools
from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, check_arrays, check_heads, check_latent, check_that
from pallas_kernels.kv import KV_DTYPES, is_quantized
from pallas_kernels.op import Implementation, Op
from pallas_kernels.ragged_paged_attention import pallas_triton, triton_jit
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.ragged_paged_attention.specs import SPECS, problem
from pallas_kernels.run import Options, run
from pallas_kernels.work_list import MOST_QUERIES, decoded_keys, latent_queries, make_work_list, most_splits

OP = Op(
    name="ragged_paged_attention",
    reference=ragged_paged_attention_reference,
    implementations={
        "pallas_triton": Implementation.of(
            pallas_triton.ragged_paged_attention_pallas, pallas_triton, supports=pallas_triton.supports
        ),
        "triton_jit": Implementation.of(
            functools.partial(pallas_triton.ragged_paged_attention_pallas, decode=triton_jit.decode),
            pallas_triton,
            sources=triton_jit.sources,
            supports=triton_jit.supports,
        ),
    },
    specs=SPECS,
    sizes=("T", "S", "context"),
)


def ragged_paged_attention(
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
    work_list: jax.Array | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Attends a flat batch to its sequences' pages, `[T, H, Dh]` or, of latents, `[T, H, value_dim]`; see
    `ragged_paged_attention_reference`.

    Args:
        q: `[T, H, Dh]`, bfloat16, float16 or float32; Dh a multiple of 8, up to 256.
        k_pages, v_pages: `[N, K, bs, Dh]` of one of `pallas_kernels.kv.KV_DTYPES`; bs a power of two, at
            least 8. v_pages None: latents (implementation "pallas_triton"), of which K is 1.
        value_dim: with latents, how many numbers at a key's end are its value: a multiple of 8 up to 512; Dh
            is a multiple of 8 up to 256 more. None otherwise.
        k_scale, v_scale: float32 `[N, K, bs]`, with int8 and float8 pages only, v_scale not with latents.
        max_q_len: 1: every sequence has at most one query, and only the decode kernel runs; rows of a
            sequence that has more would then hold anything. None: not known.
        work_list: int32 `[2·S + splits]`, how contexts of decodes are cut into parts, as
            `pallas_kernels.work_list` makes it of `kv_lens`, cut to `window`, of the sequences with one
            query and 0 for others. Unless `max_q_len` is 1, it may have contexts of those with up to
            `MOST_QUERIES` as well, of latents `latent_queries`. None: it is made here as `decoded_keys` has
            it, by operations of XLA's.
        options: an implementation, "pallas_triton", "triton_jit" (decode only) or "reference", and how it
            runs; see `Options`.

    Raises:
        KernelError: shapes that disagree, no tokens, an unsupported dtype, head dimension or block size,
            scales missing or too many. Values of tables and lengths are `check_block_table`'s.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for (name, array), pages in zip(scales.items(), (k_pages, v_pages), strict=True):
        kind = None if pages is None else k_pages.dtype
        wanted = kind is not None and is_quantized(kind)
        got = None if array is None else "an array"
        expected = f"{'an array' if wanted else 'None'} with pages of {kind}"
        check_that(OP.name, name, (array is not None) == wanted, got, expected)
    arguments = {
        "q": (q, "T H Dh", FLOATS),
        "k_pages": (k_pages, "N K bs Dh", KV_DTYPES),
        "v_pages": (v_pages, "N K bs Dh", (k_pages.dtype,)),
        "block_table": (block_table, "S M", (jnp.int32,)),
        "kv_lens": (kv_lens, "S", (jnp.int32,)),
        "sinks": (sinks, "H", FLOATS),
        "work_list": (work_list, "2S+splits", (jnp.int32,)),
        **{name: (scale, "N K bs", (jnp.float32,)) for name, scale in scales.items()},
    }
    sizes = check_arrays(OP.name, arguments)
    check_arrays(OP.name, {"cu_q_lens": (cu_q_lens, "S+1", (jnp.int32,))}, **{"S+1": sizes["S"] + 1})
    S, M, H, K, Dh, bs = (sizes[name] for name in ("S", "M", "H", "K", "Dh", "bs"))
    if v_pages is None:
        check_latent(OP.name, K, Dh, value_dim)
    else:
        check_that(OP.name, "value_dim", value_dim is None, value_dim, "None where there are v_pages")
        check_heads(OP.name, H, K, Dh)
    check_that(OP.name, "k_pages", bs >= 8 and bs & (bs - 1) == 0, f"bs={bs}", "a power of two, at least 8")
    check_that(OP.name, "scale", scale > 0, scale, "a positive number")
    check_that(OP.name, "window", window is None or window >= 1, window, "None or at least 1")
    check_that(OP.name, "soft_cap", soft_cap is None or soft_cap > 0, soft_cap, "None or a positive number")
    check_that(OP.name, "max_q_len", max_q_len is None or max_q_len >= 1, max_q_len, "None or at least 1")
    if work_list is None:
        reach = M * bs if window is None else min(window, M * bs)
        queries = MOST_QUERIES if value_dim is None else latent_queries(H)
        keys = decoded_keys(jnp.diff(cu_q_lens), kv_lens, K, reach, jnp, queries)
        work_list = make_work_list(keys, most_splits(S, K, reach), jnp)
    parts = work_list.shape[0]
    check_that(OP.name, "work_list", parts > 2 * S, f"shape [{parts}]", f"more than 2·S={2 * S} elements")
    return run(
        OP,
        problem(
            sizes,
            q.dtype,
            k_pages.dtype,
            window=window,
            sinks=sinks is not None,
            max_q_len=max_q_len,
            latent=value_dim,
        ),
        {
            **arrays_of(arguments),
            "cu_q_lens": cu_q_lens,
            "scale": scale,
            "value_dim": value_dim,
            "window": window,
            "soft_cap": soft_cap,
            "max_q_len": max_q_len,
            "work_list": work_list,
        },
        **options,
    )
