"""Which request rates a ramp offers. Host code on plain values."""

import math
from dataclasses import dataclass

from moejax.core.config import check_number, check_positive
from moejax.core.errors import ConfigError

_MOST_REQUESTS = 20_000


@dataclass(frozen=True)
class RampConfig:
    """Rising request rates; without `start` and `rates` there is no ramp.

    Attributes:
        start, factor, max_steps: requests/s of the first step, what each next one is multiplied by, and after
            how many to stop where the engine follows all.
        rates: requests/s of each step instead, rising.
        refine: after the first saturated rate, so many more between it and the last that was followed, each
            in the (geometric) middle.
        duration_s: seconds over which the requests of a step arrive: a step has rate times this of them,
            but at least `min_requests` (more at low rates give steadier percentiles).
        followed: share of the arrivals that must end in the same time for the engine to have followed.
    """

    start: float | None = None
    factor: float = 2.0
    max_steps: int = 10
    rates: list[float] | None = None
    refine: int = 2
    duration_s: float = 6.0
    min_requests: int = 32
    followed: float = 0.9

    def __post_init__(self) -> None:
        for name in ("max_steps", "min_requests"):
            check_positive(f"ramp.{name}", getattr(self, name))
        for name in ("factor", "duration_s", "followed"):
            check_number(f"ramp.{name}", getattr(self, name))
        if isinstance(self.refine, bool) or not isinstance(self.refine, int) or self.refine < 0:
            raise ConfigError(f"ramp.refine must be an integer of at least 0, got {self.refine!r}")
        if self.factor <= 1:
            raise ConfigError(f"ramp.factor must be above 1, so that the rate rises; got {self.factor:g}")
        if not 0 < self.followed <= 1:
            raise ConfigError(f"ramp.followed is a share in (0, 1], got {self.followed:g}")
        if self.start is not None and self.rates is not None:
            raise ConfigError("ramp.start and ramp.rates exclude each other")
        if self.start is not None:
            check_number("ramp.start", self.start)
        if self.rates is not None:
            rates = list(self.rates)
            if not rates or any(not isinstance(r, (int, float)) or isinstance(r, bool) for r in rates):
                raise ConfigError(f"ramp.rates must be a list of requests per second, got {self.rates!r}")
            if any(not 0 < rate < math.inf for rate in rates) or sorted(set(rates)) != rates:
                raise ConfigError(f"ramp.rates must be above 0 and rise, got {self.rates!r}")
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

    def check_alone(self, request_rate: float, trace_file: str | None) -> None:
        """Raises `ConfigError` where the workload has arrivals of its own."""
        if self.enabled and request_rate != math.inf:
            raise ConfigError(
                f"workload.request_rate={request_rate:g} and a ramp exclude each other: leave it out, or set "
                "ramp.start=null ramp.rates=null"
            )
        if self.enabled and trace_file is not None:
            raise ConfigError("a ramp has arrivals of its own: leave out workload.trace_file")

    def steps(self) -> list[float]:
        """Requests/s of every step, in order."""
        if self.rates is not None:
            return [float(rate) for rate in self.rates]
        assert self.start is not None
        return [self.start * self.factor**step for step in range(self.max_steps)]

    def num_requests(self, rate: float) -> int:
        """Requests of a step."""
        return max(self.min_requests, math.ceil(rate * self.duration_s))
