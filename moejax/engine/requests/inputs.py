"""Checks what callers pass and brings it to one form: prompts, parameters, conversations."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from moejax.core.errors import RequestError
from moejax.engine.requests.tokenizer import ChatMessage

T = TypeVar("T")
Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]


def one_each(given: T | Sequence[T] | None, kind: type[T], count: int, name: str) -> list[T]:
    """Returns one value a prompt of what a caller gave under `name`: one for all, one each, or nothing."""
    if given is None or isinstance(given, kind):
        return [given or kind()] * count
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, kind) for each in given):
        raise RequestError(f"{name} must be {kind.__name__} or a list of them, got {given!r}")
    if len(given) != count:
        raise RequestError(f"{len(given)} {name} for {count} prompts; pass one, or one a prompt")
    return list(given)


def as_list(prompts: Any) -> list[Prompt]:
    """Turns one prompt or several into a list of prompts.

    Raises:
        RequestError: nothing was given.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (np.ndarray, jax.Array)) and prompts.ndim == 1:
        return [np.asarray(prompts)]
    try:
        items = None if isinstance(prompts, bytes) else list(prompts)
    except TypeError:
        items = None
    if items is None:
        raise RequestError(f"prompts must be text, token ids or a list of either, got {prompts!r}")
    if not items:
        raise RequestError("no prompt given")
    return [items] if isinstance(items[0], (int, np.integer)) else items


def flat_ids(prompt: Any) -> list[int] | None:
    """Returns the integers of a list or array of them; None for anything else, bools and floats included."""
    if isinstance(prompt, (np.ndarray, jax.Array)):
        array = np.asarray(prompt)
        whole = array.ndim == 1 and (np.issubdtype(array.dtype, np.integer) or not array.size)
        return array.tolist() if whole else None
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        return None
    whole = all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt)
    return [int(token) for token in prompt] if whole else None


def conversations(messages: Any) -> list[list[ChatMessage]]:
    """Turns one conversation or several into a list of conversations.

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
