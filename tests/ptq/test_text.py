"""Calibration tokens: which text, which windows, and what a text that is too short says."""

from types import SimpleNamespace

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.core.quant import CalibrationConfig
from moejax.ptq import text
from moejax.ptq.text import calibration_tokens
from moejax.text.corpus import Corpus, Document


class Letters:
    """A token a character; special tokens only where they are asked for."""

    def encode(self, text, *, add_special_tokens=True):
        return ([999] if add_special_tokens else []) + [ord(c) for c in text]


class Wrapped:
    """As the tokenizers library answers."""

    def encode(self, text, *, add_special_tokens=True):
        return SimpleNamespace(ids=Letters().encode(text, add_special_tokens=add_special_tokens))


def config(path, **changes):
    return CalibrationConfig(**({"text": str(path), "num_samples": 4, "seq_len": 5} | changes))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(i) for i in range(1000, 1053)), encoding="utf-8")  # 10 windows of 5, and 3
    return path


@pytest.mark.parametrize("tokenizer", [Letters(), Wrapped()])
def test_windows_of_a_file_none_twice(file, tokenizer):
    found = calibration_tokens(config(file, num_samples=10), tokenizer)
    assert found.shape == (10, 5) and found.dtype == np.int32
    assert sorted(map(tuple, found.tolist())) == [tuple(range(1000 + 5 * i, 1005 + 5 * i)) for i in range(10)]


def test_the_seed_decides(file):
    first, again, other = (calibration_tokens(config(file, seed=s), Letters()) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_samples": 11}, ("53 tokens", "needs 55", "lower num_samples to at most 10")),
        ({"num_samples": 1, "seq_len": 60}, ("53 tokens", "needs 60", "lower seq_len to at most 53")),
    ],
)
def test_a_text_that_is_too_short_says_what_to_lower(file, changes, words):
    with pytest.raises(ConfigError) as caught:
        calibration_tokens(config(file, **changes), Letters())
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_what_is_lowered_is_enough(file):
    assert calibration_tokens(config(file, num_samples=10), Letters()).shape == (10, 5)
    assert calibration_tokens(config(file, num_samples=1, seq_len=53), Letters()).shape == (1, 53)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing.txt"):
        calibration_tokens(config(tmp_path / "nothing.txt"), Letters())
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        calibration_tokens(config(tmp_path / "latin"), Letters())
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match=r"0 tokens.*give a longer text"):
        calibration_tokens(config(tmp_path / "empty"), Letters())


@pytest.fixture
def corpus(monkeypatch):
    """20 documents to train on, each of one letter, and one that is held out."""
    train = tuple(Document(f"topic:{i}", chr(1000 + i) * 10) for i in range(20))
    monkeypatch.setattr(text, "build_corpus", lambda fraction: Corpus(train, (Document("held", "h" * 500),)))


def test_auto_takes_documents_of_the_train_part_in_the_seeds_order(corpus):
    found = calibration_tokens(config("auto", num_samples=4, seq_len=11), Letters(), end=7)
    documents = [row for row in found.tolist()]
    assert all(row[-1] == 7 and len(set(row[:-1])) == 1 and row[0] >= 1000 for row in documents)
    assert len({row[0] for row in documents}) == 4
    other = calibration_tokens(config("auto", num_samples=4, seq_len=11, seed=1), Letters(), end=7)
    assert {row[0] for row in other.tolist()} != {row[0] for row in documents}


def test_auto_can_use_all_of_it_and_no_more(corpus):
    assert calibration_tokens(config("auto", num_samples=40, seq_len=5), Letters()).shape == (40, 5)
    with pytest.raises(ConfigError, match=r"'auto' .* has 200 tokens.*needs 205"):
        calibration_tokens(config("auto", num_samples=41, seq_len=5), Letters())


@pytest.mark.slow
def test_the_shipped_models_text_is_its_training_text():
    from moejax.checkpoint.directory import ASSETS
    from moejax.engine.requests.tokenizer import Tokenizer
    from moejax.text.corpus import HELD_OUT_FRACTION, build_corpus

    tokenizer = Tokenizer.load(ASSETS / "tiny")
    found = calibration_tokens(CalibrationConfig(), tokenizer, end=0)
    assert found.shape == (128, 256) and found.max() < 2048
    built = build_corpus(HELD_OUT_FRACTION)
    train = " ".join(" ".join(document.text.split()) for document in built.train)
    for row in found[:8]:
        for piece in tokenizer.decode(row[row != 0][8:48]).split("\n"):
            assert " ".join(piece.split()) in train
