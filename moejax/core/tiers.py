"""Where experts lie that do not all fit into the device's memory: how many stay, and what is below them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from moejax.core.checked import (
    Checked,
    Must,
    NonNegativeInt,
    NonNegativeNumber,
    PositiveInt,
    PositiveNumber,
    Share,
    TracePath,
)
from moejax.core.errors import ConfigError

ResidentPolicy = Literal[
    "lru", "lfu", "layer_lru", "arc", "s3_fifo", "least_stale", "static", "a2cr", "a2cr_adaptive"
]  # fmt: skip
HOST_SHARES = {"default": 0.5, "creative_writing": 0.3, "code_generation": 0.5, "simple_qa": 0.7}
"""By task, how much the host's own cost counts in the score of `engine.experts.miss=score`."""
Task = Literal["default", "creative_writing", "code_generation", "simple_qa"]
ResidentShare = Annotated[float, Must(lambda x: 0 < x <= 1, "a share in (0, 1]")]


@dataclass(frozen=True)
class A2crConfig(Checked, section="offload.a2cr"):
    """A²CR: score = attention · share of router mass + frequency · ln(1 + count) + recency · e^(−decay · Δt).

    Mass and ln(1 + count) are over their largest of all experts so far, Δt is in steps since the last use.

    Attributes:
        attention, frequency, recency: weights of the three.
        decay, threshold: of the plain policy, which at a cleanup evicts what scores below `threshold`.
        pressures, thresholds, decays: levels of the adaptive one, by falling pressure (slots taken over
            capacity): each holds above its pressure, the last one in any case.
        mass_decay: share of the mass that a step takes off; 0: all mass so far counts.
        hysteresis: a level is left downwards only so far below its pressure.
        cleanup_steps, cleanup_seconds: a cleanup follows every so many steps, or seconds of compute.
    """

    attention: NonNegativeNumber = 0.4
    frequency: NonNegativeNumber = 0.3
    recency: NonNegativeNumber = 0.3
    decay: NonNegativeNumber = 0.05
    threshold: NonNegativeNumber = 0.2
    pressures: list[float] = field(default_factory=lambda: [0.9, 0.7, 0.0])
    thresholds: list[float] = field(default_factory=lambda: [0.4, 0.3, 0.2])
    decays: list[float] = field(default_factory=lambda: [0.1, 0.05, 0.02])
    mass_decay: Share = 0.0
    hysteresis: Share = 0.05
    cleanup_steps: PositiveInt = 32
    cleanup_seconds: PositiveNumber = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        same = len(self.pressures) == len(self.thresholds) == len(self.decays) > 0
        if not same or sorted(set(self.pressures), reverse=True) != list(self.pressures):
            raise ConfigError(
                f"{self._section}pressures must fall, and thresholds and decays be as many, got"
                f" {self.pressures}, {self.thresholds}, {self.decays}"
            )


@dataclass(frozen=True)
class ExpertsA2crConfig(A2crConfig, section="engine.experts.a2cr"):
    """The same numbers, of the engine's own policy."""


@dataclass(frozen=True)
class ExpertsConfig(Checked, section="engine.experts"):
    """How many of the experts have a slot on the device, and what becomes of the others' tokens.

    Attributes:
        resident: share of all experts that slots are made for; None: all, unless `engine.tiers.device_gb`
            says how many.
        policy: which expert leaves its slot for another (`moejax.routing.residency`).
        a2cr: numbers of the policies "a2cr" and "a2cr_adaptive".
        popularity: for "static", a routing trace of the model, or the folder of a run that has one, whose
            visits say how popular experts are; None: the engine's own first steps say it.
        popularity_steps: the number of those steps; popularity stays as it is after them.
        tier: where all experts lie: in the host's memory, or in a file on disk.
        miss: what a step does about an expert without a slot. "wait" fetches it. "low_bits" (lossy) takes a
            copy of 4.5 bits a value, all of which lie in the host's memory, where no token of the step gives
            the expert `low_bits_below` of its weight or more; it fetches the expert when one does. "host" has
            the host compute the expert where it lies, once all slots are taken; "cheaper" does whichever
            was measured to take less time; "score" goes by the load of both sides and the `task`
            (`moejax.engine.tiers.host`).
        low_bits_below, task: see `miss`.
        prefetch: experts that are read from disk while the layer before them is computed: none, or those that
            the next layer's router would choose by this layer's input ("next_router").
    """

    resident: ResidentShare | None = None
    policy: ResidentPolicy = "layer_lru"
    a2cr: ExpertsA2crConfig = field(default_factory=ExpertsA2crConfig)
    popularity: TracePath | None = None
    popularity_steps: PositiveInt = 64
    tier: Literal["host", "disk"] = "host"
    miss: Literal["wait", "low_bits", "host", "cheaper", "score"] = "wait"
    low_bits_below: Share = 0.25
    task: Task = "default"
    prefetch: Literal["none", "next_router"] = "none"

    @property
    def on_host(self) -> bool:
        """Whether the host may compute experts."""
        return self.miss in ("host", "cheaper", "score")


@dataclass(frozen=True)
class TiersConfig(Checked, section="engine.tiers"):
    """The memories that experts lie in, and how a disk is read, which blocks of the cache may lie on, too.

    Attributes:
        device_gb: memory of each device for slots in units of 10^9 bytes, in place of the share
            `engine.experts.resident`.
        resident_layers: layers, from the first on, that stay on the device with all that they have but routed
            experts; the others' weights lie where the experts do, and are copied while the layer before them
            runs. None: all stay.
        host_gb: memory of the host for experts and layers in units of 10^9 bytes: with
            `engine.experts.tier=host` they must all fit (None: any number), with "disk" so many of the
            experts that were read last stay (None: none).
        host_memory: memory of experts and layers with `engine.experts.tier=host`: "pinned", page-locked,
            which a GPU copies from while the host goes on, or "pageable", the process's own. "auto" takes
            the first on one GPU, where no `codes` are decoded and XLA's limit permits it.
        codes: what experts below the device are kept in: as they are ("none"), or, lossy, in blocks of 256:
            eight bits a value ("q8_k") or 4.5 ("q4_k").
        disk_dir: folder of the file of experts, and of that of blocks; None: `experts`, and `blocks`, in the
            user's cache.
        queue_depth: reads under way at a time.
        direct: read past the operating system's cache (O_DIRECT) where the file system permits it.
    """

    device_gb: PositiveNumber | None = None
    resident_layers: NonNegativeInt | None = None
    host_gb: NonNegativeNumber | None = None
    host_memory: Literal["auto", "pinned", "pageable"] = "auto"
    codes: Literal["none", "q8_k", "q4_k"] = "none"
    disk_dir: str | None = None
    queue_depth: PositiveInt = 4
    direct: bool = True
