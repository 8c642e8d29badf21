"""Text as it grows: characters split over tokens, stop strings split over chunks, and why a sample ended."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from moejax.core.errors import RequestError
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.builder import end_tokens
from moejax.engine.requests.output import OutputProcessor, StreamChunk
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.engine.scheduling.sequence import Sequence, end_reason
from tests.engine.tiny import (
    PROPERTY,
    SPECIALS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
)

EOS = 0
BYTES = byte_level_tokenizer()
FALLBACK = byte_fallback_tokenizer()
WIDE = st.text(st.sampled_from("ab é½你🙂\u200d\n"), max_size=12)


def wrap(tokenizer: HfTokenizer) -> Tokenizer:
    return Tokenizer(tokenizer, {}, None)


def feed(
    tokens: list[int],
    params: SamplingParams,
    *,
    tokenizer: HfTokenizer | None = BYTES,
    max_tokens: int = 1000,
) -> tuple[OutputProcessor, list[StreamChunk]]:
    """Adds tokens, judged as the scheduler does, until they run out or the sample ends."""
    builder = OutputProcessor(0, params, wrap(tokenizer) if tokenizer else None)
    sample = Sequence([], 0, params, max_tokens, order=0, stop_ids=end_tokens(params, (EOS,)))
    chunks = []
    for token in tokens:
        sample.tokens.append(token)
        chunks.append(builder.add(token, None, end_reason(sample)))
        if builder.finished:
            break
    return builder, chunks


def ids(text: str, tokenizer: HfTokenizer = BYTES) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def one_by_one(text: str) -> list[int]:
    """Byte by byte, hence a character of two bytes in two tokens."""
    return [token for byte in text.encode() for token in byte_token(byte)]


def byte_token(byte: int) -> list[int]:
    # The alphabet's tokens follow the special ones in the order of their printable stand-ins.
    return [BYTES.token_to_id(_STAND_INS[byte])]


def _stand_ins() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(256 + i) for i, byte in enumerate(others)}


_STAND_INS = _stand_ins()


# -- text ----------------------------------------------------------------------------------------------


@PROPERTY
@given(WIDE)
def test_split_characters_come_out_whole(text: str) -> None:
    builder, chunks = feed([*one_by_one(text), EOS], SamplingParams())
    assert builder.output.text == text
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)


@PROPERTY
@given(st.lists(st.integers(1, BYTES.get_vocab_size() + 5), min_size=1, max_size=24), st.booleans())
def test_any_tokens_give_the_text_of_a_whole_decode(tokens: list[int], eos: bool) -> None:
    """Also where bytes make no character, with special tokens, and with ids that have no token."""
    builder, chunks = feed(tokens + [EOS] * eos, SamplingParams(), max_tokens=len(tokens) + eos)
    assert builder.output.text == BYTES.decode(tokens)
    assert "".join(chunk.text for chunk in chunks) == builder.output.text
    assert builder.output.finish_reason == ("stop" if eos else "length")


@PROPERTY
@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1), min_size=1, max_size=24))
def test_byte_fallback_never_fails(tokens: list[int]) -> None:
    """Its decoder turns a run's text, given out already, into U+FFFD when a bad byte follows the run."""
    builder, chunks = feed(
        tokens, SamplingParams(ignore_eos=True), tokenizer=FALLBACK, max_tokens=len(tokens)
    )
    text, whole = builder.output.text, FALLBACK.decode(tokens)
    assert "".join(chunk.text for chunk in chunks) == text
    rest = iter(text)
    assert all(character in rest for character in whole if character != "\ufffd"), "lost or out of order"


@PROPERTY
@given(WIDE)
def test_byte_fallback_text_comes_out_whole(text: str) -> None:
    tokens = ids(text, FALLBACK)
    builder, _ = feed([*tokens, 2], SamplingParams(stop_token_ids=[2]), tokenizer=FALLBACK)
    assert builder.output.text == FALLBACK.decode(tokens)


def test_an_unfinished_character_shows_only_at_the_end() -> None:
    tokens = one_by_one("a🙂")[:-1]
    builder, chunks = feed(tokens, SamplingParams(), max_tokens=len(tokens))
    assert [chunk.text for chunk in chunks] == ["a", "", "", "\ufffd"]
    assert builder.output.text == BYTES.decode(tokens)
    for last in (EOS, BYTES.token_to_id(SPECIALS[1])):
        builder, _ = feed([*tokens, last], SamplingParams(stop_token_ids=[last]))
        assert builder.output.text == "a\ufffd"


def test_without_a_tokenizer_there_is_no_text() -> None:
    builder, chunks = feed([5, 6, EOS], SamplingParams(), tokenizer=None)
    assert builder.output.text == "" and builder.output.token_ids == [5, 6, EOS]
    assert [chunk.token_ids for chunk in chunks] == [[5], [6], [EOS]]


# -- stop strings --------------------------------------------------------------------------------------


def cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """What is left of `text`: it ends where the first stop string is complete (the longest, if several)."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


# Pieces that are tokens of several characters, so that a stop string may lie inside one, or several in it.
PIECES = st.lists(st.sampled_from([" experts", " router", "tokens", "é", "s", "er", " "]), max_size=5).map(
    "".join
)
STOPS = st.sampled_from(["e", "r", "er", "ert", "ter", "rts", "rs", "s e", "é", "xp", "oute", "tokensé", "q"])


@settings(PROPERTY, max_examples=400)
@given(PIECES, st.lists(STOPS, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_stop_strings(text: str, stops: list[str], include: bool, split: bool) -> None:
    """The same cut however the text falls into tokens, and nothing streamed that is cut off later."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    tokens = [*(one_by_one(text) if split else ids(text)), EOS]
    builder, chunks = feed(tokens, params)
    want, stop = cut(text, tuple(stops), include)
    assert builder.output.text == want
    assert "".join(chunk.text for chunk in chunks) == want
    assert (builder.output.finish_reason, builder.output.stop_reason) == ("stop", stop)


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    for stops in (["r", "er"], ["er", "r"]):
        for tokens in (ids("er"), one_by_one("er")):
            builder, _ = feed(tokens, SamplingParams(stop=stops))
            assert (builder.output.text, builder.output.stop_reason) == ("", "er")


def test_a_stop_string_over_several_tokens_is_held_back() -> None:
    builder, chunks = feed(one_by_one("one END two"), SamplingParams(stop=["END"]))
    assert builder.output.text == "one " and builder.output.stop_reason == "END"
    assert builder.output.token_ids == one_by_one("one END")
    for i in range(len(chunks)):
        assert "one ".startswith("".join(chunk.text for chunk in chunks[:i]))


def test_held_text_comes_out_when_the_stop_string_does_not() -> None:
    builder, chunks = feed(one_by_one("one EN"), SamplingParams(stop=["END"]), max_tokens=6)
    assert builder.output.text == "one EN" and builder.output.finish_reason == "length"
    assert chunks[-1].text.endswith("EN")


def test_a_stop_string_completed_by_the_last_token_stops() -> None:
    builder, _ = feed(one_by_one("ab"), SamplingParams(stop=["b"]), max_tokens=2)
    assert (builder.output.text, builder.output.finish_reason) == ("a", "stop")


# -- ends ----------------------------------------------------------------------------------------------


def test_ends() -> None:
    a, b = one_by_one("ab")
    cases = {
        "eos": (SamplingParams(), [a, EOS, b], "a", 2, "stop", None),
        "ignore_eos": (SamplingParams(ignore_eos=True), [a, EOS, b], "ab", 3, "length", None),
        "stop token": (SamplingParams(stop_token_ids=[b]), [a, b, a], "a", 2, "stop", b),
        "stop token over ignore_eos": (
            SamplingParams(stop_token_ids=[EOS], ignore_eos=True), [a, EOS, b], "a", 2, "stop", EOS,
        ),
        "max_tokens": (SamplingParams(), [a, a, a], "aaa", 3, "length", None),
        "eos is the last token": (SamplingParams(), [a, a, EOS], "aa", 3, "stop", None),
    }  # fmt: skip
    for name, (params, tokens, text, count, reason, stop) in cases.items():
        builder, chunks = feed(tokens, params, max_tokens=3)
        out = builder.output
        assert (out.text, len(out.token_ids)) == (text, count), name
        assert (out.finish_reason, out.stop_reason) == (reason, stop), name
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (reason, stop), name
        assert all(chunk.finish_reason is None for chunk in chunks[:-1]), name


def test_abort_keeps_what_was_generated_even_if_held() -> None:
    builder, _ = feed([*one_by_one("xE"), *one_by_one("é")[:1]], SamplingParams(stop=["END"]))
    assert not builder.finished
    builder.abort()
    assert builder.output.text == "xE\ufffd" and builder.output.finish_reason == "abort"


# -- the tokenizer's files -----------------------------------------------------------------------------


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    text = "the router sends each token to a few experts"
    assert loaded.encode(text) == ids(text)
    assert loaded.decode(loaded.encode(text)) == text


def test_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("special", SPECIALS)
def test_special_tokens_are_known_but_not_shown(special: str) -> None:
    tokenizer = wrap(BYTES)
    token = BYTES.token_to_id(special)
    assert token is not None and tokenizer.encode(f"a{special}") == [*ids("a"), token]
    assert tokenizer.decode([*ids("a"), token]) == "a"
    assert tokenizer.vocab_size == BYTES.get_vocab_size()


def test_special_tokens_are_shown_where_asked_for() -> None:
    tokens = [*ids("a"), *[BYTES.token_to_id(special) for special in SPECIALS[1:]], *ids("b")]
    shown, chunks = feed(tokens, SamplingParams(skip_special_tokens=False))
    assert shown.output.text == "".join(chunk.text for chunk in chunks) == f"a{''.join(SPECIALS[1:])}b"
    assert feed(tokens, SamplingParams())[0].output.text == "ab"


def test_outputs_without_a_text() -> None:
    builder, chunks = feed([*one_by_one("ab"), EOS], SamplingParams(detokenize=False))
    assert builder.output.text == "" == "".join(chunk.text for chunk in chunks)
    assert builder.output.token_ids == [*one_by_one("ab"), EOS] and builder.output.finish_reason == "stop"
    with pytest.raises(RequestError, match="stop is sought in the text"):
        SamplingParams(stop=["a"], detokenize=False)
