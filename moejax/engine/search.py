"""Beam search over an engine's `generate`: each step is a batch of the prompts' beams. No JAX here.

Candidates, scores and when to stop are those of transformers' `generate(num_beams=B)`: of all beams'
continuations the likeliest (1 + E)·B count, where E tokens end a sequence; those of them that end and are
among the best B are kept, by their sum of log-probabilities over length to the power of `length_penalty`; the
best B of the others go on. Beams share what is computed of them where `engine.prefix_cache` is enabled; else
each step computes them whole.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moejax.core.checked import Checked, PositiveInt
from moejax.core.errors import RequestError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.inputs import Prompt, as_list


@dataclass(frozen=True)
class BeamSearchParams(Checked, error=RequestError):
    """How wide and how long to search; names follow transformers and vLLM.

    Attributes:
        beam_width: B, sequences that go on, and that are returned.
        max_tokens: most tokens of a sequence.
        length_penalty: power of the length that a sum of log-probabilities is divided by: above 0 for longer
            sequences, 0 for the likeliest.
        early_stopping: True stops with B sequences that have ended; False where the best that goes on is, at
            its length, no better than the worst of these; "never" where it could not be at any length.
        ignore_eos: go on past the end-of-sequence token.
    """

    beam_width: PositiveInt = 4
    max_tokens: PositiveInt = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False


class Beam(NamedTuple):
    """A sequence's tokens after its prompt, and the sum of their log-probabilities."""

    cumulative_logprob: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence that was found: its `score` is what it is ranked by; `text` is None without a tokenizer."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]
    text: str | None = None


@dataclass
class _Search:
    """One prompt's search: `ended` is a heap, the worst first, of (score, beam)."""

    prompt: list[int]
    running: list[Beam] = field(default_factory=lambda: [Beam(0.0, ())])
    ended: list[tuple[float, Beam]] = field(default_factory=list)

    def step(self, told: Sequence[dict[int, float]], params: BeamSearchParams, ends: set[int]) -> None:
        """Takes in the likeliest next tokens of each running beam, with their log-probabilities."""
        B, length = params.beam_width, len(self.running[0].token_ids) + 1
        candidates = [
            Beam(beam.cumulative_logprob + logprob, (*beam.token_ids, token))
            for beam, each in zip(self.running, told, strict=True)
            for token, logprob in each.items()
        ]
        best = heapq.nlargest((1 + len(ends)) * B, candidates, key=lambda beam: beam.cumulative_logprob)
        over = [beam.token_ids[-1] in ends or length == params.max_tokens for beam in best]
        full = len(self.ended) == B and params.early_stopping is True
        for beam, ended in list(zip(best, over, strict=True))[:B]:
            if ended and not full:
                heapq.heappush(self.ended, (beam.cumulative_logprob / length**params.length_penalty, beam))
        while len(self.ended) > B:
            heapq.heappop(self.ended)
        self.running = [beam for beam, ended in zip(best, over, strict=True) if not ended][:B]
        if len(self.ended) == B and self.running:
            longest = params.early_stopping == "never" and params.length_penalty > 0
            at = params.max_tokens if longest else length
            reach = self.running[0].cumulative_logprob / at**params.length_penalty
            if params.early_stopping is True or reach <= self.ended[0][0]:
                self.running = []


def beam_search(
    llm: LLM, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
) -> list[list[BeamSearchSequence]]:
    """Searches each prompt's likeliest continuations; the best of them comes first.

    Raises:
        RequestError: what `LLM.generate` raises of a prompt, or one over the limit with all its tokens.
    """
    params = params or BeamSearchParams()
    ends = set() if params.ignore_eos else set(llm.eos_token_ids)
    count = (1 + len(ends)) * params.beam_width
    if count > min(1024, llm.config.vocab_size):
        raise RequestError(
            f"beam_width {params.beam_width} needs the {count} likeliest tokens; 1024 are told"
        )
    checked = llm.builder.to_generate(as_list(prompts), SamplingParams(max_tokens=1))
    searches = [_Search(list(request.output.prompt_token_ids)) for request in checked]
    for i, search in enumerate(searches):
        if len(search.prompt) + params.max_tokens > llm.max_model_len:
            raise RequestError(
                f"prompt {i} has {len(search.prompt)} tokens; with max_tokens {params.max_tokens} that is "
                f"over the limit of {llm.max_model_len} (engine.max_model_len)"
            )
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=count, ignore_eos=True)
    while live := [search for search in searches if search.running]:
        beams = [search.prompt + list(beam.token_ids) for search in live for beam in search.running]
        outputs = iter(llm.generate(beams, one))
        for search in live:
            told = [(next(outputs).outputs[0].logprobs or [])[0].top for _ in search.running]
            search.step(told, params, ends)
    return [
        [
            BeamSearchSequence(
                list(beam.token_ids),
                score,
                beam.cumulative_logprob,
                "stop" if beam.token_ids[-1] in ends else "length",
                None if llm.tokenizer is None else llm.tokenizer.decode(beam.token_ids),
            )
            for score, beam in sorted(search.ended, reverse=True)
        ]
        for search in searches
    ]
