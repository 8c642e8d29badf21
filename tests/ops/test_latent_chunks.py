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
from moejax.ops.kv_segments import ChunkPlan, Segment
from moejax.ops.paged_attention import has_plain_chunks, paged_attention
from moejax.perf.operation_costs import attribute
from moejax.perf.sizes import attention_sizes, takes_plain_form
from tests.engine.tiny import PROPERTY
from tests.examples import examples
from tests.model_shapes import LATENT as LATENT_MODEL
from tests.numerics import assert_close, tolerance
from tests.ops.paged_case import Spec, make, rounded
from tests.perf.models import small_model

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
SLOW = ("two_segments", "blocks_of_1", "bfloat16", "e4m3_float16", "e5m2_bfloat16")


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
        )[:2]

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
    """DeepSeek-V3's sizes: at long contexts above 256 tokens, at a prompt's beginning where keys made in vain
    cost less than the pairs save. A step that can have no such chunk has no program for it."""
    sizes = LatentConfig(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    absorbed, plain = 2 * (64 + 2 * 512), 2 * (64 + 128 + 128)
    for new, context in ((1, 1), (1, 4096), (250, 4096), (258, 1 << 20), (280, 4096), (20, 20), (256, 256)):
        earlier = -(-context // 256) * 256 - new
        pairs = sum(range(context - new + 1, context + 1))
        costs = pairs * absorbed, pairs * plain + 1.5 * earlier * 2 * 512 * 256
        assert takes_plain_form(sizes, new, context) == (new > 1 and costs[1] < costs[0]), (new, context)
    chunks, contexts = (grid.ravel() for grid in np.mgrid[1:700:7, 0:6000:100])
    taken = takes_plain_form(sizes, chunks, contexts + chunks)
    assert taken.any() and not taken.all()
    assert all(has_plain_chunks(int(tokens), sizes) for tokens in chunks[taken])
    assert not has_plain_chunks(64, sizes) and has_plain_chunks(256, sizes)


def products(jaxpr) -> int:
    """FLOPs of a program's products of matrices, those of a loop of unknown length once."""
    counted = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = [eqn.invars[0].aval.shape[axis] for axis in contracted]
            counted += 2 * eqn.outvars[0].aval.size * int(np.prod(sizes))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            counted += eqn.params.get("length", 1) * products(inner) if hasattr(inner, "eqns") else 0
    return counted


@pytest.mark.parametrize(("plain", "new", "context"), [(False, 20, 64), (True, 128, 256), (True, 256, 256)])
def test_flops_are_those_of_the_account(
    plain: bool, new: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of one tile, or part, and one turn: what the program multiplies, masked pairs included, is what
    `attribute` counts."""
    config = small_model(**LATENT_MODEL)
    latent, H, sizes = config.latent, config.num_heads, attention_sizes(config)
    assert latent is not None and takes_plain_form(latent, new, context) == plain
    monkeypatch.setattr(module, "PLAIN_QUERIES", new)
    segments = (Segment(jnp.zeros((context // 32, 1, 22, 32)), None, latent=latent.kv_rank),)
    field = jnp.zeros(2, jnp.int32)
    plan = ChunkPlan(*[field] * 11)._replace(table=jnp.zeros((1, context // 32), jnp.int32))

    def run(q: jax.Array, weight: jax.Array) -> jax.Array:
        heads = LatentHeads(weight, latent)
        if plain:
            return module.plain_chunk_attention(
                q, segments, plan, heads, jnp.zeros((new, H, latent.value_dim))
            )
        out, _ = module.chunk_attention(heads.absorb(q)[:, None], segments, plan, None)
        return heads.values(out[:, 0])

    weight = jnp.zeros((latent.kv_rank, H, latent.nope_dim + latent.value_dim))
    counted = products(jax.make_jaxpr(run)(jnp.zeros((new, H, config.head_dim)), weight).jaxpr)
    ops = attribute(config, new_tokens=[new], context=[context], phase="prefill", hits=[0] * 3)
    flops = {op.operation: op.flops for op in ops if op.layer == 0}
    pairs = sum(range(context - new + 1, context + 1))
    latents = flops["qkv_projection"] - 2 * new * (sizes.qkv_params - sizes.made_params)
    assert counted == latents + flops["attention"] * new * context / pairs
