"""Linear attention block by block, against its recurrence token by token in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.linear_attention import BLOCK, attend_block, linear_attention
from tests.numerics import assert_close, tolerance

# Half of what is there is forgotten in one token, in 35 tokens, in 70,000.
RATES = np.array([0.7, 0.02, 1e-5])


def token_by_token(q: Any, k: Any, v: Any, rates: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """q, k, v float64 `[T, H, Dh]`, state `[H, Dh, Dh]` → `[T, H, Dh]` and the last state."""
    outs, state = [], np.array(state, np.float64)
    for t in range(len(q)):
        state = np.exp(-rates)[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        outs.append(np.einsum("hd,hde->he", q[t], state))
    return np.array(outs), state


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 2])
def test_whole_sequences(length: int) -> None:
    q, k, v = (draw(2, length, 3, 6, seed=seed) for seed in range(3))
    ours = jax.jit(linear_attention)(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, RATES)))
    for b in range(2):
        theirs, _ = token_by_token(q[b], k[b], v[b], RATES, np.zeros((3, 6, 6)))
        assert_close(ours[b], theirs, tolerance(6, length))


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_block_goes_on_from_a_state_and_ends_where_its_tokens_do(count: int) -> None:
    """What lies past the real tokens, another sequence's numbers for example, counts nothing."""
    q, k, v = (draw(7, 3, 6, seed=seed) for seed in range(3))
    before = draw(3, 6, 6, seed=4)
    theirs, after = token_by_token(q[:count], k[:count], v[:count], RATES, before)
    k[count:], v[count:] = np.nan, np.inf
    start, rates, *qkv = (jnp.asarray(x, jnp.float32) for x in (before, RATES, q, k, v))
    ours, state = jax.jit(attend_block)(start, qkv, rates, jnp.int32(count))
    assert_close(ours[:count], theirs, tolerance(6, 7))
    assert_close(state, after, tolerance(7))
