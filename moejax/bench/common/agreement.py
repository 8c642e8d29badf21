"""How far the tokens of two engines agree on the same requests.

Greedy tokens of one model agree except where two logits are nearly equal and another order of summation turns
them round; in lower precision that is more often so. No JAX here.
"""

from collections.abc import Sequence
from typing import Any


def percent_agreed(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float | None:
    """Returns the per cent of the reference's tokens that an engine gave as well, up to the first difference
    of each request: from there on the two continue different texts. None where a side's tokens are not
    known."""
    if len(tokens) != len(reference) or any(not len(row) for row in (*tokens, *reference)):
        return None
    same = sum(agreed_tokens(ours, theirs) for ours, theirs in zip(tokens, reference, strict=True))
    total = sum(len(theirs) for theirs in reference)
    return 100 * same / total if total else None


def token_agreement(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns how far two runs of the same requests agree: `equal_requests`, the share with the same tokens
    throughout, `equal_lengths`, and `first_difference`, the earliest place at which any part (None: none).
    All None where a side's tokens are not known: a server may only count them."""
    if any(not len(tokens) for tokens in (*mine, *theirs)):
        return dict.fromkeys(("equal_requests", "equal_lengths", "first_difference"))
    pairs = list(zip(mine, theirs, strict=True))
    parted = [agreed_tokens(a, b) for a, b in pairs if list(a) != list(b)]
    return {
        "equal_requests": 1.0 - len(parted) / len(pairs) if pairs else 1.0,
        "equal_lengths": all(len(a) == len(b) for a, b in pairs),
        "first_difference": min(parted, default=None),
    }


def agreed_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of tokens before the first that differ, or before the shorter one's end."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
