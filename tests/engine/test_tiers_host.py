"""Experts that the host computes where they lie: the same tokens, and the choice of who is."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import MoeConfig
from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig
from moejax.core.tiers import ExpertsConfig
from moejax.engine.tiers.host import HostExperts
from moejax.moe.experts import Experts
from tests.engine.test_tiers import DEEP, FAMILIES, GREEDY, PROMPTS, opened, slots_of
from tests.examples import slow_but
from tests.numerics import assert_close, tolerance


@pytest.mark.parametrize(
    ("family", "miss", "options"),
    slow_but(
        [("gqa", "score", {})],
        [
            *((family, miss, {}) for family in FAMILIES for miss in ("host", "score")),
            ("gqa", "host", {"quant": QuantConfig(method="rtn", format="int8")}),
            ("gqa", "host", {"moe": MoeConfig(expert_layout="efd")}),
            ("gqa", "score", {"prefetch": "next_router", "tier": "disk"}),
            ("gqa", "host", {"kernels": "pallas_triton", "block_size": 8, "num_blocks": 16}),
        ],
    ),
)
def test_tokens_are_those_of_the_engine_that_has_all(
    family: str, miss: str, options: dict[str, Any], tmp_path: Path
) -> None:
    experts = {"resident": 0.5, "miss": miss}
    experts |= {name: options.pop(name) for name in ("tier", "prefetch") if name in options}
    tol = tolerance(32, 32, 32)
    with opened(FAMILIES[family], **options) as plain:
        with opened(FAMILIES[family], tmp_path, experts=experts, **options) as mine:
            outputs, wanted = mine.generate(PROMPTS, GREEDY), plain.generate(PROMPTS, GREEDY)
            for one, other in zip(outputs, wanted, strict=True):
                sample, twin = one.outputs[0], other.outputs[0]
                assert sample.token_ids == twin.token_ids
                told, other_told = ([x.logprob for x in each.logprobs or ()] for each in (sample, twin))
                assert_close(told, other_told, tol)
            tiers, stats = slots_of(mine), mine.stats()
            tiers.check_integrity()
            assert 0 < stats["experts_on_host"] <= stats["experts_misses"]
            moved = stats["experts_misses"] - stats["experts_on_host"]
            assert stats["experts_moved_bytes"] == moved * tiers.records.held
            # Who found a slot free was moved there, whatever it would cost.
            assert moved >= tiers.slots and not tiers._free


def test_cheaper_goes_by_what_both_take() -> None:
    with opened(DEEP, experts={"resident": 0.5, "miss": "cheaper"}) as mine:
        tiers = slots_of(mine)
        assert tiers.host.move_s > 0 and (tiers.host.host_s > 0).all()
        assert len(tiers.host.host_s) == 1 + np.log2(tiers.host._sizes[-1])
        tiers.host.moved = lambda seconds: None
        tiers.host.move_s = 0.0
        plain = [x.outputs[0].token_ids for x in mine.generate(PROMPTS, GREEDY)]
        assert mine.stats()["experts_on_host"] == 0
        mine.reset_stats()
        tiers.host.move_s = 1e9
        again = [x.outputs[0].token_ids for x in mine.generate(PROMPTS, GREEDY)]
        stats = mine.stats()
        assert again == plain and stats["experts_on_host"] == stats["experts_misses"] > 0


def choosing(**options: Any) -> HostExperts:
    experts = Experts(DEEP, "edf", np.dtype("float32"))
    return HostExperts(ExpertsConfig(resident=0.5, **options), experts, 16)


def test_cheaper_row_by_row() -> None:
    host = choosing(miss="cheaper")
    host.host_s[:], host.move_s = [1, 2, 3, 4, 5], 3.5
    assert host.choose(np.array([1, 4, 5, 16, 2])).tolist() == [True, True, False, False, True]
    host.moved(13.5)
    assert host.move_s == pytest.approx(4.5)
    assert host.choose(np.array([1, 4, 5, 16, 2])).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("task", ["default", "creative_writing", "code_generation", "simple_qa"])
def test_scores_by_a_plain_loop(task: str) -> None:
    """One expert after another goes where the score is less, the device where both are equal."""
    host, draws = choosing(miss="score", task=task), np.random.default_rng(0)
    share = {"creative_writing": 0.3, "simple_qa": 0.7}.get(task, 0.5)
    for m in (1, 2, 3, 7, 16):
        step, wait, ran = draws.uniform(1, 2), draws.uniform(0, 0.4), draws.uniform(0, 0.4)
        host.used(step, wait, ran)
        on_device = on_host = 0
        for _ in range(m):
            device = 0.5 * (1 - share) + 0.3 * (1 - (wait + ran) / step) + 0.2 * on_device / m
            mine = 0.5 * share + 0.3 * ran / step + 0.2 * on_host / m
            on_device, on_host = (on_device, on_host + 1) if mine < device else (on_device + 1, on_host)
        rows = draws.integers(1, 17, m)
        chosen = host.choose(rows)
        assert chosen.sum() == on_host
        assert not chosen.any() or chosen.all() or rows[chosen].max() <= rows[~chosen].min()


def test_what_is_refused() -> None:
    with opened(DEEP, experts={"resident": 0.9, "miss": "score"}) as mine:
        more = dataclasses.replace(mine.engine_config, max_num_batched_tokens=16)
        with pytest.raises(ConfigError, match=r"max_num_batched_tokens=16: .* steps of up to 8 tokens"):
            mine.variant(more)
    with pytest.raises(ConfigError, match=r"engine\.deterministic=tiles with engine\.experts\.miss=host"):
        opened(DEEP, experts={"resident": 0.5, "miss": "host"}, deterministic="tiles", tile_tokens=4)
    with pytest.raises(ConfigError, match=r"engine\.experts\.task"):
        ExpertsConfig(task="poetry")  # type: ignore[arg-type]
