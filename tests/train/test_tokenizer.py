"""The tokenizer: any text survives, and its files are what Hugging Face expects."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moejax.core.errors import ConfigError
from moejax.engine.requests.tokenizer import Tokenizer as EngineTokenizer
from moejax.train.tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer

from .small import VOCAB, small_text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_text().tokenizer


@settings(max_examples=200)
@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_size_special_tokens_and_determinism(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.encode("a<|endoftext|>").ids[-1] == 0
    assert tokenizer.to_str() == small_text().tokenizer.to_str()


def test_too_little_text_is_said() -> None:
    with pytest.raises(ConfigError, match="set vocab_size to that"):
        train_tokenizer(["short"], 1000)


def test_files_load_with_the_chat_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, max_length=64)
    loaded = EngineTokenizer.load(tmp_path)
    assert loaded is not None
    prompt = loaded.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.encode(prompt)[0] == 1
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>" and settings["model_max_length"] == 64
    assert settings["added_tokens_decoder"]["0"]["special"] is True
    assert json.loads((tmp_path / "special_tokens_map.json").read_text())["pad_token"] == "<|endoftext|>"
