"""A request while the engine works on it: its sequences on one side, what its caller sees on the other."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moejax.core.errors import RequestError
from moejax.engine.requests.api import (
    Checkpoint,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    SamplingParams,
)
from moejax.engine.requests.output import OutputProcessor, StreamChunk
from moejax.engine.scheduling.sequence import Sequence


class RequestState:
    """One request. The engine calls it; callers read `output` and `chunks`.

    Attributes:
        roots: the sequences to queue; a root's forks follow it by themselves.
        chunks: what each step added, kept only where `streams`.
        retries: how often it was computed again after a failed step.
        on_close, on_end: called once the request has ended; the second, the engine's, with its output.
        asked: the caller's parameters, where they are not those of its samples (`best_of`).
    """

    def __init__(
        self, output: RequestOutput, builders: list[OutputProcessor], *, streams: bool = False
    ) -> None:
        self.output = output
        self.builders = builders
        self.streams = streams
        self.retries = 0
        self.roots: list[Sequence] = []
        self.sequences: list[Sequence] = []
        self.chunks: deque[StreamChunk] = deque()
        self.on_close: Callable[[], Any] = lambda: None
        self.on_end: Callable[[RequestOutput], Any] = lambda output: None
        self.asked: SamplingParams | None = None

    @property
    def finished(self) -> bool:
        return self.output.finished

    def attach(self, roots: list[Sequence]) -> None:
        """Binds the sequences, in the builders' order, each root followed by its forks."""
        self.roots = roots
        self.sequences = [sequence for root in roots for sequence in (root, *root.forks)]
        for index, sequence in enumerate(self.sequences):
            sequence.owner = (self, index)

    def take(
        self, index: int, token: int, logprob: Logprob | None, reason: FinishReason | None, now: float
    ) -> bool:
        """Adds a sample's new token and returns whether the sample has ended, see `OutputProcessor.add`."""
        builder = self.builders[index]
        chunk, times = builder.add(token, logprob, reason), self.output.metrics.token_times
        if index == 0:
            chunk.prompt_logprobs = None if times else self.output.prompt_logprobs
            times.append(now)
        if self.streams:
            self.chunks.append(chunk)
        return builder.finished

    def take_prompt(self, start: int, entries: list[Logprob | None]) -> None:
        """Takes what a chunk from position `start` gave for the tokens that follow its own, None where that
        is not asked for. What a preempted sequence computes again is there already."""
        every = self.output.prompt_logprobs
        if every is not None:
            every += [entry for entry in entries[max(0, len(every) - 1 - start) :] if entry is not None]

    def close(self) -> None:
        """Marks the request finished if all its samples are."""
        if not self.finished and all(builder.finished for builder in self.builders):
            self.output.metrics.preemptions = sum(s.preemptions for s in self.sequences)
            if self.asked is not None and self.asked.best_of is not None:
                self._keep_best(self.asked)
            self.output.finished = True
            self.on_close()
            self.on_end(self.output)

    def _keep_best(self, asked: SamplingParams) -> None:
        """Leaves the samples with the highest mean log-probability, the best first; of two the earlier."""

        def mean(sample: CompletionOutput) -> float:
            logprobs = [each.logprob for each in sample.logprobs or []]
            return sum(logprobs) / len(logprobs) if logprobs else -math.inf

        self.output.outputs = sorted(self.output.outputs, key=mean, reverse=True)[: asked.n]
        for index, sample in enumerate(self.output.outputs):
            sample.index = index
            if asked.logprobs is None:
                sample.logprobs = None

    def checkpoint(self, model: str) -> Checkpoint:
        """Returns what it has between two steps; `model` says what its model is."""
        if self.asked is not None and self.asked.best_of is not None:
            raise RequestError("interrupt: of a request with best_of no sample can go on alone")
        out, first = self.output, self.sequences[0]
        room = first.max_length - first.prompt_len
        least = min(room, first.params.min_tokens)
        params = replace(first.params, seed=first.seed, max_tokens=room, min_tokens=least)
        samples = tuple(tuple(sample.token_ids) for sample in out.outputs)
        logprobs = tuple(tuple(sample.logprobs or ()) for sample in out.outputs)
        return Checkpoint(model, out.prompt, tuple(out.prompt_token_ids), params, samples, logprobs)

    def abort(self, reason: FinishReason = "abort") -> None:
        """Ends every sample with what it has."""
        for builder in self.builders:
            if not builder.finished:
                chunk = builder.abort(reason)
                if self.streams and reason != "error":  # of which a stream raises
                    self.chunks.append(chunk)
        self.close()
