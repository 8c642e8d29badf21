"""A server that speaks OpenAI's completions (vLLM, llama.cpp's server, SGLang, …), as its client sees it.

One streamed request each, all in one event loop of a thread of its own. What is measured includes the way to
the server and back; nothing is known of its steps, queue or memory. No JAX here.
"""

import asyncio
import importlib.metadata
import itertools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai

from moejax.bench.backends.base import Backend, BackendError
from moejax.bench.backends.chunks import Chunk, Counting, count_tokens
from moejax.bench.backends.config import BackendOptions
from moejax.core.errors import ConfigError, RequestError, unknown
from moejax.core.words import one_line
from moejax.engine.requests.api import (
    CompletionOutput,
    RequestMetrics,
    RequestOptions,
    RequestOutput,
    SamplingParams,
)

_REACH_S = 10.0
# How long `step` waits for an end: a request that is due meanwhile is sent that much late, and counted from
# when it was due.
_LOOK_S = 0.001


class OpenAIEndpoint(Backend):
    """Sends requests and takes note of when their tokens come.

    A token's instant is that of the chunk that brought it. How many a chunk brought is read from the token
    ids or the running usage that the server sends, else spread evenly over the chunks from the usage at the
    end; `describe` says which, and `itl_known` is False in the last case. Chunks are never taken for tokens.

    Raises:
        ConfigError: no key in the environment, or a model that the server does not have.
        BackendError: no server answers.
    """

    def __init__(
        self,
        name: str,
        options: BackendOptions,
        *,
        vocab_size: int,
        max_model_len: int | None,
        encode: Callable[[str], Sequence[int]] | None,
        decode: Callable[[Sequence[int]], str] | None,
        checkpoint: Path | None,
    ) -> None:
        self.name, self.batching, self.max_num_seqs = name, "server", None
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.encode, self.checkpoint, self.seed = encode, checkpoint, None
        self.on_step = None
        self._options, self._decode = options, decode
        if options.prompts == "text" and decode is None:
            raise ConfigError("backend.prompts=text needs the model's tokenizer, and its folder has none")
        key, url = _key(options), options.url
        assert url is not None  # BackendOptions.check
        self._model = _find_model(name, options, key)
        self._countings: set[Counting] = set()
        self._ids = itertools.count()
        self._live: dict[str, RequestOutput] = {}
        self._tasks: dict[str, Any] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"backend-{name}", daemon=True)
        self._thread.start()
        # A retry would be another request; the limit on connections must not become a queue of ours.
        # aiohttp takes less than half of httpx's time for each event, which would count as the server's.
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=key, max_retries=0, timeout=options.timeout_s,
            http_client=openai.DefaultAioHttpClient(limits=_limits()),
        )  # fmt: skip

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        bodies = [self._body(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        now = time.perf_counter()
        outputs = [
            self._start(prompt, body, one, now)
            for prompt, body, one in zip(prompts, bodies, params, strict=True)
        ]
        while any(output.request_id in self._live for output in outputs):
            self.step()
        failed = [output for output in outputs if output.error]
        if failed:
            raise RequestError(f"backend {self.name}: {failed[0].error}")
        return outputs

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        arrival = time.perf_counter() if arrival_time is None else arrival_time
        return self._start(prompt, self._body(prompt, params), params, arrival)

    def step(self) -> bool:
        """Waits a moment for a request to end. The server moves on by itself."""
        if not self._live:
            return False
        try:
            ended = self._ended.get(timeout=_LOOK_S)
        except queue.Empty:
            return True
        self._live.pop(ended, None)
        self._tasks.pop(ended, None)
        return True

    def abort(self, request_id: str) -> None:
        task, output = self._tasks.pop(request_id, None), self._live.pop(request_id, None)
        if task is not None:
            task.cancel()
        if output is not None and not output.finished:
            output.outputs[0].finish_reason, output.finished = "abort", True

    def _body(self, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
        self.check(params)
        text = self._options.prompts == "text" and self._decode is not None
        # Not as the package's own argument, whose token ids it would check one by one for half of its time.
        extra: dict[str, Any] = {
            "prompt": self._decode(prompt) if text and self._decode else prompt,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": True,  # vLLM
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
        }
        return {
            "model": self._model,
            "prompt": None,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "extra_body": {**extra, **self._options.options},
        }

    def _start(
        self, prompt: list[int], body: dict[str, Any], params: SamplingParams, arrival: float
    ) -> RequestOutput:
        name = str(next(self._ids))
        output = RequestOutput(name, None, prompt, [CompletionOutput(0, "", [])], RequestMetrics(arrival))
        self._live[name] = output
        self._tasks[name] = asyncio.run_coroutine_threadsafe(self._serve(output, body, params), self._loop)
        return output

    async def _serve(self, output: RequestOutput, body: dict[str, Any], params: SamplingParams) -> None:
        """One request, to its end."""
        chunks: list[Chunk] = []
        reason = None
        try:
            # Lines instead of the package's own events, which would take as long as the server's part does.
            async with self._client.completions.with_streaming_response.create(**body) as response:
                async for line in response.iter_lines():
                    now, text = time.perf_counter(), line.removeprefix("data:").strip()
                    if line.startswith("data:") and text != "[DONE]":
                        chunk, ended = _read(text, now)
                        chunks.append(chunk)
                        reason = ended or reason
            counted = count_tokens(chunks)
        except asyncio.CancelledError:
            raise
        except openai.APIConnectionError as error:  # whose own words are the same for each cause
            self._fail(output, f"{one_line(error)} ({one_line(error.__cause__ or error)})"[:300])
        except (openai.OpenAIError, RequestError) as error:
            self._fail(output, one_line(error)[:300])
        except Exception as error:
            self._fail(output, f"{type(error).__name__}: {error}")
        else:
            self._countings.add(counted.how)
            output.metrics.token_times = counted.times
            sample = output.outputs[0]
            sample.token_ids, sample.text = counted.ids, "".join(chunk.text for chunk in chunks)
            if params.ignore_eos and len(counted.times) != params.max_tokens:
                self._fail(
                    output,
                    f"the server gave {len(counted.times)} of {params.max_tokens} tokens although it was told"
                    " to ignore the end of sequence; measure with workload.ignore_eos=false",
                )
            else:
                sample.finish_reason = "length" if reason in (None, "length") else "stop"
        output.finished = True
        self._ended.put(output.request_id)

    def _fail(self, output: RequestOutput, why: str) -> None:
        output.error, output.outputs[0].finish_reason = why, "error"

    @property
    def itl_known(self) -> bool:
        """Whether every chunk said how many tokens it brought."""
        return "spread" not in self._countings

    def describe(self) -> dict[str, Any]:
        said = {
            "ids": "of its chunk, which names its tokens",
            "usage": "of its chunk, which counts the tokens so far",
            "single": "of its chunk, each of which is one token by the usage at the end",
            "spread": "spread evenly over the chunks: the server counts tokens only at the end",
        }
        return {
            "name": self.name,
            "kind": "openai_endpoint",
            "versions": {"openai": importlib.metadata.version("openai")},
            "url": self._options.url,
            "weights": self._model,
            "batching": self.batching,
            "token_instants": "; ".join(said[counting] for counting in sorted(self._countings)) or None,
        }

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for task in self._tasks.values():
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _limits() -> Any:
    """Returns the package's limits, but no connection is used again that a server may be about to close: most
    do so after five idle seconds."""
    usual = openai.DEFAULT_CONNECTION_LIMITS
    return type(usual)(max_connections=usual.max_connections, keepalive_expiry=1.0)


def _read(text: str, now: float) -> tuple[Chunk, str | None]:
    """Returns what an event says, and why the output ends where it does.

    Raises:
        RequestError: it tells of an error.
    """
    event = json.loads(text)
    if error := event.get("error"):
        raise RequestError(str(error.get("message", error) if isinstance(error, dict) else error))
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    reason, said = choice.get("finish_reason"), choice.get("text") or ""
    usage = (event.get("usage") or {}).get("completion_tokens")
    spoke = bool(choice) and bool(said or not reason)
    return Chunk(now, said, choice.get("token_ids"), usage, spoke), reason


def _key(options: BackendOptions) -> str:
    if options.api_key_env is None:
        return "none"
    key = os.environ.get(options.api_key_env)
    if not key:
        raise ConfigError(
            f"backend.api_key_env: the environment has no {options.api_key_env}; set it to the server's key"
        )
    return key


def _find_model(name: str, options: BackendOptions, key: str) -> str:
    """The model's name at the server, which is asked for its list: that also shows that it is there."""
    try:
        with openai.OpenAI(base_url=options.url, api_key=key, max_retries=0, timeout=_REACH_S) as client:
            known = [model.id for model in client.models.list().data]
    except openai.APIConnectionError as error:
        why = error.__cause__ or error
        raise BackendError(
            f"backend {name}: no server answers at {options.url} ({one_line(why)}); start one,"
            " or give its address as backend.url"
        ) from error
    except openai.OpenAIError as error:
        text = one_line(error)[:200]
        raise BackendError(f"backend {name}: {options.url} does not list its models: {text}") from error
    if options.model is None:
        if len(known) != 1:
            raise ConfigError(f"backend.model is missing: {options.url} serves {', '.join(known) or 'none'}")
        return known[0]
    if options.model not in known:
        raise ConfigError(f"backend.model: {unknown('model', options.model, known)} at {options.url}")
    return options.model
