"""What heads keep of a prompt that ends is what they attended to most; nothing else of the cache moves."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cache.pool import PagedLayer
from moejax.core.scheduling import KvPolicyConfig
from moejax.ops.kv_by_head import keep_by_head
from moejax.ops.kv_segments import ChunkPlan, Segments
from moejax.ops.paged_attention import AttentionPlan, Evicted
from tests.examples import slow_but
from tests.ops.paged_case import Spec, given_back, make, rounded, segments_with, sinks_of
from tests.plain.evicted import between, chosen

SCALE = 0.7
SPECS = {
    "three_segments": Spec(),
    "one_segment_blocks_of_1": Spec(heads=3, kv_heads=1, segments=(40,), block_size=1, width=26),
    "bfloat16_sinks": Spec(dtype="bfloat16", bits=True, sinks=True, heads=6),
    "several_turns": Spec(segments=(9, 8), block_size=16, width=8),
    "int8": Spec(codes="int8"),
    "int4": Spec(codes="int4", segments=(5, 11)),
}


@pytest.mark.optimized
@pytest.mark.parametrize("codes", slow_but([None], [None, "int8"]))
def test_no_segment_is_copied(codes: str | None) -> None:
    """Attention reads a layer's segments, and what a head keeps is moved where it lies."""
    spec = Spec(segments=(37,), codes=codes)
    case = make(spec, 1)
    policy = KvPolicyConfig("snapkv", sinks=1, recent=3, budget=20, observe=4)
    ends = dict.fromkeys(("end_row", "end_token", "end_position"), jnp.zeros(spec.rows, jnp.int32))
    assert case.plan.chunk is not None
    plan = case.plan._replace(chunk=case.plan.chunk._replace(**ends))

    def step(
        segments: Segments, plan: AttentionPlan, q: jax.Array, k: jax.Array, v: jax.Array, rope: Any
    ) -> Any:
        layer = PagedLayer(segments, plan, "xla", Evicted(by_head=policy))
        out, layer = layer.update_and_attend(q, k, v, rope, jnp.zeros(0), window=None, scale=SCALE)
        return out, layer.segments

    given = [jnp.asarray(x[:, None], jnp.float32) for x in (case.q, case.k, case.v)]
    rope = (jnp.ones((len(case.q), 1, spec.head_dim // 2)),) * 2
    text = jax.jit(step, donate_argnums=0).lower(case.before, plan, *given, rope).compile().as_text()
    pool = rf"(f32|s8|u8)\[37,{spec.kv_heads},\d+,\d+\]"
    assert re.search(pool, text) and not re.search(rf"= {pool}\S* copy\(", text)


@pytest.mark.parametrize("name", slow_but(["three_segments", "int4"], list(SPECS)))
def test_each_head_keeps_its_own(name: str) -> None:
    spec = SPECS[name]
    rng, size = np.random.default_rng(3), spec.block_size
    policy = KvPolicyConfig("snapkv", sinks=1, recent=3, budget=5 * size, observe=4, pooling=3)
    lengths = [spec.longest - size, 6 * size] if size > 1 else [25, 11]
    free = rng.permutation(spec.num_blocks).tolist()
    tables = [[free.pop() for _ in range(-(-n // size))] for n in lengths]
    K, H, Dh = spec.kv_heads, spec.heads, spec.head_dim
    keys, values = ([rounded(rng.normal(size=(n, K, Dh)), spec.dtype) for n in lengths] for _ in range(2))
    q = rounded(rng.normal(size=(24, H, Dh)) * 2, spec.dtype)
    lasts = [9, 20]  # the prompts' last tokens among the 24
    sinks = sinks_of(spec)
    before, after = {}, {}
    for table, n, k, v, last in zip(tables, lengths, keys, values, lasts, strict=True):
        own = {(table[p // size], p % size): (k[p].copy(), v[p].copy()) for p in range(n)}
        before |= own
        moved = {place: (pair[0].copy(), pair[1].copy()) for place, pair in own.items()}
        stored, weights = given_back(k, spec), np.zeros((H, n, n))
        for i in range(policy.observe):
            position, query = n - 1 - i, rounded(q[last - i] * SCALE, spec.dtype)
            for h in range(H):
                score = np.exp(stored[: position + 1, h // (H // K)] @ query[h])
                weights[h, position, : position + 1] = score / (
                    score.sum() + (0 if sinks is None else np.exp(sinks[h]))
                )
        first = between(policy, size, n)[0][0] * size
        for head in range(K):
            ours = slice(head * (H // K), (head + 1) * (H // K))
            may_go, keeps = chosen(policy, size, n, weights[ours])
            assert 0 < len(keeps) < len(may_go)
            for place, p in enumerate(sorted(keeps), first):
                for part, source in zip(moved[table[place // size], place % size], (k, v), strict=True):
                    part[head] = source[p, head]
        after |= moved
    S = spec.rows
    table = np.zeros((S, spec.width), np.int32)
    for row, own_table in zip((1, 2), tables, strict=True):
        table[row, : len(own_table)] = own_table
    none = jnp.zeros(1, jnp.int32)
    ends = np.zeros((3, S), np.int32)
    ends[:, :2] = [1, 2], lasts, lengths
    plan = ChunkPlan(none, none, none, none, none, jnp.asarray(table), *[none] * 5)
    plan = plan._replace(
        end_row=jnp.asarray(ends[0]), end_token=jnp.asarray(ends[1]), end_position=jnp.asarray(ends[2])
    )
    got = jax.jit(
        lambda q, segments, plan: keep_by_head(
            q, segments, plan, policy, scale=SCALE, sinks=None if sinks is None else jnp.asarray(sinks)
        )
    )(jnp.asarray(q, jnp.dtype(spec.dtype)), segments_with(spec, before), plan)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(segments_with(spec, after)), strict=True):
        np.testing.assert_array_equal(x, y)
