"""What callers pass, checked and brought to one form: prompts, parameters, conversations."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moejax.core.errors import RequestError
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.tokenizer import ChatMessage, Tokenizer

Prompt = str | Sequence[int] | np.ndarray


class PromptReader:
    """Turns prompts into checked token ids for one model.

    Args:
        tokenizer: None where the model has none; text is then an error.
        vocab_size, max_model_len: of the model, and of prompt and output together.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer.json; pass token ids instead of text")
        return self.tokenizer

    def token_ids(self, prompt: Prompt, name: str) -> tuple[str | None, list[int]]:
        """A prompt's text, where it is text, and its checked token ids."""
        text = None
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(f"{name} is empty")
            text, prompt = prompt, self.need_tokenizer().encode(prompt)
        ids = flat_ids(prompt)
        if ids is None:
            raise RequestError(f"{name} must be text or a flat list of token ids")
        if not ids:
            raise RequestError(f"{name} is empty")
        strange = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"{name}: token id {strange} out of range; the vocabulary is 0..{self.vocab_size - 1}"
            )
        return text, ids

    def to_generate(self, prompt: Prompt, params: SamplingParams, name: str) -> tuple[str | None, list[int]]:
        """`token_ids` of a prompt that leaves room for output under `params`."""
        text, ids = self.token_ids(prompt, name)
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"{name} has {len(ids)} tokens; with at least one to generate that is over the limit "
                f"of {self.max_model_len} (engine.max_model_len)"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if params.stop_token_ids and max(params.stop_token_ids) >= self.vocab_size:
            raise RequestError(
                f"{name}: stop_token_ids has {max(params.stop_token_ids)}, out of range; the vocabulary "
                f"is 0..{self.vocab_size - 1}"
            )
        return text, ids

    def to_score(self, sequences: Sequence[Prompt]) -> list[list[int]]:
        """The ids of sequences of at least two tokens each."""
        every = [self.token_ids(sequence, f"sequence {i}")[1] for i, sequence in enumerate(sequences)]
        for i, ids in enumerate(every):
            if len(ids) < 2:
                raise RequestError(f"sequence {i} has one token; scoring needs at least 2")
            if len(ids) > self.max_model_len:
                raise RequestError(
                    f"sequence {i} has {len(ids)} tokens, over the limit of {self.max_model_len}"
                )
        return every


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One set of parameters a prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {params!r}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; pass one, or one a prompt")
    return list(params)


def as_list(prompts: Any) -> list[Prompt]:
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


def flat_ids(prompt: Any) -> list[int] | None:
    """The integers of a list or array of them; None for anything else, bools and floats included."""
    if isinstance(prompt, (np.ndarray, jax.Array)):
        array = np.asarray(prompt)
        whole = array.ndim == 1 and (np.issubdtype(array.dtype, np.integer) or not array.size)
        return array.tolist() if whole else None
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        return None
    whole = all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt)
    return [int(token) for token in prompt] if whole else None


def conversations(messages: Any) -> list[list[ChatMessage]]:
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
