"""Runs a peer in a worker process, as a `Backend`. No JAX here."""

import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.bench.backends.base import Backend, BackendError
from moejax.bench.backends.config import BackendOptions, missing_package
from moejax.bench.backends.process import Worker, WorkerFault
from moejax.engine.requests.api import (
    CompletionOutput,
    RequestMetrics,
    RequestOptions,
    RequestOutput,
    SamplingParams,
)
from moejax.engine.stats import StepRecord

WORKERS = Path(__file__).parent / "workers"


class WorkerBackend(Backend):
    """A peer that runs on this machine: starts the worker, loads the model there and speaks to it.

    `hf_transformers` is `AutoModelForCausalLM` on the model's own directory, under greedy or plain sampling,
    in static batches in order of arrival: transformers takes no request into a running batch. `llama_cpp` is
    llama.cpp's own functions on a GGUF file of the model's weights, all sequences in one context: prompts
    join the running sequences' decode step.

    Instants are the worker's own `time.perf_counter()`, which is this process's clock too (CLOCK_MONOTONIC is
    the machine's); that is checked when it starts. A request of `generate` arrives when the worker has read
    it: the pipe is no part of the peer. While served, requests arrive when the driver says, as for any
    engine, and the worker takes its next step without waiting for this process.

    Args:
        name: in rows and messages.
        model_dir: the model's folder, whose weights it loads where `options` name no others.
        encode: of the model's tokenizer.
        max_num_seqs: its limit while served.
        log_dir: where its stderr is kept.

    Attributes:
        workers: by kind the script, how it shares steps between requests, and whose instant a token has.

    Raises:
        BackendError: no weights, no interpreter, no package, or a model that does not load.
    """

    workers: Mapping[str, tuple[Path, str, str]] = {
        "hf_transformers": (WORKERS / "hf_worker.py", "static", "each forward pass"),
        "llama_cpp": (WORKERS / "llama_worker.py", "continuous", "each decode call"),
    }

    def __init__(
        self,
        name: str,
        options: BackendOptions,
        *,
        model_dir: Path | None,
        encode: Callable[[str], Sequence[int]] | None,
        max_num_seqs: int,
        log_dir: Path,
    ) -> None:
        weights = model_dir if options.path is None else Path(options.path)
        is_llama = options.kind == "llama_cpp"
        if weights is None or not (is_llama or [*weights.glob("*.safetensors"), *weights.glob("*.bin")]):
            raise BackendError(
                f"backend {name} reads weights, and {weights or 'this model'} has none: model=checkpoint"
                " model.path=DIR, or backend.path=DIR"
            )
        script, self.batching, instants = self.workers[options.kind]
        facts = {"token_instants": instants}
        if is_llama:
            with open(weights, "rb") as file:
                facts["weights_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        self.name, self.max_num_seqs, self.encode, self.seed = name, max_num_seqs, encode, None
        self.checkpoint = model_dir if is_llama else weights
        self.on_step = None
        self._memory: dict[str, Any] = {}
        self._ids = itertools.count()
        self._queued: list[dict[str, Any]] = []
        self._live: dict[str, RequestOutput] = {}
        log = log_dir / f"backend-{name}.log"
        self._worker = Worker(name, options.python or sys.executable, script, log, options.timeout_s)
        fields = {key: getattr(options, key) for key in ("device", "dtype", "threads", "options")}
        try:
            loaded = self._worker.ask("load", options={**fields, "path": str(weights.resolve())})
            self._check_clock()
        except WorkerFault as error:
            if error.module is None:
                raise
            log.unlink(missing_ok=True)
            # The first backend's name is its kind, as that of a peer of its kind is.
            section = "backend" if name == options.kind else f"backend.peers.{name}"
            raise BackendError(missing_package(options.kind, section, error.module)) from error
        except BaseException:
            self._worker.close()
            raise
        self.vocab_size = loaded["vocab_size"]
        self.max_model_len = loaded["max_model_len"]
        self._facts = {
            "name": name,
            "kind": options.kind,
            "weights": str(weights.resolve()),
            **loaded["facts"],
            **facts,
        }

    def _check_clock(self) -> None:
        before = time.perf_counter()
        now = self._worker.ask("ping")["now"]
        if not before <= now <= time.perf_counter():
            raise BackendError(
                f"backend {self.name}: its process's clock is not this one's ({now:.3f} s against "
                f"{before:.3f} s), so that its instants mean nothing here"
            )

    def prepare(self, *, max_num_seqs: int, max_total_len: int, params: Sequence[SamplingParams]) -> None:
        self._worker.ask("prepare", max_num_seqs=max_num_seqs, max_total_len=max_total_len)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        answer = self._worker.ask("generate", requests=requests)
        outputs = []
        for fields, said in zip(requests, answer["outputs"], strict=True):
            output = _output(fields, answer["start"])
            output.outputs[0].token_ids = said["tokens"]
            output.outputs[0].finish_reason = said["reason"]
            output.metrics.token_times = said["times"]
            output.metrics.scheduled_time = said["scheduled"]
            output.finished = True
            outputs.append(output)
        return outputs

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        fields = self._request(prompt, params)
        output = _output(fields, time.perf_counter() if arrival_time is None else arrival_time)
        self._queued.append(fields)
        self._live[output.request_id] = output
        return output

    def step(self) -> bool:
        """Hands over what was submitted, waits for the worker's next step and takes in what it did."""
        if self._queued:
            self._worker.send("submit", requests=self._queued)
            self._queued = []
        if not self._live:
            return False
        self._take(self._worker.receive())
        while self._live and self._worker.has_line:
            self._take(self._worker.receive())
        return True

    def abort(self, request_id: str) -> None:
        output = self._live.pop(request_id, None)
        self._queued = [fields for fields in self._queued if fields["id"] != request_id]
        if output is not None:
            output.outputs[0].finish_reason, output.finished = "abort", True
            if self._worker.alive:
                self._worker.send("abort", ids=[request_id])

    def _request(self, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
        self.check(params)
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos")
        fields = {name: getattr(params, name) for name in names}
        return {"id": str(next(self._ids)), "prompt": list(prompt), "seed": params.seed or 0, **fields}

    def _take(self, message: dict[str, Any]) -> None:
        """Adds one step's tokens to their requests' outputs."""
        for request_id in message["admitted"]:
            if (output := self._live.get(request_id)) is not None:
                output.metrics.scheduled_time = message["start"]
        for request_id, token, reason in message["tokens"]:
            output = self._live.get(request_id)
            if output is None:
                continue  # aborted meanwhile
            output.outputs[0].token_ids.append(token)
            output.metrics.token_times.append(message["time"])
            if reason is not None:
                output.outputs[0].finish_reason, output.finished = reason, True
                del self._live[request_id]
        if self.on_step is not None:
            self.on_step(_record(message))

    def describe(self) -> dict[str, Any]:
        return {**self._facts, "batching": self.batching}

    def memory(self) -> dict[str, int | float | None]:
        if self._worker.alive and not self._live:
            answer = self._worker.ask("memory")
            self._memory = {key: value for key, value in answer.items() if key != "event"}
        return dict(self._memory)

    def close(self) -> None:
        self._worker.close()


def _output(fields: dict[str, Any], arrival: float) -> RequestOutput:
    sample = CompletionOutput(0, "", [])
    return RequestOutput(fields["id"], None, fields["prompt"], [sample], RequestMetrics(arrival))


def _record(message: dict[str, Any]) -> StepRecord:
    """A step as ours count them. A peer says nothing of its cache: no blocks at all, which reductions leave
    out."""
    return StepRecord(
        time=message["time"],
        seconds=message["time"] - message["start"],
        prefill_tokens=message["prefill"],
        decode_tokens=message["decode"],
        padded_tokens=message["padded"],
        sequences=len(message["tokens"]),
        running=message["running"],
        waiting=message["waiting"],
        used_blocks=0,
        num_blocks=0,
        stored_tokens=0,
        preempted=0,
    )
