"""The configuration of `experiments.simulate`."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from moejax.bench.traffic import Lengths, ThroughputWorkload
from moejax.core.checked import Among, Checked, NonNegativeInt, OpenShare, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError, unknown
from moejax.core.hardware import KNOWN
from moejax.core.parallel import PRESETS, ParallelConfig
from moejax.routing.generate import KINDS
from moejax.routing.source import check_trace
from moejax.simulate.fleet import Fleet
from moejax.simulate.kernels import WEIGHTS, Kernels
from moejax.simulate.routing import RoutingLaw

STACKS = ("vllm", "sglang", "trtllm")
LAWS = ("even", *KINDS, "power")


def parse_layout(name: str, key: str = "simulate.layouts") -> ParallelConfig:
    """Returns a preset's layout, or one said by its degrees, such as "tp4", "pp2_ep4" or "data_ep8" (with
    data-parallel attention); "nodes2" beside them spreads it over two machines, and "redundant8" has eight
    experts twice.

    Raises:
        ConfigError: it is neither, or no layout.
    """
    if name in PRESETS:
        return PRESETS[name]
    degrees: dict[str, Any] = {}
    for word in name.split("_"):
        match = re.fullmatch(r"(dp|pp|ep|tp|nodes|redundant)([1-9]\d*)", word)
        if word == "data":
            degrees["attention"] = "data"
        elif match and (degree := {"redundant": "redundant_experts"}.get(match[1], match[1])) not in degrees:
            degrees[degree] = int(match[2])
        else:
            raise ConfigError(
                f"{key}: {name!r} is neither a preset ({', '.join(PRESETS)}) nor degrees such as"
                " tp4, pp2_ep4, data_ep8_nodes2 or ep8_redundant8"
            )
    return ParallelConfig(**degrees)


@dataclass(frozen=True)
class RoutingSection(Checked, section="simulate.routing"):
    """Which experts tokens visit.

    Attributes:
        kind: "even"; a law of `moejax.routing.generate`; or "power", the one of the measured tables.
        exponent: of "zipf" and "power"; None: the law's own.
        trace: a routing trace, or a run's folder with one, instead of a law.
        shift_steps: steps of an engine after which other experts, drawn by `simulate.seed`, are as popular as
            those were; 0: never.
    """

    kind: Annotated[str, Among(LAWS, "law")] = "zipf"
    exponent: PositiveNumber | None = None
    trace: str | None = None
    shift_steps: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exponent is not None and self.kind in ("even", "uniform"):
            raise ConfigError(
                f"simulate.routing.exponent={self.exponent:g} has no meaning for kind={self.kind}"
            )
        if self.trace is not None:
            check_trace("simulate.routing.trace", self.trace)

    @property
    def law(self) -> RoutingLaw:
        """Returns the law; a trace is opened by who knows the model."""
        return RoutingLaw(self.kind, {} if self.exponent is None else {"exponent": self.exponent})


@dataclass(frozen=True)
class PlanSection(Checked, section="simulate.plan"):
    """What a deployment is wanted for, within the objectives of `workload.slo`.

    Attributes:
        tokens_per_s: output tokens a second of all replicas together.
        devices: device kinds that may be used → price of one an hour, None where it is not known; none: the
            kind and the price of `hardware`.
        most_devices: of one replica, on nodes of eight.
        simulated: of the layouts that a steady state promises most so many are simulated under the workload.
    """

    tokens_per_s: PositiveNumber = 10_000.0
    devices: dict[str, float | None] = field(default_factory=dict)
    most_devices: PositiveInt = 8
    simulated: PositiveInt = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.devices:
            if kind not in KNOWN or KNOWN[kind].bandwidth is None:
                known = [name for name, device in KNOWN.items() if device.bandwidth is not None]
                raise ConfigError(f"simulate.plan.devices: {unknown('device', kind, known)}")


@dataclass(frozen=True)
class SimulateSection(Fleet, section="simulate"):
    """What is simulated, on the fleet that the keys of `moejax.simulate.fleet.Fleet` describe.

    Attributes:
        mode: "run" serves the workload on each layout at each rate; "plan" looks for layout, batch and
            devices; "validate" holds the simulator against what was measured; "calibrate" chooses its
            constants anew; "machine" holds it against the engine on this machine.
        layouts: presets (`configs/parallel/`) or degrees, see `parse_layout`.
        rates: requests/s of each layout's cases; none: the workload's own.
        loads: name → fields of the workload, each a case of each layout instead of `rates`.
        stack: whose kernels and host costs: "vllm", "sglang" or "trtllm".
        weights: the experts' dtype by the tables' names, `dense` the other matrices'; `cache` of keys and
            values.
        attention: "flash"; or "naive", whose scores of prompts are written to memory and read again.
        routing: see `RoutingSection`.
        laws: further laws whose effect on the first rate's TPOT is told.
        fleets: name → fleet, each a case instead of the one described.
        memory_share: of a device's memory that weights, cache and step may take.
        interval: simulate everything at both ends of its 90 % interval, too.
        plan: see `PlanSection`.
        points: a folder of published points in the columns of the package's `e2e_*` files, which "validate"
            takes instead of them; None: the package's, and its tables and trace.
        groups: beginnings of the groups of points that it simulates, or models that "machine" serves; none:
            all.
        seed: of the laws' draws.
    """

    mode: Literal["run", "plan", "validate", "calibrate", "machine"] = "run"
    layouts: list[str] = field(default_factory=lambda: ["ep8", "tp8", "dp_attention_ep8"])
    rates: list[PositiveNumber] = field(default_factory=list)
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)
    stack: Annotated[str, Among(STACKS, "stack")] = "vllm"
    weights: Annotated[str, Among(WEIGHTS, "dtype")] = "bf16"
    dense: Annotated[str, Among(WEIGHTS, "dtype")] = "bf16"
    cache: Annotated[str, Among(("bf16", "fp8"), "dtype")] = "bf16"
    attention: Literal["flash", "naive"] = "flash"
    routing: RoutingSection = field(default_factory=RoutingSection)
    laws: list[Annotated[str, Among(LAWS, "law")]] = field(default_factory=list)
    fleets: dict[str, Fleet] = field(default_factory=dict)
    memory_share: OpenShare = 0.9
    interval: bool = True
    plan: PlanSection = field(default_factory=PlanSection)
    points: str | None = None
    groups: list[str] = field(default_factory=list)
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layouts:
            raise ConfigError(f"simulate.layouts is empty: name presets ({', '.join(PRESETS)}) or degrees")
        for name in self.layouts:
            parse_layout(name)
        for fleet in (self, *self.fleets.values()):
            self._check_steps(fleet.autoscale.layouts)

    def _check_steps(self, names: Sequence[str], key: str = "simulate.autoscale.layouts") -> None:
        """Refuses layouts between which no replica can change."""
        told, sizes = ", ".join(names), [parse_layout(name, key).num_devices for name in names]
        if len(sizes) == 1 or sizes != sorted(set(sizes)):
            raise ConfigError(f"{key}=[{told}]: name two or more, each of more devices than the one before")
        if names and self.mode == "plan":
            raise ConfigError(f"{key}: simulate.mode=plan chooses one layout; leave them out")
        for name in self.layouts if names else ():
            if name not in names:
                raise ConfigError(f"simulate.layouts: {name} is none of {key}=[{told}] to start with")

    def cases(self) -> dict[str | None, "SimulateSection"]:
        """Returns the section for each fleet by its name; itself for None where none has one."""
        names = [item.name for item in dataclasses.fields(Fleet)]
        told = {name: {key: getattr(fleet, key) for key in names} for name, fleet in self.fleets.items()}
        return {name: dataclasses.replace(self, **fields) for name, fields in told.items()} or {None: self}

    def asked(self, workload: ThroughputWorkload) -> list[tuple[str | None, ThroughputWorkload]]:
        """Returns what each layout serves, by the name of the load: the workload with each load's fields, or
        at each of the rates, and of a list of users with each number of them.

        Raises:
            ConfigError: rates beside loads, or a load that is no workload.
        """
        if self.loads and self.rates:
            raise ConfigError("simulate.rates and simulate.loads exclude each other: a load has its own rate")
        changes: list[tuple[str | None, dict[str, Any]]] = [*self.loads.items()]
        changes = changes or [(None, {"request_rate": rate}) for rate in self.rates] or [(None, {})]
        served = []
        for name, fields in changes:
            try:
                made: dict[str, Any] = {
                    key: Lengths(**v) if isinstance(v, dict) else v for key, v in fields.items()
                }
                one = dataclasses.replace(workload, **made)
            except (ConfigError, TypeError) as error:
                known = [item.name for item in dataclasses.fields(ThroughputWorkload)]
                wrong = next((unknown("field", key, known) for key in fields if key not in known), str(error))
                raise ConfigError(f"simulate.loads.{name}: {wrong}" if name else wrong) from error
            served += [(name, dataclasses.replace(one, concurrency=users)) for users in one.users]
        return served

    def kernels(self, kind: str) -> Kernels:
        """Returns the kernels of a device kind. Raises `ConfigError` for an unknown one."""
        naive = self.attention == "naive"
        return Kernels(kind, self.stack, self.weights, self.dense, self.cache, naive_attention=naive)
