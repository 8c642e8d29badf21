"""A request while the engine works on it: its sequences on one side, what its caller sees on the other."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moejax.engine.requests.api import Checkpoint, FinishReason, Logprob, RequestOutput
from moejax.engine.requests.output import OutputProcessor, StreamChunk
from moejax.engine.scheduling.sequence import Sequence


class RequestState:
    """One request. The engine calls it; callers read `output` and `chunks`.

    Attributes:
        roots: the sequences to queue; a root's forks follow it by themselves.
        chunks: what each step added, kept only where `streams`.
        retries: how often it was computed again after a failed step.
        on_close: called once the request has ended.
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
        if all(builder.finished for builder in self.builders):
            self.output.metrics.preemptions = sum(s.preemptions for s in self.sequences)
            self.output.finished = True
            self.on_close()

    def checkpoint(self, model: str) -> Checkpoint:
        """Returns what it has between two steps; `model` says what its model is."""
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
