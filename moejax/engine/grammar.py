"""What a request's tokens must be of: allowed ones, and grammars by the `llguidance` library. No JAX here.

Each sample has a `Constraint`, which follows its output and gives the mask of the tokens that may come next.
A step's rows are masked each by itself, so that drafts are too: the state goes forward to a row's place, and
back where drafts were wrong. Log-probabilities are the model's own, without the mask.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from moejax.core.errors import RequestError
from moejax.core.words import one_line
from moejax.engine.requests.tokenizer import Tokenizer

_ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of JSON, as `json.dumps` writes it: where any space may be, small models write no more than that. What a
schema says itself (`x-guidance`) goes first."""


class Constraint:
    """The tokens that may follow one sample's output.

    Args:
        words: int32 `[ceil(V / 32)]`, a bit for each token of the vocabulary that is ever allowed.
        matcher: an `LLMatcher`, the state of a grammar; None without.
        ends: tokens that end a sample.
    """

    def __init__(self, words: np.ndarray, matcher: Any = None, ends: Collection[int] = ()) -> None:
        self.allowed, self.matcher, self.ends = words, matcher, ends
        self._known: list[int] = []  # tokens that the matcher has been given

    @property
    def needs_host(self) -> bool:
        """Tells whether what may come next depends on the tokens before it."""
        return self.matcher is not None

    def words(self, output: Sequence[int]) -> np.ndarray:
        """Returns int32 `[ceil(V / 32)]`: a bit for each token that may follow an output. All that is allowed
        where no output begins like this, as a draft may have it."""
        if not self.needs_host or not self._go_to(output):
            return self.allowed
        mask = np.zeros(len(self.allowed), np.int32)
        grammar = np.frombuffer(self.matcher.compute_bitmask(), np.int32)[: len(mask)]
        mask[: len(grammar)] = grammar
        return mask & self.allowed

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """Returns `most` tokens at most of the only text that may follow an output (as tokenized)."""
        known = self.needs_host and self._go_to(output)
        return self.matcher.compute_ff_tokens()[:most] if known and not self.matcher.is_stopped() else []

    def _go_to(self, output: Sequence[int]) -> bool:
        """Brings the matcher to the end of an output; False if none begins like this."""
        if output and output[-1] in self.ends:
            return False  # it has ended: what follows is dropped
        same = 0
        for mine, theirs in zip(self._known, output, strict=False):
            if mine != theirs:
                break
            same += 1
        if back := len(self._known) - same:
            self.matcher.rollback(back)
            del self._known[same:]
        rest = list(output[same:])
        taken = self.matcher.try_consume_tokens(rest) if rest else 0
        self._known += rest[:taken]
        return taken == len(rest)


class Constraints:
    """Makes the constraints of an engine's requests.

    Args:
        tokenizer: the model's; None where it has none.
        vocab_size: V, of the logits.
        ends: the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, ends: Sequence[int]) -> None:
        self.tokenizer, self.vocab_size, self.ends = tokenizer, vocab_size, ends
        self._lib: Any = None
        self._of_lib: Any = None
        self._all = self._words(range(vocab_size))

    def make(
        self, structure: dict[str, Any], allowed: Sequence[int] | None, samples: int
    ) -> list[Constraint | None]:
        """Returns the constraint of each of a request's samples.

        Raises:
            RequestError: the grammar has none or more than one meaning, or there is nothing to make it of.
        """
        if not structure and allowed is None:
            return [None] * samples
        words = self._all if allowed is None else self._words(allowed)
        first = self._matcher(structure) if structure else None
        matchers = [first, *(first.deep_copy() if first else None for _ in range(samples - 1))]
        return [Constraint(words, matcher, self.ends) for matcher in matchers]

    def _words(self, tokens: Sequence[int]) -> np.ndarray:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _matcher(self, structure: dict[str, Any]) -> Any:
        if self.tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and this model has none")
        if not self.ends:
            raise RequestError("structured_outputs needs an end-of-sequence token, and this model has none")
        if self._lib is None:
            try:
                import llguidance
                import llguidance.gbnf_to_lark
            except ImportError:
                raise RequestError(
                    "structured_outputs needs the library llguidance; pip install 'moejax[structured]'"
                ) from None
            self._of_lib = llguidance.LLTokenizer(
                self.tokenizer.to_json(), n_vocab=self.vocab_size, eos_token=list(self.ends)
            )
            self._lib = llguidance
        ((kind, value),) = structure.items()
        try:
            matcher = self._lib.LLMatcher(self._of_lib, self._grammar(kind, value), log_level=0)
        except Exception as error:  # the library raises kinds of its own for what it cannot read
            raise RequestError(f"structured_outputs.{kind}: {one_line(error)}") from None
        if matcher.is_error():
            raise RequestError(f"structured_outputs.{kind}: {one_line(matcher.get_error())}")
        return matcher

    def _grammar(self, kind: str, value: Any) -> str:
        """Returns what `llguidance` reads."""
        of = self._lib.LLMatcher
        if kind in ("json", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else value
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return of.grammar_from_json_schema(text, defaults=_ON_ONE_LINE)
        if kind == "regex":
            return of.grammar_from_regex(value)
        if kind == "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            return of.grammar_from_lark(f"start: {texts}")
        return of.grammar_from_lark(self._lib.gbnf_to_lark.any_to_lark(value))
