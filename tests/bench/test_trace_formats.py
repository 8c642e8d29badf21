"""Traces in the formats of others: read, detected, replayed, and wrong rows named by file and line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moejax.bench.trace import TraceRow, load_trace
from moejax.bench.traffic import ThroughputWorkload, plan_requests
from moejax.core.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
45,GPT-4,1087,230,1317,Conversation log
5,ChatGPT,472,18,490,API log
"""
MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 9]},
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [4, 5, 6]},
    {"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [4]},
]
SHARE = [
    {"id": "a", "conversations": [
        {"from": "system", "value": "be"}, {"from": "human", "value": "ab"}, {"from": "gpt", "value": "abcd"},
        {"from": "human", "value": "c"}, {"from": "gpt", "value": ""},
    ]},
    {"id": "b", "conversations": [{"from": "human", "value": "d"}]},
]  # fmt: skip
CHAT = [
    {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "abc"}]},
    {"messages": [{"role": "user", "content": "c"}, {"role": "user", "content": "d"}]},
]


def letters(text: str) -> list[int]:
    return [ord(letter) % 50 for letter in text]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def trace(tmp_path: Path):
    def write(text: str) -> str:
        (tmp_path / "t").write_text(text, encoding="utf-8")
        return str(tmp_path / "t")

    return write


def test_tables_of_times_and_lengths(trace) -> None:
    first, second = load_trace(trace(AZURE))
    assert second.time - first.time == pytest.approx(4.314579)
    assert (first.prompt_len, first.output_len, second.output_len) == (374, 44, 109)
    assert load_trace(trace(BURST), "burstgpt") == [
        TraceRow(5.0, None, 472, 18), TraceRow(45.0, None, 1087, 230)
    ]  # fmt: skip
    workload = ThroughputWorkload(None, trace_file=trace(BURST), trace_speedup=2.0)
    plan = plan_requests(workload, 50)
    assert [(asked.arrival_s, asked.prompt_len, asked.output_len) for asked in plan] == [
        (0.0, 472, 18), (20.0, 1087, 230)
    ]  # fmt: skip


def test_mooncakes_prompts_share_the_blocks_that_they_say(trace) -> None:
    plan = plan_requests(ThroughputWorkload(None, trace_file=trace(lines(MOONCAKE))), 1000)
    one, two, three = (asked.prompt_token_ids for asked in plan)
    assert [asked.arrival_s for asked in plan] == [0.0, 3.0, 3.0] and plan[1].output_len == 7
    assert (len(one), len(two), len(three)) == (1030, 1100, 600)
    assert one[:1024] == two[:1024] and one[1024:] != two[1024:1030] and three[:512] == one[:512]
    assert three[512:] != one[512:600]  # its own, where ids leave off


def indented(rows: list[Any]) -> str:
    return json.dumps(rows, indent=1)


@pytest.mark.parametrize("write", [json.dumps, indented, lines])
def test_conversations_are_turns_with_the_files_texts(trace, write: Any) -> None:
    workload = ThroughputWorkload(None, trace_file=trace(write(SHARE)), think_s=0.5, output_len=9)
    plan = plan_requests(workload, 50, encode=letters)
    assert [asked.prompt_token_ids for asked in plan] == [*map(letters, ("be\nab", "c", "d"))]
    assert [asked.follows for asked in plan] == [None, 0, None]
    assert [asked.output_len for asked in plan] == [4, 1, 9]  # an answer's length, of none the workload's
    assert [asked.arrival_s for asked in plan] == [0.0, 0.5, 0.0] and plan[1].history_len == 9
    rated = replace(workload, request_rate=2.0)
    assert plan_requests(rated, 50, encode=letters)[2].arrival_s > 0 and rated.offered_rate == 2.0
    assert plan_requests(replace(workload, num_requests=2), 50, encode=letters) == plan[:2]
    assert replace(workload, concurrency=2).users == [2]
    chat = load_trace(trace(write(CHAT)))
    assert chat == [TraceRow(None, "ab", answer="abc"), TraceRow(None, "c\nd")]


@pytest.mark.parametrize(
    ("text", "form", "where", "words"),
    [
        (AZURE + "yesterday,3,4\n", "auto", 4, "Invalid isoformat string"),
        (AZURE + "2023-11-16 18:15:46,3\n", "auto", 4, "no GeneratedTokens"),
        (AZURE + '2023-11-16 18:15:46,"3,4\n', "auto", 4, "invalid literal for int()"),
        (BURST + "7,GPT-4,9,0,9,API log\n", "auto", 4, "a request that failed is not replayed"),
        (BURST, "azure", 1, "no column 'ContextTokens', which trace_format=azure has"),
        (lines(MOONCAKE) + "{}\n", "auto", 4, "`timestamp` must be an integer of at least 0"),
        (
            lines([*MOONCAKE, {**MOONCAKE[2], "hash_ids": [1, 2, 3]}]),
            "auto",
            4,
            "3 `hash_ids`, each of 512 of",
        ),
        (lines([*MOONCAKE, {**MOONCAKE[2], "hash_ids": [-1]}]), "auto", 4, "`hash_ids` must be a list"),
        (indented([*CHAT, {"messages": [{"role": "user"}]}]), "auto", 26, "`messages` must be a list of obj"),
        (lines([*SHARE, {"conversations": []}]), "auto", 3, "`conversations` must be a list of objects"),
        (lines(CHAT), "sharegpt", 1, "`conversations` must be a list of objects"),
        ('[\n{"messages": 1,\n}]', "auto", 2, "not JSON"),
        (lines(CHAT[:1]) + "{\n", "auto", 2, "not JSON"),
        (lines(MOONCAKE), "moejax", 1, "unknown key 'timestamp'"),
    ],
)
def test_a_wrong_row_is_named(trace, text: str, form: Any, where: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_trace(trace(text), form)
    assert f"/t:{where}: " in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_formats_and_times_must_fit_the_rest(trace) -> None:
    with pytest.raises(ConfigError, match=r"trace_format needs workload.trace_file"):
        ThroughputWorkload(trace_format="azure")
    with pytest.raises(
        ConfigError, match=r"workload.trace_format: unknown value 'azur'; did you mean 'azure'"
    ):
        ThroughputWorkload(trace_file="x", trace_format="azur")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"concurrency excludes workload.request_rate and a trace's times"):
        ThroughputWorkload(None, trace_file=trace(AZURE), concurrency=2)
    for text in ("[]", AZURE.split("\n")[0]):
        with pytest.raises(ConfigError, match="holds no request"):
            load_trace(trace(text))
    assert len(load_trace(trace(json.dumps(CHAT * 5000)))) == 10_000  # one long line
    with pytest.raises(ConfigError, match="the model has no tokenizer"):
        plan_requests(ThroughputWorkload(None, trace_file=trace(lines(CHAT))), 50)
