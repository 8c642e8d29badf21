"""The corpus: what is read, what is left out, and that nothing leaks from the held-out part."""

import sysconfig
from pathlib import Path

import pytest

from moejax.core.errors import ConfigError
from moejax.text.corpus import (
    _BLANK_LINE,
    MIN_REPEATED,
    Corpus,
    Document,
    build_corpus,
    characters,
    collect,
    name_hash,
)
from moejax.train.data import HELD_OUT_CHARACTERS, sample_of

FILLER = "This sentence is long enough to count as a paragraph of prose for anyone who reads it. "


def _library(folder: Path, files: dict[str, str], topics: dict[str, str] | None = None) -> Path:
    """A standard library of our own."""
    topics = (
        {"if": "The if statement is used for conditional execution of code. " * 5}
        if topics is None
        else topics
    )
    for name, text in {"pydoc_data/topics.py": f"topics = {topics!r}\n", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def _text_of(folder: Path, name: str) -> str:
    return next(document.text for document in collect(folder) if document.name == name)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_corpus(0.05)


def _paragraphs(documents: tuple[Document, ...]) -> set[str]:
    split = (" ".join(part.split()) for document in documents for part in _BLANK_LINE.split(document.text))
    return {paragraph for paragraph in split if len(paragraph) >= MIN_REPEATED}


def test_no_long_paragraph_is_in_both_parts(corpus: Corpus) -> None:
    train, held_out = _paragraphs(corpus.train), _paragraphs(corpus.held_out)
    assert len(train) > 5000 and len(held_out) > 100
    assert not train & held_out
    assert not {d.name for d in corpus.train} & {d.name for d in corpus.held_out}


def test_the_running_python_has_text_enough(corpus: Corpus) -> None:
    assert characters(corpus.train) > 1_500_000
    assert any(document.name.startswith("topic:") for document in corpus.train)
    assert not any("site-packages" in d.name or ".test." in d.name for d in (*corpus.train, *corpus.held_out))
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.02 < share < 0.08


def test_the_library_in_use_is_read_and_no_other(corpus: Corpus) -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    for document in (*corpus.train, *corpus.held_out):
        kind, _, name = document.name.partition(":")
        if kind == "module":
            path = stdlib.joinpath(*name.split("."))
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name


def test_the_same_library_gives_the_same_split(tmp_path: Path) -> None:
    files = {f"module{i}.py": f'"""Module {i}. {FILLER * 3}"""\n' for i in range(40)}
    first = build_corpus(0.3, _library(tmp_path / "a", files))
    second = build_corpus(0.3, _library(tmp_path / "b", dict(reversed(files.items()))))
    assert first == second
    assert all(name_hash(d.name) < 0.3 for d in first.held_out)
    assert all(name_hash(d.name) >= 0.3 for d in first.train)


def test_a_new_module_moves_no_document(tmp_path: Path) -> None:
    files = {f"module{i}.py": f'"""Module {i}. {FILLER * 3}"""\n' for i in range(40)}
    before = build_corpus(0.3, _library(tmp_path / "a", files))
    after = build_corpus(0.3, _library(tmp_path / "b", {**files, "new.py": f'"""New. {FILLER * 3}"""\n'}))
    assert set(before.held_out) <= set(after.held_out) and set(before.train) <= set(after.train)


def test_sources_are_read_and_never_imported(tmp_path: Path) -> None:
    source = f'"""Doc of the module. {FILLER * 3}"""\nraise SystemExit("imported!")\nBAD = "\\d"\n'
    assert "Doc of the module." in _text_of(_library(tmp_path, {"danger.py": source}), "module:danger")


def test_docstrings_stand_under_their_objects_name_in_source_order(tmp_path: Path) -> None:
    source = (
        f'"""{FILLER * 2}"""\n'
        "class Queue:\n"
        '    """Holds items until somebody asks for them."""\n'
        "    def put(self, item):\n"
        '        """Put an item into the queue at its end."""\n'
        "    # A comment block that explains why the thing above is as it is, at some length,\n"
        "    # over two lines.\n"
        'TEXT = """\n# This is not a comment but the inside of a string, however long it may become.\n"""\n'
    )
    text = _text_of(_library(tmp_path, {"queues.py": source}), "module:queues")
    order = [
        "queues\n\nThis sentence",
        "queues.Queue\n\nHolds",
        "queues.Queue.put(item)\n\nPut",
        "A comment block",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "inside of a string" not in text


def test_left_out_are_tests_third_parties_code_and_addresses(tmp_path: Path) -> None:
    doc = f'"""{{}} {FILLER * 3}"""\n'
    files = {
        "site-packages/other.py": doc.format("Third party."),
        "test/test_it.py": doc.format("A test."),
        "pkg/tests/more.py": doc.format("Another test."),
        "_sysconfigdata_x.py": doc.format("Build data."),
        "kept.py": f'"""Kept. {FILLER * 3}\n\nWritten by A. Body <a.body@example.org> in winter.\n"""\n',
        "table.py": '"""' + "0x00 | 0x01 | 0x02 | 0x03\n" * 20 + '"""\n',
        "broken.py": "def (:\n",
    }
    documents = {d.name: d.text for d in collect(_library(tmp_path, files))}
    assert set(documents) == {"topic:if", "module:kept"}
    assert "example.org" not in documents["module:kept"]


def test_a_paragraph_is_kept_once(tmp_path: Path) -> None:
    shared = "Execution of the suite of statements is repeated for as long as the expression is true. " * 3
    topics = {
        "while": shared,
        "compound": f"{shared}\n\nAnd there is more to say about other statements. {FILLER}",
    }
    documents = collect(_library(tmp_path, {"a.py": f'"""{FILLER * 3}"""\n'}, topics))
    assert [d.name for d in documents] == ["topic:compound", "module:a"]


def test_no_library_in_source_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="help topics"):
        collect(tmp_path)
    with pytest.raises(ConfigError, match="no Python source"):
        collect(_library(tmp_path, {}))


def test_an_empty_part_is_said(tmp_path: Path) -> None:
    folder = _library(tmp_path, {"a.py": f'"""{FILLER * 3}"""\n'})
    with pytest.raises(ConfigError, match=r"=0\.001 leaves 2 documents to train on and 0 held out"):
        build_corpus(0.001, folder)


def test_the_sample_is_whole_documents(corpus: Corpus) -> None:
    sample = sample_of(corpus.held_out)
    assert set(sample) <= set(corpus.held_out)
    assert 0 < characters(sample) <= HELD_OUT_CHARACTERS
    assert sample_of([Document("module:long", "x" * (HELD_OUT_CHARACTERS + 1))])
