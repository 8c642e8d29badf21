"""`LLM`: the public way to generate from and score with a model."""

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from moejax.checkpoint.hf import save_pretrained
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.core.resolve import Resolution
from moejax.core.words import byte_words
from moejax.engine.core import CLOSED, PauseMode
from moejax.engine.llm_card import engine_card, engine_line
from moejax.engine.llm_changes import Changes
from moejax.engine.opening.foreign import refuse
from moejax.engine.opening.memory import EngineMemory, device_limit
from moejax.engine.opening.resolve import ResolvedEngine, resolve
from moejax.engine.opening.start import Started, planning_engine, start
from moejax.engine.opening.weights import load
from moejax.engine.requests.api import Checkpoint, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.builder import RequestBuilder, drawn
from moejax.engine.requests.inputs import Prompt, as_list, conversations
from moejax.engine.requests.output import StreamChunk
from moejax.engine.requests.state import RequestState
from moejax.engine.requests.tokenizer import ChatMessage, Tokenizer
from moejax.engine.routing.expert_counts import RoutingRecord
from moejax.engine.routing.recorder import require_recorder
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.step.bucket_runner import PlannedSteps
from moejax.engine.step.ledger import CompileLedger
from moejax.engine.step.sampler import common_mode
from moejax.models.decoder import Decoder
from moejax.perf.certificate import Certificate
from moejax.routing.capture import RoutingCapture


class _Closed:
    """Stands for what a closed `LLM` had."""

    def __getattr__(self, name: str) -> Any:
        raise RequestError(CLOSED)


class LLM(Changes):
    """A model ready to generate.

    Args:
        model: a shipped model's name, a Hugging Face directory, or (with `load_format="dummy"`) a
            `config.json` as a dictionary or a `ModelConfig`.
        dtype: "auto" (float32 on CPU, the checkpoint's own elsewhere), "float32", "bfloat16", "float16".
        parallel: how the model is spread over devices, see `ParallelConfig`; None: on one. The engine's
            limits (`max_num_seqs`, `num_blocks`, …) are each data-parallel group's.
        quant: quantizes weights while the model opens, and the key/value cache, see `QuantConfig`. Quantized
            directories need none. Methods that calibrate want a tokenizer and one device.
        engine: limits and choices, see `EngineConfig`.
        seed: where the random streams of requests without a seed of their own, and dummy weights, start.
        load_format: "auto" reads safetensors, "dummy" fills weights at random from the configuration alone.
        on_progress: while methods calibrate, told the share that is done, 0 to 1, and what is being done.
        fill: False opens it with the weights' shapes alone: it tells its sizes and choices, and computes
            nothing.

    Raises:
        ConfigError, CheckpointError, DeviceError: one line each, see `moejax.core.errors`. What a device
            cannot hold is refused before a weight is read (`engine.memory_check`).
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
        on_progress: Callable[[float, str], None] | None = None,
        fill: bool = True,
        **foreign: Any,
    ) -> None:
        self.arguments = dict(model=model, dtype=dtype, quant=quant, seed=seed, load_format=load_format)
        for keyword in foreign:
            raise refuse(keyword, inspect.signature(LLM).parameters.keys() - {"foreign"})
        resolved = resolve(model, dtype, parallel, engine, quant, seed, load_format)
        planned = load(resolved, fill=False)
        self._planned = EngineMemory.of(resolved, planned)
        if fill:  # what is only planned may be for another device
            self._planned.check(device_limit(devices=resolved.parallel.num_devices), planned)
        self._weights = load(resolved, on_progress, tiers=planned.tiers) if fill else planned
        self.quant_config = resolved.quant
        self.seed = resolved.seed
        self.model_dir, self.config = resolved.directory, resolved.config
        self.tokenizer, self.eos_token_ids = resolved.tokenizer, resolved.eos_token_ids
        self.quant_report = self._weights.quant_report  # None where no weights were quantized
        self._start(resolved)

    def _start(self, resolved: ResolvedEngine) -> None:
        """Builds scheduler, cache and runner."""
        self._take(resolved, start(resolved, self._weights))
        self.builder = self._request_builder(resolved.replay)
        self._submitted: dict[str, RequestState] = {}
        self._ledgers: dict[Any, CompileLedger] = {}  # of the layouts that it has had

    def _take(self, resolved: ResolvedEngine, started: Started) -> None:
        self._resolved, self.parallel_config = resolved, resolved.parallel
        self._weights.users.add(self)
        self.engine_config, self.max_model_len = resolved.engine, resolved.max_model_len
        self.engine, self.runner, blocks = started
        self.ledger = self.runner.ledger
        self._planned = dataclasses.replace(self._planned, resolved=resolved)
        self.memory = self._planned.certificate(cache=self.runner.cache)
        memory = Resolution("memory", byte_words(self.memory.total), f"of a device: {self.memory.parts()}")
        chosen = [*resolved.resolutions, *self._weights.resolutions, resolved.kv_cache, blocks]
        windows = [resolved.window_cache] if any(resolved.config.sliding_windows) else []
        self.resolutions = [*chosen, *windows, memory]

    def _request_builder(self, replay: RoutingReplay | None) -> RequestBuilder:
        """Returns a builder that has numbered no request yet."""
        return RequestBuilder(self._resolved, self.runner.cache, replay, self._weights.adapters)

    def close(self) -> None:
        """Frees what it has on its devices; closing again does nothing. `with LLM(…) as llm:` closes it.

        What runs ends with finish reason "abort". Weights that `variant` has shared are freed with the last
        engine that has them, `stages` that somebody holds included. Any later call raises `RequestError`, as
        this one does from within a step.
        """
        engine = self.engine
        if isinstance(engine, _Closed):
            return
        with engine.lock:
            engine.pause("abort", CLOSED)
            if self.engine is engine:  # not closed by another thread meanwhile
                self.runner.reset()
                self._weights.release(self)
                for name in ("engine", "runner", "ledger", "builder", "_weights", "_submitted"):
                    setattr(self, name, _Closed())

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = isinstance(self.engine, _Closed)
        return f"<LLM {self.config.family}: closed>" if closed else engine_line(self)

    def _repr_html_(self) -> str:
        return repr(self) if isinstance(self.engine, _Closed) else engine_card(self)

    def check_memory(self, limit: float | None, *, compiles: bool = False) -> Certificate:
        """Returns what a device with `limit` bytes (None: not known) would hold; with `compiles` the largest
        step as it is compiled for the devices that are here, else `memory`.

        Raises:
            ConfigError: it does not fit; one line names the parts and the smallest changes that make it fit.
        """
        return self._planned.check(limit, self._weights if compiles else None, compiles)

    @property
    def stages(self) -> list[Decoder]:
        """The decoder's parts, one for each pipeline stage."""
        return self._weights.stages

    @property
    def model(self) -> Decoder:
        """The decoder.

        Raises:
            ConfigError: it is in pipeline stages, see `stages`, or its experts are in tiers.
        """
        return self._weights.whole()

    def variant(self, engine: EngineConfig) -> "LLM":
        """Returns the same weights and tokenizer behind an engine of its own.

        Raises:
            ConfigError: `engine` asks for another execution of the experts, which belongs to the weights, or
                for what the model does not take.
        """
        resolved = self._resolved.variant(engine)
        other = copy.copy(self)
        other._start(resolved)
        alike = (other.runner.cache, other.runner.limits) == (self.runner.cache, self.runner.limits)
        if alike and len(self.stages) == 1:
            other.ledger.share(self.ledger)  # equal steps are one program
        return other

    def save_pretrained(self, directory: str | os.PathLike[str], **options: Any) -> None:
        """Writes the model with its tokenizer and generation settings; options and errors are those of
        `moejax.save_pretrained`."""
        save_pretrained(self.model, directory, **{"text_from": self.model_dir} | options)

    # -- generation ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        record_routing: bool = False,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt; outputs come in the prompts' order.

        Args:
            prompts: text, token ids, a dictionary {"prompt": text} or {"prompt_token_ids": ids}, or a list.
            sampling_params: one for all, or one a prompt.
            record_routing: add the expert counts of these requests' steps to `routing`.
            options: what `engine.policy` goes by: one for all, or one a prompt.

        Raises:
            RequestError: an empty prompt, one over the limit, a token id out of range, one that can never
                fit the cache, text where the model has no tokenizer, or one that a replayed trace does not
                have. All prompts are checked before any is run.
            StepError: a step failed; its `outputs` are this call's, those that it did not concern whole.
        """
        requests = self.builder.to_generate(
            as_list(prompts), sampling_params, record=record_routing, options=options
        )
        self.engine.run(requests)
        return [request.output for request in requests]

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> Iterator[StreamChunk]:
        """Yields what each step adds, for one prompt; with n > 1 the samples' chunks alternate.

        The prompt is checked at the call, not at the first chunk. Several streams may be read at once, in
        one thread or in many: whoever waits moves all of them on. A stream left early is aborted.
        """
        request = self.builder.to_generate([prompt], sampling_params, streams=True, options=options)[0]
        self.engine.add([request])
        chunks = self.engine.stream(request)
        next(chunks)  # enters its try block: a stream that nobody ever reads aborts its request too
        return chunks

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Runs `generate` for one conversation, or several, written out by the model's chat template."""
        prompts: list[Prompt] = [self.chat_prompt(c) for c in conversations(messages)]
        return self.generate(prompts, sampling_params)

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns a conversation's token ids by the model's chat template.

        Raises:
            RequestError: no tokenizer or template, or messages that the template rejects.
        """
        tokenizer = self.builder.need_tokenizer()
        # The template writes the special tokens itself.
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises `RequestError` where it has none."""
        return self.builder.need_tokenizer()

    def encode(self, text: str) -> list[int]:
        """Returns a text's token ids, special tokens included, as `generate` takes it."""
        return self.get_tokenizer().encode(text)

    def score(self, sequences: Sequence[Prompt], *, adapter: str | None = None) -> list[np.ndarray]:
        """Returns log p(token t | tokens < t) for each sequence of n tokens, float32 arrays of length n - 1,
        by the model with an `adapter` where one is named.

        Raises:
            RequestError: as for `generate`, or a sequence of fewer than two tokens.
            StepError: a step failed.
        """
        requests = self.builder.to_score(as_list(sequences), adapter)
        self.engine.run(requests)
        every = [request.output.prompt_logprobs or [] for request in requests]
        return [np.array([entry.logprob for entry in entries if entry], np.float32) for entries in every]

    # -- one step at a time ----------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        """Queues a request and returns its output, which `step` fills; `finished` turns True at its end.

        Args:
            arrival_time: instant from which its latencies count, `time.perf_counter()` seconds; None: now.
            options: what `engine.policy` goes by.

        Raises:
            RequestError: as for `generate`.
        """
        made = self.builder.to_generate([prompt], sampling_params, arrival=arrival_time, options=options)
        return self._submit(made[0])

    def _submit(self, request: RequestState) -> RequestOutput:
        with self.engine.lock:  # else another thread could end it before `on_close` is set
            self.engine.add([request])
            self._submitted[request.output.request_id] = request
            request.on_close = lambda: self._submitted.pop(request.output.request_id, None)
        return request.output

    @property
    def kv_cache_dtype(self) -> str:
        """The dtype that keys and values are stored in: the model's, or that of 8-bit codes with scales."""
        return self._resolved.kv_cache.value

    def step(self) -> bool:
        """Runs one step of the engine, for whatever is queued. False if there was nothing to do, or where it
        is paused."""
        return self.engine.step()

    def abort(self, request_id: str) -> None:
        """Ends a submitted request with what it has; nothing happens to one that has ended."""
        with self.engine.lock:
            request = self._submitted.get(request_id)
            if request is not None:
                self.engine.abort(request)

    def interrupt(self, request_id: str) -> Checkpoint:
        """Ends a submitted request with finish reason "interrupt" and returns what `resume` takes.

        Raises:
            RequestError: no such request is running, or its tokens depend on more than itself (experts or
                exchanges of limited capacity, drafts under `acceptance=rejection`, a replayed trace).
        """
        self.builder.check_resumable()
        with self.engine.lock:
            if (request := self._submitted.get(request_id)) is None:
                raise RequestError(f"interrupt: no submitted request {request_id!r} is running")
            checkpoint = request.checkpoint(self.builder.model_of(request))
            self.engine.abort(request, "interrupt")
        return checkpoint

    def resume(self, checkpoint: Checkpoint, *, options: RequestOptions | None = None) -> RequestOutput:
        """Queues an interrupted request, as `submit` does, on any engine of its model; it ends with what it
        would have had. `max_time_s`, `metrics` and what policies go by (`options`) start anew.

        Raises:
            RequestError: as for `interrupt` and `submit`; the checkpoint is another model's, or not sound.
        """
        return self._submit(self.builder.resume(checkpoint, options))

    def pause(self, mode: PauseMode = "wait") -> None:
        """Takes no step from now on until `unpause`; blocks and tokens stay as they are.

        Meanwhile `submit` queues, `step` returns False and logs why, and `generate` and `score` raise
        `RequestError`; what other threads wait for is held, and what this one reads on raises, too.

        Args:
            mode: "wait" runs what has begun to its end and admits nothing else; "keep" stops after the step
                in flight and holds all requests where they are; "abort" ends all, with finish reason "abort".

        Raises:
            RequestError: there is no such mode, or it is called from within a step.
        """
        self.engine.pause(mode)

    def unpause(self) -> None:
        """Lets requests go on after `pause`; without one nothing happens."""
        self.engine.unpause()

    def stats(self, window_s: float | None = None) -> dict[str, Any]:
        """Returns counts of what the engine holds now, and sums since the start or `reset_stats`; with
        `window_s` also, in "window", rates, latencies, errors, hits and memory of the last so many seconds
        (see `moejax.engine.recent.Recent.window`). Raises `ConfigError` for a window that is none."""
        if window_s is not None:
            return {"window": self.engine.recent.window(window_s), **self.stats()}
        with self.engine.lock:
            return {
                **self.engine.state(),
                "cache_dtype": self.kv_cache_dtype,
                "kv_cache_allocated_bytes": sum(pool.nbytes for pool in self.runner.pools),
                "kv_cache_capacity_bytes": sum(pool.capacity_bytes for pool in self.runner.pools),
                **self.engine.stats.as_dict(),
                "compiles": len(self.ledger.entries),
                "recompiles_after_warmup": len(self.ledger.recompiles),
                "compile_ledger": self.ledger.rows(),
            }

    def reset_stats(self) -> None:
        """Starts the sums afresh."""
        with self.engine.lock:
            self.engine.reset_stats()

    def cache_prefix(self, prompt: Prompt, options: RequestOptions | None = None) -> int:
        """Computes a prompt and pins it: of all that the prefix cache remembers it is given up last.

        Args:
            options: whose tenant finds it with `engine.prefix_cache.share=tenant`.

        Returns:
            How many of its tokens are pinned, in every data-parallel group.

        Raises:
            ConfigError: the engine was built without `engine.prefix_cache.enabled`.
            RequestError, StepError: as for `generate`.
        """
        caches = self.engine.scheduler.prefix_caches
        if not caches:
            raise ConfigError("no prefix is cached; set engine.prefix_cache.enabled=true")
        params = SamplingParams(max_tokens=1, temperature=0.0)
        pinned, options = [], options or RequestOptions()
        with self.engine.lock:  # so that nothing is given up in between
            for group, prefixes in enumerate(caches):
                request = self.builder.to_generate([prompt], params, options=options)[0]
                self.engine.run([request], group)
                pinned.append(prefixes.pin(request.sequences[0].identity, request.output.prompt_token_ids))
        return min(pinned)

    def clear_prefix_cache(self) -> None:
        """Forgets all prefixes that no running request uses, pinned ones too."""
        with self.engine.lock:
            for prefixes in self.engine.scheduler.prefix_caches:
                prefixes.forget()

    def clear_drafts(self) -> None:
        """Forgets ended requests' outputs, from which `engine.speculation.method=suffix` drafts."""
        with self.engine.lock:
            self.engine.clear_drafts()

    def warmup(
        self,
        *,
        max_total_len: int,
        sampling_params: Sequence[SamplingParams] = (SamplingParams(temperature=0.0),),
        score: bool = False,
        record_routing: bool = False,
    ) -> None:
        """Compiles ahead of time every step that a workload can need. From then on a compilation is a defect,
        recorded in the ledger and fatal to its step under `engine.strict_compile`.

        Args:
            max_total_len: tokens of its longest request, prompt and output.
            sampling_params: what its requests ask for, one of each kind; their batches run in the least mode
                that serves all.
            score, record_routing: whether `score` and `generate(record_routing=True)` are to come as well.
        """
        modes = [self.builder.mode(p, self.builder.biases(p)) for p in sampling_params]
        prompts = {self.builder.logprobs_size(p.prompt_logprobs) for p in sampling_params}
        with self.engine.lock:
            self.ledger.warmed_up = False
            self.runner.warmup(
                min(max_total_len, self.max_model_len),
                [common_mode(modes)],
                samples=max(drawn(p).n for p in sampling_params),
                prompt_logprobs=prompts | {0} if score else prompts,
                record=record_routing,
            )
            self.ledger.warmed_up = True

    def compile_for(
        self,
        batches: Sequence[tuple[Sequence[Prompt], Sequence[SamplingParams]]],
        *,
        record_routing: bool = False,
        planned: bool = True,
    ) -> None:
        """Compiles, side by side, the steps that `generate` is going to take for each of these batches alone.
        What it finds out by scheduling them without computing anything: tokens that end a request early lead
        to steps which are compiled when they are met. Does nothing while a trace is replayed, or on stages.

        Args:
            batches: prompts and their parameters.
            record_routing: `generate(record_routing=True)` is to come; on one group all steps then count.
            planned: else all is compiled that requests so long can need, in few buckets (`warmup`), as where
                adaptive batching or drafts choose the steps.
        """
        if self.builder.replay is not None:
            return
        builder, longest, config = self._request_builder(None), 0, self.engine_config
        steps = PlannedSteps(self.runner.builder, self.eos_token_ids)
        planned = planned and not config.steps_vary
        with self.engine.lock:
            self.runner.count_always(record_routing)
            for prompts, params in batches:
                whole = [dataclasses.replace(p, max_time_s=None) for p in params]
                requests = builder.to_generate(prompts, whole, record=record_routing)
                longest = max([longest, *(s.max_length for r in requests for s in r.sequences)])
                if planned:
                    planning_engine(self._resolved, self.runner.cache, steps).run(requests)
            self.runner.compile_ahead(steps.keys)
            if not planned:
                asked = [p for _, params in batches for p in params]
                self.warmup(max_total_len=longest, sampling_params=asked, record_routing=record_routing)

    @property
    def routing(self) -> RoutingRecord:
        """The expert counts that requests with `record_routing` have recorded."""
        return self.runner.routing

    def routing_capture(self) -> RoutingCapture:
        """Returns the experts that every token computed since the start or `reset_capture` visited, by layer.

        Tokens that nobody got are there too (one past the end of a sequence, computed before that was known).

        Not seen: what `parallel.exchange_capacity` drops is there as if it had run, since the sender does not
        learn what it was. `meta` has that capacity; `routing.overflow` counts.

        Raises:
            ConfigError: the engine was built without `engine.capture_routing`.
        """
        with self.engine.lock:
            return require_recorder(self.runner.capture).trace()

    def reset_capture(self) -> None:
        """Forgets what has been captured; raises what `routing_capture` does."""
        with self.engine.lock:
            require_recorder(self.runner.capture).reset()

    def replay_routing(self, trace: RoutingCapture | None) -> None:
        """Forces a trace on all requests from now on, bit for bit; None: the routers choose again.

        `RoutingReplay.assign` says which recorded request each one takes, and what it raises. From replaying
        to not, or back, a new engine starts: with statistics, observer, capture and compiled steps anew.

        Raises:
            ConfigError: the trace is not this model's, or requests are running.
        """
        replay = None if trace is None else RoutingReplay(trace, self.config)
        with self.engine.lock:
            if not self.engine.scheduler.idle:
                raise ConfigError("replay_routing: requests are running; wait for them, or abort them")
            if (replay is None) != (self.builder.replay is None):
                self.runner.reset()  # else the old cache would take the new one's memory
                self._start(dataclasses.replace(self._resolved, replay=replay))
            self.builder.replay = self.runner.builder.replay = replay
