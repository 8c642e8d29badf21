"""Grows one sample's text token by token, up to its stop strings. Knows nothing of batches or JAX."""

from dataclasses import dataclass

from moejax.engine.requests.api import CompletionOutput, FinishReason, Logprob, SamplingParams
from moejax.engine.requests.tokenizer import Tokenizer


@dataclass
class StreamChunk:
    """The part of a streamed request's sample that one step added.

    The chunks' `text` joined is the sample's final text: text that may turn out to be the start of a stop
    string is held back until that is decided. The request's first chunk has `prompt_logprobs`, if it asked.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: list[Logprob | None] | None = None

    def add(self, later: "StreamChunk") -> None:
        """Takes in the chunk that comes next of the same sample."""
        self.text, self.token_ids = self.text + later.text, self.token_ids + later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class OutputProcessor:
    """One sample's output. `add` takes tokens until `finished`.

    Which token ends a sample is the scheduler's decision; only stop strings, which the text shows, are found
    here.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.params = params
        self.output = CompletionOutput(index, "", [], [] if params.logprobs is not None else None)
        written = tokenizer if params.detokenize else None
        self._stream = written.stream(params.skip_special_tokens) if written else None
        self._held = ""
        self._hold = max((len(s) for s in params.stop), default=1) - 1

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def add(self, token: int, logprob: Logprob | None, reason: FinishReason | None = None) -> StreamChunk:
        """Appends a token and returns what it added.

        Args:
            reason: why the scheduler ends the sample with this token; None if it goes on. A stop string that
                is complete comes first. After "error" the sample is left as it is, for `abort`.
        """
        out, ends = self.output, reason in ("stop", "length")
        out.token_ids.append(token)
        if out.logprobs is not None and logprob is not None:
            out.logprobs.append(logprob)
        before = len(self._held)
        if self._stream is not None:
            self._held += "" if reason == "stop" else self._stream.step(token)
            self._held += self._stream.flush() if ends else ""
        stop = self._cut_at_stop_string(before) if len(out.token_ids) > self.params.min_tokens else None
        if stop is not None:
            text = self._finish("stop", stop)
        elif reason is not None and ends:
            requested = reason == "stop" and token in self.params.stop_token_ids
            text = self._finish(reason, token if requested else None)
        else:
            ready = max(0, len(self._held) - self._hold)
            text, self._held = self._held[:ready], self._held[ready:]
        out.text += text
        logprobs = [logprob] if logprob is not None and out.logprobs is not None else None
        return StreamChunk(out.index, text, [token], logprobs, out.finish_reason, out.stop_reason)

    def abort(self, reason: FinishReason = "abort") -> StreamChunk:
        """Ends the sample with what it has, and returns what that added."""
        if self._stream is not None:
            self._held += self._stream.flush()
        text = self._finish(reason, None)
        self.output.text += text
        return StreamChunk(self.output.index, text, [], None, reason, None)

    def _cut_at_stop_string(self, before: int) -> str | None:
        """Cuts the held text where a stop string is complete, and returns that; None if none is. One within
        the first `before` characters has been let pass by `min_tokens`."""
        # The string that is complete first ends the text, however its characters fall into tokens.
        starts = [(self._held.find(s, max(0, before - len(s) + 1)), s) for s in self.params.stop]
        ends = [(start + len(s), -len(s), s) for start, s in starts if start >= 0]
        if not ends:
            return None
        end, _, stop = min(ends)
        self._held = self._held[: end if self.params.include_stop_str_in_output else end - len(stop)]
        return stop

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> str:
        """Sets the reason and returns the text still held."""
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason
        text, self._held = self._held, ""
        return text
