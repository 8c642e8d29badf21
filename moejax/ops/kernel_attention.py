"""Attention over a paged cache by the GPU kernels: rotate and store, then attend (see `paged_attention`)."""

from dataclasses import dataclass, field
from typing import Any

import jax

from moejax.ops.attention import QkNorms
from moejax.ops.kv_segments import Segment


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelPlan:
    """Indices of a step's reads and writes; R sequences, N tokens.

    Attributes:
        slot_mapping: int32 `[N]`, block · block_size + offset of each token; -1 stores nothing.
        block_table: int32 `[R, M]`.
        kv_lens: int32 `[R]`, keys of each sequence, this step's own among them.
        cu_q_lens: int32 `[R + 1]`, a sequence's queries are the tokens between two neighbours.
        work_list: int32, which parts of contexts decode's programs read, see `pallas_kernels.work_list`.
        decode_only: no sequence has more than one query. Otherwise a sequence may have a query and no keys:
            its row is 0.
    """

    slot_mapping: jax.Array
    block_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    work_list: jax.Array
    decode_only: bool = field(default=False, metadata={"static": True})


def kernel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    rope: tuple[jax.Array, jax.Array],
    pages: Segment,
    plan: KernelPlan,
    *,
    norms: QkNorms | None = None,
    sinks: jax.Array | None = None,
    window: int | None,
    scale: float,
    implementation: str,
) -> tuple[jax.Array, Segment]:
    """Normalises q and k where there are `norms`, rotates them, stores k and v, attends.

    Args:
        q: `[N, H, Dh]`, k and v: `[N, K, Dh]`, not rotated; v is None where pages have no values.
        rope: cos and sin, float32 `[N, R/2]`.
        sinks: `[H]`, see `moejax.ops.attention.attention`.
        pages: keys not transposed; scales where they are quantized.
        implementation: of the kernels, see `pallas_kernels`.

    Returns:
        `[N, H, Dv]` and the updated pages.
    """
    # Here, because Pallas takes a while to import and most runs never need it.
    from pallas_kernels.ragged_paged_attention import ragged_paged_attention
    from pallas_kernels.rope_kv_write import rope_kv_write

    with jax.named_scope("kv_write"):
        normalized: dict[str, Any] = (
            {} if norms is None else {"q_norm": norms.q, "k_norm": norms.k, "eps": norms.eps}
        )
        q, keys, values, key_scale, value_scale = rope_kv_write(
            q,
            k,
            v,
            *rope,
            pages.keys,
            pages.values,
            plan.slot_mapping,
            k_scale=pages.key_scale,
            v_scale=pages.value_scale,
            implementation=implementation,
            **normalized,
        )
    pages = Segment(keys, values, key_scale, value_scale, pages.codes, pages.latent)
    out = ragged_paged_attention(
        q,
        keys,
        values,
        plan.block_table,
        plan.kv_lens,
        plan.cu_q_lens,
        scale=scale,
        value_dim=pages.latent,
        window=window,
        k_scale=pages.key_scale,
        v_scale=pages.value_scale,
        sinks=sinks,
        max_q_len=1 if plan.decode_only else None,
        work_list=plan.work_list,
        implementation=implementation,
    )
    return out, pages
