"""From a stream's chunks to one instant per token. Tokens are counted, never chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moejax.core.errors import RequestError

Counting = Literal["ids", "usage", "single", "spread"]


@dataclass(frozen=True)
class Chunk:
    """The content of one event of a stream.

    Attributes:
        time: when it came, seconds.
        text: what it adds.
        ids: token ids that it adds; None where the server does not send any.
        usage: tokens of the whole output so far; None where the event does not say.
        spoke: whether it was about the output at all, and not only its end or its usage. A token may add no
            text.
    """

    time: float
    text: str
    ids: list[int] | None
    usage: int | None
    spoke: bool = True


@dataclass(frozen=True)
class Counted:
    """`times`: an instant per output token; `ids`: the tokens, none where they are not known; `how`."""

    times: list[float]
    ids: list[int]
    how: Counting


def count_tokens(chunks: Sequence[Chunk]) -> Counted:
    """An instant for each token: that of the chunk that brought it.

    How many a chunk brought is known from its token ids (`ids`), or from usage that grows from chunk to chunk
    (`usage`). Where only the end says how many there were, the chunks are either as many (`single`), or
    the tokens are spread over them evenly (`spread`): first and last instant are right then, those between
    are not.

    Raises:
        RequestError: the server sends neither ids nor usage, or tokens without any chunk, or no token.
    """
    if any(chunk.ids for chunk in chunks):
        pairs = [(chunk.time, token) for chunk in chunks for token in chunk.ids or ()]
        return Counted([time for time, _ in pairs], [token for _, token in pairs], "ids")
    said = [chunk for chunk in chunks if chunk.usage is not None]
    if not said:
        raise RequestError(
            "the server sends neither token ids nor usage, so that its tokens cannot be counted; it has to"
            " know stream_options.include_usage"
        )
    total = said[-1].usage or 0
    if not total:
        raise RequestError("the server ended the request without any token, so that it has no latencies")
    spoke = [chunk for chunk in chunks if chunk.spoke]
    if all(chunk.usage is not None for chunk in spoke) and spoke:
        times: list[float] = []
        for chunk in chunks:
            times += [chunk.time] * ((chunk.usage or 0) - len(times))
        return Counted(times, [], "usage")
    if not spoke and total:
        raise RequestError(f"the server counts {total} tokens and sent none; send token ids with its chunks")
    if len(spoke) == total:
        return Counted([chunk.time for chunk in spoke], [], "single")
    places = [index * len(spoke) // total for index in range(total)]
    if total > 1:
        places[-1] = len(spoke) - 1
    return Counted([spoke[place].time for place in places], [], "spread")
