"""A request while the engine works on it: its sequences on one side, what its caller sees on the other."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.engine.requests.api import FinishReason, Logprob, RequestOutput
from moejax.engine.requests.output import OutputProcessor, StreamChunk
from moejax.engine.scheduling.sequence import Sequence, State


class RequestState:
    """One request. The engine calls it; callers read `output`, `chunks` and `scores`.

    Attributes:
        roots: the sequences to queue; a root's forks follow it by themselves.
        chunks: what each step added, kept only where `streams`.
        scores: float32 parts of the prompt's log-probabilities, for a scoring request.
        on_close: called once the request has ended.
    """

    def __init__(
        self, output: RequestOutput, builders: list[OutputProcessor], *, streams: bool = False
    ) -> None:
        self.output = output
        self.builders = builders
        self.streams = streams
        self.roots: list[Sequence] = []
        self.sequences: list[Sequence] = []
        self.chunks: deque[StreamChunk] = deque()
        self.scores: list[np.ndarray] = []
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
        if index == 0:
            self.output.metrics.token_times.append(now)
        chunk = builder.add(token, logprob, reason)
        if self.streams:
            self.chunks.append(chunk)
        return builder.finished

    def take_scores(self, sequence: Sequence, start: int, part: np.ndarray) -> None:
        """Takes the log-probabilities of one chunk of the prompt, from position `start` on."""
        if start == 0:
            self.scores.clear()  # a preempted sequence begins again
        self.scores.append(part)
        if sequence.state is State.FINISHED:
            self.close()

    def close(self) -> None:
        """Marks the request finished if all its samples are."""
        if all(builder.finished for builder in self.builders):
            self.output.metrics.preemptions = sum(s.preemptions for s in self.sequences)
            self.output.finished = True
            self.on_close()

    def abort(self, reason: FinishReason = "abort") -> None:
        """Ends every sample with what it has."""
        for builder in self.builders:
            if not builder.finished:
                builder.abort(reason)
        self.close()

    def fail(self, reason: str) -> None:
        """Ends every sample, and the request with an error."""
        self.output.error = reason
        self.abort("error")
