"""Chunks attend to latents in the plain form as in the absorbed one, wherever both stand in a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.config import LatentConfig
from moejax.ops import paged_attention as module
from moejax.ops.attention import LatentHeads
from moejax.ops.kv_segments import ChunkPlan
from moejax.ops.paged_attention import has_plain_chunks, paged_attention
from moejax.perf.sizes import takes_plain_form
from tests.engine.tiny import PROPERTY
from tests.examples import examples
from tests.numerics import assert_close, tolerance
from tests.ops.paged_case import Spec, make, rounded

LATENT = LatentConfig(kv_rank=10, rope_dim=6, nope_dim=8, value_dim=5)
ONE = {"heads": 3, "kv_heads": 1, "head_dim": 16}
SPECS = {
    "two_segments": Spec(**ONE, tokens=23),
    "turns": Spec(**ONE, block_size=8, segments=(5, 9), width=11, tokens=70, rows=3),
    "blocks_of_1": Spec(**ONE, block_size=1, segments=(19, 8), width=20, tokens=19),
    "bfloat16": Spec(**ONE, dtype="bfloat16"),
    "int8": Spec(**ONE, codes="int8", tokens=23),
    "e4m3_float16": Spec(**ONE, codes="float8_e4m3fn", dtype="float16"),
    "e5m2_bfloat16": Spec(**ONE, codes="float8_e5m2", dtype="bfloat16", segments=(11,)),
}
SLOW = ("blocks_of_1", "bfloat16", "e4m3_float16")


def whole_chunks(plan: ChunkPlan, some: np.random.Generator) -> ChunkPlan:
    """The same chunks, some of them whole and marked so."""
    count = int(plan.num_tiles[0])
    tiles = np.stack(plan[:4], axis=1)[:count]
    plain = {row for row in set(tiles[:, 1].tolist()) if some.random() < 0.7}
    parts = [tile for tile in tiles.tolist() if tile[1] not in plain]
    whole = [
        [*mine[0, :3], mine[:, 3].sum()] for mine in (tiles[tiles[:, 1] == row] for row in sorted(plain))
    ]
    arrays = np.zeros((len(plan.tile_start), 4), np.int32)
    arrays[: len(parts + whole)] = np.reshape(parts + whole, (-1, 4))
    ends = jnp.asarray([len(parts), len(parts + whole)], jnp.int32)
    return plan._replace(
        **dict(zip(ChunkPlan._fields, map(jnp.asarray, arrays.T), strict=False)), num_tiles=ends
    )


@functools.cache
def program(spec: Spec, plain: bool):
    def run(q, k, segments, plan, weight):
        return paged_attention(
            q, k, None, segments, plan, window=None, scale=0.4, latents=LatentHeads(weight, LATENT)
        )

    return jax.jit(run)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SPECS]
)
@settings(PROPERTY, max_examples=examples(20))
@given(seed=st.integers(0, 2**20))
def test_the_plain_form_is_the_absorbed_one(name: str, seed: int) -> None:
    """A chunk's own and earlier keys in several turns of 16 and parts of 8 queries; other chunks stay
    absorbed. What nobody has written is finite rubbish, and stays where it is."""
    spec = SPECS[name]
    case, draw = make(spec, seed), np.random.default_rng(seed)
    dtype = jnp.dtype(spec.dtype)
    heads = LATENT.rope_dim + LATENT.nope_dim
    q = rounded(draw.normal(size=(*case.q.shape[:2], heads)), spec.dtype)
    weight = rounded(draw.normal(size=(LATENT.kv_rank, 3, 13)), spec.dtype)
    before, after = (
        tuple(dataclasses.replace(x, values=None, value_scale=None, latent=LATENT.kv_rank) for x in segments)
        for segments in (case.before, case.after)
    )
    assert case.plan.chunk is not None
    mixed = case.plan._replace(chunk=whole_chunks(case.plan.chunk, draw))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PLAIN_KEYS", 16)
        patch.setattr(module, "PLAIN_QUERIES", 8)
        for plain, plan in ((False, case.plan), (True, mixed)):
            patch.setattr(module, "has_plain_chunks", lambda *_, plain=plain: plain)
            arrays = (jnp.asarray(x, dtype) for x in (q, case.k))
            out, segments = program(spec, plain)(*arrays, before, plan, jnp.asarray(weight, dtype))
            found.append(np.asarray(out, np.float64))
            for ours, want in zip(jax.tree.leaves(segments), jax.tree.leaves(after), strict=True):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(want))
    # Keys and values are sums of `kv_rank` products, rounded to the dtype; scores and values sums of them.
    limit = tolerance(spec.head_dim, spec.longest, spec.longest, dtype=spec.dtype)
    for place in case.places:
        assert np.isfinite(found[1][place]).all()
        assert_close(found[1][place], found[0][place], limit)


def test_the_form_is_chosen_by_cost() -> None:
    """DeepSeek-V3's sizes: at long contexts above 170 tokens, at a prompt's beginning where keys made in vain
    cost less than the pairs save. A step that can have no such chunk has no program for it."""
    sizes = LatentConfig(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    absorbed, plain = 2 * (64 + 2 * 512), 2 * (64 + 128 + 128)
    for new, context in ((1, 1), (1, 4096), (160, 4096), (172, 1 << 20), (176, 4096), (20, 20), (256, 256)):
        keys = -(-context // 256) * 256
        pairs = sum(range(context - new + 1, context + 1))
        costs = [new * 2 * 512 * 256 + pairs * absorbed, keys * 2 * 512 * 256 + pairs * plain]
        assert takes_plain_form(sizes, new, context) == (new > 1 and costs[1] < costs[0]), (new, context)
    chunks, contexts = (grid.ravel() for grid in np.mgrid[1:700:7, 0:6000:100])
    taken = takes_plain_form(sizes, chunks, contexts + chunks)
    assert taken.any() and not taken.all()
    assert all(has_plain_chunks(int(tokens), sizes) for tokens in chunks[taken])
    assert not has_plain_chunks(64, sizes) and has_plain_chunks(256, sizes)
