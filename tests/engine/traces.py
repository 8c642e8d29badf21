"""What the tests of captured and replayed routing share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.engine.requests.api import RequestOutput
from moejax.routing.capture import CapturedRequest, RoutingCapture

Place = tuple[int, int, int]


def places(trace: RoutingCapture) -> list[Place]:
    """Each row's request (its number in the engine, counted from the trace's first), sample and position."""
    numbers = np.asarray([int(request.request_id) for request in trace.requests], np.int64)
    request = (numbers - numbers.min(initial=10**9))[trace.request] if len(numbers) else trace.request
    return list(zip(request.tolist(), trace.sample.tolist(), trace.position.tolist(), strict=True))


def by_place(trace: RoutingCapture) -> dict[Place, tuple[bytes, bytes]]:
    """Place → the last ids and weights there, bit for bit."""
    return {p: (trace.ids[i].tobytes(), trace.weights[i].tobytes()) for i, p in enumerate(places(trace))}


def experts(trace: RoutingCapture) -> dict[Place, list[list[int]]]:
    """Place → the last ids there, each layer's in rising order: two weights that differ by a rounding may
    change places."""
    return {p: np.sort(trace.ids[i], axis=-1).tolist() for i, p in enumerate(places(trace))}


def computed(outs: Sequence[RequestOutput]) -> set[Place]:
    """The tokens that had to be computed: all but each sample's last, the prompt once."""
    found = set()
    for r, out in enumerate(outs):
        prompt = len(out.prompt_token_ids)
        found |= {(r, 0, p) for p in range(prompt)}
        for s, sample in enumerate(out.outputs):
            found |= {(r, s, prompt + p) for p in range(len(sample.token_ids) - 1)}
    return found


def values(outs: Sequence[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, to be equal to the last bit."""
    return [
        (sample.token_ids, sample.logprobs and [(step.logprob, step.top) for step in sample.logprobs])
        for out in outs
        for sample in out.outputs
    ]


def made(
    ids: np.ndarray, weights: np.ndarray, num_experts: int, layers: tuple[int, ...], **fields: Any
) -> RoutingCapture:
    """A trace of one request that stands for any prompt: ids and weights `[R, L, k]`, a row a position."""
    rows = len(ids)
    columns: dict[str, Any] = {name: np.zeros(rows, np.int32) for name in ("step", "request", "sample")}
    columns |= {"position": np.arange(rows, dtype=np.int32), "prefill": np.zeros(rows, np.bool_)}
    columns |= {"requests": (CapturedRequest("0", "", 1),), "origin": "generated"} | fields
    weights = weights.astype(np.float32)
    return RoutingCapture(ids.astype(np.uint8), weights, layers=layers, num_experts=num_experts, **columns)
