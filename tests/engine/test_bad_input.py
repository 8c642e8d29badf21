"""A user's mistake is one line that names it and what would be right, and nothing has run."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import CheckpointError, ConfigError, DeviceError, MoejaxError, RequestError
from moejax.core.moe import MoeConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.inputs import as_list
from moejax.models.registry import config_to_hf
from tests.engine.conftest import ENGINE
from tests.engine.tiny import PROPERTY, small_config

FLAT = "must be text or a flat list of token ids"


@pytest.fixture
def idle(llm: LLM, bare_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step may run."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("a step ran")

    for each in (llm, bare_llm):
        monkeypatch.setattr(each.runner, "launch", never)


def refusal(error: type[MoejaxError], call: Any, *args: Any, **options: Any) -> str:
    """The text of the error that the call must raise: one line."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


# -- prompts -------------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty list": ([], "no prompt given"),
    "empty table": (np.zeros((0, 3), np.int32), "no prompt given"),
    "empty text": ("", "prompt 0 is empty"),
    "empty text second": (["a", ""], "prompt 1 is empty"),
    "empty ids": ([[]], "prompt 0 is empty"),
    "empty array": (np.array([], np.int64), "prompt 0 is empty"),
    "too long": ([[1] * 64], "prompt 0 has 64 tokens"),
    "too long second": ([[1], [1] * 99], "prompt 1 has 99 tokens"),
    "too long text": ("é" * 90, "prompt 0 has "),
    "id too large": ([1, 320], "prompt 0: token id 320 out of range; the vocabulary is 0..319"),
    "id far too large": ([1, 2**63], f"prompt 0: token id {2**63} out of range"),
    "id negative": ([[1], [-1]], "prompt 1: token id -1 out of range; the vocabulary is 0..319"),
    "floats": ([1.0, 2.0], f"prompt 0 {FLAT}"),
    "float among ids": ([1, 2.5], f"prompt 0 {FLAT}"),
    "float array": (np.array([1.0]), f"prompt 0 {FLAT}"),
    "nested": ([[[1, 2], [3, 4]]], f"prompt 0 {FLAT}"),
    "ragged": ([[[1, 2], [3]]], f"prompt 0 {FLAT}"),
    "cube": (np.zeros((1, 2, 3), np.int32), f"prompt 0 {FLAT}"),
    "bools": ([True, False], f"prompt 0 {FLAT}"),
    "bool among ids": ([1, True], f"prompt 0 {FLAT}"),
    "text among ids": ([1, "a"], f"prompt 0 {FLAT}"),
    "ids among prompts": ([[1, 2], 3], f"prompt 1 {FLAT}"),
    "None": (None, "prompts must be text, token ids or a list of either, got None"),
    "a number": (5, "prompts must be text, token ids or a list of either, got 5"),
    "a 0-d array": (np.array(5), "prompts must be text, token ids or a list of either"),
    "None among prompts": (["a", None], f"prompt 1 {FLAT}"),
    "bytes": (b"abc", "prompts must be text, token ids or a list of either, got b'abc'"),
    "a dictionary": ({"text": "a"}, "prompt 0 takes the keys prompt and prompt_token_ids"),
    "half a surrogate pair": ("\ud83d", "the text is not valid Unicode"),
    "id beyond any integer": ([2**70], f"prompt 0: token id {2**70} out of range"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt(name: str, llm: LLM, idle: None) -> None:
    prompt, says = BAD_PROMPTS[name]
    compiled, made = len(llm.ledger.entries), next(llm.builder._ids)
    text = refusal(RequestError, llm.generate, prompt)
    assert text.startswith(says)
    if "long" in name:
        assert "over the limit of 64 (engine.max_model_len)" in text
    assert len(llm.ledger.entries) == compiled
    assert next(llm.builder._ids) <= made + 2  # at most a good prompt before the bad one was looked at


@pytest.mark.parametrize("name", [n for n in BAD_PROMPTS if "too long" not in n])
def test_bad_sequence_to_score(name: str, llm: LLM, idle: None) -> None:
    prompt, says = BAD_PROMPTS[name]
    text = refusal(RequestError, llm.score, prompt)
    assert text.startswith(says.replace("prompt 0", "sequence 0").replace("prompt 1", "sequence 1"))


def test_scoring_needs_two_tokens_and_heeds_the_limit(llm: LLM, idle: None) -> None:
    assert refusal(RequestError, llm.score, [[1, 2], [3]]) == (
        "sequence 1 has one token; scoring needs at least 2"
    )
    assert refusal(RequestError, llm.score, [[1] * 65]) == ("sequence 0 has 65 tokens, over the limit of 64")


def test_a_stream_takes_one_prompt(llm: LLM, idle: None) -> None:
    assert refusal(RequestError, llm.generate_stream, ["a", "b"]) == f"prompt 0 {FLAT}"
    assert refusal(RequestError, llm.generate_stream, [[1, 2], [3, 4]]) == f"prompt 0 {FLAT}"
    assert refusal(RequestError, llm.generate_stream, "").startswith("prompt 0 is empty")


def test_text_without_a_tokenizer(bare_llm: LLM, idle: None) -> None:
    says = "this model has no tokenizer.json; pass token ids instead of text"
    assert refusal(RequestError, bare_llm.generate, "hello") == says
    assert refusal(RequestError, bare_llm.generate, [[1], "hello"]) == says
    assert refusal(RequestError, bare_llm.score, "hello") == says
    assert refusal(RequestError, bare_llm.chat, [{"role": "user", "content": "hi"}]) == says
    says = "stop strings need a tokenizer, and this model has none; use stop_token_ids"
    assert refusal(RequestError, bare_llm.generate, [1], SamplingParams(stop=["a"])) == says


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        None,
        5,
        {"role": "user", "content": "hi"},
        [[]],
        ["hi"],
        [[{"role": "user"}], "hi"],
        [{}, "hi"],
    ],
    ids=repr,
)
def test_bad_messages(messages: Any, llm: LLM, idle: None) -> None:
    text = refusal(RequestError, llm.chat, messages)
    assert text.startswith(("chat needs a list of messages such as", "no prompt given"))


@PROPERTY
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.binary(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.integers(), inner, max_size=2),
            st.tuples(inner, inner),
        ),
        max_leaves=6,
    )
)
def test_anything_is_taken_or_refused_in_one_line(llm: LLM, prompts: Any) -> None:
    """What is taken is token ids, flat or one list deep."""
    try:
        requests = llm.builder.to_generate(as_list(prompts), None)
    except RequestError as error:
        assert str(error) and "\n" not in str(error)
    else:
        given_ids = [prompts] if isinstance(prompts[0], int) else prompts
        assert [request.output.prompt_token_ids for request in requests] == [list(ids) for ids in given_ids]
        for request in requests:
            assert all(type(i) is int and 0 <= i < 320 for i in request.output.prompt_token_ids)


# -- parameters ----------------------------------------------------------------------------------------


def test_number_of_sampling_params(llm: LLM, idle: None) -> None:
    one = SamplingParams()
    assert refusal(RequestError, llm.generate, [[1], [2]], [one]) == (
        "1 sampling_params for 2 prompts; pass one, or one a prompt"
    )
    assert refusal(RequestError, llm.generate, [1, 2], [one, one]).startswith(
        "2 sampling_params for 1 prompts"
    )
    assert refusal(RequestError, llm.generate, [[1]], []).startswith("0 sampling_params for 1 prompts")


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 5, [None], [{"n": 2}], object], ids=repr)
def test_what_is_not_sampling_params(params: Any, llm: LLM, idle: None) -> None:
    text = refusal(RequestError, llm.generate, [[1]], params)
    assert text.startswith("sampling_params must be SamplingParams or a list of them, got ")


def test_a_stop_token_that_the_model_has_not(llm: LLM, idle: None) -> None:
    params = SamplingParams(stop_token_ids=[3, 320])
    assert refusal(RequestError, llm.generate, [[1], [2]], params) == (
        "prompt 0: stop_token_ids has 320, out of range; the vocabulary is 0..319"
    )


# -- construction --------------------------------------------------------------------------------------


def refused_llm(error: type[MoejaxError], model: Any, **options: Any) -> str:
    return refusal(error, LLM, model, **({"engine": ENGINE} | options))


def dummy(config: ModelConfig | dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"model": small_config() if config is None else config, "load_format": "dummy"} | options


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight may be read or made."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("a model was built")

    monkeypatch.setattr("moejax.engine.llm.load", never)


def test_unknown_model(unbuilt: None, tmp_path: Path) -> None:
    text = refused_llm(ConfigError, "no-such-model")
    assert text.startswith("model.path: unknown model 'no-such-model'") and "not a directory" in text
    (tmp_path / "file").touch()
    assert "is a file, not a Hugging Face directory" in refused_llm(ConfigError, tmp_path / "file")
    assert "config.json: not found" in refused_llm(CheckpointError, tmp_path)


@pytest.mark.parametrize("model", [None, 5, ["tiny"]], ids=repr)
def test_a_model_that_is_no_model(model: Any, unbuilt: None) -> None:
    text = refused_llm(ConfigError, model)
    assert text.startswith("model must be a shipped model's name, a directory") and repr(model) in text


@pytest.mark.parametrize("value", ["dumy", "safetensors", None, 1])
def test_load_format(value: Any, unbuilt: None) -> None:
    text = refused_llm(ConfigError, **dummy(load_format=value))
    assert text == f"load_format must be 'auto' or 'dummy', got {value!r}"


def test_a_configuration_has_no_weights(unbuilt: None) -> None:
    text = refused_llm(ConfigError, small_config())
    assert text == "a configuration without a directory has no weights; use load_format='dummy'"


@pytest.mark.parametrize("value", ["flaot32", "int8", "", None, 32, "float64"])
def test_dtype(value: Any, unbuilt: None) -> None:
    text = refused_llm(ConfigError, **dummy(dtype=value))
    assert text.startswith(f"model.dtype: unknown value {str(value)!r}")
    assert text.endswith("(known: auto, bfloat16, float16, float32)")
    assert ("did you mean 'float32'?" in text) == (value == "flaot32")


def test_a_gpu_where_there_is_none(unbuilt: None) -> None:
    engine = dataclasses.replace(ENGINE, platform="gpu")
    text = refused_llm(DeviceError, **dummy(engine=engine))
    assert text.startswith("engine.platform=gpu: JAX sees no such device, only cpu; install moejax[cuda12]")


@pytest.mark.parametrize(
    ("name", "kind"), [("parallel", "ParallelConfig"), ("quant", "QuantConfig"), ("engine", "EngineConfig")]
)
@pytest.mark.parametrize("value", [{"tp": 2}, {}, "gptq", 0])
def test_what_is_not_a_config(name: str, kind: str, value: Any, unbuilt: None) -> None:
    """A dictionary would otherwise be passed over in silence."""
    assert refused_llm(ConfigError, **dummy(**{name: value})) == f"{name} must be a {kind}, got {value!r}"


@pytest.mark.parametrize("value", [1.5, "1", None, True])
def test_seed(value: Any, unbuilt: None) -> None:
    assert refused_llm(ConfigError, **dummy(seed=value)) == f"seed must be an integer, got {value!r}"


def test_max_model_len_above_the_models(unbuilt: None) -> None:
    """Known before any weight is read."""
    text = refused_llm(ConfigError, **dummy(engine=dataclasses.replace(ENGINE, max_model_len=65)))
    assert text == "engine.max_model_len=65 exceeds the model's max_position_embeddings 64"


def test_an_activation_that_is_not_there(unbuilt: None) -> None:
    text = refused_llm(ConfigError, **dummy(small_config(hidden_act="sillu")))
    assert text.startswith("hidden_act: unknown activation 'sillu'; did you mean 'silu'?")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"model_type": "qwen3_moo"}, "did you mean 'qwen3_moe'?"),
        ({"model_type": None}, "no 'model_type'"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        ({"hidden_act": "sillu"}, "did you mean 'silu'?"),
        ({"logit_softcap": 30.0}, "logit_softcap=30.0"),
        ({"hidden_size": "big"}, "hidden_size must be an integer of at least 1, got 'big'"),
        ({"dtype": "float8"}, "dtype: unknown value 'float8'"),
        ({"num_experts": None, "num_local_experts": None}, "missing field 'num_experts'"),
    ],
)
def test_bad_model_configuration(changes: dict[str, Any], says: str) -> None:
    raw = config_to_hf(small_config()) | changes
    assert says in refused_llm(ConfigError, **dummy(raw))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_model_len": 0}, "engine.max_model_len must be an integer of at least 1, got 0"),
        ({"max_num_seqs": -1}, "engine.max_num_seqs must be an integer of at least 1, got -1"),
        ({"platform": "cup"}, "engine.platform: unknown value 'cup'; did you mean 'cpu'?"),
        ({"moe": {"execution": "dense"}}, "engine.moe must be a MoeConfig, got {'execution': 'dense'}"),
        ({"compile_cache": "no"}, "engine.compile_cache must be True or False, got 'no'"),
    ],
)
def test_bad_engine_configuration(changes: dict[str, Any], says: str) -> None:
    assert refusal(ConfigError, lambda: EngineConfig(**changes)).startswith(says)


def test_bad_moe_configuration() -> None:
    text = refusal(ConfigError, lambda: MoeConfig(execution="groupd"))  # type: ignore[arg-type]
    assert text.startswith("engine.moe.execution: unknown value 'groupd'; did you mean 'grouped'?")
