"""The learning rate's curve and what decays."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.train.optimizer import decayed, learning_rate_schedule, make_optimizer
from moejax.train.step import init_state

from .small import small_config


def test_rate_rises_to_the_peak_and_falls_along_a_cosine(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=100, warmup_steps=10, learning_rate=0.5, min_lr_ratio=0.1)
    schedule = learning_rate_schedule(config)
    rates = [float(schedule(done)) for done in range(100)]  # the rate of step done + 1
    np.testing.assert_allclose(rates[:10], [0.05 * n for n in range(1, 11)], rtol=1e-6)
    cosine = [0.05 + 0.45 * (1 + math.cos(math.pi * (n - 10) / 90)) / 2 for n in range(11, 101)]
    np.testing.assert_allclose(rates[10:], cosine, rtol=1e-5)
    assert rates[-1] == pytest.approx(0.05, rel=1e-6)


def test_without_warm_up_the_first_step_moves(tmp_path: Path) -> None:
    assert float(learning_rate_schedule(small_config(tmp_path, warmup_steps=0))(0)) > 0


def test_matrices_decay_and_norms_do_not(tmp_path: Path) -> None:
    params = init_state(small_config(tmp_path)).params
    mask = decayed(params)
    layer, flags = params["layers"][0], mask["layers"][0]
    assert flags["moe"]["experts"]["gate_proj"] and flags["attention"]["q_proj"]["kernel"]
    assert mask["embedding"]["table"]
    assert layer["input_norm"]["scale"].ndim == 1 and not flags["input_norm"]["scale"]
    assert not flags["attention"]["q_norm"]["scale"] and not mask["norm"]["scale"]

    optimizer = make_optimizer(small_config(tmp_path, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(optimizer.init)(params)
        updates, _ = jax.jit(optimizer.update)(zero, state, params)
    assert float(jnp.abs(updates["embedding"]["table"]).max()) > 0
    assert float(jnp.abs(updates["norm"]["scale"]).max()) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup_steps": 24}, "warmup_steps must be at least 0 and below steps"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0"),
        ({"vocab_size": 100}, "vocab_size must be an integer of at least 259"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
        ({"capacity_factor": 0.0}, "capacity_factor must be a positive number"),
        ({"token_noise": 1.0}, r"token_noise must be a number in \[0, 1\)"),
        ({"seq_len": 65}, "seq_len 65 exceeds"),
        ({"held_out_fraction": 0.0}, "held_out_fraction must be a number above 0 and below 1"),
    ],
)
def test_wrong_values_are_one_line(tmp_path: Path, changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small_config(tmp_path, **changes)
