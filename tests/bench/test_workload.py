"""Workloads: cases, prompts, hashes, and the errors of wrong ones."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.bench.workload import (
    COPIES,
    LatencyCase,
    WorkloadConfig,
    case_prompts,
    latency_cases,
    load_prompts,
    random_prompts,
)
from moejax.core.errors import ConfigError, RequestError


def rows(config: WorkloadConfig) -> list[tuple[int, ...]]:
    return [dataclasses.astuple(case) for case in latency_cases(config)]


def test_product_in_order_without_repeats() -> None:
    config = WorkloadConfig(batch_size=[1, 8, 1], prompt_len=16, output_len=[2, 4])
    assert rows(config) == [(1, 16, 2), (1, 16, 4), (8, 16, 2), (8, 16, 4)]


def test_zip_spreads_single_values() -> None:
    config = WorkloadConfig(batch_size=[1, 8, 16], prompt_len=[128, 128, 32], output_len=64, pairing="zip")
    assert rows(config) == [(1, 128, 64), (8, 128, 64), (16, 32, 64)]
    assert rows(WorkloadConfig(1, 2, 3, pairing="zip")) == [(1, 2, 3)]


def test_case_name_and_length() -> None:
    case = LatencyCase(8, 128, 64)
    assert (case.name, case.total_len) == ("b8_p128_n64", 192)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"batch_size": 0}, "workload.batch_size"),
        ({"batch_size": [1, -2]}, "workload.batch_size"),
        ({"prompt_len": []}, "workload.prompt_len"),
        ({"prompt_len": 1.5}, "workload.prompt_len"),
        ({"output_len": True}, "workload.output_len"),
        ({"output_len": "many"}, "'many'"),
        ({"output_len": None}, "workload.output_len"),
        ({"iterations": 0}, "workload.iterations"),
        ({"warmup": -1}, "workload.warmup"),
        ({"seed": -1}, "workload.seed"),
        ({"pairing": "zap"}, "did you mean 'zip'"),
        ({"pairing": "zip", "batch_size": [1, 2], "prompt_len": [1, 2, 3]}, "batch_size 2, prompt_len 3"),
        ({"prompts_file": "no-such-file.txt"}, "no-such-file.txt"),
        ({"text": "prose"}, "workload.text.*'prose'"),
        ({"text": "copy", "prompts_file": __file__}, "text=copy .* leave out workload.prompts_file"),
    ],
)
def test_wrong_values_name_their_key(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        WorkloadConfig(**fields)
    assert "\n" not in str(caught.value)


def test_wrong_sampling_is_found_at_once() -> None:
    with pytest.raises(RequestError, match="top_p"):
        WorkloadConfig(top_p=0.0)


def test_sampling_is_greedy_to_the_full_length_and_seeded_per_request() -> None:
    params = WorkloadConfig(seed=5).sampling(7, index=2)
    assert (params.max_tokens, params.greedy, params.ignore_eos, params.seed) == (7, True, True, 7)


@given(
    batch=st.integers(1, 4), length=st.integers(1, 40), vocab=st.integers(3, 500), seed=st.integers(0, 2**40)
)
def test_random_prompts_have_their_shape_and_range(batch: int, length: int, vocab: int, seed: int) -> None:
    case = LatencyCase(batch, length, 1)
    prompts = random_prompts(case, vocab, seed)
    assert [len(prompt) for prompt in prompts] == [length] * batch
    assert all(type(token) is int and 0 <= token < vocab for prompt in prompts for token in prompt)
    assert prompts == random_prompts(case, vocab, seed)


def test_random_prompts_differ_between_cases_rows_and_seeds() -> None:
    case = LatencyCase(2, 32, 8)
    variants = [
        *random_prompts(case, 1000, 0), *random_prompts(case, 1000, 1),
        *random_prompts(LatencyCase(3, 32, 8), 1000, 0), *random_prompts(LatencyCase(2, 32, 9), 1000, 0),
    ]  # fmt: skip
    assert len({tuple(prompt[:8]) for prompt in variants}) == len(variants)


@pytest.mark.parametrize("length", [1, 3, 4, 30, 64])
def test_copied_prompts_repeat_a_random_passage(length: int) -> None:
    case = LatencyCase(2, length, 8)
    config = WorkloadConfig(2, length, 8, text="copy", seed=3)
    passage = -(-length // COPIES)
    for prompt, drawn in zip(case_prompts(config, case, 1000), random_prompts(case, 1000, 3), strict=True):
        assert prompt == (COPIES * drawn[:passage])[:length]


def test_kinds_of_text_are_other_workloads_and_random_is_what_it_was() -> None:
    texts = {WorkloadConfig(text=text).hash for text in ("random", "copy", "own", "seen")}
    assert len(texts) == 4 and WorkloadConfig().hash == "33f78dcd751f4e30"


def write(path: Path, lines: list[Any]) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def test_load_prompts(tmp_path: Path) -> None:
    jsonl = write(tmp_path / "p.jsonl", [{"prompt": "a b"}, "", {"prompt_token_ids": [1, 2]}, '"c"', [3]])
    assert load_prompts(jsonl) == ["a b", [1, 2], "c", [3]]
    assert load_prompts(write(tmp_path / "p.txt", ["one", "", '"two"'])) == ["one", '"two"']


@pytest.mark.parametrize("line", ["{", '{"text": "a"}', '""', "[]", '[1, "a"]', "[true]", "3"])
def test_bad_prompt_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a"}, line])
    with pytest.raises(ConfigError, match=r"p\.jsonl:2"):
        load_prompts(path)


def test_unusable_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prompt"):
        load_prompts(write(tmp_path / "empty.txt", [""]))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_prompts(tmp_path / "binary.txt")
    with pytest.raises(ConfigError, match="cannot read"):
        load_prompts(tmp_path)


def test_case_prompts_cut_repeat_and_cycle(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [[1, 2, 3, 4, 5], '"ab"'])
    config = WorkloadConfig(prompts_file=path)
    encode = lambda text: [ord(c) - 96 for c in text]  # noqa: E731
    assert case_prompts(config, LatencyCase(3, 4, 1), 10, encode=encode) == [
        [1, 2, 3, 4], [1, 2, 1, 2], [1, 2, 3, 4],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no tokenizer"):
        case_prompts(config, LatencyCase(2, 4, 1), 10)
    with pytest.raises(ConfigError, match="token id 5 is outside"):
        case_prompts(config, LatencyCase(1, 4, 1), 5, encode=encode)
    with pytest.raises(ConfigError, match="encodes to no token"):
        case_prompts(config, LatencyCase(2, 4, 1), 10, encode=lambda text: [])


def test_case_prompts_are_random_without_a_file() -> None:
    case = LatencyCase(2, 8, 1)
    assert case_prompts(WorkloadConfig(seed=3), case, 50) == random_prompts(case, 50, 3)


def test_hash_is_of_what_is_asked_and_nothing_else(tmp_path: Path) -> None:
    base = WorkloadConfig().hash
    assert base == WorkloadConfig(batch_size=[1], iterations=9, warmup=0, pairing="zip").hash
    for fields in (
        {"batch_size": 2},
        {"output_len": 1},
        {"seed": 1},
        {"temperature": 1.0},
        {"ignore_eos": False},
    ):
        assert WorkloadConfig(**fields).hash != base
    first, second = write(tmp_path / "a.txt", ["x"]), write(tmp_path / "b.txt", ["x"])
    one = WorkloadConfig(prompts_file=first).hash
    assert one == WorkloadConfig(prompts_file=second).hash != base
    write(tmp_path / "b.txt", ["y"])
    assert one != WorkloadConfig(prompts_file=second).hash
