"""A replayed trace is what runs, bit for bit, however either run was batched; what it lacks is an error."""

import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, ModelConfig, ParallelConfig, SamplingParams
from moejax.core.errors import ConfigError, RequestError, StepError
from moejax.engine.routing.replay import RoutingReplay
from moejax.routing.capture import RoutingCapture
from tests.engine.mesh_models import prompts as mesh_prompts
from tests.engine.paged import SCARCE, TIGHT, greedy, prompt, tight
from tests.engine.test_capture import ASKED, LAYOUTS, MESHED, MODEL, PARAMS
from tests.engine.tiny import small_config
from tests.engine.traces import by_place, made, values

CONFIGS: dict[str, EngineConfig] = {
    "chunked": TIGHT,
    "chunked_plain_loop": tight(overlap=False),
    "preempting": SCARCE,
    "static": dataclasses.replace(SCARCE, batching="static"),
}


def captured(llm: LLM) -> RoutingCapture:
    """What has been captured since the last time."""
    trace = llm.routing_capture()
    llm.reset_capture()
    return trace


@pytest.fixture(scope="module")
def recording(bare_llm: LLM) -> LLM:
    return bare_llm.variant(dataclasses.replace(TIGHT, capture_routing=True))


@pytest.fixture(scope="module")
def recorded(recording: LLM) -> tuple[RoutingCapture, list[Any]]:
    """A trace of `ASKED`, and what came out."""
    recording.reset_capture()
    outs = recording.generate(ASKED, PARAMS)
    return captured(recording), values(outs)


@pytest.fixture(scope="module")
def replaying(bare_llm: LLM, recorded: Any) -> Callable[[str], LLM]:
    """The same model, replaying that trace in an engine of such a configuration, and capturing."""

    @functools.cache
    def made(name: str) -> LLM:
        llm = bare_llm.variant(dataclasses.replace(CONFIGS[name], capture_routing=True))
        llm.replay_routing(recorded[0])
        return llm

    def fresh(name: str) -> LLM:
        llm = made(name)
        llm.replay_routing(recorded[0])
        llm.reset_capture()
        return llm

    return fresh


# -- the same experts ----------------------------------------------------------------------------------


PREEMPTING = pytest.param("preempting", marks=pytest.mark.slow)


def as_shipped(name: str, *marks: Any) -> Any:
    return pytest.param(name, marks=[pytest.mark.optimized, *marks], id=f"{name}_as_shipped")


# Of these only "chunked" runs the steps that recorded, whose bits must be seen as it ships.
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunked_plain_loop", "static")),
        *(PREEMPTING, as_shipped("chunked")),
        *(as_shipped(name, pytest.mark.slow) for name in ("static", "preempting")),
    ],
)
def test_the_recorded_rows_run_again(name: str, replaying: Any, recorded: Any) -> None:
    trace, came_out = recorded
    llm = replaying(name)
    outs = llm.generate(ASKED, PARAMS)
    again = captured(llm)
    assert by_place(again) == by_place(trace)
    if name == "chunked":
        assert values(outs) == came_out
        np.testing.assert_array_equal(again.ids, trace.ids)
        np.testing.assert_array_equal(again.prefill, trace.prefill)
    else:  # other steps round otherwise
        assert [tokens for tokens, _ in values(outs)] == [tokens for tokens, _ in came_out]
    assert name != "preempting" or again.num_rows > trace.num_rows


def test_another_model_runs_this_ones_experts(recorded: Any) -> None:
    trace, came_out = recorded
    other = LLM(
        small_config(), load_format="dummy", seed=1, engine=dataclasses.replace(TIGHT, capture_routing=True)
    )
    free = by_place(captured_run(other))
    other.replay_routing(trace)
    outs = other.generate(ASKED, PARAMS)
    assert by_place(captured(other)) == by_place(trace) != free
    assert values(outs) != came_out  # the rest of the model is its own


def captured_run(llm: LLM) -> RoutingCapture:
    llm.generate(ASKED, PARAMS)
    return captured(llm)


def test_a_trace_is_forced_as_written(replaying: Any) -> None:
    """Experts that no router has chosen, in an order and with weights of its own, and with none at places."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((40, 1, 8)), axis=-1)[..., :2]
    ids[7] = 8
    weights = np.where(ids < 8, rng.random((40, 1, 2)), 0.0)
    trace = made(ids, weights, 8, (0,))
    llm = replaying("chunked")
    llm.replay_routing(trace)
    llm.generate(ASKED, PARAMS)  # one generated request stands for all
    again = captured(llm)
    np.testing.assert_array_equal(again.ids, trace.ids[again.position])
    np.testing.assert_array_equal(again.weights, trace.weights[again.position])


def test_generated_requests_are_given_out_in_order(replaying: Any) -> None:
    ids = np.repeat(np.arange(6).reshape(2, 3), 40, axis=1).reshape(2, 40, 3)[:, :, :1]
    ids = np.concatenate([ids, ids + 2], axis=-1)[:, :, None].reshape(80, 1, 2)
    ids[40:] += 1
    one = made(ids, np.full(ids.shape, 0.5), 8, (0,), position=np.tile(np.arange(40, dtype=np.int32), 2))
    request = np.repeat(np.arange(2, dtype=np.int32), 40)
    both = (one.requests[0], dataclasses.replace(one.requests[0], request_id="1"))
    trace = dataclasses.replace(one, request=request, requests=both)
    llm = replaying("chunked")
    llm.replay_routing(trace)
    for _ in range(
        2
    ):  # five requests and two recorded: the sixth is the first again, but the next call goes on
        llm.generate(ASKED, greedy(2, logprobs=2))
    again = captured(llm)
    for index in range(10):
        rows = again.select(again.request == index)
        np.testing.assert_array_equal(rows.ids, trace.ids[40 * (index % 2) + rows.position])


def test_equal_prompts_take_their_recordings_in_turn(recording: LLM, replaying: Any) -> None:
    recording.reset_capture()
    params = [SamplingParams(max_tokens=8, temperature=2.0, seed=seed, ignore_eos=True) for seed in (1, 2)]
    came_out = values(recording.generate([ASKED[2]] * 2, params))
    trace = captured(recording)
    assert came_out[0] != came_out[1] and len({r.prompt_hash for r in trace.requests}) == 1
    llm = replaying("chunked")
    llm.replay_routing(trace)
    for _ in range(2):  # a second run of the same workload
        assert values(llm.generate([ASKED[2]] * 2, params)) == came_out
        assert by_place(captured(llm)) == by_place(trace)


def test_threads_are_given_different_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are made outside of the engine's lock."""
    one = made(np.tile([[[0, 1]]], (8, 1, 1)), np.full((8, 1, 2), 0.5), 8, (0,))
    requests = tuple(dataclasses.replace(one.requests[0], request_id=str(i)) for i in range(8))
    request = np.arange(8, dtype=np.int32)
    replay = RoutingReplay(dataclasses.replace(one, request=request, requests=requests), small_config())
    given = []

    def tables(request: Any, index: int, name: str) -> list[np.ndarray]:
        time.sleep(0.01)  # long enough for the others to come
        given.append(index)
        return []

    monkeypatch.setattr(replay, "_tables", tables)
    asked: Any = SimpleNamespace(output=SimpleNamespace(prompt_token_ids=[1]), sequences=[])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: replay.assign([asked]), range(8)))
    assert sorted(given) == list(range(8))


@pytest.mark.parametrize(
    "name",
    ["chunked", PREEMPTING, *(as_shipped(name, pytest.mark.slow) for name in ("chunked", "preempting"))],
)
def test_samples_replay_their_own_and_a_recomputed_one_its_roots_prompt(
    name: str, recording: LLM, replaying: Any
) -> None:
    recording.reset_capture()
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=3, ignore_eos=True)
    asked = [prompt(11), prompt(6)]
    came_out = values(recording.generate(asked, params))
    trace = captured(recording)
    llm = replaying(name)
    llm.replay_routing(trace)
    outs = llm.generate(asked, params)
    again = by_place(captured(llm))
    root = by_place(trace)
    for (request, sample, position), row in again.items():
        place = (request, sample, position)
        assert row == root.get(place, root[request, 0, min(position, 10)])
    if name == "chunked":
        assert values(outs) == came_out and again == root
    else:
        assert llm.stats()["preemptions"] > 0 and set(again) > set(root)


def test_scores_under_a_recorded_routing(recording: LLM, replaying: Any) -> None:
    recording.reset_capture()
    want = recording.score(ASKED[1:])
    trace = captured(recording)
    llm = replaying("chunked")
    llm.replay_routing(trace)
    for got, expected in zip(llm.score(ASKED[1:]), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert by_place(captured(llm)) == by_place(trace)
    with pytest.raises(RequestError, match="sequence 0: none of the 4 requests"):
        llm.score([prompt(5)])


# -- where a recording ends ----------------------------------------------------------------------------


def test_a_request_that_ended_early_replays_up_to_there(recording: LLM, replaying: Any) -> None:
    stop = recording.generate([ASKED[3]], PARAMS)[0].outputs[0].token_ids[3]
    recording.reset_capture()
    params = dataclasses.replace(PARAMS, stop_token_ids=(stop,))
    came_out = values(recording.generate([ASKED[3]], params))
    trace = captured(recording)
    length = len(ASKED[3]) + len(came_out[0][0])
    # With and without the token past the end, which the overlapped loop computes.
    for end in (length, length - 1):
        for name in ("chunked", "chunked_plain_loop"):
            llm = replaying(name)
            llm.replay_routing(trace.select(trace.position < end))
            assert values(llm.generate([ASKED[3]], params)) == came_out
    # What would stop it does not come: it fails there, and its neighbours go on.
    llm.replay_routing(dataclasses.replace(recorded_with(recording), meta={}))
    short = llm.runner.builder.replay
    assert short is not None
    others = dataclasses.replace(PARAMS, stop_token_ids=(319,), max_tokens=14)
    with pytest.raises(
        StepError, match=r"request \d+: the replayed routing trace ends with token 23"
    ) as error:
        llm.generate([ASKED[3], ASKED[1]], [others, PARAMS])
    failed, whole = error.value.outputs
    assert failed.outputs[0].finish_reason == "error" and len(failed.outputs[0].token_ids) == 10
    assert whole.outputs[0].finish_reason == "length"
    assert llm.stats()["used_blocks"] == 0 and llm.stats()["failed_steps"] == 0
    # A stream says so at its end.
    chunks = llm.generate_stream(ASKED[3], others)
    with pytest.raises(StepError, match="would go on"):
        list(chunks)


def recorded_with(llm: LLM) -> RoutingCapture:
    llm.reset_capture()
    llm.generate([ASKED[3], ASKED[1]], PARAMS)
    return captured(llm)


def test_requests_that_the_trace_cannot_serve(replaying: Any, recorded: Any) -> None:
    llm = replaying("chunked")
    trace = recorded[0]
    unknown = "prompt 1: none of the 5 requests of the replayed routing trace has this prompt of 4 tokens"
    for asked, params, text in (
        ([ASKED[0], prompt(4)], PARAMS, unknown),
        ([ASKED[1]], greedy(12), r"prompt 0: its 3 tokens and max_tokens=12 need the routing of 14, and the "
         r"replayed trace has 12 of this request; lower max_tokens to at most 10"),
        ([ASKED[1]], greedy(4, n=2), r"prompt 0: n=2, and the replayed routing trace has 1 of its samples"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=text):
            llm.generate(asked, params)
    # Nothing was run, nor given out.
    assert captured(llm).num_rows == 0
    llm.generate(ASKED, PARAMS)
    assert by_place(captured(llm)) == by_place(trace)
    llm.replay_routing(trace.phase("decode"))
    with pytest.raises(RequestError, match="prompt 0 has 9 tokens, and the replayed routing trace has 0 of"):
        llm.generate([ASKED[2]], PARAMS)


# -- which trace ---------------------------------------------------------------------------------------


def test_a_trace_by_its_path(tmp_path: Path, recorded: Any) -> None:
    trace, came_out = recorded
    for path in (trace.save(tmp_path / "routing.npz"), tmp_path):
        llm = LLM(small_config(), load_format="dummy", engine=tight(replay_routing=str(path)))
        assert values(llm.generate(ASKED, PARAMS)) == came_out
    with pytest.raises(RequestError, match="none of the 5 requests"):
        llm.submit(prompt(4), PARAMS)


@pytest.mark.slow
def test_replaying_starts_and_stops(bare_llm: LLM, recorded: Any) -> None:
    trace, came_out = recorded
    changed = dataclasses.replace(trace, ids=((trace.ids + 1) % 8).astype(np.uint8))
    llm = bare_llm.variant(TIGHT)
    assert values(llm.generate(ASKED, PARAMS)) == came_out
    before = llm.runner
    assert before.pool.nbytes > 0
    llm.replay_routing(changed)
    assert llm.runner is not before and before.pool.nbytes == 0  # it made room for the new one
    assert values(llm.generate(ASKED, PARAMS)) != came_out
    llm.submit(ASKED[0], PARAMS)
    with pytest.raises(ConfigError, match="requests are running"):
        llm.replay_routing(trace)
    while llm.step():
        pass
    compiled = len(llm.ledger.entries)
    llm.replay_routing(trace)  # another trace, the same programs
    assert values(llm.generate(ASKED, PARAMS)) == came_out
    assert len(llm.ledger.entries) == compiled
    llm.replay_routing(None)
    assert values(llm.generate([prompt(4)], PARAMS))


def test_traces_that_do_not_fit(tmp_path: Path, recorded: Any, recording: LLM) -> None:
    trace: RoutingCapture = recorded[0]

    def opened(path: Path, config: ModelConfig | None = None) -> None:
        LLM(config or small_config(), load_format="dummy", engine=tight(replay_routing=str(path)))

    path = trace.save(tmp_path / "routing.npz")
    where = r"engine\.replay_routing=\S*routing\.npz: "
    for config, text in (
        (small_config(num_experts=16), where + "it has 8 experts and the model has 16"),
        (small_config(num_experts_per_tok=4), where + "it has 2 experts per token and the model has 4"),
        (
            small_config(num_layers=2, moe_layers=(True, True), sliding_windows=(None, None)),
            where + "it has 1 MoE layers and the model has 2",
        ),
        (small_config(moe_layers=(False,)), where + "the model has no MoE layer"),
    ):
        with pytest.raises(ConfigError, match=text):
            opened(path, config)
    with pytest.raises(ConfigError, match=r"engine\.replay_routing: there is no routing trace \S*gone\.npz"):
        opened(tmp_path / "gone.npz")
    (tmp_path / "run").mkdir()
    with pytest.raises(
        ConfigError, match=r"engine\.replay_routing: \S*run holds no routing\.npz; run it with"
    ):
        opened(tmp_path / "run")
    for bad in ("", 3):
        with pytest.raises(ConfigError, match=r"engine\.replay_routing must be the path of a routing trace"):
            EngineConfig(replay_routing=bad)  # type: ignore[arg-type]
    twice, infinite, before = trace.ids.copy(), trace.weights.copy(), trace.position.copy()
    twice[5] = 3
    infinite[6, 0, 1] = np.inf
    before[7] = -1
    for changes, text in (
        ({"ids": twice}, "row 5 has a token that visits the same expert twice"),
        ({"weights": infinite}, "weights that are not finite"),
        ({"position": before}, "a position of -1"),
    ):
        with pytest.raises(ConfigError, match=text):
            recording.replay_routing(dataclasses.replace(trace, **changes))
    with pytest.raises(ConfigError, match="it is empty"):
        recording.replay_routing(trace.select(np.zeros(trace.num_rows, np.bool_)))


# -- several devices -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device() -> RoutingCapture:
    llm = LLM(MODEL, load_format="dummy", engine=MESHED)
    llm.generate(mesh_prompts(5), greedy(5))
    return llm.routing_capture()


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_replay_what_one_recorded(layout: str, one_device: RoutingCapture) -> None:
    # Another model's weights, so that nothing but the trace makes the experts equal.
    llm = LLM(MODEL, load_format="dummy", engine=MESHED, parallel=ParallelConfig(**LAYOUTS[layout]), seed=1)
    llm.replay_routing(one_device)
    llm.generate(mesh_prompts(5), greedy(5))
    assert by_place(llm.routing_capture()) == by_place(one_device)
