"""`LLM`: the public way to generate from and score with a model."""

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

from moejax.checkpoint.hf import load_config, load_pretrained, read_json, resolve_model_dir
from moejax.core.config import EngineConfig, ExpertLayout, ModelConfig, ParallelConfig, QuantConfig
from moejax.core.errors import CheckpointError, ConfigError, RequestError
from moejax.core.resolve import Resolution, resolve_dtype, resolve_platform
from moejax.engine.contiguous import ContiguousEngine, Row
from moejax.engine.ledger import CompileLedger, enable_compile_cache
from moejax.engine.output import SampleBuilder, StreamChunk
from moejax.engine.request import RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.tokenizer import ChatMessage, Tokenizer
from moejax.models.decoder import Decoder
from moejax.models.registry import config_from_hf
from moejax.nn.activation import activation
from moejax.ops.dispatch import choose_expert_layout, choose_grouped_matmul

Prompt = str | Sequence[int] | np.ndarray
# Scoring pads a call's sequences to its longest; this many tokens go through the model at a time.
MAX_SCORE_TOKENS = 8192


class LLM:
    """A model ready to generate.

    Args:
        model: a shipped model's name, a Hugging Face directory, or (with `load_format="dummy"`) a
            `config.json` as a dictionary or a `ModelConfig`.
        dtype: "auto" (float32 on CPU, the checkpoint's own elsewhere), "float32", "bfloat16", "float16".
        parallel, quant: only the defaults are built so far; anything else raises.
        engine: limits and choices, see `EngineConfig`.
        seed: where the random streams of requests without a seed of their own, and dummy weights, start.
        load_format: "auto" reads safetensors, "dummy" fills weights at random from the configuration alone.

    Raises:
        ConfigError, CheckpointError, DeviceError: one line each, see `moejax.core.errors`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig,
        *,
        dtype: str = "auto",
        parallel: ParallelConfig | None = None,
        engine: EngineConfig | None = None,
        quant: QuantConfig | None = None,
        seed: int = 0,
        load_format: Literal["auto", "dummy"] = "auto",
    ) -> None:
        if load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
        self.parallel_config = _given("parallel", parallel, ParallelConfig)
        self.quant_config = _given("quant", quant, QuantConfig)
        self.engine_config = _given("engine", engine, EngineConfig)
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            raise ConfigError(f"seed must be an integer, got {seed!r}")
        self.seed = int(seed)
        platform = resolve_platform(self.engine_config.platform)
        if self.engine_config.compile_cache:
            enable_compile_cache(default_cache_dir())
        self.model_dir, config = _find_model(model, load_format)
        activation(config.hidden_act)  # an unknown one raises here, not when the first step is compiled
        resolved = resolve_dtype(dtype, config.dtype, platform.value)
        product = choose_grouped_matmul(self.engine_config.moe.grouped_matmul, platform.value)
        layout = choose_expert_layout(self.engine_config.moe.expert_layout, platform.value)
        self.resolutions = [
            platform,
            resolved,
            Resolution("engine.moe.grouped_matmul", *product),
            Resolution("engine.moe.expert_layout", *layout),
        ]
        moe = dataclasses.replace(self.engine_config.moe, expert_layout=cast(ExpertLayout, layout.value))
        self.max_model_len = self._longest(config)
        if load_format == "dummy":
            config = config.replace(dtype=resolved.value)
            self.model = Decoder(config, moe=moe, seed=seed)
        else:
            assert self.model_dir is not None
            self.model, config = load_pretrained(self.model_dir, dtype=resolved.value, moe=moe)
        self.config = config
        self.tokenizer = Tokenizer.load(self.model_dir) if self.model_dir else None
        self.eos_token_ids = _eos_token_ids(config, self.model_dir)
        self.ledger = CompileLedger()
        self.engine = ContiguousEngine(self.model, self.ledger)
        self._request_ids = itertools.count()

    # -- generation ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        record_routing: bool = False,
    ) -> list[RequestOutput]:
        """Completes each prompt; outputs come in the prompts' order.

        Args:
            prompts: text, token ids, or a list of either.
            sampling_params: one for all, or one a prompt.
            record_routing: add each step's expert counts to `routing_counts`.

        Raises:
            RequestError: an empty prompt, one over the limit, a token id out of range, or text where the
                model has no tokenizer. All prompts are checked before any is run.
        """
        requests = self._requests(_as_list(prompts), sampling_params)
        for _ in self._run(requests, record_routing):
            pass
        return [request.output for request in requests]

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Yields what each step adds, for one prompt; with n > 1 the samples' chunks alternate.

        The prompt is checked at the call, not at the first chunk.
        """
        requests = self._requests([prompt], sampling_params)
        return self._run(requests, False)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or several, written out by the model's chat template."""
        prompts: list[Prompt] = [self.chat_prompt(c) for c in _conversations(messages)]
        return self.generate(prompts, sampling_params)

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation's token ids by the model's chat template.

        Raises:
            RequestError: no tokenizer or template, or messages that the template rejects.
        """
        tokenizer = self._need_tokenizer()
        # The template writes the special tokens itself.
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)

    def score(self, sequences: Sequence[Prompt]) -> list[np.ndarray]:
        """float32 arrays of length n - 1: log p(token t | tokens < t) for each sequence of n tokens.

        Raises:
            RequestError: as for `generate`, or a sequence of fewer than two tokens.
        """
        ids = [
            self._token_ids(sequence, f"sequence {i}")[1] for i, sequence in enumerate(_as_list(sequences))
        ]
        for i, sequence in enumerate(ids):
            if len(sequence) < 2:
                raise RequestError(f"sequence {i} has one token; scoring needs at least 2")
            if len(sequence) > self.max_model_len:
                raise RequestError(
                    f"sequence {i} has {len(sequence)} tokens, over the limit of {self.max_model_len}"
                )
        scores: list[np.ndarray] = []
        per_call = max(1, MAX_SCORE_TOKENS // max(map(len, ids), default=1))
        for start in range(0, len(ids), per_call):
            scores += self.engine.score(ids[start : start + per_call])
        return scores

    @property
    def routing_counts(self) -> dict[str, np.ndarray]:
        """int64 `[L, E]` for "prefill" and "decode": assignments per layer and expert that were recorded."""
        return self.engine.routing_counts

    # -- inside ----------------------------------------------------------------------------------------

    def _longest(self, config: ModelConfig) -> int:
        """The limit on prompt and output together, before any weight is read."""
        asked, own = self.engine_config.max_model_len, config.max_position_embeddings
        if asked is not None and asked > own and config.rope.kind != "dynamic":
            raise ConfigError(
                f"engine.max_model_len={asked} exceeds the model's max_position_embeddings {own}"
            )
        return asked or own

    def _run(self, requests: "Sequence[_Request]", record_routing: bool) -> Iterator[StreamChunk]:
        """Runs the requests' samples in batches of at most `max_num_seqs` and fills their outputs."""
        samples = [(request, builder) for request in requests for builder in request.samples]
        limit = self.engine_config.max_num_seqs
        try:
            for start in range(0, len(samples), limit):
                yield from self._run_batch(samples[start : start + limit], record_routing)
        finally:
            # A stream that its caller leaves early ends with what it has.
            for request, builder in samples:
                if not builder.finished:
                    builder.abort()
                request.output.finished = True

    def _run_batch(
        self, samples: "Sequence[tuple[_Request, SampleBuilder]]", record_routing: bool
    ) -> Iterator[StreamChunk]:
        rows = [request.row(builder.output.index) for request, builder in samples]
        for steps, ended in self.engine.run(rows, record_routing=record_routing):
            now = time.perf_counter()
            for step in steps:
                request, builder = samples[step.row]
                if builder.output.index == 0:
                    request.output.metrics.token_times.append(now)
                chunk = builder.add(step.token, step.logprob)
                if builder.finished:
                    ended.add(step.row)
                yield chunk

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> "list[_Request]":
        params = self._params_list(sampling_params, len(prompts))
        arrival = time.perf_counter()
        requests = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            text, ids = self._token_ids(prompt, f"prompt {i}")
            if len(ids) >= self.max_model_len:
                raise RequestError(
                    f"prompt {i} has {len(ids)} tokens; with at least one to generate that is over the limit "
                    f"of {self.max_model_len} (engine.max_model_len)"
                )
            if p.stop and self.tokenizer is None:
                raise RequestError(
                    "stop strings need a tokenizer, and this model has none; use stop_token_ids"
                )
            if p.stop_token_ids and max(p.stop_token_ids) >= self.config.vocab_size:
                raise RequestError(
                    f"prompt {i}: stop_token_ids has {max(p.stop_token_ids)}, out of range; the vocabulary "
                    f"is 0..{self.config.vocab_size - 1}"
                )
            # The request's place in the call seeds it, so that it draws the same whatever runs beside it.
            seed = p.seed if p.seed is not None else (self.seed * 1_000_003 + i * 1_009) % 2**32
            requests.append(_Request(self, next(self._request_ids), text, ids, p, seed, arrival))
        return requests

    def _params_list(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if not isinstance(params, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in params):
            raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {params!r}")
        if len(params) != count:
            raise RequestError(
                f"{len(params)} sampling_params for {count} prompts; pass one, or one a prompt"
            )
        return list(params)

    def _token_ids(self, prompt: Prompt, name: str) -> tuple[str | None, list[int]]:
        """A prompt's text, where it is text, and its checked token ids."""
        text = None
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(f"{name} is empty")
            text, prompt = prompt, self._need_tokenizer().encode(prompt)
        ids = _flat_ids(prompt)
        if ids is None:
            raise RequestError(f"{name} must be text or a flat list of token ids")
        if not ids:
            raise RequestError(f"{name} is empty")
        strange = next((token for token in ids if not 0 <= token < self.config.vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"{name}: token id {strange} out of range; the vocabulary is 0..{self.config.vocab_size - 1}"
            )
        return text, ids

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer.json; pass token ids instead of text")
        return self.tokenizer


class _Request:
    """A request with the builders of its samples."""

    def __init__(
        self,
        llm: LLM,
        number: int,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        seed: int,
        arrival: float,
    ) -> None:
        self.params, self.ids, self.seed = params, ids, seed
        self.max_tokens = min(params.max_tokens, llm.max_model_len - len(ids))
        eos = llm.eos_token_ids
        self.samples = [
            SampleBuilder(i, params, llm.tokenizer, eos, self.max_tokens) for i in range(params.n)
        ]
        outputs = [builder.output for builder in self.samples]
        self.output = RequestOutput(str(number), text, ids, outputs, RequestMetrics(arrival))

    def row(self, sample: int) -> Row:
        return Row(self.ids, self.params, self.seed + sample, self.max_tokens)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several → a list of prompts.

    Raises:
        RequestError: nothing was given.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (np.ndarray, jax.Array)) and prompts.ndim == 1:
        return [np.asarray(prompts)]
    try:
        items = None if isinstance(prompts, (bytes, Mapping)) else list(prompts)
    except TypeError:
        items = None
    if items is None:
        raise RequestError(f"prompts must be text, token ids or a list of either, got {prompts!r}")
    if not items:
        raise RequestError("no prompt given")
    return [items] if isinstance(items[0], (int, np.integer)) else items


def _flat_ids(prompt: Any) -> list[int] | None:
    """The integers of a list or array of them; None for anything else, bools and floats included."""
    if isinstance(prompt, (np.ndarray, jax.Array)):
        array = np.asarray(prompt)
        whole = array.ndim == 1 and (np.issubdtype(array.dtype, np.integer) or not array.size)
        return array.tolist() if whole else None
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        return None
    whole = all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt)
    return [int(token) for token in prompt] if whole else None


def _conversations(messages: Any) -> list[list[ChatMessage]]:
    """One conversation or several → a list of conversations.

    Raises:
        RequestError: something else was given.
    """
    several = isinstance(messages, (list, tuple)) and not any(isinstance(m, Mapping) for m in messages)
    conversations = list(messages) if several else [messages]
    for conversation in conversations:
        whole = isinstance(conversation, (list, tuple)) and all(isinstance(m, Mapping) for m in conversation)
        if not whole or not conversation:
            raise RequestError(
                "chat needs a list of messages such as {'role': 'user', 'content': '...'}, or several such "
                f"lists, got {conversation!r}"
            )
    return conversations


def _given(name: str, value: Any, kind: Any) -> Any:
    """`value`, or `kind`'s defaults for None.

    Raises:
        ConfigError: it is something else, a dictionary for example.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")
    return kind() if value is None else value


def _find_model(
    model: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig, load_format: str
) -> tuple[Path | None, ModelConfig]:
    if isinstance(model, (ModelConfig, Mapping)):
        if load_format != "dummy":
            raise ConfigError("a configuration without a directory has no weights; use load_format='dummy'")
        return None, model if isinstance(model, ModelConfig) else config_from_hf(dict(model))
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            "model must be a shipped model's name, a directory, or a configuration with load_format='dummy', "
            f"got {model!r}"
        )
    directory = resolve_model_dir(model)
    return directory, load_config(directory)


def _eos_token_ids(config: ModelConfig, directory: Path | None) -> tuple[int, ...]:
    """The configuration's end-of-sequence tokens and those that `generation_config.json` adds."""
    ids = set(config.eos_token_ids)
    path = directory / "generation_config.json" if directory else None
    if path is not None and path.is_file():
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise CheckpointError(f"{path}: not a JSON object")
        extra = settings.get("eos_token_id")
        more = extra if isinstance(extra, list) else [] if extra is None else [extra]
        if not all(isinstance(token, int) for token in more):
            raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {extra!r}")
        ids.update(more)
    return tuple(sorted(ids))


def default_cache_dir() -> str:
    """Where compiled programs are kept: `$MOEJAX_CACHE_DIR` or the user's cache folder."""
    base = os.environ.get("MOEJAX_CACHE_DIR")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moejax"
    # XLA's CPU programs depend on the host's instruction set; JAX's key covers versions and options.
    return str(root / "xla" / f"{jax.__version__}-{jax.default_backend()}")
