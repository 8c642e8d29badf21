"""Below a `HostEngine`: few blocks in memory and a disk that fails now and then; and a cache that grows."""

import tempfile
import time
from pathlib import Path
from typing import Any

from moejax.cache.store import BlockFile, BlockStore
from moejax.engine.scheduling.sequence import Sequence


def doubled(limits: Any) -> list[list[int]]:
    """Returns the sizes that a cache grows through, as an argument; none where there is no first."""
    first, last = limits.initial, limits.num_blocks
    return [[*(first << i for i in range(9) if first << i < last), last]] if first else []


def lie_below(engine: Any, rows: int, slots: int) -> None:
    """Has so many of the slots in the host's memory, and the others in a file."""
    file = BlockFile(Path(tempfile.gettempdir()), slots - rows)
    read, write, forget, chance = file._read, file.write, engine.swap.forget, engine.chance

    def reads(*given: Any) -> Any:
        return (None, time.perf_counter()) if chance.random() < 0.1 else read(*given)

    def writes(*given: Any) -> None:
        file.refuses |= chance.random() < 0.002
        write(*given)

    def forgets(sequence: Sequence) -> None:
        if sequence.swapped:
            engine._stored[sequence.order] = 0
        forget(sequence)

    engine.runner.store = engine.scheduler.store = BlockStore(slots, rows, file)
    for owner, name, function in (
        (file, "_read", reads),
        (file, "write", writes),
        (engine.swap, "forget", forgets),
    ):
        setattr(owner, name, function)
