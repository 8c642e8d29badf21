"""Chat templates: what a conversation is written out as, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from moejax.core.errors import CheckpointError, RequestError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.tokenizer import Tokenizer
from tests.engine.tiny import CHATML, SPECIALS, byte_level_tokenizer

USER = [{"role": "user", "content": "hi"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Tokenizer]:
    """A tokenizer with the given template and settings."""

    def make(template: Any, **settings: Any) -> Tokenizer:
        byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
        text = json.dumps({"chat_template": template, **settings})
        (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        return tokenizer

    return make


def test_every_role_is_written_out(llm: LLM) -> None:
    assert llm.tokenizer is not None
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "naïve 🙂?"},
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": "{}"},
    ]
    want = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nnaïve 🙂?<|im_end|>\n"
        "<|im_start|>assistant\ncalling<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert llm.tokenizer.apply_chat_template(messages) == want
    bare = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert bare == want.removesuffix("<|im_start|>assistant\n")


def test_chat_generates_from_the_templates_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == llm.tokenizer.encode(SPECIALS[1])[0]
    (out,) = llm.chat(USER, GREEDY)
    assert out.prompt_token_ids == ids
    assert out.outputs[0].token_ids == llm.generate([ids], GREEDY)[0].outputs[0].token_ids


def test_the_templates_special_tokens_are_not_added_twice(
    load: Callable[..., Tokenizer], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that puts a token in front of a plain prompt does not do so to a conversation."""
    tokenizer = load(CHATML)
    first = tokenizer._tokenizer.token_to_id(SPECIALS[0])
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], first)]
    )
    monkeypatch.setattr(llm.builder, "tokenizer", tokenizer)
    (plain,) = llm.generate("hi", GREEDY)
    (chat,) = llm.chat(USER, GREEDY)
    assert plain.prompt_token_ids[0] == first
    assert first not in chat.prompt_token_ids


def test_several_conversations(llm: LLM) -> None:
    outs = llm.chat([USER, [{"role": "system", "content": "x"}, *USER], tuple(USER)], [GREEDY] * 3)
    assert len(outs) == 3
    assert outs[0].prompt_token_ids == outs[2].prompt_token_ids
    assert len(outs[1].prompt_token_ids) > len(outs[0].prompt_token_ids)


def test_the_templates_own_refusal_is_the_error(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat([{"role": "wizard", "content": "hi"}])
    assert str(caught.value) == "the chat template rejects these messages: unknown role wizard"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (CHATML, [{"role": "user", "content": None}], "rejects these messages: "),
        (CHATML, [{"content": "hi"}], "rejects these messages: "),
        ("{{ messages[9].content + 'x' }}", USER, "rejects these messages: "),
        ("{{ 1 / 0 }}", USER, "rejects these messages: division by zero"),
        ("{% for %}", USER, "rejects these messages: "),
        ("{{ messages.append(1) }}", USER, "rejects these messages: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", USER, "rejects these messages: "),
    ],
)
def test_whatever_a_template_raises_is_one_request_error(
    template: str, messages: list[Any], says: str, load: Callable[..., Tokenizer]
) -> None:
    """Also a template that tries to leave its sandbox."""
    with pytest.raises(RequestError) as caught:
        load(template).apply_chat_template(messages)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [None, ""])
def test_no_template(template: Any, load: Callable[..., Tokenizer]) -> None:
    with pytest.raises(RequestError, match="no chat template; pass a plain prompt"):
        load(template).apply_chat_template(USER)


def test_what_a_template_sees(load: Callable[..., Tokenizer]) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ tools | tojson }}|{% for m in messages %}{% if loop.index > 1 %}"
        "{% break %}{% endif %}{{ m.content }}{% endfor %}\n  {% if true %}x{% endif %}\n"
        "|{{ strftime_now('%Y')|length }}"
    )
    tokenizer = load(template, bos_token="<b>", eos_token={"content": "<e>"}, model_max_length=9)
    text = tokenizer.apply_chat_template([*USER, *USER], tools=[{"name": "é"}])
    # A newline after a block, and spaces before one, are the template's own layout.
    assert text == '<b>|<e>|[{"name": "é"}]|hix|4'


def test_named_templates_and_the_template_file(load: Callable[..., Tokenizer], tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load(named).apply_chat_template(USER) == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert load(named).apply_chat_template(USER) == "from the file"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", b"{", "not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "not a tokenizer"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"\xff\xfe", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
        (
            "tokenizer_config.json",
            b'{"chat_template": 5}',
            "chat_template is neither text nor a list of named",
        ),
    ],
)
def test_damaged_files(
    name: str, content: bytes, says: str, load: Callable[..., Tokenizer], tmp_path: Path
) -> None:
    load(CHATML)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert name in str(caught.value) and says in str(caught.value) and "\n" not in str(caught.value)
