"""Text to tokens and back, by the `tokenizers` library, with Hugging Face's chat templates (jinja2)."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HfTokenizer

from moejax.core.errors import CheckpointError, RequestError

ChatMessage = dict[str, Any]


class Tokenizer:
    """A model directory's `tokenizer.json` and chat template."""

    def __init__(self, tokenizer: HfTokenizer, settings: dict[str, Any], chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._chat_template = chat_template

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer | None":
        """Reads a directory's tokenizer; None where it has no `tokenizer.json`.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizer = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{path}: not a tokenizer ({error})") from None
        # Training settings that some files carry: they would cut or pad a prompt without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings: dict[str, Any] = {}
        settings_path = directory / "tokenizer_config.json"
        if settings_path.is_file():
            try:
                settings = json.loads(settings_path.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{settings_path}: not valid JSON ({error})") from None
            if not isinstance(settings, dict):
                raise CheckpointError(f"{settings_path}: not a JSON object")
        template_path = directory / "chat_template.jinja"
        if template_path.is_file():
            template: Any = template_path.read_text(encoding="utf-8")
        else:
            template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{settings_path}: chat_template is neither text nor a list of named texts")
        return cls(tokenizer, settings, template)

    def __repr__(self) -> str:
        template = "a chat template" if self._chat_template else "no chat template"
        return f"<Tokenizer: {self.vocab_size:,} tokens, {template}>"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns a text's token ids.

        Raises:
            RequestError: text with half a surrogate pair, which no tokenizer can read.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> str:
        """Returns it as `tokenizer.json` has it."""
        return self._tokenizer.to_str()

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        return TextStream(self._tokenizer, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the prompt text of a conversation.

        Raises:
            RequestError: the model has no template, or the template rejects the messages.
        """
        if not self._chat_template:
            raise RequestError("this model has no chat template; pass a plain prompt")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        try:
            return environment.from_string(self._chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **special, **variables
            )
        except Exception as error:  # a template runs Python's operators on whatever the messages hold
            raise RequestError(f"the chat template rejects these messages: {error}") from None


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class TextStream:
    """Text of a growing token sequence; bytes of an unfinished character are held back.

    New tokens are decoded together with the ones before them, because decoders look at neighbours (a leading
    space, a character of several bytes); what lies beyond the older ones' text is new. `DecodeStream` of
    `tokenizers` works alike, but raises where a byte-fallback decoder turns text that was given out already
    into U+FFFD, and cannot give out what it holds at the end.
    """

    def __init__(self, tokenizer: HfTokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # The tokens of the text given out last, then those that are held back.
        self._ids: list[int] = []
        self._given_ids = 0
        self._given_chars = 0

    def step(self, token: int) -> str:
        """Returns the text that `token` completes; may be empty."""
        self._ids.append(token)
        text = self._decode()
        if len(text) <= self._given_chars or text.endswith("\ufffd"):
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        """Returns the text held back, at the sequence's end: an unfinished character shows as U+FFFD."""
        return self._give_out(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def _give_out(self, text: str) -> str:
        new = text[self._given_chars :]
        self._ids = self._ids[self._given_ids :]
        self._given_ids, self._given_chars = len(self._ids), len(self._decode())
        return new
