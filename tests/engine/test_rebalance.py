"""Expert placement in a running engine: weights move, outputs do not change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, ParallelConfig, SamplingParams, save_pretrained
from moejax.core.errors import ConfigError
from moejax.engine.routing.rebalance import current_placement, sources
from moejax.moe.placement import balancedness
from moejax.routing.generate import generate
from tests.engine.mesh_models import ENGINE, FAMILIES, checkpoint, prompts

pytestmark = pytest.mark.multidevice

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router that prefers few experts: its loads are far from even."""
    return checkpoint(FAMILIES["qwen3_moe"], tmp_path_factory.mktemp("model"))


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts(8), GREEDY)]


@pytest.fixture(scope="module")
def wide(directory: Path) -> LLM:
    parallel = ParallelConfig(ep=4, attention="data", redundant_experts=4)
    return LLM(str(directory), engine=ENGINE, parallel=parallel)


def test_tokens_stay_while_weights_move_under_running_requests(directory: Path, wide: LLM) -> None:
    want = tokens(LLM(str(directory), engine=ENGINE))
    assert tokens(wide) == want  # with replicas of the first experts
    window = wide.track_load(window_steps=64)
    assert tokens(wide) == want
    loads = window.sum()
    assert loads.sum() > 0 and not loads[1].any()  # layer 1 is dense
    compiled = len(wide.ledger.entries)

    outputs = [wide.submit(prompt, GREEDY) for prompt in prompts(8)]
    for _ in range(5):
        wide.step()
    loads = window.sum()
    done = wide.rebalance(min_gain=0.0)
    while wide.step():
        pass
    assert [out.outputs[0].token_ids for out in outputs] == want
    assert len(wide.ledger.entries) == compiled

    assert done.applied and done.comparison.moved.sum() > 0
    assert done.comparison.bytes_moved == done.comparison.moved.sum() * 3 * 64 * 16 * 4
    assert done.comparison.after.max() < done.comparison.before.max()
    placed = current_placement([wide.model], 4)
    sparse = loads[[0, 2]]
    np.testing.assert_allclose(balancedness(sparse, placed), done.comparison.after)
    assert tokens(wide) == want


@pytest.mark.slow
def test_groups_stay_on_a_node(tmp_path: Path) -> None:
    """Experts of a group, of which a token visits several, stay together; tokens are the same."""
    directory = checkpoint(FAMILIES["deepseek_v3"], tmp_path)
    parallel = ParallelConfig(ep=4, nodes=2, attention="data", exchange="hierarchical")
    llm = LLM(str(directory), engine=ENGINE, parallel=parallel)
    want = tokens(llm)
    loads = np.random.default_rng(0).zipf(1.3, size=(2, 16)).clip(max=200)
    assert llm.rebalance(loads, min_gain=0.0).applied
    for experts in current_placement([llm.model], 4).physical_to_logical:
        of_group = [set(group.tolist()) for group in (experts // 4).reshape(2, -1)]
        assert not of_group[0] & of_group[1]
    assert tokens(llm) == want


def test_nothing_moves_below_the_threshold(wide: LLM) -> None:
    even = np.ones((3, 16), np.int64)
    before = current_placement([wide.model], 4)
    done = wide.rebalance(even, factor=50.0)
    assert not done.applied and done.comparison.moved.sum() == 0
    assert current_placement([wide.model], 4) == before


def test_a_trace_says_what_to_balance(wide: LLM) -> None:
    """One of another run, or made up; layer 1 is dense."""
    shape: dict[str, Any] = {"top_k": 4, "requests": 8, "prompt_len": 16, "output_len": 1, "exponent": 1.5}
    trace = generate("zipf", num_experts=16, layers=(0, 2), **shape)
    want = tokens(wide)
    done = wide.rebalance(trace, min_gain=0.0)
    assert done.applied and done.comparison.after.max() < 1.4 < done.comparison.before.max()
    np.testing.assert_allclose(
        balancedness(trace.counts(), current_placement([wide.model], 4)), done.comparison.after
    )
    assert tokens(wide) == want
    with pytest.raises(ConfigError, match=r"rebalance: it has 8 experts and the model has 16"):
        wide.rebalance(generate("zipf", num_experts=8, layers=(0, 2), **shape))
    with pytest.raises(ConfigError, match="rebalance: the trace has no rows"):
        wide.rebalance(trace.select(np.zeros(trace.num_rows, bool)))


def test_a_rebalanced_model_is_saved_in_the_experts_order(directory: Path, wide: LLM, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    assert wide.rebalance(rng.integers(1, 1000, (3, 16)), min_gain=0.0).applied
    save_pretrained(wide.model, tmp_path)
    again, first = (LLM(str(d), engine=ENGINE) for d in (tmp_path, directory))
    assert tokens(again) == tokens(first)


def test_experts_on_one_device_or_uncounted_loads_are_refused(directory: Path, wide: LLM) -> None:
    single = LLM(str(directory), engine=ENGINE)
    with pytest.raises(ConfigError, match="no load has been counted"):
        single.rebalance()
    with pytest.raises(ConfigError, match="experts are on one device"):
        single.rebalance(np.ones((3, 16), np.int64))


@pytest.mark.parametrize("seed", range(5))
def test_an_expert_is_taken_from_its_own_device_where_it_is_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    was = rng.permutation(np.concatenate([np.arange(8), rng.integers(0, 8, 4)]))
    now = rng.permutation(was)
    taken: Any = sources(was, now, 3)
    np.testing.assert_array_equal(was[taken], now)
    for slot, expert in enumerate(now):
        home = slot // 3
        if expert in was[3 * home : 3 * home + 3]:
            assert taken[slot] // 3 == home
