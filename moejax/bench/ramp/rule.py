"""When an engine is saturated, and what of a ramp is worth naming.

The engine followed a rate if, in the second half of the time in which requests came, it ended at least the
share `followed` of as many as came. It is saturated if it did not, and requests were waiting for their first
step when the last one came: without a queue, too few to end means only that they are still being served. (The
first half is left out because the batch fills in it.) It is also saturated if at that moment more than the
share 1 - `followed` of all requests were waiting: then what ended in the second half was the first's backlog.
Of conversations the rate is their first turns', and requests that come after the last of these are left out.
Host code on plain values; no JAX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moejax.bench.driver import ServedRequest, TrafficRun
from moejax.results.pareto import pareto

# One request in twenty, and one besides, may wait at any instant without that being a queue that grows: the
# last arrivals always wait for the step that runs.
_WAITING = 0.05


@dataclass(frozen=True)
class Followed:
    """How an engine kept up with a step's arrivals.

    Attributes:
        offered_rate: requests/s that came, of conversations their first turns.
        followed: requests ended over requests come, at most 1, in the second half of the arrivals' time.
        waiting: requests without a first step when the last one came.
        saturated: see the module.
    """

    offered_rate: float
    followed: float
    waiting: int
    saturated: bool


def judge(run: TrafficRun, least: float) -> Followed:
    """Whether the engine followed, from one pass; `least` is `RampConfig.followed`."""
    times = [(item.record.metrics.arrival_time - run.start, item) for item in run.served]
    offered = [time for time, item in times if not item.turn]
    last = max(offered)
    if last <= 0:  # all at once: there is no rate to follow
        return Followed(float("inf"), 0.0, len(offered), True)
    due = [item for time, item in times if time <= last]
    came = sum(last / 2 < time <= last for time, _ in times)
    ended = sum(last / 2 < _end(item, run.start) <= last for item in due)
    waiting = sum(_first_step(item, run.start) > last for item in due)
    share = min(1.0, ended / came)
    behind = share < least and waiting > 1 + _WAITING * came
    saturated = behind or waiting > 1 + (1 - least) * len(due)
    return Followed((len(offered) - 1) / last, share, waiting, saturated)


def user_rates(served: Sequence[ServedRequest], median_tpot_ms: float | None) -> dict[str, float | None]:
    """Returns the rates that one user sees, in output tokens/s, with waiting and prefill and without them."""
    seen = [
        item.record.output_len / item.record.metrics.e2e
        for item in served
        if item.record.completed and item.record.metrics.e2e > 0
    ]
    return {
        "tokens_per_s_per_user": float(np.median(seen)) if seen else None,
        "decode_tokens_per_s_per_user": 1e3 / median_tpot_ms if median_tpot_ms else None,
    }


def knee(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the highest rate that was followed, of one mode's; None if none was."""
    followed = [row for row in rows if not row["saturated"]]
    return max(followed, key=lambda row: row["request_rate"], default=None)


def best_goodput(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row with the most requests/s within the objectives; None without objectives."""
    known = [row for row in rows if row["request_goodput"] is not None]
    return max(known, key=lambda row: row["request_goodput"], default=None)


def pareto_front(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the rows that no other beats in both tokens/s/user and tokens/s/device, in rising order of
    the former."""
    places = [i for i, row in enumerate(rows) if row["tokens_per_s_per_user"] is not None]
    user, device = ([-rows[i][f"tokens_per_s_per_{of}"] for i in places] for of in ("user", "device"))
    return [places[i] for i in reversed(pareto(user, device))]


def _end(item: ServedRequest, start: float) -> float:
    times = item.record.metrics.token_times
    return times[-1] - start if times and item.record.completed else float("inf")


def _first_step(item: ServedRequest, start: float) -> float:
    """Seconds after the start; of an engine that does not tell, the first token's instant."""
    times = item.record.metrics
    if item.queue_s is not None:
        return times.arrival_time - start + item.queue_s
    return times.token_times[0] - start if times.token_times else float("inf")
