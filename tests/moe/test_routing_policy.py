"""Routing policies against the same choices made token by token in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.config import RouterConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import RoutingPolicy
from moejax.engine.routing.load_bias import moved
from moejax.moe.router import Router, Routing, expert_counts
from moejax.nn.param import initialize
from tests.model_shapes import experts_only
from tests.moe import reference
from tests.numerics import assert_close, tolerance

E, K, N = 8, 4, 40
ROUTERS = {
    "softmax": RouterConfig(),
    "sigmoid, corrected, in groups": RouterConfig(
        "sigmoid", True, groups=4, top_groups=3, group_score="top2", scaling=1.5
    ),
    "groups' gate": RouterConfig(groups=4, top_groups=3, group_gate=True),
}
POLICIES = {
    "top_p": RoutingPolicy("top_p", threshold=0.6),
    "top_p of two": RoutingPolicy("top_p", threshold=0.3, min_experts=2),
    "top_p of up to six": RoutingPolicy("top_p", threshold=0.75, max_experts=6),
    "confidence": RoutingPolicy("confidence", threshold=0.35),
    "ratio": RoutingPolicy("ratio", threshold=0.7),
    "batch": RoutingPolicy("batch", min_experts=1),
    "bias": RoutingPolicy("bias", rate=0.1),
}


def made(router: RouterConfig, policy: RoutingPolicy, normalize: bool = True, kernels: str = "xla") -> Router:
    config = experts_only(16, 8, E, K).replace(norm_topk_prob=normalize, initializer_range=0.4, router=router)
    module = Router(config, jnp.float32, kernels, policy)
    initialize(module, 0)
    if module.correction_bias is not None:
        module.correction_bias.set_value(jnp.linspace(-0.2, 0.2, E))
    if module.load_bias is not None:
        module.load_bias.set_value(jnp.linspace(0.3, -0.3, E))
    return module


def rows(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(N, 16)).astype(np.float32)


def plain(module: Router, base: Routing, valid: np.ndarray, policy: RoutingPolicy) -> list[dict[int, float]]:
    """Each token's experts and weights, from the model's own choice `base`."""
    logits = np.asarray(base.logits, np.float64)
    config = module.config
    scores = 1 / (1 + np.exp(-logits)) if config.scores == "sigmoid" else reference.softmax(logits)
    if config.group_gate:  # whose logits are log probabilities already, some of them left out
        scores = np.exp(logits)
    own = [list(map(int, ids)) for ids in np.asarray(base.ids)]
    m, k = policy.min_experts, policy.max_experts or K
    hit = {expert for token, ids in enumerate(own) for expert in ids[:m] if valid[token]}
    chosen: list[dict[int, float]] = []
    for token in range(N):
        ids, mine = own[token], scores[token]
        # Only what the model could choose itself: experts of its groups.
        order = [int(e) for e in np.asarray(module.ranking(base.logits))[token]]
        order = order[: E * config.top_groups // config.groups]
        if policy.method == "top_p":
            kept: list[int] = []
            for expert in ids:
                if len(kept) < m or sum(mine[kept]) / mine.sum() < policy.threshold:
                    kept.append(expert)
        elif policy.method == "confidence":
            kept = ids if mine[ids].max() / mine.sum() < policy.threshold else ids[:m]
        elif policy.method == "ratio":
            best = mine[ids].max()
            kept = [e for place, e in enumerate(ids) if place < m or mine[e] >= policy.threshold * best]
        elif policy.method == "batch":
            kept = [expert for expert in order if expert in hit][:k]
        else:
            assert module.load_bias is not None
            correction = 0 if module.correction_bias is None else np.asarray(module.correction_bias[...])
            wanted = mine + correction + np.asarray(module.load_bias[...])
            kept = sorted(order, key=lambda expert: -wanted[expert])[:k]
        weights = mine[kept] / (mine[kept].sum() if module.normalize else 1) * config.scaling
        chosen.append(dict(zip(kept, weights, strict=True)) if valid[token] else {})
    return chosen


@pytest.mark.each_value
@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("kind", list(ROUTERS))
@pytest.mark.parametrize("normalize", [True, False])
def test_the_same_choice_token_by_token(name: str, kind: str, normalize: bool) -> None:
    policy, x = POLICIES[name], rows()
    if name == "confidence" and ROUTERS[kind].scores == "sigmoid":
        policy = dataclasses.replace(policy, threshold=0.18)
    valid = np.arange(N) % 15 == 3 if name == "batch" else np.arange(N) % 5 != 3
    module = made(ROUTERS[kind], policy, normalize)
    base = made(ROUTERS[kind], RoutingPolicy(max_experts=policy.max_experts), normalize)(jnp.asarray(x))
    got = module(jnp.asarray(x), jnp.asarray(valid))
    expected = plain(module, base, valid, policy)
    ids, weights = np.asarray(got.ids), np.asarray(got.weights)
    assert ids.dtype == np.int32 and ids.shape == weights.shape == (N, policy.max_experts or K)
    assert (weights[ids == E] == 0).all()
    dense, wanted = np.zeros((2, N, E + 1))
    for token in range(N):
        dense[token, ids[token]] = weights[token]
        wanted[token, list(expected[token])] = list(expected[token].values())
        assert set(ids[token]) - {E} == set(expected[token])
    assert_close(dense, wanted, tolerance(16, 8))
    np.testing.assert_array_equal(got.logits, base.logits)
    changed = [set(a[a < E]) != set(b) for a, b in zip(ids[valid], np.asarray(base.ids)[valid], strict=True)]
    assert 0 < sum(changed), "a policy that changes nothing here shows nothing"


def test_extremes_are_the_models_own_choice() -> None:
    x = jnp.asarray(rows())
    base = made(ROUTERS["softmax"], RoutingPolicy())(x)
    for policy in (
        RoutingPolicy("top_p", threshold=0.999),
        RoutingPolicy("ratio", threshold=1e-6),
        RoutingPolicy("confidence", threshold=0.2, min_experts=K + 3),
        RoutingPolicy("batch", min_experts=K),
    ):
        got = made(ROUTERS["softmax"], policy)(x)
        np.testing.assert_array_equal(got.ids, base.ids)
        assert_close(got.weights, base.weights, tolerance(16, 8))


@pytest.mark.parametrize("name", ["top_p", "ratio", "batch"])
def test_with_the_kernel_of_the_router(name: str) -> None:
    """Interpreted here: what leaves experts out follows the kernel, what chooses others does without."""
    x, valid, policy = jnp.asarray(rows()), jnp.arange(N) < 33, POLICIES[name]
    with_kernel = made(ROUTERS["softmax"], policy, kernels="pallas_triton")
    assert with_kernel.kernels == ("xla" if name == "batch" else "pallas_triton")
    one, other = with_kernel(x, valid), made(ROUTERS["softmax"], policy)(x, valid)
    np.testing.assert_array_equal(one.ids, other.ids)
    assert_close(one.weights, other.weights, tolerance(16, 8))


def test_a_bias_that_follows_the_load_evens_it_out() -> None:
    """Steps of tokens that all want the same: load over the mean falls from what the router alone gives."""
    policy = RoutingPolicy("bias", rate=0.01)
    module = made(ROUTERS["softmax"], policy)
    assert module.load_bias is not None
    bias, loads = np.zeros(E, np.float32), []
    for step in range(100):
        module.load_bias.set_value(jnp.asarray(bias))
        x = rows(step) * 0.5 + rows(99)[:1]
        loads.append(np.asarray(expert_counts(module(jnp.asarray(x)).ids, E)))
        bias = moved(bias, loads[-1], policy.rate)
    before, after = (np.sum(part, axis=0) for part in (loads[:5], loads[-20:]))
    assert after.max() / after.mean() < 1.2 < 1.6 < before.max() / before.mean()
    assert moved(np.zeros(3, np.float32), np.array([4, 1, 1]), 0.5).tolist() == [-0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "best"}, "engine.moe.routing.method"),
        ({"method": "top_p", "threshold": 1.0}, "engine.moe.routing.threshold.*above 0 and below 1"),
        ({"min_experts": 0}, "engine.moe.routing.min_experts"),
        ({"rate": -1.0}, "engine.moe.routing.rate"),
        ({"min_experts": 3, "max_experts": 2}, "engine.moe.routing.min_experts=3 exceeds max_experts=2"),
    ],
)
def test_mistakes(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RoutingPolicy(**fields)
