"""Grows one sample token by token: text, stop strings, end of sequence. Knows nothing of batches or JAX."""

from collections.abc import Collection
from dataclasses import dataclass

from moejax.engine.requests.api import CompletionOutput, FinishReason, Logprob, SamplingParams
from moejax.engine.requests.tokenizer import Tokenizer


@dataclass
class StreamChunk:
    """What one step added to one sample of a streamed request.

    The chunks' `text` joined is the sample's final text: text that may turn out to be the start of a stop
    string is held back until that is decided.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class OutputProcessor:
    """One sample's output. `add` takes tokens until `finished`."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        max_tokens: int,
    ) -> None:
        self.params = params
        self.output = CompletionOutput(index, "", [], [] if params.logprobs is not None else None)
        self._stream = tokenizer.stream() if tokenizer else None
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._held = ""
        self._hold = max((len(s) for s in params.stop), default=1) - 1

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def add(self, token: int, logprob: Logprob | None) -> StreamChunk:
        """Appends a token and says what it added."""
        out = self.output
        out.token_ids.append(token)
        if out.logprobs is not None and logprob is not None:
            out.logprobs.append(logprob)
        ends = token in self._eos or token in self.params.stop_token_ids
        last = ends or len(out.token_ids) >= self._max_tokens
        if self._stream is not None:
            self._held += "" if ends else self._stream.step(token)
            self._held += self._stream.flush() if last else ""
        text = self._release(ends)
        if last and not self.finished:
            text += self._finish("length", None)
        out.text += text
        logprobs = [logprob] if logprob is not None and out.logprobs is not None else None
        return StreamChunk(out.index, text, [token], logprobs, out.finish_reason, out.stop_reason)

    def abort(self, reason: FinishReason = "abort") -> None:
        """Ends the sample with what it has."""
        if self._stream is not None:
            self._held += self._stream.flush()
        self.output.text += self._finish(reason, None)

    def _release(self, ends: bool) -> str:
        """Takes from the held text what can no longer become part of a stop string."""
        # The string that is complete first ends the text, however its characters fall into tokens.
        found = [(self._held.find(s) + len(s), -len(s), s) for s in self.params.stop if s in self._held]
        if found:
            end, _, stop = min(found)
            self._held = self._held[: end if self.params.include_stop_str_in_output else end - len(stop)]
            return self._finish("stop", stop)
        if ends:
            last = self.output.token_ids[-1]
            return self._finish("stop", last if last in self.params.stop_token_ids else None)
        ready = len(self._held) - self._hold
        if ready <= 0:
            return ""
        text, self._held = self._held[:ready], self._held[ready:]
        return text

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> str:
        """Sets the reason and returns the text still held."""
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason
        text, self._held = self._held, ""
        return text
