"""Named batches of `ragged_paged_attention`: decode at several contexts, prompt chunks, and both together."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv import is_quantized
from pallas_kernels.models import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GPT_OSS_20B,
    MIXTRAL,
    OLMOE,
    QWEN3,
    WIDE64,
    ModelShape,
)
from pallas_kernels.op import Cost, Problem, Spec, make_problem
from pallas_kernels.work_list import (
    MOST_QUERIES,
    decoded_keys,
    latent_heads,
    latent_queries,
    make_work_list,
    most_splits,
)

PAGE = 32


def problem(
    sizes: Mapping[str, int],
    dtype: Any,
    kv_dtype: Any,
    *,
    window: int | None,
    sinks: bool,
    max_q_len: int | None,
    latent: int | None = None,
) -> Problem:
    """Returns the problem: `context` tokens fit the block table; `decode`: 1 where all have one query;
    `latent`: with latents only, numbers of a value."""
    return make_problem(
        **{name: sizes[name] for name in ("T", "S", "H", "K", "Dh")},
        context=sizes["M"] * sizes["bs"],
        page=sizes["bs"],
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=window or 0,
        sinks=sinks,
        decode=max_q_len == 1,
        **({} if latent is None else {"latent": latent}),
    )


def make_spec(
    model: ModelShape,
    name: str,
    sequences: Sequence[tuple[int, int]],
    *,
    kv: Any = jnp.bfloat16,
    window: int | None = None,
    sinks: bool = False,
    page: int = PAGE,
) -> Spec:
    """Returns bfloat16 queries over pages of dtype `kv`. `sequences`: queries and keys of each."""
    q_lens, kv_lens = np.array(sequences, np.int32).T
    T, S = int(q_lens.sum()), len(sequences)
    H, K, Dh = model.heads, model.kv_heads, model.head_dim
    pages = -(-kv_lens // page)
    M, N = int(pages.max()), int(pages.sum())
    decode = bool((q_lens == 1).all())
    quantized = is_quantized(kv)
    reach = min(M * page, window or M * page)
    groups, queries = (K, MOST_QUERIES) if model.latent is None else (latent_heads(H), latent_queries(H))
    decoded = decoded_keys(q_lens, kv_lens, groups, reach, queries=queries)
    work_list = make_work_list(decoded, most_splits(S, groups, reach))

    def pool(key: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        values, scales = jax.random.split(key)
        if not quantized:
            return jax.random.normal(values, (N, K, page, Dh), kv), None
        largest = 127 if kv == jnp.int8 else float(jnp.finfo(kv).max)
        stored = (jax.random.normal(values, (N, K, page, Dh)) * (largest / 4)).clip(-largest, largest)
        return stored.astype(kv), jax.random.uniform(scales, (N, K, page), minval=1.0, maxval=4.0) / largest

    def make(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c, d, e = jax.random.split(key, 5)
        (k_pages, k_scale), (v_pages, v_scale) = pool(b), pool(c) if model.latent is None else (None, None)
        # A pool in use is fragmented: no two pages of a sequence are neighbours.
        order = jax.random.permutation(d, jnp.arange(N, dtype=jnp.int32))
        first = np.concatenate([[0], np.cumsum(pages)[:-1]]).astype(np.int32)
        index = np.minimum(first[:, None] + np.arange(M, dtype=np.int32)[None, :], N - 1)
        arrays = {
            "q": jax.random.normal(a, (T, H, Dh), jnp.bfloat16),
            "k_pages": k_pages,
            "v_pages": v_pages,
            "block_table": order[index],
            "kv_lens": jnp.asarray(kv_lens),
            "cu_q_lens": jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
            "k_scale": k_scale,
            "v_scale": v_scale,
            "sinks": jax.random.normal(e, (H,)) if sinks else None,
            "work_list": jnp.asarray(work_list),
        }
        return {name: array for name, array in arrays.items() if array is not None}

    static: dict[str, Any] = {"scale": Dh**-0.5, "window": window, "max_q_len": 1 if decode else None}
    static |= {} if model.latent is None else {"value_dim": model.latent, "v_pages": None}
    sizes = {"T": T, "S": S, "M": M, "bs": page, "H": H, "K": K, "Dh": Dh}
    many = (q_lens > 1).any()
    phase = "decode" if decode else "mixed" if (q_lens == 1).any() else "prefill"
    tags = {model.name, phase, str(jnp.dtype(kv)), "ragged" if len(set(kv_lens)) > 1 and not many else "even"}
    return Spec(
        name=f"{model.name}/{phase}_{name}",
        make=make,
        static=static,
        problem=problem(
            sizes,
            jnp.bfloat16,
            kv,
            window=window,
            sinks=sinks,
            max_q_len=static["max_q_len"],
            latent=model.latent,
        ),
        cost=_cost(sizes, sequences, kv, window, model.latent),
        tags=frozenset(tags | ({"window"} if window else set()) | ({"sinks"} if sinks else set())),
    )


def _cost(
    sizes: Mapping[str, int],
    sequences: Sequence[tuple[int, int]],
    kv: Any,
    window: int | None,
    latent: int | None,
) -> Cost:
    """Costs reading each key and value that a query sees once (of latents they are one), reading queries and
    writing results."""
    pairs = needed = 0
    for queries, keys in sequences:
        position = np.arange(keys - queries, keys)
        seen = position + 1 if window is None else np.minimum(position + 1, window)
        pairs += int(seen.sum())
        needed += min(keys, int(seen[0]) + queries - 1)
    H, K, Dh = sizes["H"], sizes["K"], sizes["Dh"]
    row = Dh * jnp.dtype(kv).itemsize + (4 if is_quantized(kv) else 0)
    # Two floats that differ are multiplied as float32.
    unit = "bfloat16" if is_quantized(kv) or kv == jnp.bfloat16 else "float32"
    Dv, rows = latent or Dh, 2.0 if latent is None else 1.0
    moved = rows * needed * K * row + 2.0 * sizes["T"] * H * (Dh + Dv)
    return Cost(flops=2.0 * pairs * H * (Dh + Dv), bytes=moved, unit=unit)


def _decodes(batch: int, context: int) -> list[tuple[int, int]]:
    return [(1, context)] * batch


def _ragged(batch: int, longest: int) -> list[tuple[int, int]]:
    """Contexts spread evenly in their logarithm from a sixteenth of the longest."""
    return [(1, int(n)) for n in np.geomspace(longest / 16, longest, batch)]


_MIXED = [*_ragged(16, 8192), (512, 1024)]
_FP8 = jnp.float8_e4m3fn

SPECS = (
    make_spec(MIXTRAL, "1x32768", _decodes(1, 32768)),
    make_spec(MIXTRAL, "8x8192", _decodes(8, 8192)),
    make_spec(MIXTRAL, "8x8192_page16", _decodes(8, 8192), page=16),
    make_spec(MIXTRAL, "8x8192_int8", _decodes(8, 8192), kv=jnp.int8),
    make_spec(MIXTRAL, "8x8192_e4m3", _decodes(8, 8192), kv=_FP8),
    make_spec(MIXTRAL, "8x32768_window4096_sinks", _decodes(8, 32768), window=4096, sinks=True),
    make_spec(MIXTRAL, "64x2048", _decodes(64, 2048)),
    make_spec(MIXTRAL, "64_ragged_32768", _ragged(64, 32768)),
    make_spec(MIXTRAL, "512", [(512, 4096)]),
    make_spec(MIXTRAL, "2048", [(2048, 2048)]),
    make_spec(MIXTRAL, "2048_int8", [(2048, 2048)], kv=jnp.int8),
    make_spec(MIXTRAL, "2048_window4096", [(2048, 16384)], window=4096),
    make_spec(MIXTRAL, "16_and_512", _MIXED),
    make_spec(QWEN3, "1x32768", _decodes(1, 32768)),
    make_spec(QWEN3, "8x8192", _decodes(8, 8192)),
    make_spec(QWEN3, "64x2048", _decodes(64, 2048)),
    make_spec(QWEN3, "64_ragged_32768_e4m3", _ragged(64, 32768), kv=_FP8),
    make_spec(QWEN3, "2048", [(2048, 2048)]),
    make_spec(QWEN3, "8_of_16384", [(8, 16384)]),
    make_spec(QWEN3, "8x4_of_4096", [(4, 4096)] * 8),
    make_spec(QWEN3, "16_and_512", _MIXED),
    make_spec(OLMOE, "8x4096", _decodes(8, 4096)),
    make_spec(OLMOE, "64x2048", _decodes(64, 2048)),
    make_spec(OLMOE, "2048", [(2048, 2048)]),
    make_spec(WIDE64, "64x8192", _decodes(64, 8192)),
    make_spec(WIDE64, "16_and_512_e4m3", _MIXED, kv=_FP8),
    # The heads of DeepSeek-V3 on one of eight devices, too.
    make_spec(DEEPSEEK_V2_LITE, "1x32768", _decodes(1, 32768)),
    make_spec(DEEPSEEK_V2_LITE, "8x8192", _decodes(8, 8192)),
    make_spec(DEEPSEEK_V2_LITE, "8x8192_int8", _decodes(8, 8192), kv=jnp.int8),
    make_spec(DEEPSEEK_V2_LITE, "64x2048", _decodes(64, 2048)),
    make_spec(DEEPSEEK_V2_LITE, "2048", [(2048, 2048)]),
    make_spec(DEEPSEEK_V3, "1x32768", _decodes(1, 32768)),
    make_spec(DEEPSEEK_V3, "8x8192", _decodes(8, 8192)),
    make_spec(DEEPSEEK_V3, "64_ragged_32768", _ragged(64, 32768)),
    make_spec(DEEPSEEK_V3, "512", [(512, 4096)]),
    make_spec(DEEPSEEK_V3, "16_and_512", _MIXED),
    make_spec(GPT_OSS_20B, "64x2048_sinks", _decodes(64, 2048), sinks=True),
    make_spec(GPT_OSS_20B, "64x2048_window128_sinks", _decodes(64, 2048), window=128, sinks=True),
    make_spec(GPT_OSS_20B, "2048_sinks", [(2048, 4096)], sinks=True),
    make_spec(GPT_OSS_20B, "2048_window128_sinks", [(2048, 4096)], window=128, sinks=True),
)
