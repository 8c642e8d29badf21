"""What a caller does while the engine works on its requests: waits for all of them, or reads one's stream."""

from collections.abc import Iterator, Sequence

from moejax.core.errors import StepError
from moejax.engine.core import Engine
from moejax.engine.requests.output import StreamChunk
from moejax.engine.requests.state import RequestState


def run_to_end(engine: Engine, requests: Sequence[RequestState]) -> None:
    """Queues requests and turns the crank until all have ended.

    Raises:
        RequestError: one of them could never run; then none is queued.
        StepError: one of them failed.
    """
    engine.add(requests)
    try:
        engine.run_until(lambda: all(request.finished for request in requests))
    finally:
        for request in requests:
            if not request.finished:
                engine.abort(request)
    failed = [request.output.error for request in requests if request.output.error]
    if failed:
        more = f" (and {len(failed) - 1} more requests)" if len(failed) > 1 else ""
        raise StepError(f"{failed[0]}{more}", [request.output for request in requests])


def stream(engine: Engine, request: RequestState) -> Iterator[StreamChunk]:
    """Yields a queued request's chunks; before them an empty one, to be read at once.

    Raises:
        StepError: the request failed.
    """
    try:
        yield StreamChunk(0, "", [], None, None, None)
        finished = False
        while not finished:
            # Read first: another thread may add the last chunk and finish once there is none.
            finished = request.finished
            while request.chunks:
                yield request.chunks.popleft()
            if finished:
                break
            engine.run_until(lambda: bool(request.chunks) or request.finished)
    finally:
        engine.abort(request)
    if request.output.error:
        raise StepError(request.output.error, [request.output])
