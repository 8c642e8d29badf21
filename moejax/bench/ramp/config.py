"""Which request rates a ramp offers. Host code on plain values."""

import math
from dataclasses import dataclass
from typing import Annotated

from moejax.bench.traffic import ThroughputWorkload
from moejax.core.checked import Checked, Must, NonNegativeInt, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError

_MOST_REQUESTS = 20_000

Factor = Annotated[float, Must(lambda x: 1 < x < math.inf, "a number above 1, so that the rate rises")]
Rates = Annotated[
    list[PositiveNumber],
    Must(lambda rates: rates and sorted(set(rates)) == rates, "a list of requests per second that rise"),
]


@dataclass(frozen=True)
class RampConfig(Checked, section="ramp"):
    """Rising request rates; without `start` and `rates` there is no ramp.

    Attributes:
        start, factor, max_steps: requests/s of the first step, what each next one is multiplied by, and after
            how many to stop where the engine follows all.
        rates: requests/s of each step instead, rising.
        refine: after the first saturated rate, so many more between it and the last that was followed, each
            in the (geometric) middle.
        duration_s: seconds over which the requests of a step arrive: a step has rate times this of them,
            but at least `min_requests` (more at low rates give steadier percentiles); of conversations so
            many of each turn.
        followed: share of the arrivals that must end in the same time for the engine to have followed.
    """

    start: PositiveNumber | None = None
    factor: Factor = 2.0
    max_steps: PositiveInt = 10
    rates: Rates | None = None
    refine: NonNegativeInt = 2
    duration_s: PositiveNumber = 6.0
    min_requests: PositiveInt = 32
    followed: Annotated[float, Must(lambda x: 0 < x <= 1, "a share in (0, 1]")] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is not None and self.rates is not None:
            raise ConfigError("ramp.start and ramp.rates exclude each other")
        try:
            last: float = self.num_requests(self.steps()[-1]) if self.enabled else 0
        except OverflowError:
            last = math.inf
        if last > _MOST_REQUESTS:
            raise ConfigError(
                f"the ramp's last step has {last:,} requests, over {_MOST_REQUESTS:,}: lower ramp.max_steps, "
                "ramp.factor or ramp.duration_s"
            )

    @property
    def enabled(self) -> bool:
        return self.start is not None or self.rates is not None

    def check_alone(self, workload: ThroughputWorkload) -> None:
        """Raises `ConfigError` where the workload has arrivals, or an end, of its own."""
        request_rate = workload.request_rate
        if self.enabled and request_rate != math.inf:
            raise ConfigError(
                f"workload.request_rate={request_rate:g} and a ramp exclude each other: leave it out, or set "
                "ramp.start=null ramp.rates=null"
            )
        for name in ("trace_file", "concurrency", "duration_s", "warmup_s", "branches"):
            if self.enabled and getattr(workload, name):
                raise ConfigError(f"a ramp has arrivals of its own: leave out workload.{name}")

    def steps(self) -> list[float]:
        """Requests/s of every step, in order."""
        if self.rates is not None:
            return [float(rate) for rate in self.rates]
        assert self.start is not None
        return [self.start * self.factor**step for step in range(self.max_steps)]

    def num_requests(self, rate: float) -> int:
        """Requests of a step."""
        return max(self.min_requests, math.ceil(rate * self.duration_s))
