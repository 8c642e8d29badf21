"""Experts in fewer bits below the device: within their steps, and the engine that has such weights."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import SamplingParams
from moejax.core.errors import ConfigError
from moejax.engine.tiers.codes import BLOCK, CODECS
from tests.engine.test_tiers import DEEP, PROMPTS, checked, opened, same_run, slots_of
from tests.examples import examples

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**30), st.integers(1, 700), st.floats(0.02, 1e3), st.floats(-2, 2))
def test_values_come_back_within_a_step(seed: int, size: int, scale: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    values = (scale * (rng.standard_normal(size) + shift)).astype(np.float32)
    for name, codec in CODECS.items():
        data = codec.encode(values)
        assert data.dtype == np.uint8 and data.size == codec.nbytes(size)
        back = codec.decode(data, size)
        most = np.abs(np.pad(values, (0, -size % BLOCK)).reshape(-1, BLOCK)).max(axis=1).repeat(BLOCK)[:size]
        # Half a step of 127; half of 15 over twice the range, scale and minimum each off by half of 63.
        step = {"q8_k": 0.502 / 127, "q4_k": 1 / 15 + 2.5 / 63}[name]
        assert (np.abs(back - values) <= step * most + 1e-6 * scale).all()


def test_bits_of_a_value_and_zeros() -> None:
    assert [8 * codec.nbytes(BLOCK) / BLOCK for codec in CODECS.values()] == [8.125, 4.5]
    for codec in CODECS.values():
        assert not codec.decode(codec.encode(np.zeros((3, 200))), 600).any()


def coded(plain: Any, codes: str) -> None:
    """Gives a plain engine the experts that the codes stand for."""
    codec, values = CODECS[codes], {}
    for number, layer in enumerate(plain.model.layers):
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = getattr(layer.moe.experts, name)
            array = np.asarray(weight[...])
            each = [codec.decode(codec.encode(x), x.size).reshape(x.shape) for x in array]
            spec = weight.get_metadata("spec")
            values[f"layers.{number}.moe.experts.{name}"] = spec.canonical(np.stack(each))
    plain.update_weights(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "experts", "tiers"),
    [
        ("q8_k", {}, {"codes": "q8_k"}),
        ("q4_k", {"tier": "disk"}, {"codes": "q4_k"}),
        ("q4_k", {"miss": "low_bits", "low_bits_below": 1.0, "tier": "disk"}, {}),
    ],
)
def test_the_engine_that_has_what_the_codes_stand_for(
    codes: str, experts: dict[str, Any], tiers: dict[str, Any], tmp_path: Path
) -> None:
    with (
        opened(DEEP) as plain,
        opened(DEEP, tmp_path, experts={"resident": 0.5} | experts, tiers=tiers) as mine,
    ):
        exact = plain.generate(PROMPTS, GREEDY)
        coded(plain, codes)
        same_run(mine, plain, GREEDY)
        assert mine.generate(PROMPTS, GREEDY)[0].outputs[0].logprobs != exact[0].outputs[0].logprobs
        stats, records = mine.stats(), slots_of(mine).records
        assert stats["experts_low_bits"] == (stats["experts_misses"] if "miss" in experts else 0)
        assert (records.nbytes < 0.3 * records.held) == ("codes" in tiers)


@pytest.mark.slow
def test_few_bits_for_what_weighs_little(tmp_path: Path) -> None:
    """At 0 nothing is taken in few bits; between, what comes to weigh more is fetched whole."""
    low = {"resident": 0.5, "miss": "low_bits"}
    with opened(DEEP) as plain, opened(DEEP, experts={**low, "low_bits_below": 0.0}) as mine:
        same_run(checked(mine), plain, GREEDY)
        assert mine.stats()["experts_low_bits"] == 0
    with opened(DEEP, experts={**low, "low_bits_below": 0.45}) as mine:
        tiers = slots_of(mine)
        mine.generate(PROMPTS, dataclasses.replace(GREEDY, max_tokens=12))
        tiers.check_integrity()
        stats = mine.stats()
        assert 0 < stats["experts_low_bits"] < stats["experts_misses"]
        below = tiers.records.count * (tiers.records.nbytes + tiers._lower.nbytes)
        assert tiers.most_below == below


def test_copies_that_the_host_has_no_room_for() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tiers\.host_gb=0\.0001 does not hold the .* GB"):
        opened(DEEP, experts={"resident": 0.5, "miss": "low_bits"}, tiers={"host_gb": 1e-4})
