"""Sampling parameters are checked one by one, in one line that names field, limits and value."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.core.errors import RequestError
from moejax.engine.requests.api import RequestMetrics, SamplingParams
from tests.engine.tiny import PROPERTY

INF, NAN = float("inf"), float("nan")


# field → (what the message starts with, values)
BAD: list[tuple[str, str, list[Any]]] = [
    ("max_tokens", "max_tokens must be an integer of at least 1", [0, -1, 1.0, NAN, True, None, "3"]),
    ("min_tokens", "min_tokens must be an integer of at least 0", [-1, 1.0, None]),
    ("presence_penalty", "presence_penalty must be a number in [-2, 2]", [-2.1, 2.1, NAN, None, "1"]),
    ("frequency_penalty", "frequency_penalty must be a number in [-2, 2]", [-2.1, 2.1, NAN, None, "1"]),
    (
        "logit_bias",
        "logit_bias must map token ids to numbers",
        [{"a": 1.0}, {1: 10**400}, {1: "a"}, {1: None}],
    ),
    ("bad_words", "bad_words[{}] must be a string that is not empty", [[1], ["a", None], ""]),
    ("max_time_s", "max_time_s must be a positive number", [0, -1.0, NAN, INF, 10**400, True, "1"]),
    ("n", "n must be an integer of at least 1", [0, -2, 1.5, False, "2", None]),
    ("top_k", "top_k must be an integer of at least 0", [-2, 0.5, True, None, INF]),
    ("logprobs", "logprobs must be an integer between 0 and 1024", [-1, 1025, True, 1.0, "1"]),
    ("prompt_logprobs", "prompt_logprobs must be an integer between 0 and 1024", [-1, 1025, True, 1.0]),
    ("seed", "seed must be an integer between 0 and 4294967295", [-1, 2**32, 0.5, True, "1"]),
    ("temperature", "temperature must be a number of at least 0", [-0.1, NAN, INF, True, "1", None]),
    ("top_p", "top_p must be a number in (0, 1]", [0, 0.0, 1.01, -1, NAN, True, "1", None]),
    ("min_p", "min_p must be a number in [0, 1]", [-0.01, 1.01, NAN, True, None]),
    ("repetition_penalty", "repetition_penalty must be a positive number", [0, -1.0, NAN, INF, True, None]),
    ("stop", "stop must be a string or a list of strings", [None, 3, b"a", {"a": 1}]),
    ("stop", "stop[{}] must be a string that is not empty", [[1], ["a", None], "", [""], ["a", ""]]),
    ("stop_token_ids", "stop_token_ids must be a list of token ids", [None, 5, "5", b"5"]),
    (
        "stop_token_ids",
        "stop_token_ids[{}] must be an integer of at least 0",
        [[-1], [1.0], [True], ["5"], [None], [[1]]],
    ),
    ("ignore_eos", "ignore_eos must be True or False", [None, 1, "yes"]),
    ("deterministic", "deterministic must be True or False", [1, "yes"]),
    ("structured_outputs", "structured_outputs must be a dict", [3, None, ["regex"]]),
    ("allowed_token_ids", "allowed_token_ids must be a list of token ids", [5, "5"]),
    ("allowed_token_ids", "allowed_token_ids[{}] must be an integer of at least 0", [[-1], [1.0]]),
    ("best_of", "best_of must be an integer of at least 1", [0, "2"]),
    ("detokenize", "detokenize must be True or False", [None, 0, "no"]),
    ("skip_special_tokens", "skip_special_tokens must be True or False", [None, 1, "yes"]),
    ("include_stop_str_in_output", "include_stop_str_in_output must be True or False", [None, 0, "no"]),
]


@pytest.mark.parametrize(
    ("field", "says", "value"), [(field, says, value) for field, says, values in BAD for value in values]
)
def test_bad_field(field: str, says: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    text = str(caught.value)
    in_list = "{}" in says
    wrong = value[-1] if in_list and isinstance(value, list) else value
    assert text == f"{says.format(len(value) - 1) if in_list and value else says.format(0)}, got {wrong!r}"


def test_every_field_has_a_bad_value_above() -> None:
    assert {field for field, _, _ in BAD} == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("fields", "name", "want"),
    [
        ({"stop": "ab"}, "stop", ("ab",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop_token_ids": [1, np.int64(2)]}, "stop_token_ids", (1, 2)),
        ({"stop_token_ids": np.array([3])}, "stop_token_ids", (3,)),
        ({"stop_token_ids": {4}}, "stop_token_ids", (4,)),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"temperature": 1}, "temperature", 1),
        ({"top_p": np.float64(0.5)}, "top_p", 0.5),
        ({"max_tokens": np.int32(3)}, "max_tokens", 3),
        ({"seed": 2**32 - 1}, "seed", 2**32 - 1),
        ({"logprobs": 0}, "logprobs", 0),
    ],
)
def test_good_field(fields: dict[str, Any], name: str, want: Any) -> None:
    assert getattr(SamplingParams(**fields), name) == want


def test_params_can_be_shared_and_compared() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert params == SamplingParams(stop=("a",), stop_token_ids=(1,))
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert SamplingParams(temperature=0.0).greedy and not SamplingParams().greedy


@PROPERTY
@given(
    st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]),
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
        st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none()), max_size=3),
        st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    ),
)  # fmt: skip
def test_anything_is_taken_or_refused_in_one_line(field: str, value: Any) -> None:
    try:
        SamplingParams(**{field: value})
    except RequestError as error:
        assert str(error).startswith(field) and "\n" not in str(error)


@PROPERTY
@given(st.floats(0, 1e6), st.lists(st.floats(0, 1e3) | st.just(0.0), min_size=1, max_size=20))
def test_metrics_agree_with_each_other(arrival: float, gaps: list[float]) -> None:
    times = (arrival + np.cumsum(gaps)).tolist()
    metrics = RequestMetrics(arrival, times)
    steps = len(times) - 1
    assert metrics.ttft == times[0] - arrival and metrics.e2e == times[-1] - arrival
    assert len(metrics.itl) == len({*times}) - 1  # what comes together is one gap
    np.testing.assert_allclose(metrics.ttft + sum(metrics.itl), metrics.e2e, atol=1e-6)
    np.testing.assert_allclose(metrics.ttft + metrics.tpot * steps, metrics.e2e, atol=1e-6)
    if not steps:
        assert metrics.tpot == 0.0


def test_top_k_of_minus_one_keeps_all_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
