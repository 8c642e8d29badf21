"""Expert placement in a running engine: weights move, outputs do not change."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, ParallelConfig, SamplingParams, save_pretrained
from moejax.core.errors import ConfigError
from moejax.core.parallel import check_rebalance
from moejax.core.scheduling import RebalanceConfig
from moejax.engine.routing import rebalance as rebalancing
from moejax.engine.routing.rebalance import current_placement, sources
from moejax.engine.stats import RebalanceEvent
from moejax.moe.placement import Placement, balancedness
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


AUTOMATIC = RebalanceConfig(every_steps=4, replicate_above=1.2, remove_below=0.6, min_gain=0.02)


def traffic(llm: LLM) -> tuple[list[list[int]], list[RebalanceEvent]]:
    """Tokens of requests that come while others run, and what was decided meanwhile."""
    events: list[RebalanceEvent] = []
    llm.engine.on_step = lambda record: events.append(record.rebalance) if record.rebalance else None
    outputs = []
    for prompt in prompts(8):
        outputs.append(llm.submit(prompt, GREEDY))
        llm.step()
    while llm.step():
        pass
    return [out.outputs[0].token_ids for out in outputs], events


def put_in_order(llm: LLM) -> None:
    """Experts go where an engine starts with them."""
    start = Placement.contiguous(2, 16, 4, redundant=4)
    rebalancing.apply_placement(llm._weights, current_placement([llm.model], 4), start)


@pytest.mark.parametrize("overlap", [True, False])
def test_experts_move_by_themselves_and_tokens_stay(wide: LLM, overlap: bool) -> None:
    want = tokens(wide)
    llm = wide.variant(dataclasses.replace(ENGINE, overlap=overlap, rebalance=AUTOMATIC))
    assert traffic(llm)[0] == want  # whatever had to be compiled is
    compiled = len(llm.ledger.entries)
    put_in_order(llm)
    llm.reset_stats()
    found, events = traffic(llm)
    assert found == want and len(llm.ledger.entries) == compiled
    moved = [event for event in events if event.reason == "moved"]
    assert moved and {b.step - a.step for a, b in itertools.pairwise(events)} == {4}
    assert moved[0].after < moved[0].before and not moved[0].bytes_moved % (3 * 64 * 16 * 4)
    assert all(event.seconds > 0 for event in events)
    stats = llm.stats()
    assert stats["rebalances"] == len(moved)
    assert stats["rebalance_bytes"] == sum(event.bytes_moved for event in moved)
    assert stats["last_rebalance"] == dataclasses.asdict(events[-1])
    # The steps' weights are the module's.
    (functions,) = llm._weights.functions
    for mine, made in zip(functions.leaves, type(functions)(llm.model).leaves, strict=True):
        assert mine is made
    assert not any(leaf.is_deleted() for leaf in functions.leaves)


def test_a_move_that_breaks_off_leaves_the_old_placement(wide: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_order(wide)
    want, before = tokens(wide), current_placement([wide.model], 4)
    llm = wide.variant(dataclasses.replace(ENGINE, rebalance=AUTOMATIC))
    calls, taken = [], rebalancing._taker

    def trap(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:  # the second of the second layer's three tensors
            raise MemoryError("no room")
        return taken(*args)

    monkeypatch.setattr(rebalancing, "_taker", trap)
    placed = []
    llm.engine.on_step = lambda record: placed.append((record.rebalance, current_placement([llm.model], 4)))
    outputs = [llm.submit(prompt, GREEDY) for prompt in prompts(8)]
    while llm.step():
        if any(event and event.reason.startswith("failed") for event, _ in placed):
            break
    event, after = placed[-1]
    assert event.reason == "failed: no room" and not event.bytes_moved
    assert len(calls) == 8 and after == before  # the first layer was moved back
    while llm.step():
        pass
    assert [out.outputs[0].token_ids for out in outputs] == want
    assert llm.stats()["failed_steps"] == 0 and llm.stats()["rebalances"] > 0  # later ones do


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"pp": 2, "ep": 2}, {"dp": 2, "ep": 4, "redundant_experts": 8}, {"ep": 8}]
)
def test_experts_move_by_themselves_on_other_meshes(directory: Path, parallel: dict[str, int]) -> None:
    want = tokens(LLM(str(directory), engine=ENGINE))
    spread = ParallelConfig(**{"redundant_experts": 8 if parallel["ep"] == 8 else 4} | parallel)
    llm = LLM(str(directory), engine=dataclasses.replace(ENGINE, rebalance=AUTOMATIC), parallel=spread)
    found, events = traffic(llm)
    assert found == want and any(event.reason == "moved" for event in events)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({}, "does not go with experts on one device: parallel.ep=1"),
        ({"ep": 4}, "parallel.redundant_experts=0: replicas need slots"),
        (
            {"ep": 4, "redundant_experts": 4, "exchange_capacity": 2.0},
            "does not go with parallel.exchange_cap",
        ),
        ({"ep": 4, "redundant_experts": 4, "nodes": 2}, "parallel.nodes=2: it would part groups"),
    ],
)
def test_where_experts_cannot_move_by_themselves(
    directory: Path, parallel: dict[str, Any], says: str
) -> None:
    layout = ParallelConfig(**{"attention": "data", **parallel})
    with pytest.raises(ConfigError, match=rf"engine\.rebalance\.every_steps=4 .*{says}"):
        LLM(str(directory), engine=dataclasses.replace(ENGINE, rebalance=AUTOMATIC), parallel=layout)
    config = FAMILIES["qwen3_moe"]
    sound = ParallelConfig(ep=4, redundant_experts=4)
    with pytest.raises(ConfigError, match=r"does not go with 2 processes: use LLM\.rebalance"):
        check_rebalance(AUTOMATIC, sound, config, 2)
    with pytest.raises(ConfigError, match="does not go with a model without experts"):
        check_rebalance(AUTOMATIC, ParallelConfig(), FAMILIES["llama"], 1)
    check_rebalance(AUTOMATIC, sound, config, 1)


@pytest.mark.slow
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
