"""Simulated replicas of a model on a device kind: what fits its memory, and how long its steps take."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moejax.bench.backends.replica import FleetCosts, Layout
from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.simulate.config import SimulateSection
from moejax.bench.simulate.experts import SimulatedExperts, check_law
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig, check_parallel, check_rebalance
from moejax.engine.core import Engine
from moejax.models.decoder import Decoder
from moejax.nn.param import specs
from moejax.perf.certificate import Certificate, Change, step_bytes
from moejax.perf.links import latency
from moejax.perf.memory import Declared, StageMemory, device_memory, largest
from moejax.perf.sizes import DTYPE_BYTES
from moejax.results.metrics import Slo
from moejax.sharding.pipeline import split_layers
from moejax.simulate.calibration import Calibration, kind_of, load_calibration
from moejax.simulate.fleet import Link
from moejax.simulate.kernels import WEIGHTS, Kernels
from moejax.simulate.routing import RoutingLaw
from moejax.simulate.runner import CostModelRunner, VirtualClock, simulated_engine
from moejax.simulate.step import StepDurations

NODE = 8
_TIMES = 64
"""Times more devices that a layout is looked for with."""


class Room(NamedTuple):
    """Memory of the fullest device, bytes of a cache block, and blocks that fit."""

    memory: Certificate
    block: float
    blocks: int

    def held(self, cache_use: float) -> float:
        """Returns the bytes in use where a share of the cache's blocks is."""
        return self.memory.total - (1 - cache_use) * self.blocks * self.block


@dataclass(frozen=True)
class Deployment:
    """One layout of a model, ready to be simulated.

    Attributes:
        room: what its devices hold.
        step: its steps' durations.
        calibration: where the host's costs come from, and how far off each operation may be.
        others: the deployments that autoscaling may change a replica to, by layout.
    """

    name: str
    model: ModelConfig
    parallel: ParallelConfig
    engine: EngineConfig
    room: Room
    step: StepDurations
    calibration: Calibration
    others: Mapping[str, "Deployment"] = field(default_factory=dict)

    def under(self, law: RoutingLaw) -> "Deployment":
        """Returns it with another law of routing."""
        others = {name: other.under(law) for name, other in self.others.items()}
        return dataclasses.replace(self, step=dataclasses.replace(self.step, routing=law), others=others)

    def _layout(self, section: SimulateSection, scale: float) -> Layout:
        """Returns what its replicas are of, whose steps take `scale` times as long."""
        host = self.step.host
        costs = {
            name: getattr(host, name) * scale for name in ("step_s", "row_s", "token_s", "layer_s", "factor")
        }
        step = (
            self.step
            if scale == 1.0
            else dataclasses.replace(self.step, host=dataclasses.replace(host, **costs))
        )
        groups, sizes = self.parallel.data_groups, (self.room.blocks, self.room.block)

        def make() -> tuple[Engine, CostModelRunner, VirtualClock]:
            made = simulated_engine(self.engine, step.time, sizes[0], groups=groups, block_bytes=sizes[1])
            if any(self.model.moe_layers):
                SimulatedExperts(made, step, self.engine.rebalance, section.routing.shift_steps)
            return made

        return Layout(
            make,
            self.name,
            self.parallel.num_devices,
            self.room.memory.held.weights / (section.autoscale.load_gb_per_s * 1e9),
        )

    def backend(
        self, section: SimulateSection, scale: float = 1.0, slo: Slo | None = None
    ) -> SimulatedBackend:
        """Returns idle replicas whose steps take `scale` times as long; `slo` is what autoscaling aims at."""
        names = section.autoscale.layouts or [self.name]
        costs = FleetCosts(
            self._link(section),
            block_bytes=self.room.block,
            senders=self.parallel.num_devices // self.parallel.data_groups,
            request_s=self.step.host.request_s,
            slo=slo or Slo(),
        )
        layouts = [{self.name: self, **self.others}[name]._layout(section, scale) for name in names]
        start = names.index(self.name)
        return SimulatedBackend(self.model, self.engine, layouts, start=start, fleet=section, costs=costs)

    def _link(self, section: SimulateSection) -> Link:
        """Returns what a device of one pool sends to its peer in the other over. Raises `ConfigError` where
        its rate is not known."""
        hardware, near = self.step.kernels.hardware, section.pools.link == "nvlink"
        # A data sheet counts both directions of NVLink.
        rate = (hardware.link_bandwidth or 0.0) / 2 if near else hardware.network_bandwidth
        if section.pools.prefill and not rate:
            raise ConfigError(
                f"simulate.pools.link={section.pools.link}: its rate on {hardware.kind} is not known"
            )
        return Link(latency("collective-permute", 2, 1 if near else 2), rate or math.inf)


def deploy(
    name: str,
    model: ModelConfig,
    parallel: ParallelConfig,
    engine: EngineConfig,
    section: SimulateSection,
    kind: str,
    law: RoutingLaw,
) -> Deployment:
    """Returns a layout's deployment on a device kind.

    Raises:
        ConfigError: the model cannot be spread so, or does not fit.
    """
    check_parallel(parallel, model, parallel.num_devices)
    check_rebalance(engine.rebalance, parallel, model, 1)
    check_law(law, engine.rebalance, section.routing.shift_steps)
    if engine.moe.execution == "capacity" and parallel.redundant_experts:
        raise ConfigError("engine.moe.execution=capacity does not go with parallel.redundant_experts")
    kernels = section.kernels(kind)
    room = device_room(model, parallel, engine, kernels, section.memory_share)
    calibration = load_calibration(kind, section.stack, kind_of(model))
    stages = split_layers(model, parallel.pp, parallel.stage_layers)
    step = StepDurations(model, parallel, kernels, law, calibration.host, section.seed, stages, engine.moe)
    return Deployment(name, model, parallel, engine, room, step, calibration)


def layouts(model: ModelConfig, most: int) -> Iterator[tuple[str, ParallelConfig]]:
    """Yields the layouts that suit a model on up to so many devices, by powers of two: expert, tensor and
    pipeline parallelism, with attention split by heads or by requests."""
    sizes = [1 << power for power in range(most.bit_length())]
    for pp, ep, tp in itertools.product(sizes, repeat=3):
        devices = pp * ep * tp
        for attention in ("tensor", "data") if ep > 1 else ("tensor",):
            nodes = max(1, devices // NODE)
            if devices > most or (ep > 1 and not any(model.moe_layers)):
                continue
            try:
                parallel = ParallelConfig(pp=pp, ep=ep, tp=tp, nodes=nodes, attention=attention)
                check_parallel(parallel, model, devices)
            except ConfigError:
                continue
            degrees = [f"{name}{n}" for name, n in (("pp", pp), ("ep", ep), ("tp", tp)) if n > 1]
            degrees += ["data"] * (attention == "data") + [f"nodes{nodes}"] * (nodes > 1)
            yield "_".join(degrees) or "single", parallel


def device_room(
    model: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, kernels: Kernels, share: float
) -> Room:
    """Returns what the devices of the fullest stage hold.

    Raises:
        ConfigError: not one sequence of the longest length fits beside the weights.
    """
    limit = share * (kernels.hardware.memory or math.inf)

    def room(change: Change) -> Room:
        """Returns the room with some settings changed, with at least one sequence's blocks."""
        settings = {key.removeprefix("engine."): value for key, value in change.items() if "engine." in key}
        formats = {key: change.get(f"simulate.{key}", getattr(kernels, key)) for key in ("weights", "dense")}
        layout = wider[change["simulate.layouts"].strip("[]")] if "simulate.layouts" in change else parallel
        return _room(model, layout, dataclasses.replace(engine, **settings), formats, kernels.cache, limit)

    found = room({})
    if found.memory.fits:
        return found
    wider = dict(layouts(model, _TIMES * parallel.num_devices))
    limits = {
        "engine.max_model_len": (engine.block_size, engine.max_model_len or model.max_position_embeddings),
        "engine.max_num_batched_tokens": (engine.max_num_seqs, engine.max_num_batched_tokens),
        "engine.max_num_seqs": (1, engine.max_num_seqs),
    }
    formats = [name for name in ("w8a16_int8", "w4a16_int4") if WEIGHTS[name] < WEIGHTS[kernels.weights]]
    changes = [{"simulate.weights": name, "simulate.dense": name} for name in formats]
    more = sorted((one.num_devices, name) for name, one in wider.items())
    raise ConfigError(
        f"{kernels.kind}, {share:.0%} of its memory: "
        + found.memory.refusal(
            lambda change: room(change).memory.fits,
            {key: (low, high - 1) for key, (low, high) in limits.items()},
            changes,
            [{"simulate.layouts": f"[{name}]"} for count, name in more if count > parallel.num_devices],
        )
    )


def _room(
    model: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, formats: Mapping[str, str],
    cache: str, limit: float,
) -> Room:  # fmt: skip
    """Returns as many blocks as fit, and what is held with them; at least those of the longest sequence."""
    itemsize, held = DTYPE_BYTES[model.dtype], _held(model, parallel, engine.block_size, engine.max_num_seqs)
    experts, dense = (WEIGHTS[formats[key]] / itemsize for key in ("weights", "dense"))
    size = (held.cache - held.states) * WEIGHTS[cache] / itemsize
    step = step_bytes(
        model, parallel, engine.max_num_seqs, engine.max_num_batched_tokens, sampled=False, kernels=True
    )
    needed = math.ceil((engine.max_model_len or model.max_position_embeddings) / engine.block_size)
    weights = held.expert_weights * experts + held.other_weights * dense
    fitting = (limit - weights - held.states - step) // size if size else math.inf
    most = min(max(needed, fitting), engine.max_num_seqs * needed * 4)
    blocks = int(min(most, engine.num_blocks or math.inf))
    of_dense = ("other_weights", "attention_weights", "embedding_weights")
    parts = {name: round(getattr(held, name) * dense) for name in of_dense}
    parts |= {"expert_weights": round(held.expert_weights * experts)}
    memory = dataclasses.replace(held, **parts, cache=round(blocks * size) + held.states)
    return Room(Certificate(memory, step, limit=limit), size, blocks)


@functools.lru_cache(maxsize=256)
def _held(model: ModelConfig, parallel: ParallelConfig, block_size: int, sequences: int) -> StageMemory:
    """Returns what the fullest stage holds with one block."""
    stages = split_layers(model, parallel.pp, parallel.stage_layers)
    held = device_memory(
        model, parallel, _declared(model), num_blocks=1, block_size=block_size, sequences=sequences + 1,
        stages=stages,
    )  # fmt: skip
    return largest(held)


@functools.lru_cache(maxsize=4)
def _declared(model: ModelConfig) -> Mapping[str, Declared]:
    return specs(Decoder(model))
