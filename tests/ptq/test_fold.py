"""Folding leaves the float model's logits and routing as they are, in every family and at every site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.nn.param import iter_params
from moejax.ptq.fold import tie
from moejax.ptq.sites import stages_of
from tests.examples import slow_but
from tests.numerics import assert_close, relative_error, tolerance
from tests.ptq.models import FAMILIES, build, fold, logits, routing, tokens


def random_scales(stage, site, rng):
    """Between 1/4 and 4, tied where they must be."""
    shape = stage.params()[site.readers[0]].get_metadata("spec").canonical_shape
    if site.name == "moe.experts.down_proj":
        shape = (shape[0], shape[-2])
    else:
        shape = (shape[-2],)
    return tie(jnp.asarray(2.0 ** rng.uniform(-2, 2, shape), jnp.float32), site, "mean")


def chain(config):
    """Lengths of the reductions that a token goes through, for the tolerance."""
    layer = [config.hidden_size, config.hidden_size, config.hidden_size, config.moe_intermediate_size]
    return [n for _ in range(config.num_layers) for n in layer] + [config.hidden_size]


SITE_BY_SITE = ("qwen2_moe", "olmoe", "qwen3_moe", "llama", "gemma3_text")
"""Families whose sites are folded one by one, too."""


@pytest.mark.parametrize(
    ("family", "layout"),
    slow_but(
        [(f, ("edf", "efd")[i % 2]) for i, f in enumerate(FAMILIES) if f not in SITE_BY_SITE[1:]],
        [(family, layout) for family in FAMILIES for layout in ("edf", "efd")],
    ),
)
def test_logits_and_routing_stay(family, layout):
    config = FAMILIES[family]
    model, ids, rng = build(config, layout=layout), tokens(), np.random.default_rng(3)
    before = logits(model, ids)
    routed = routing(model, ids)
    start = {name: np.asarray(param[...]) for name, param in iter_params(model)}
    changed = []
    for stage in stages_of(model):
        sites = {site.name: random_scales(stage, site, rng) for site in stage.sites if site.blocked is None}
        changed += [stage.prefix + name for name in fold(stage, sites)]
    moved = {name for name, param in iter_params(model) if not np.array_equal(start[name], param[...])}
    assert moved == set(changed)
    router = {f"layers.{i}.moe.router.kernel" for i, sparse in enumerate(config.moe_layers) if sparse}
    # Where the residual comes after the norm, nothing is folded into what the router reads.
    assert (router <= moved) == (config.normed_residual is None) and len(routed) == len(router)
    assert_close(logits(model, ids), before, tolerance(*chain(config)))
    assert all(map(np.array_equal, routed, routing(model, ids)))


@pytest.mark.parametrize("family", SITE_BY_SITE)
def test_each_site_alone_changes_its_readers_and_its_source_only(family):
    config = FAMILIES[family]
    before = logits(build(config), tokens())
    names = {site.name for stage in stages_of(build(config)) for site in stage.sites}
    for name in sorted(names):
        model, rng, changed = build(config), np.random.default_rng(4), set()
        for stage in stages_of(model):
            for site in stage.sites:
                if site.name == name:
                    done = fold(stage, {name: random_scales(stage, site, rng)})
                    allowed = {*site.readers, site.source, site.source.replace("kernel", "bias")}
                    assert {*site.readers, site.source} <= set(done) <= allowed
                    changed |= set(done)
        assert changed
        assert relative_error(logits(model, tokens()), before) <= tolerance(*chain(config)), name


def test_scaling_without_the_source_is_seen():
    """The test above would notice a fold that is half done."""
    model = build(FAMILIES["qwen2_moe"])
    before = logits(model, tokens())
    stage = stages_of(model)[0]
    stage.params()["moe.router.kernel"].set_value(1.5 * stage.params()["moe.router.kernel"][...])
    assert relative_error(logits(model, tokens()), before) > 1e-3


def test_nothing_is_folded_through_a_clip():
    sites = {site.name: site for stage in stages_of(build(FAMILIES["olmoe-clip"])) for site in stage.sites}
    assert "clip_qkv=0.7" in sites["attention.o_proj"].blocked
    assert all(site.blocked is None for name, site in sites.items() if name != "attention.o_proj")


def test_heads_that_read_one_value_head_are_tied():
    site = next(s for s in stages_of(build(FAMILIES["mixtral"]))[0].sites if s.name == "attention.o_proj")
    values = jnp.arange(32, dtype=jnp.float32)
    heads = np.arange(32.0).reshape(2, 2, 8)  # value head, query head of it, channel
    want = np.broadcast_to(heads.mean(1, keepdims=True), heads.shape).reshape(-1)
    np.testing.assert_array_equal(tie(values, site, "mean"), want)
    want = np.broadcast_to(heads.max(1, keepdims=True), heads.shape).reshape(-1)
    np.testing.assert_array_equal(tie(values, site, "max"), want)


@pytest.mark.slow
def test_powers_of_two_fold_exactly_in_bfloat16():
    config = FAMILIES["qwen2_moe"].replace(dtype="bfloat16")
    model = build(config)
    before = logits(model, tokens())
    for stage in stages_of(model):
        scales = {}
        for site in stage.sites:
            found = random_scales(stage, site, np.random.default_rng(5))
            scales[site.name] = jax.lax.exp2(jnp.round(jnp.log2(found)))
        fold(stage, scales)
    np.testing.assert_array_equal(logits(model, tokens()), before)
