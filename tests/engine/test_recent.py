"""What the engine remembers of its latest requests and steps, and its histograms, beside its outputs."""

import threading
from bisect import bisect_left
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.core.errors import ConfigError
from moejax.engine import recent as recent_module
from moejax.engine.llm import LLM
from moejax.engine.recent import EDGES
from moejax.engine.requests.api import RequestOutput
from moejax.serving.metrics import render
from tests.engine.paged import greedy, prompt
from tests.engine.tiny import PROPERTY
from tests.serving.stub import request, serve, stub

ASKED = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 3), st.booleans()), min_size=1, max_size=9
)


def latencies(outputs: list[RequestOutput]) -> dict[str, list[float]]:
    """The values of each latency, by the outputs alone."""
    with_tokens = [out.metrics for out in outputs if out.metrics.token_times]
    scheduled = [out.metrics for out in outputs if out.metrics.scheduled_time is not None]
    return {
        "ttft": [times.ttft for times in with_tokens],
        "itl": [gap for times in with_tokens for gap in times.itl],
        "tpot": [times.tpot for times in with_tokens if len(times.token_times) > 1],
        "e2el": [times.e2e for times in with_tokens],
        "queue": [(times.scheduled_time or 0.0) - times.arrival_time for times in scheduled],
    }


def assert_counts(llm, outputs: list[RequestOutput]) -> None:
    recent, truth = llm.engine.recent, latencies(outputs)
    for name, (counts, total) in recent.histograms().items():
        want = Counter(bisect_left(EDGES[name], value) for value in truth[name])
        assert counts.tolist() == [want[place] for place in range(len(EDGES[name]) + 1)], name
        assert total == pytest.approx(sum(truth[name]))
    reasons = Counter("error" if out.error else out.outputs[0].finish_reason for out in outputs)
    assert recent.ended == reasons
    assert recent.generation_tokens == sum(len(s.token_ids) for out in outputs for s in out.outputs)
    begun = [out for out in outputs if out.metrics.scheduled_time is not None]
    assert recent.prompt_tokens == sum(len(out.prompt_token_ids) for out in begun)


@PROPERTY
@given(ASKED, st.booleans(), st.sets(st.integers(0, 12), max_size=2), st.integers(0, 2), st.integers(0, 99))
def test_histograms_count_each_request_once(asked, overlap, fails, retries, seed) -> None:
    """With several samples, aborts, preemptions, steps that fail and are tried again, reads in between."""
    llm = stub(frozenset(fails), seed, overlap=overlap, retries=retries)
    states = [request(llm, list(range(length)), count, n) for length, count, n, _ in asked]
    for state, (*_, given_up) in zip(states, asked, strict=True):
        llm.engine.add([state])
        llm.engine.step()
        llm.engine.recent.histograms()
        if given_up:
            llm.engine.abort(state)
            llm.engine.abort(state)
    serve(llm)
    assert_counts(llm, [state.output for state in states])


def test_the_window_is_of_its_seconds_alone() -> None:
    llm = stub()
    first = [request(llm, [1, 2, 3], 5) for _ in range(4)]
    llm.engine.add(first)
    serve(llm)
    llm.clock.now += 1000.0
    begin = llm.clock.now
    later = [request(llm, list(range(10, 18)), 7) for _ in range(30)]
    llm.engine.add(later)
    serve(llm)
    span = llm.clock.now - begin
    told = llm.engine.recent.window(span + 1.0)
    truth = latencies([state.output for state in later])
    assert told["requests"] == 30 and told["seconds"] == pytest.approx(span + 1.0)
    assert told["output_throughput"] == pytest.approx(30 * 7 / (span + 1.0))
    for name in ("ttft", "itl", "e2el", "queue"):
        assert told[f"mean_{name}_ms"] == pytest.approx(1e3 * np.mean(truth[name]))
        assert told[f"p95_{name}_ms"] == pytest.approx(1e3 * np.percentile(truth[name], 95))
    assert told["p99_ttft_ms"] is None and told["p99_itl_ms"] is not None  # 30 and over 100 values
    assert told["error_rate"] == 0.0 and 0.0 < told["cache_use_mean"] <= told["cache_use_peak"] <= 1.0
    assert told["prefix_hit_rate"] == pytest.approx(sum(s.output.metrics.cached_tokens for s in later) / 240)
    assert llm.engine.recent.window(1e6)["requests"] == 34
    llm.engine.reset_stats()
    empty = llm.engine.recent.window(60.0)
    assert empty["requests"] == 0 and empty["mean_ttft_ms"] is None and empty["error_rate"] is None
    assert_counts(llm, [state.output for state in [*first, *later]])  # these go on


def test_a_window_over_the_oldest_record_says_how_long_it_is(monkeypatch) -> None:
    monkeypatch.setattr(recent_module, "RECORDS", 10)
    llm = stub()
    llm.engine.add([request(llm, [1, 2, 3], 60)])
    serve(llm)
    told = llm.engine.recent.window(1e6)
    assert told["steps"] == 10 and told["seconds"] < llm.clock.now - 100.0


@PROPERTY
@given(st.lists(st.lists(st.integers(0, 99), max_size=25), max_size=9))
def test_a_ring_has_the_latest_rows(given) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_module, "RECORDS", 10)
        ring, twin = recent_module._Ring(2), deque(maxlen=10)
    for values in given:
        rows = [(float(value), value / 3) for value in values]
        ring.extend(rows)
        twin.extend(rows)
        assert ring.rows().tolist() == [list(row) for row in twin]
    assert ring.rows().shape[1] == 2


def test_errors_and_hits_of_tiers() -> None:
    llm = stub(fail_at=frozenset({3}))
    llm.engine.tiers = type("Tiers", (), {"hits": 0, "misses": 0, "stats": lambda self: {}})()
    collect = llm.clock.collect

    def counted(handle):
        llm.engine.tiers.hits += 3
        llm.engine.tiers.misses += 1
        return collect(handle)

    llm.clock.collect = counted
    llm.engine.add([request(llm, [1, 2, 3], 9)])
    serve(llm)
    llm.engine.add([request(llm, [1, 2, 3], 9)])
    serve(llm)
    told = llm.engine.recent.window(60.0)
    assert told["error_rate"] == 0.5 and told["expert_hit_rate"] == 0.75


def test_threads_may_read_while_it_runs() -> None:
    llm, stop, failed = stub(), threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                llm.engine.recent.histograms()
                llm.engine.recent.window(60.0)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    states = [request(llm, [1, 2, 3, i], 20) for i in range(60)]
    llm.engine.add(states)
    serve(llm)
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert_counts(llm, [state.output for state in states])


def test_an_llm_tells_the_last_seconds(bare_llm: LLM) -> None:
    assert "window" not in bare_llm.stats()
    bare_llm.reset_stats()
    bare_llm.generate([prompt(5), prompt(9)], greedy(4))
    told = bare_llm.stats(window_s=60)
    assert told["window"]["requests"] == 2 and told["window"]["output_throughput"] > 0
    assert told["steps"] == told["window"]["steps"] and told["window"]["process_rss_bytes"] > 1e6
    shown = render({"m": bare_llm}).decode()
    tokens = bare_llm.engine.recent.generation_tokens
    assert f'moejax:generation_tokens_total{{model_name="m"}} {tokens}.0' in shown
    for wrong in (0, -1.0, "a", float("nan")):
        with pytest.raises(ConfigError, match="window_s must be"):
            bare_llm.stats(wrong)
