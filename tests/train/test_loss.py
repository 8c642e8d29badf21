"""The losses against numpy, and at the points where their value is known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe.layer import RoutingTrace
from moejax.train.loss import chosen_experts, load_balance_loss, loss_parts, router_z_loss, token_losses
from tests.numerics import assert_close, tolerance

B, T, E, K = 3, 8, 4, 2


def _trace(values: Any, k: int = K, dropped: int = 0) -> RoutingTrace:
    """What a router with these logits gives."""
    logits = jnp.asarray(values, jnp.float32)
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), k)
    counts = jnp.zeros(logits.shape[-1], jnp.int32).at[ids.reshape(-1)].add(1)
    return RoutingTrace(ids, weights, logits, counts, jnp.int32(dropped), jnp.int32(0))


def _random_logits(seed: int, scale: float = 2.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal((B, T, E)).astype(np.float32)


def _balance(logits: np.ndarray, k: int = K) -> float:
    """E · Σ f · P in float64, f per assignment."""
    flat = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
    probability = np.exp(flat) / np.exp(flat).sum(-1, keepdims=True)
    chosen = np.argsort(-flat, axis=-1, kind="stable")[:, :k]
    share = np.bincount(chosen.ravel(), minlength=flat.shape[1]) / chosen.size
    return float(flat.shape[1] * share @ probability.mean(0))


@pytest.mark.parametrize("seed", range(4))
def test_balance_against_numpy(seed: int) -> None:
    logits = _random_logits(seed)
    assert_close(load_balance_loss(_trace(logits)), _balance(logits), tolerance(E, B * T))


def test_balance_is_one_when_all_experts_share_alike() -> None:
    # Every expert is the favourite of as many tokens, and the second choice of as many.
    favourites = np.eye(E)[np.arange(B * T) % E] * 2 + np.eye(E)[(np.arange(B * T) + 1) % E]
    trace = _trace(favourites.reshape(B, T, E))
    assert float(load_balance_loss(trace)) == pytest.approx(1.0, rel=1e-6)


def test_balance_is_one_for_a_router_that_knows_nothing() -> None:
    # All probabilities equal: then P is even, and Σ f · 1/E · E = Σ f = 1 whatever top_k picks.
    assert float(load_balance_loss(_trace(np.zeros((B, T, E))))) == pytest.approx(1.0, rel=1e-6)


def test_balance_grows_with_collapse_up_to_its_largest_value() -> None:
    values = []
    for strength in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 40.0):
        logits = _random_logits(0, 0.3)
        logits[..., 0] += strength
        values.append(float(load_balance_loss(_trace(logits, k=1))))
    assert values == sorted(values)
    assert values[0] < 1.2
    assert values[-1] == pytest.approx(E, rel=1e-5)


def test_balance_pushes_probability_away_from_the_crowded_expert() -> None:
    logits = _random_logits(1, 0.3)
    logits[..., 2] += 1.0

    def loss(values: jax.Array) -> jax.Array:
        return load_balance_loss(_trace(values)._replace(logits=values))

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(logits)))
    assert np.abs(gradient).max() > 0
    assert gradient[..., 2].mean() > 0 > np.delete(gradient, 2, axis=-1).mean()


def test_chosen_counts_what_was_asked_for_not_what_found_room() -> None:
    logits = _random_logits(2)
    trace = _trace(logits)
    short = trace._replace(ids=jnp.full_like(trace.ids, E), counts=jnp.zeros(E, jnp.int32))
    np.testing.assert_array_equal(chosen_experts(short), trace.counts)


@pytest.mark.parametrize("seed", range(4))
def test_router_z_against_numpy(seed: int) -> None:
    logits = _random_logits(seed, 5.0)
    expected = np.mean(np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2)
    assert_close(router_z_loss(_trace(logits)), expected, tolerance(E, B * T))


def test_router_z_of_large_logits_is_finite() -> None:
    assert float(router_z_loss(_trace(np.full((B, T, E), 200.0)))) == pytest.approx(
        (200 + np.log(E)) ** 2, rel=1e-5
    )


def test_token_losses_against_numpy() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((B, T, 17)).astype(np.float32) * 3
    targets = rng.integers(17, size=(B, T)).astype(np.int32)
    wide = logits.astype(np.float64)
    expected = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, targets[..., None], -1)[..., 0]
    assert_close(token_losses(jnp.asarray(logits), jnp.asarray(targets)), expected, tolerance(17))


def test_the_sum_and_its_parts() -> None:
    traces = [_trace(_random_logits(0), dropped=3), None, _trace(_random_logits(1))]
    logits, targets = jnp.zeros((B, T, 5)), jnp.zeros((B, T), jnp.int32)
    parts, counts = loss_parts(logits, targets, traces, load_balance_coef=0.5, router_z_coef=0.25)
    assert float(parts.cross_entropy) == pytest.approx(np.log(5), rel=1e-6)
    expected = parts.cross_entropy + 0.5 * parts.load_balance + 0.25 * parts.router_z
    assert float(parts.loss) == pytest.approx(float(expected), rel=1e-6)
    assert counts.chosen.shape == (2, E) and int(counts.chosen.sum()) == 2 * B * T * K
    assert counts.dropped.tolist() == [3, 0]
