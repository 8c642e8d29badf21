"""What a fleet of replicas is: pools, sites, autoscaling, failures, power. No JAX here."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from moejax.core.checked import (
    Among,
    Checked,
    Name,
    NonNegativeInt,
    NonNegativeNumber,
    OpenShare,
    PositiveInt,
    PositiveNumber,
)
from moejax.core.errors import ConfigError
from moejax.simulate.routers import DISPATCHES, ROUTERS


class Link(NamedTuple):
    """What a device sends keys and values over: seconds before the first byte, and bytes/s."""

    latency_s: float = 0.0
    bandwidth: float = float("inf")


@dataclass(frozen=True)
class Pools(Checked, section="simulate.pools"):
    """Replicas that compute prompts alone, and those that go on after the first token (DistServe, OSDI 2024,
    and Splitwise, ISCA 2024); none: each replica does both.

    Attributes:
        prefill, decode: how many of each.
        link: between them; NVLink joins the devices of a node.
    """

    prefill: NonNegativeInt = 0
    decode: NonNegativeInt = 0
    link: Literal["nvlink", "network"] = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prefill == 0) != (self.decode == 0):
            raise ConfigError("simulate.pools needs prefill and decode, or neither: one cannot serve alone")


@dataclass(frozen=True)
class Site(Checked, section="simulate.sites"):
    """Replicas in one place.

    Attributes:
        latency_ms: one way between it and the users.
        price_per_hour: of a device there.
    """

    name: Name
    replicas: PositiveInt = 1
    latency_ms: NonNegativeNumber = 0.0
    price_per_hour: NonNegativeNumber = 0.0


@dataclass(frozen=True)
class Autoscale(Checked, section="simulate.autoscale"):
    """How many replicas there are as the load changes, or how large each is, see
    `moejax.simulate.routers.desired_replicas` and `desired_size`.

    Attributes:
        min, max: replicas; it starts with `min`. max=0: their number stays.
        layouts: instead of `max`: those that a replica may have, from few devices to many. A successor of the
            next larger or smaller one takes a replica's place, one replica at a time.
        surge: the successor starts on devices of its own, and the replica drains once that serves; otherwise
            the replica drains first, and the successor takes over its devices.
        queue_ms: aims at this mean time between arrival and the first step, or
        attainment: at this share of requests within `workload.slo`.
        interval_s, cooldown_s: seconds between two looks, and between two changes at least.
        cold_start_s: until a new replica serves, besides the time that its weights take to be read.
        load_gb_per_s: at which each device reads its weights from a disk, over PCIe.
    """

    min: PositiveInt = 1
    max: NonNegativeInt = 0
    queue_ms: PositiveNumber | None = None
    attainment: OpenShare | None = None
    interval_s: PositiveNumber = 5.0
    cooldown_s: NonNegativeNumber = 15.0
    cold_start_s: NonNegativeNumber = 20.0
    load_gb_per_s: PositiveNumber = 2.0
    layouts: list[str] = field(default_factory=list)
    surge: bool = False

    @property
    def enabled(self) -> bool:
        return bool(self.max or self.layouts)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layouts and (self.max or self.min > 1):
            raise ConfigError("simulate.autoscale.layouts excludes its min and max: have simulate.replicas")
        if self.surge and not self.layouts:
            raise ConfigError("simulate.autoscale.surge has no meaning without simulate.autoscale.layouts")
        if self.enabled and (self.queue_ms is None) == (self.attainment is None):
            raise ConfigError("simulate.autoscale needs one of queue_ms and attainment to aim at")
        if 0 < self.max < self.min:
            raise ConfigError(f"simulate.autoscale.max={self.max} is below min={self.min}")


@dataclass(frozen=True)
class Failure(Checked, section="simulate.fail"):
    """A replica, by its number, that is lost so many seconds after the start; None: none is."""

    replica: NonNegativeInt = 0
    at_s: NonNegativeNumber | None = None


@dataclass(frozen=True)
class Power(Checked, section="simulate.power"):
    """Assumed watts of a device: while it has nothing to do, in steps with prompts, and in those without."""

    idle_w: NonNegativeNumber = 0.0
    prefill_w: NonNegativeNumber = 0.0
    decode_w: NonNegativeNumber = 0.0


@dataclass(frozen=True)
class Fleet(Checked, section="simulate"):
    """The engines that serve a workload together.

    Attributes:
        replicas: engines behind the router, each on devices of its own.
        router: who of a pool or a site gets a request.
        dispatch: which of the `sites` gets it, each with its own replicas.
        pools, sites, autoscale, fail, power: see there.
    """

    replicas: PositiveInt = 1
    router: Annotated[str, Among(ROUTERS, "router")] = "least_loaded"
    dispatch: Annotated[str, Among(DISPATCHES, "rule")] = "nearest"
    pools: Pools = field(default_factory=Pools)
    sites: list[Site] = field(default_factory=list)
    autoscale: Autoscale = field(default_factory=Autoscale)
    fail: Failure = field(default_factory=Failure)
    power: Power = field(default_factory=Power)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.pools.prefill) + bool(self.sites) + self.autoscale.enabled > 1:
            raise ConfigError("simulate.pools, simulate.sites and simulate.autoscale exclude each other")
        if self.fail.at_s is None or self.autoscale.max:
            return
        places = self.places
        if self.fail.replica >= len(places):
            raise ConfigError(
                f"simulate.fail.replica={self.fail.replica}: there are {len(places)}, from 0 on"
            )
        if places.count(places[self.fail.replica]) == 1:
            raise ConfigError("simulate.fail: nobody is left to take over; have two replicas in its place")

    @property
    def places(self) -> list[tuple[str, int]]:
        """Returns each first replica's part ("prefill", "decode" or "both") and the number of its site."""
        if self.pools.prefill:
            return [("prefill", 0)] * self.pools.prefill + [("decode", 0)] * self.pools.decode
        if self.sites:
            return [("both", number) for number, site in enumerate(self.sites) for _ in range(site.replicas)]
        return [("both", 0)] * (self.autoscale.min if self.autoscale.max else self.replicas)
