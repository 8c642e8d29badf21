"""OpenAI's completions and chat completions: bodies in, and what answers them. No server here.

Beside OpenAI's fields a body may have those of `SamplingParams` and `RequestOptions` by their own names, as
vLLM's does, which check themselves.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moejax.core.errors import RequestError, unknown
from moejax.engine.requests.api import (
    CompletionOutput,
    Logprob,
    RequestOptions,
    RequestOutput,
    SamplingParams,
)
from moejax.engine.requests.output import StreamChunk
from moejax.engine.requests.tokenizer import Tokenizer

Body = TypeVar("Body", bound=BaseModel)
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""OpenAI's fields that change no answer here."""
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {"prompt_logprobs", "max_time_s"}
_OPTIONS = {field.name for field in dataclasses.fields(RequestOptions)} - {"tenant", "adapter"}


class StreamOptions(BaseModel):
    """What a stream tells of counts, at its end and (vLLM) in each chunk."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(BaseModel):
    """Fields that both kinds of completion have; others are `SamplingParams`', see `parameters`."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool = False

    def parameters(self, **more: Any) -> tuple[SamplingParams, RequestOptions]:
        """Returns how to sample and what the policy goes by; `more` comes on top.

        Raises:
            RequestError: a field that is not known, or a value that does not fit.
        """
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        known = _SAMPLING | _OPTIONS
        for name in given.keys() - known - {*IGNORED}:
            raise RequestError(unknown("field", name, sorted(known | type(self).model_fields.keys())))
        sampling = {name: value for name, value in given.items() if name in _SAMPLING} | more
        options = {name: value for name, value in given.items() if name in _OPTIONS}
        if (structure := _structure(self.response_format)) is not None:
            sampling["structured_outputs"] = structure
        return SamplingParams(**sampling), RequestOptions(**options)

    def choice(self, index: int, part: CompletionOutput | StreamChunk) -> dict[str, Any]:
        """Returns what choices of both kinds say of a sample, or of what a step added to it. A request whose
        time is over has reached a limit, too: "length"."""
        reason = "length" if part.finish_reason == "time" else part.finish_reason
        told = {"index": index, "finish_reason": reason, "stop_reason": part.stop_reason}
        return told | ({"token_ids": part.token_ids} if self.return_token_ids else {})


class CompletionBody(_Body):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    max_tokens: int | None = None

    @property
    def prompts(self) -> list[Any]:
        several = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]

    @property
    def scores_only(self) -> bool:
        """Whether it wants its prompt's log-probabilities and no token."""
        return self.echo and self.max_tokens == 0

    def to_sampling(self) -> tuple[SamplingParams, RequestOptions]:
        """See `parameters`."""
        prompt = self.logprobs if self.echo else None
        if self.echo and self.stream:
            raise RequestError("echo does not go with stream: prompts' log-probabilities come at once")
        tokens = {} if self.max_tokens is None else {"max_tokens": 1 if self.scores_only else self.max_tokens}
        return self.parameters(logprobs=self.logprobs, prompt_logprobs=prompt, **tokens)


class Message(BaseModel):
    """A turn of a conversation; content in parts must be text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str | list[dict[str, Any]]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Returns what templates take."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        texts = []
        for part in self.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    "messages: content has a part that is no text; this model reads text alone"
                )
            texts.append(part["text"])
        return {"role": self.role, "content": "".join(texts)}


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    def to_sampling(self, room: int) -> tuple[SamplingParams, RequestOptions]:
        """See `parameters`; without a limit an answer may take all the room that there is."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true")
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return self.parameters(
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=min([*limits, max(1, room)]),
        )


class TokenizeBody(BaseModel):
    """`POST /tokenize`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    tokens: list[int]


def parse(kind: type[Body], body: bytes) -> Body:
    """Returns a body that was checked; raises `RequestError` with the first fault, in one line."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        raise RequestError(f"{where or 'body'}: {first['msg']}"[:300]) from None


def _structure(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns `structured_outputs` for OpenAI's `response_format`."""
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        schema = (wanted.get("json_schema") or {}).get("schema")
        if isinstance(schema, dict):
            return {"json": schema}
        raise RequestError("response_format.json_schema.schema must be a JSON schema")
    raise RequestError(
        f"response_format: {unknown('type', str(kind), ('text', 'json_object', 'json_schema'))}"
    )


# -- answers ---------------------------------------------------------------------------------------------


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Returns counts of tokens, of prompts and of all samples so far."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    done = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    cached = sum(output.metrics.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": done,
        "total_tokens": prompt + done,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Speller:
    """Writes tokens one by one, as answers' log-probabilities name them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._known = tokenizer, dict[int, str]()

    def __call__(self, token: int) -> str:
        """Returns a token's text, special ones included; "token_id:N" where it has none of its own."""
        if token not in self._known:
            text = "" if self._tokenizer is None else self._tokenizer.stream(False).step(token)
            self._known[token] = text or f"token_id:{token}"
        return self._known[token]

    def completion(
        self, tokens: Sequence[int], entries: Sequence[Logprob | None], offset: int = 0
    ) -> dict[str, list[Any]]:
        """Returns the lists of `/v1/completions`; `offset` is the first token's in the text."""
        names, offsets = [self(token) for token in tokens], []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry is None else {name: entry.logprob} | {self(t): x for t, x in entry.top.items()}
                for name, entry in zip(names, entries, strict=True)
            ],
            "text_offset": offsets,
        }

    def chat(self, tokens: Sequence[int], entries: Sequence[Logprob]) -> dict[str, list[Any]]:
        """Returns the list of `/v1/chat/completions`."""

        def told(token: int, logprob: float) -> dict[str, Any]:
            name = self(token)
            return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

        rows = []
        for token, entry in zip(tokens, entries, strict=True):
            top = [told(other, x) for other, x in entry.top.items()]
            rows.append({**told(token, entry.logprob), "top_logprobs": top})
        return {"content": rows}


def completion_choice(
    body: CompletionBody, output: RequestOutput, sample: CompletionOutput, index: int, spell: Speller,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:  # fmt: skip
    """Returns a choice of `/v1/completions`, with the prompt before it where `echo` asks for that."""
    if body.scores_only:
        sample = CompletionOutput(sample.index, "", [], finish_reason="length")
    tokens, text, entries = list(sample.token_ids), sample.text, list[Logprob | None](sample.logprobs or [])
    choice = body.choice(index, sample)
    if body.echo:
        text = (decode(output.prompt_token_ids) if output.prompt is None else output.prompt) + text
        tokens, entries = [*output.prompt_token_ids, *tokens], [*(output.prompt_logprobs or []), *entries]
    told = None if body.logprobs is None else spell.completion(tokens, entries)
    if body.return_token_ids:
        choice |= {"prompt_token_ids": output.prompt_token_ids}
    return choice | {"text": text, "logprobs": told}


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(data: dict[str, Any] | str) -> bytes:
    """Returns a server-sent event."""
    text = data if isinstance(data, str) else _JSON.encode(data)
    return f"data: {text}\n\n".encode("utf-8", "replace")
