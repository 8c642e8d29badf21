"""Experts foreseen for a layer's turn, and how long compute waits for those that are absent. Numpy only."""

from typing import NamedTuple

import numpy as np

from moejax.routing.capture import Floats
from moejax.routing.residency import Bools, Visits, leave_one_out

PREDICTORS = ("none", "previous", "transition")


def predict(predictor: str, visits: Visits) -> Bools:
    """Returns the experts foreseen for each layer's turn, bool `[T, S, L, E]`, while the turn before runs.

    "previous": those of the layer in the step before. "transition": as many as a turn needs in the mean, of
    those that follow most often on the experts of the turn before, by a table counted on the other traces
    (`leave_one_out`). What needs the model, such as the next router on this layer's input, is an array of the
    same shape made elsewhere, which `stall` takes.
    """
    needed = visits.needed
    predicted = np.zeros_like(needed)
    T, S, L, E = needed.shape
    if predictor == "previous":
        predicted[:, 1:] = needed[:, :-1]
    elif predictor == "transition":
        turns = needed.reshape(T, S * L, E)
        before = np.zeros_like(turns)
        before[:, 1:] = turns[:, :-1]
        prior = before.reshape(needed.shape).transpose(0, 2, 1, 3).astype(np.float32)
        after = needed.transpose(0, 2, 1, 3).astype(np.float32)
        table = leave_one_out(prior.transpose(0, 1, 3, 2) @ after)
        table /= np.maximum(leave_one_out(prior.sum(2))[..., None], 1)
        scores = (prior @ table).transpose(0, 2, 1, 3)
        count = max(1, round(needed.sum() / max(needed.any(3).sum(), 1)))
        best = np.argsort(-scores, axis=3, kind="stable")[..., :count]
        np.put_along_axis(predicted, best, np.take_along_axis(scores, best, axis=3) > 0, axis=3)
    return predicted


class Stall(NamedTuple):
    """float64 `[T, C]`: seconds that compute waits for experts, and experts moved (parts of one count)."""

    seconds: Floats
    moved: Floats


def stall(
    visits: Visits, absent: Bools, expert_s: float, compute_s: float, predicted: Bools | None = None
) -> Stall:
    """How long a link holds a decode up: a turn waits until all that it misses has come, one after another.

    What is foreseen and absent is sent for while the turn before computes, right and wrong in no order: of
    both the share comes that fits into that time. It goes to a buffer of its own, so that wrong ones evict
    nothing, and what of the right ones has come is not waited for.

    Args:
        absent: of `replay`.
        expert_s, compute_s: seconds that one expert's transfer and one layer's compute take.
        predicted: bool `[T, S, L, E]`, of `predict` or made elsewhere.
    """
    needed = visits.needed[:, None]
    misses = (absent & needed).sum(4).astype(np.float64)
    hidden = wrong = np.zeros_like(misses)
    if predicted is not None:
        sent = absent & predicted[:, None]
        right, all_sent = (sent & needed).sum(4), sent.sum(4)
        share = np.minimum(1, compute_s / expert_s / np.maximum(all_sent, 1))
        hidden, wrong = right * share, (all_sent - right) * share
    waited, moved = (misses - hidden).sum((2, 3)), (misses + wrong).sum((2, 3))
    return Stall(waited * expert_s, moved)
