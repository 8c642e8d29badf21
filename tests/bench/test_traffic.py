"""Traffic: arrivals and lengths have the statistics of their names, seeds reproduce, mistakes are named."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.bench.trace import TraceRow, load_trace
from moejax.bench.traffic import (
    Lengths,
    RequestKind,
    ThroughputWorkload,
    ideal_hit_rate,
    next_request,
    plan_requests,
)
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.api import RequestOptions

VOCAB = 1000


def arrivals(workload: ThroughputWorkload) -> np.ndarray:
    return np.array([asked.arrival_s for asked in plan_requests(workload, VOCAB)])


def prompts(workload: ThroughputWorkload) -> list[list[int]]:
    return [asked.prompt_token_ids for asked in plan_requests(workload, VOCAB)]


def outputs(workload: ThroughputWorkload) -> list[int]:
    return [asked.output_len for asked in plan_requests(workload, VOCAB)]


def short(**fields: Any) -> ThroughputWorkload:
    """One-token prompts, so that many requests cost nothing."""
    return ThroughputWorkload(**{"prompt_len": 1, "output_len": 1, **fields})


# --- arrivals -----------------------------------------------------------------------------------------------


def test_all_at_once() -> None:
    assert arrivals(short(num_requests=5)).tolist() == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_mean_and_variance_of_gaps(burstiness: float) -> None:
    """Gamma gaps of shape b at rate r have mean 1/r and variance 1/(r²b). The bounds are four standard errors
    of the estimates, which a right generator keeps to for all but about 1 in 16,000 seeds; the seed is fixed.
    """
    rate, count = 5.0, 20_001
    gaps = np.diff(arrivals(short(num_requests=count, request_rate=rate, burstiness=burstiness)))
    n, mean, variance = count - 1, 1 / rate, 1 / rate**2 / burstiness
    assert abs(gaps.mean() - mean) < 4 * math.sqrt(variance / n)
    # Var(s²) = (kurtosis - 1) · variance² / n, and a gamma's kurtosis is 3 + 6 / shape.
    assert abs(gaps.var() - variance) < 4 * variance * math.sqrt((2 + 6 / burstiness) / n)
    assert (gaps >= 0).all()


def test_a_rate_in_steps_has_each_steps_arrivals() -> None:
    """Two seconds at 50 a second, two at 200, and again; nearly even gaps, so that counts are known."""
    times = arrivals(
        short(num_requests=1001, request_rate=100.0, burstiness=1e4, rate_steps=[0.5, 2], rate_step_s=2.0)
    )
    counts = np.histogram(times, bins=np.arange(0.0, 10.0, 2.0))[0]
    assert (abs(counts - [100, 400, 100, 400]) <= 2).all() and (np.diff(times) > 0).all()


def test_another_rate_stretches_the_same_pattern() -> None:
    slow, fast = (arrivals(short(num_requests=50, request_rate=rate)) for rate in (2.0, 8.0))
    np.testing.assert_allclose(slow, 4 * fast)
    assert slow[0] == 0.0


# --- lengths ------------------------------------------------------------------------------------------------


@given(
    low=st.integers(1, 50), more=st.integers(0, 200), seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["uniform", "normal", "lognormal"]),
    share=st.floats(0, 1), spread=st.floats(0.5, 300),
)  # fmt: skip
def test_lengths_are_whole_and_within_their_range(
    low: int, more: int, seed: int, kind: Any, share: float, spread: float
) -> None:
    high = low + more
    shape = {} if kind == "uniform" else {"mean": min(high, low + share * more), "std": spread}
    drawn = Lengths(low, high, kind, **shape).draw(np.random.default_rng(seed), 40)
    assert all(type(length) is int and low <= length <= high for length in drawn)
    assert drawn == Lengths(low, high, kind, **shape).draw(np.random.default_rng(seed), 40)


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_mean_and_std_are_the_lengths_own(kind: Any) -> None:
    """The range is far beyond the spread, so that clipping takes no part. Four standard errors of the mean,
    and of the standard deviation for the heavier tail, a lognormal's."""
    mean, std, n = 200.0, 60.0, 40_000
    drawn = np.array(Lengths(1, 5000, kind, mean, std).draw(np.random.default_rng(0), n))
    assert abs(drawn.mean() - mean) < 4 * std / math.sqrt(n)
    growth = 1 + (std / mean) ** 2
    kurtosis = growth**4 + 2 * growth**3 + 3 * growth**2 - 3
    assert abs(drawn.std() - std) < 4 * std * math.sqrt((kurtosis - 1) / n) / 2


def test_uniform_reaches_both_ends_evenly() -> None:
    drawn = np.array(Lengths(3, 7).draw(np.random.default_rng(0), 20_000))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert (abs(counts - 4000) < 4 * math.sqrt(20_000 * 0.2 * 0.8)).all()


def test_one_number_is_every_length() -> None:
    workload = ThroughputWorkload(num_requests=3, prompt_len=5, output_len=7)
    assert [len(ids) for ids in prompts(workload)] == [5] * 3 and outputs(workload) == [7] * 3


# --- streams ------------------------------------------------------------------------------------------------

BASE = ThroughputWorkload(num_requests=20, request_rate=10.0)


def test_a_seed_reproduces_and_another_changes_everything() -> None:
    assert plan_requests(BASE, VOCAB) == plan_requests(BASE, VOCAB)
    other = replace(BASE, seed=1)
    for part in (arrivals, prompts, outputs):
        assert list(part(BASE)) != list(part(other))


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"request_rate": 3.0}, arrivals),
        ({"burstiness": 0.5}, arrivals),
        ({"prompt_len": 24}, prompts),
        ({"output_len": Lengths(8, 300)}, outputs),
    ],
)
def test_streams_are_independent(fields: dict[str, Any], changed: Callable[..., Any]) -> None:
    other = replace(BASE, **fields)
    for part in (arrivals, prompts, outputs):
        assert (list(part(BASE)) != list(part(other))) == (part is changed), part


def test_a_prompt_does_not_depend_on_the_others_lengths() -> None:
    mixed, fixed = prompts(BASE), prompts(replace(BASE, prompt_len=64))
    assert [long[: len(ids)] for ids, long in zip(mixed, fixed, strict=True)] == mixed
    assert len({tuple(ids[:8]) for ids in mixed}) == len(mixed)
    assert all(0 <= token < VOCAB for ids in fixed for token in ids)


@given(st.integers(1, 20))
def test_fewer_requests_are_the_first_of_more(count: int) -> None:
    kinds = replace(BASE, output_len=Lengths(1, 500, "lognormal", 60, 50), burstiness=0.7)
    assert plan_requests(replace(kinds, num_requests=count), VOCAB) == plan_requests(kinds, VOCAB)[:count]


def test_sampling_is_seeded_per_request() -> None:
    params = ThroughputWorkload(seed=5, temperature=0.5).sampling(7, index=2)
    assert (params.max_tokens, params.temperature, params.ignore_eos, params.seed) == (7, 0.5, True, 7)


# --- files --------------------------------------------------------------------------------------------------


def write(path: Path, lines: list[Any]) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def letters(text: str) -> list[int]:
    return [ord(letter) - 96 for letter in text]


def test_prompts_file_is_taken_in_turn_at_natural_length(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [[1, 2, 3], '"ab"'])
    plan = plan_requests(ThroughputWorkload(num_requests=3, prompts_file=path), 10, encode=letters)
    assert [asked.prompt_token_ids for asked in plan] == [[1, 2, 3], [1, 2], [1, 2, 3]]
    with pytest.raises(ConfigError, match="no tokenizer"):
        plan_requests(ThroughputWorkload(num_requests=3, prompts_file=path), 10)
    with pytest.raises(ConfigError, match="token id 3 is outside"):
        plan_requests(ThroughputWorkload(num_requests=3, prompts_file=path), 3, encode=letters)


def test_trace_rows_win_and_the_workload_fills_in(tmp_path: Path) -> None:
    rows = [
        {"time": 103.0, "prompt": "abc", "output_len": 5},
        {"time": 101.0, "prompt_token_ids": [7, 8]},
        "",
        {"time": 102, "prompt_len": 4, "output_len": 6},
        {"time": 103.0},
    ]
    path = write(tmp_path / "t.jsonl", rows)
    assert load_trace(path)[0] == TraceRow(101.0, [7, 8])
    workload = ThroughputWorkload(None, trace_file=path, trace_speedup=2.0, prompt_len=9, output_len=3)
    plan = plan_requests(workload, VOCAB, encode=letters)
    assert [asked.arrival_s for asked in plan] == [0.0, 0.5, 1.0, 1.0]
    assert [asked.output_len for asked in plan] == [3, 6, 5, 3]
    assert [len(asked.prompt_token_ids) for asked in plan] == [2, 4, 3, 9]
    assert plan[2].prompt_token_ids == [1, 2, 3]
    assert plan_requests(replace(workload, num_requests=2), VOCAB, encode=letters) == plan[:2]
    assert len(plan_requests(replace(workload, num_requests=99), VOCAB, encode=letters)) == 4


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ({"prompt_len": 4}, "`time` must be"),
        ({"time": "now"}, "`time` must be"),
        ('{"time": NaN}', "`time` must be"),
        ({"time": True}, "`time` must be"),
        ({"time": 1, "prompt": "a", "prompt_len": 4}, "prompt and prompt_len exclude"),
        ({"time": 1, "prompt_len": 0}, "`prompt_len` must be an integer of at least 1, got 0"),
        ({"time": 1, "output_len": 2.5}, "`output_len` must be"),
        ({"time": 1, "prompt": ""}, "`prompt` must be a text"),
        ({"time": 1, "prompt_token_ids": [1, -1]}, "`prompt_token_ids` must be"),
        ({"time": 1, "prompt_token_ids": []}, "`prompt_token_ids` must be"),
        ({"time": 1, "output_length": 4}, "unknown key 'output_length'; did you mean 'output_len'?"),
    ],
)
def test_bad_trace_line_names_file_and_line(tmp_path: Path, line: Any, text: str) -> None:
    path = write(tmp_path / "t.jsonl", [{"time": 0.0}, line])
    with pytest.raises(ConfigError) as caught:
        ThroughputWorkload(trace_file=path)
    assert "t.jsonl:2: " in str(caught.value) and text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unusable_trace_files(tmp_path: Path) -> None:
    for path, text in (
        (tmp_path / "none.jsonl", "no file"),
        (tmp_path, "cannot read"),
        (Path(write(tmp_path / "empty.jsonl", [""])), "holds no request"),
    ):
        with pytest.raises(ConfigError, match=text):
            ThroughputWorkload(trace_file=str(path))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_trace(tmp_path / "binary.jsonl")


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_requests": 0}, "workload.num_requests must be an integer of at least 1"),
        ({"num_requests": None}, "workload.num_requests=null"),
        ({"num_requests": None, "duration_s": 1.0}, "null needs workload.concurrency or a finite"),
        ({"turns": 3}, "num_requests=64 is no multiple of workload.turns=3"),
        ({"turns": 2, "branches": 2}, "workload.turns, workload.branches and workload.trace_file exclude"),
        ({"branches": 0}, "workload.branches must be an integer of at least 1"),
        ({"concurrency": 2, "request_rate": 1.0}, "workload.concurrency excludes workload.request_rate"),
        ({"concurrency": []}, "workload.concurrency must be an integer of at least 1 or a list"),
        ({"ramp_up_s": 1.0}, "workload.ramp_up_s needs workload.concurrency"),
        ({"think_s": 1.0}, "workload.think_s needs workload.turns above 1"),
        ({"warmup_s": 2.0, "duration_s": 2.0}, "workload.warmup_s=2 leaves nothing of workload.duration_s=2"),
        ({"timeout_s": 0.0}, "workload.timeout_s must be a positive number"),
        ({"request_rate": 0}, "workload.request_rate must be requests per second above 0, or inf, got 0"),
        ({"request_rate": math.nan}, "workload.request_rate"),
        ({"request_rate": "fast"}, "'fast'"),
        ({"request_rate": True}, "workload.request_rate"),
        ({"burstiness": 0.0, "request_rate": 1.0}, "workload.burstiness must be a positive number"),
        ({"burstiness": 0.5}, "needs a finite workload.request_rate"),
        ({"rate_steps": [1, 2]}, "workload.rate_steps need a finite workload.request_rate"),
        ({"rate_steps": [1, 0], "request_rate": 1.0}, r"workload.rate_steps"),
        ({"trace_speedup": 2.0}, "needs workload.trace_file"),
        ({"trace_speedup": 0.0}, "workload.trace_speedup"),
        ({"prompt_len": 0}, "workload.prompt_len must be an integer of at least 1 or a distribution"),
        ({"output_len": [8, 16]}, r"workload.output_len.low"),
        ({"output_len": True}, "workload.output_len"),
        ({"prompts_file": "nowhere.txt"}, "no file 'nowhere.txt'"),
        ({"iterations": 0}, "workload.iterations"),
        ({"warmup": -1}, "workload.warmup"),
        ({"seed": -1}, "workload.seed"),
        ({"compare": ("statik",)}, "workload.compare.*did you mean 'static'"),
        ({"compare": "statik"}, r"workload.compare\[0\]: unknown value"),
    ],
)
def test_wrong_values_name_their_key(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        ThroughputWorkload(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"low": 9, "high": 8}, "low 9 exceeds high 8"),
        ({"low": 0, "high": 8}, "low must be an integer of at least 1"),
        ({"low": 1, "high": 8, "kind": "gauss"}, "kind: unknown value 'gauss'.*lognormal, normal, uniform"),
        ({"low": 1, "high": 8, "mean": 4.0}, "kind=uniform has no mean"),
        ({"low": 1, "high": 8, "kind": "normal", "mean": 4.0}, "kind=normal needs std"),
        ({"low": 1, "high": 8, "kind": "normal", "mean": 4.0, "std": 0.0}, "std must be a positive number"),
        ({"low": 1, "high": 8, "kind": "normal", "mean": 9.0, "std": 1.0}, "mean 9.0 is outside"),
    ],
)
def test_wrong_distributions(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Lengths(**fields)


def test_rate_and_trace_exclude_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"time": 0.0}])
    with pytest.raises(ConfigError, match=r"request_rate=2 and workload.trace_file exclude"):
        ThroughputWorkload(trace_file=path, request_rate=2.0)


def test_wrong_sampling_is_found_at_once() -> None:
    with pytest.raises(RequestError, match="top_p"):
        ThroughputWorkload(top_p=0.0)


# --- hash ---------------------------------------------------------------------------------------------------


def test_hash_is_of_what_is_asked_and_nothing_else(tmp_path: Path) -> None:
    base = ThroughputWorkload().hash
    assert len(base) == 16
    assert base == ThroughputWorkload(iterations=3, warmup=0, compare=("static",)).hash
    for fields in (
        {"request_rate": 4.0, "rate_steps": [1, 2]}, {"num_requests": 65}, {"request_rate": 4.0},
        {"request_rate": 4.0, "burstiness": 2.0}, {"seed": 1},
        {"turns": 2}, {"concurrency": 2}, {"branches": 2},
        {"prompt_len": 9}, {"output_len": Lengths(8, 129)}, {"temperature": 1.0}, {"ignore_eos": False},
    ):  # fmt: skip
        assert ThroughputWorkload(**fields).hash != base
    paths = [write(tmp_path / name, [{"time": 0.0}]) for name in ("a.jsonl", "b.jsonl")]
    one, two = (ThroughputWorkload(trace_file=path).hash for path in paths)
    assert one == two != base
    write(tmp_path / "b.jsonl", [{"time": 0.5}])
    assert ThroughputWorkload(trace_file=paths[1]).hash != one


def test_prompts_share_prefixes_in_turn():
    workload = ThroughputWorkload(
        num_requests=6, prompt_len=Lengths(3, 9), shared_prefix_len=20, shared_prefixes=2, seed=1
    )
    prompts = [request.prompt_token_ids for request in plan_requests(workload, 50)]
    own = [r.prompt_token_ids for r in plan_requests(replace(workload, shared_prefix_len=0), 50)]
    assert [prompt[20:] for prompt in prompts] == own
    assert prompts[0][:20] == prompts[2][:20] == prompts[4][:20] != prompts[1][:20] == prompts[3][:20]
    with pytest.raises(ConfigError, match="shared_prefix_len is for random prompts"):
        ThroughputWorkload(shared_prefix_len=3, prompts_file=__file__)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8))
def test_ideal_hit_rate_is_the_longest_prefix_that_came_before(asked: list[tuple[list[int], list[int]]]):
    """Of prompts and outputs; the last token of either was not computed."""
    found, kept = 0, [[*prompt, *output[:-1]] for prompt, output in asked]
    for i, (prompt, _) in enumerate(asked):
        lengths = range(len(prompt))
        found += max(n for n in lengths if not n or any(p[:n] == prompt[:n] for p in kept[:i]))
    total = sum(len(prompt) for prompt, _ in asked)
    assert ideal_hit_rate([asked]) == ideal_hit_rate([asked, asked]) == found / total
    assert ideal_hit_rate([[]]) is None


# --- conversations, trees and users -------------------------------------------------------------------------


def test_a_conversation_s_turns_follow_each_other():
    fields = dict(num_requests=6, turns=3, think_s=0.5, request_rate=2.0, prompt_len=4, output_len=5)
    workload = ThroughputWorkload(**fields, shared_prefix_len=2, shared_prefixes=2)
    plan = plan_requests(workload, 50)
    assert [asked.follows for asked in plan] == [None, 0, 1, None, 3, 4]
    assert [asked.history_len for asked in plan] == [0, 11, 20] * 2
    assert [asked.prompt_len for asked in plan] == [6, 15, 24] * 2 and plan[2].total_len == 29
    assert [asked.arrival_s for asked in plan[1:3]] == [0.5, 0.5] and plan[3].arrival_s > 0
    assert plan_requests(replace(workload, num_requests=3), 50) == plan[:3]


def test_a_tree_s_prompts_begin_with_their_parents():
    asked = prompts(ThroughputWorkload(num_requests=8, branches=3, prompt_len=2, shared_prefix_len=1))
    assert [len(prompt) for prompt in asked] == [3, 5, 5, 5, 7, 7, 7, 7]
    parents = [None, 0, 0, 0, 1, 1, 1, 2]
    assert all(p is None or own[: len(asked[p])] == asked[p] for own, p in zip(asked, parents, strict=True))
    assert len({tuple(prompt) for prompt in asked}) == 8


def test_requests_of_users_and_of_a_rate_that_only_the_clock_ends():
    timed = plan_requests(short(num_requests=None, duration_s=5.0, request_rate=50.0), VOCAB)
    assert len(timed) == sum(time < 5 for time in arrivals(short(num_requests=2000, request_rate=50.0)))
    users = ThroughputWorkload(None, concurrency=[1, 4], duration_s=5.0, turns=2, think_s=0.5, seed=3)
    plan = plan_requests(users, VOCAB)
    assert users.users == [1, 4] and {asked.arrival_s for asked in plan} == {0.5} and len(plan) == 1024
    assert users.endless and not replace(users, num_requests=8).endless
    again = next_request(users, plan, 1024 + 7)
    assert again.follows == 1024 + 6 and again.output_len == plan[7].output_len
    assert sorted(again.prompt_token_ids) == sorted(plan[7].prompt_token_ids)
    assert again.prompt_token_ids != plan[7].prompt_token_ids


def test_a_mix_of_kinds():
    """Shares, lengths and options are each kind's own, and a conversation's turns are of one kind."""
    kinds = {
        "short": RequestKind(share=3, prompt_len=4, slo_class="interactive", deadline_ms=9.0),
        "long": RequestKind(output_len=99, priority=2, tenant="t"),
    }
    mixed = ThroughputWorkload(num_requests=2_000, mix=kinds, turns=2, prompt_len=7, output_len=5)
    plan = plan_requests(mixed, VOCAB)
    asked = {name: [each for each in plan if each.options == kinds[name].options(name)] for name in kinds}
    assert sum(map(len, asked.values())) == 2_000 and abs(len(asked["short"]) - 1_500) < 150
    assert asked["short"][0].options == RequestOptions(0, 9.0, "short", "interactive")
    assert {each.options.tenant for each in asked["long"]} == {"t"}
    assert {(len(each.prompt_token_ids), each.output_len) for each in asked["short"]} == {(4, 5)}
    assert {(len(each.prompt_token_ids), each.output_len) for each in asked["long"]} == {(7, 99)}
    assert all(plan[each.follows].options == each.options for each in plan if each.follows is not None)
    assert short(mix=kinds).hash != short().hash == short(mix={}).hash
