"""The routing trace of a measured run: taken beside it, and written next to its result."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.engine.llm import LLM
from moejax.routing.capture import CAPTURE_FILE, COLUMNS, RoutingCapture


def start_capture(llm: LLM | None) -> None:
    """Forgets what an engine has captured so far, if it captures."""
    if llm is not None and llm.engine_config.capture_routing:
        llm.reset_capture()


def take_capture(llm: LLM | None, case: int) -> RoutingCapture | None:
    """Returns what it has captured since, as the trace of a row of the result's `cases`; None where it does
    not capture."""
    if llm is None or not llm.engine_config.capture_routing:
        return None
    trace = llm.routing_capture()
    llm.reset_capture()
    requests = tuple(dataclasses.replace(request, case=case) for request in trace.requests)
    return dataclasses.replace(trace, requests=requests)


def joined(traces: Sequence[RoutingCapture]) -> RoutingCapture:
    """Traces of one model one after another, at least one: steps and requests count on."""
    step = request = 0
    parts = []
    for trace in traces:
        part = {name: getattr(trace, name) for name in COLUMNS}
        part["step"] = trace.step + np.int32(step)
        part["request"] = trace.request + np.int32(request)
        parts.append(part)
        step += int(trace.step[-1]) + 1 if trace.num_rows else 0
        request += len(trace.requests)
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    requests = tuple(request for trace in traces for request in trace.requests)
    return dataclasses.replace(traces[0], **columns, requests=requests)


def write_capture(
    traces: Iterable[RoutingCapture | None], directory: Path, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes the traces that were taken as one into `directory`.

    Returns:
        What the result says of it, `{"routing_trace": {"file", "rows", "bytes"}}`; nothing where none was.

    Raises:
        OutputError: it cannot be written.
    """
    taken = [trace for trace in traces if trace is not None]
    if not taken:
        return {}
    whole = joined(taken)
    meta = {**whole.meta, "checkpoint_hash": provenance.get("checkpoint_hash")}
    path = dataclasses.replace(whole, meta=meta).save(directory / CAPTURE_FILE)
    return {"routing_trace": {"file": path.name, "rows": whole.num_rows, "bytes": path.stat().st_size}}
