"""Captured routing is what the whole forward pass chooses, for every token, however requests are batched."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, MoeConfig, ParallelConfig, SamplingParams
from moejax.core.config import PrefixCacheConfig
from moejax.core.errors import ConfigError, StepError
from moejax.engine.requests.api import RequestOutput
from moejax.routing.capture import RoutingCapture, hash_tokens, load_capture
from tests.engine.mesh_models import BASE
from tests.engine.mesh_models import ENGINE as MESH_ENGINE
from tests.engine.mesh_models import prompts as mesh_prompts
from tests.engine.paged import SCARCE, TIGHT, greedy, prompt, tight, tokens
from tests.engine.tiny import FullForward, small_config
from tests.engine.traces import by_place, computed, experts, places, values
from tests.numerics import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("equal_steps_once")

CONFIGS: dict[str, EngineConfig] = {
    "chunked": TIGHT,
    "chunked_plain_loop": tight(overlap=False),
    "preempting": SCARCE,
    "static": dataclasses.replace(SCARCE, batching="static"),
}
# Longer than a step's eight tokens, and one more than that: the last one is then computed beside decodes.
LENGTHS = (1, 3, 9, 14, 17)
ASKED = [prompt(length) for length in LENGTHS]
PARAMS = greedy(10, logprobs=2)
# Projections, scores, values, output, router. Softmax makes of a logit's absolute error a weight's relative
# one, and the logits reach about 4.
WEIGHTS = 4 * tolerance(32, 8, 32, 32, 32)


def capturing_config(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, capture_routing=True)


@pytest.fixture(scope="module")
def variant(bare_llm: LLM) -> Callable[..., LLM]:
    """The one-layer model behind an engine of such a configuration."""

    @functools.cache
    def kept(name: str, capture: bool) -> LLM:
        config = CONFIGS[name]
        return bare_llm.variant(capturing_config(config) if capture else config)

    return kept


@pytest.fixture(scope="module")
def whole(bare_llm: LLM) -> FullForward:
    return FullForward(bare_llm.model)


def check(trace: RoutingCapture, outs: list[RequestOutput], oracle: FullForward, again: bool = False) -> None:
    """Each token has a row (or several, where it may have been computed again), and each row what the whole
    forward pass of its sequence chooses."""
    rows = Counter(places(trace))
    assert again or set(rows.values()) == {1}
    assert (set(rows) >= computed(outs)) if again else (set(rows) == computed(outs))
    assert [r.prompt_hash for r in trace.requests] == [hash_tokens(out.prompt_token_ids) for out in outs]
    assert [r.prompt_len for r in trace.requests] == [len(out.prompt_token_ids) for out in outs]
    for r, out in enumerate(outs):
        for s, sample in enumerate(out.outputs):
            whole = out.prompt_token_ids + sample.token_ids
            chosen = [layer for layer in oracle.experts(whole) if layer is not None]
            given = [layer for layer in oracle.weights(whole) if layer is not None]
            mine = (trace.request == r) & (trace.sample == s)
            at = trace.position[mine]
            np.testing.assert_array_equal(trace.ids[mine], np.stack(chosen, axis=1)[at])
            assert_close(trace.weights[mine], np.stack(given, axis=1)[at], WEIGHTS)


# -- one device ----------------------------------------------------------------------------------------


def test_capturing_changes_no_bit(variant: Any) -> None:
    plain, captured = (variant("chunked", capture).generate(ASKED, PARAMS) for capture in (False, True))
    assert values(captured) == values(plain)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_the_whole_forward_passs(name: str, variant: Any, whole: Any) -> None:
    llm = variant(name, True)
    llm.reset_capture()
    outs = llm.generate(ASKED, PARAMS)
    trace = llm.routing_capture()
    check(trace, outs, whole, again=name == "preempting")
    if name == "preempting":
        assert llm.stats()["preemptions"] > 0 and trace.num_rows > len(computed(outs))
    assert (trace.layers, trace.num_experts, trace.top_k, trace.origin) == ((0,), 8, 2, "captured")
    assert trace.ids.dtype == np.uint8 and trace.weights.dtype == np.float32
    assert (np.diff(trace.step) >= 0).all() and trace.step[0] == 0


def test_prompts_are_prefill_and_what_they_sampled_is_decode(variant: Any) -> None:
    llm = variant("chunked", True)
    llm.reset_capture()
    llm.generate(ASKED, PARAMS)
    trace = llm.routing_capture()
    lengths = np.asarray(LENGTHS)[trace.request]
    # A prompt's ninth token comes alone, in a row that decodes, and is the prompt's all the same.
    np.testing.assert_array_equal(trace.prefill, trace.position < lengths)
    assert trace.phase("decode").num_rows == len(LENGTHS) * 9
    # Eight tokens a step, whatever they are of.
    assert np.diff(np.append(trace.step_starts, trace.num_rows)).max() == 8


def test_what_is_computed_again_is_prefill(variant: Any) -> None:
    llm = variant("preempting", True)
    llm.reset_capture()
    llm.generate(ASKED, PARAMS)
    trace = llm.routing_capture()
    outputs = trace.position >= np.asarray(LENGTHS)[trace.request]
    assert (outputs & trace.prefill).any() and (outputs & ~trace.prefill).any()


def test_forks_compute_the_prompt_once(variant: Any, whole: Any) -> None:
    llm = variant("chunked", True)
    llm.reset_capture()
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=3, ignore_eos=True)
    outs = llm.generate([prompt(11), prompt(5)], params)
    assert len({tuple(sample.token_ids) for out in outs for sample in out.outputs}) > 2
    check(llm.routing_capture(), outs, whole)


def test_scoring_captures_every_token(variant: Any, whole: FullForward) -> None:
    llm = variant("chunked", True)
    llm.reset_capture()
    llm.score(ASKED[1:])
    trace = llm.routing_capture()
    assert trace.num_rows == sum(LENGTHS[1:]) and trace.prefill.all()
    for r, asked in enumerate(ASKED[1:]):
        rows = trace.select(trace.request == r)
        np.testing.assert_array_equal(rows.ids[:, 0], np.asarray(whole.experts(asked)[0])[rows.position])


def test_what_capacity_drops_is_marked() -> None:
    moe = MoeConfig(execution="capacity", capacity_factor=0.5)
    engine = dataclasses.replace(capturing_config(TIGHT), moe=moe)
    llm = LLM(small_config(), load_format="dummy", engine=engine)
    llm.generate(ASKED, greedy(4), record_routing=True)
    trace = llm.routing_capture()
    none = trace.ids == trace.num_experts
    assert 0 < int(none.sum()) == llm.routing.overflow["dropped"]
    assert (trace.weights[none] == 0).all()
    np.testing.assert_array_equal(trace.counts(), sum(llm.routing.counts.values()))


def test_a_trace_goes_on_until_it_is_reset(variant: Any) -> None:
    llm = variant("chunked", True)
    llm.reset_capture()
    empty = llm.routing_capture()
    assert (empty.num_rows, empty.num_steps, empty.requests) == (0, 0, ())
    llm.generate(ASKED[:2], greedy(3, logprobs=2))
    first = llm.routing_capture()
    llm.generate(ASKED[2:4], greedy(3, logprobs=2))
    both = llm.routing_capture()
    assert len(first.requests) == 2 and len(both.requests) == 4
    assert both.step[first.num_rows] == first.step[-1] + 1
    np.testing.assert_array_equal(both.ids[: first.num_rows], first.ids)
    llm.reset_capture()
    llm.generate(ASKED[:2], greedy(3, logprobs=2))
    again = llm.routing_capture()
    assert by_place(again) == by_place(first) and again.step[0] == 0


def test_a_token_past_the_end_is_there_only_where_it_was_computed(variant: Any) -> None:
    stop = variant("chunked", True).generate([ASKED[3]], PARAMS)[0].outputs[0].token_ids[3]
    params = dataclasses.replace(PARAMS, stop_token_ids=(stop,))
    for name, more in (("chunked", 1), ("chunked_plain_loop", 0)):
        llm = variant(name, True)
        llm.reset_capture()
        out = llm.generate([ASKED[3]], params)[0]
        length = len(ASKED[3]) + len(out.outputs[0].token_ids)
        # The overlapped loop has launched the next step before it reads the stop token.
        assert set(llm.routing_capture().position.tolist()) == set(range(length - 1 + more))


def test_a_failed_step_leaves_the_trace_whole(variant: Any, whole: Any, monkeypatch: Any) -> None:
    llm = variant("chunked", True)
    llm.reset_capture()
    run, calls = llm.runner._run, iter(range(100))

    def failing(*args: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("on purpose")
        return run(*args)

    monkeypatch.setattr(llm.runner, "_run", failing)
    with pytest.raises(StepError, match="on purpose"):
        llm.generate(ASKED[:2], greedy(5, logprobs=2))
    kept = llm.routing_capture().num_rows
    outs = llm.generate(ASKED[2:4], greedy(5, logprobs=2))
    trace = llm.routing_capture()
    later = trace.select(np.arange(trace.num_rows) >= kept)
    later = dataclasses.replace(later, request=later.request - 2, requests=trace.requests[2:])
    check(later, outs, whole)


def test_a_trace_says_what_it_is_of(variant: Any) -> None:
    meta = variant("chunked", True).routing_capture().meta
    assert meta["model"] is None and meta["family"] == "qwen3_moe" and meta["exchange_capacity"] is None
    assert set(meta["versions"]) == {"moejax", "jax", "numpy"}


def test_errors(variant: Any) -> None:
    for call in (variant("chunked", False).routing_capture, variant("chunked", False).reset_capture):
        with pytest.raises(ConfigError, match=r"engine\.capture_routing=true"):
            call()
    dense = small_config(moe_layers=(False,))
    with pytest.raises(ConfigError, match=r"engine\.capture_routing: the model has no MoE layer"):
        LLM(dense, load_format="dummy", engine=capturing_config(TIGHT))
    with pytest.raises(ConfigError, match=r"engine\.capture_routing: the model has no MoE layer"):
        LLM(dense, load_format="dummy", engine=TIGHT).variant(capturing_config(TIGHT))
    with pytest.raises(ConfigError, match=r"engine\.capture_routing must be True or False, got 'yes'"):
        EngineConfig(capture_routing="yes")  # type: ignore[arg-type]


# -- several devices -----------------------------------------------------------------------------------

MESHED = capturing_config(MESH_ENGINE)
MODEL = BASE.replace(num_layers=3, moe_layers=(True, False, True), sliding_windows=(None,) * 3)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_attention_ep2": {"ep": 2, "attention": "data"},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "dp2_ep2": {"dp": 2, "ep": 2},
    # The second stage is the dense layer alone: it has nothing to capture.
    "pp3_microbatches": {"pp": 3, "microbatches": 3},
    "pp2_dp2": {"pp": 2, "dp": 2},
}


def traced(parallel: ParallelConfig | None) -> tuple[LLM, list[RequestOutput], RoutingCapture]:
    llm = LLM(MODEL, load_format="dummy", engine=MESHED, parallel=parallel)
    outs = llm.generate(mesh_prompts(5), greedy(5))
    return llm, outs, llm.routing_capture()


@pytest.fixture(scope="module")
def single() -> dict[Any, Any]:
    llm, outs, trace = traced(None)
    assert trace.layers == (0, 2)  # the dense one has none
    check(trace, outs, FullForward(llm.model))
    return experts(trace)


@pytest.mark.slow  # tests/engine/test_replay.py has two stages that capture what they replay
@pytest.mark.multidevice
@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_capture_what_one_does(layout: str, single: dict[Any, Any]) -> None:
    _, _, trace = traced(ParallelConfig(**LAYOUTS[layout]))
    assert trace.layers == (0, 2) and experts(trace) == single


# -- tokens that were found computed -------------------------------------------------------------------


def remembering(place: Any, **fields: Any) -> EngineConfig:
    return dataclasses.replace(
        capturing_config(TIGHT), prefix_cache=PrefixCacheConfig(enabled=True, place=place), **fields
    )


ROUNDS = [
    [prompt(14), prompt(14)[:9] + prompt(7, 1)],
    [prompt(14), prompt(14)[:11], prompt(17, 2), prompt(16, 1)],
]
ROUNDS = [*ROUNDS, ROUNDS[0]]


def captured_rounds(llm: LLM) -> tuple[list[RequestOutput], RoutingCapture]:
    """Prompts that begin alike, some sampled twice, some found after others took their blocks."""
    outs = []
    for number, prompts in enumerate(ROUNDS):
        twice = dataclasses.replace(PARAMS, n=2)
        outs += llm.generate(
            prompts, [twice if number == 1 and i == 2 else PARAMS for i in range(len(prompts))]
        )
        llm.engine.scheduler.check_integrity()
    return outs, llm.routing_capture()


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        ("host", {"num_blocks": 12, "preemption": "swap"}),
        *(
            pytest.param(place, fields, marks=pytest.mark.slow)
            for place in ("host", "device")
            for fields in (
                {},
                {"overlap": False},
                {"num_blocks": 12, "max_num_seqs": 3},
                {"num_blocks": 12, "preemption": "swap"},
            )
        ),
    ],
)
def test_what_is_found_has_the_rows_of_who_computed_it(
    place: str, fields: dict[str, Any], bare_llm: LLM, variant: Any, whole: FullForward
) -> None:
    llm, plain = bare_llm.variant(remembering(place, **fields)), variant("chunked", True)
    plain.reset_capture()
    (outs, trace), (expected, computed_all) = captured_rounds(llm), captured_rounds(plain)
    assert tokens(outs) == tokens(expected) and not computed_all.cached.any()
    assert experts(trace) == experts(computed_all)
    check(trace, outs, whole, again=True)
    mine = np.bincount(trace.request[trace.cached], minlength=len(outs))
    assert mine.tolist() == [out.metrics.cached_tokens for out in outs] and mine.sum() > 30
    assert trace.prefill[trace.cached].all() and (np.diff(trace.step) >= 0).all()
    assert (trace.counts() == trace.select(~trace.cached).counts()).all()
    # Forgetting the trace forgets nothing that the cache has.
    llm.reset_capture()
    again = llm.generate([ROUNDS[0][0]], PARAMS)[0]
    rows = llm.routing_capture()
    assert int(rows.cached.sum()) == again.metrics.cached_tokens > 0
    check(rows, [again], whole)


@pytest.mark.slow
def test_a_trace_with_hits_is_replayed(bare_llm: LLM, tmp_path: Path) -> None:
    llm = bare_llm.variant(remembering("host"))
    asked = [ROUNDS[0][0]] * 2 + [ROUNDS[0][1]]
    outs = [llm.generate(one, PARAMS)[0] for one in asked]
    trace = load_capture(llm.routing_capture().save(tmp_path / "hits.npz"))
    assert trace.cached.sum() == sum(out.metrics.cached_tokens for out in outs) > 0
    llm.replay_routing(trace)
    assert tokens([llm.generate(one, PARAMS)[0] for one in asked]) == tokens(outs)
    again = llm.routing_capture()
    assert by_place(again) == by_place(trace) and not again.cached.any()


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("layout", ["dp2_ep2", "pp2_dp2", "pp3_microbatches", "dp_attention_ep2"])
@pytest.mark.parametrize("place", ["host", "device"])
def test_devices_find_what_one_computes(layout: str, place: Any) -> None:
    cache = {"prefix_cache": PrefixCacheConfig(enabled=True, place=place), "preemption": "swap"}
    rounds = [mesh_prompts(5), [[*asked[:-1], 7, 8] for asked in mesh_prompts(5)], mesh_prompts(5)]
    traces, found = [], []
    for engine, parallel in ((MESHED, None), (dataclasses.replace(MESHED, **cache), LAYOUTS[layout])):
        llm = LLM(MODEL, load_format="dummy", engine=engine, parallel=parallel and ParallelConfig(**parallel))
        outs = [out for asked in rounds for out in llm.generate(asked, greedy(5))]
        traces.append(llm.routing_capture())
        found.append((tokens(outs), [out.metrics.cached_tokens for out in outs]))
    (expected, _), (got, cached) = found
    assert got == expected and experts(traces[1]) == experts(traces[0])
    assert np.bincount(traces[1].request[traces[1].cached], minlength=15).tolist() == [
        cached[int(request.request_id)] for request in traces[1].requests
    ]
    assert sum(cached) > 20
