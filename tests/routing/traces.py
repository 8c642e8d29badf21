"""Traces made by hand."""

from typing import Any

import numpy as np

from moejax.routing.capture import CapturedRequest, RoutingCapture


def trace_of(
    ids: Any,
    step: Any,
    request: Any,
    position: Any,
    *,
    experts: int,
    prefill: Any = None,
    sample: Any = None,
    layers: tuple[int, ...] | None = None,
    hashes: tuple[str, ...] = (),
) -> RoutingCapture:
    """Of ids `[R, L, k]`; even weights, and all rows decoded unless said otherwise."""
    ids = np.asarray(ids, np.uint8)
    rows = len(ids)
    request = np.asarray(request, np.int32)
    count = max(int(request.max(initial=-1)) + 1, len(hashes))
    named = hashes or tuple(f"hash-{i}" for i in range(count))
    return RoutingCapture(
        ids=ids,
        weights=np.where(ids < experts, 1 / ids.shape[2], 0).astype(np.float32),
        step=np.asarray(step, np.int32),
        request=request,
        sample=np.zeros(rows, np.int32) if sample is None else np.asarray(sample, np.int32),
        position=np.asarray(position, np.int32),
        prefill=np.zeros(rows, bool) if prefill is None else np.asarray(prefill),
        requests=tuple(CapturedRequest(f"r{i}", named[i], 4) for i in range(count)),
        layers=tuple(range(ids.shape[1])) if layers is None else layers,
        num_experts=experts,
    )
