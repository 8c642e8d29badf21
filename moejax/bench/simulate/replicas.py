"""Simulated replicas of a model on a device kind: what fits its memory, and how long its steps take."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from moejax.bench.backends.replica import FleetCosts
from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.simulate.config import SimulateSection
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig, check_parallel
from moejax.core.words import byte_words
from moejax.models.decoder import Decoder
from moejax.nn.param import specs
from moejax.perf.links import latency
from moejax.perf.memory import StageMemory, device_memory, largest
from moejax.results.metrics import Slo
from moejax.sharding.pipeline import split_layers
from moejax.simulate.calibration import Calibration, load_calibration
from moejax.simulate.fleet import Link
from moejax.simulate.kernels import WEIGHTS, Kernels
from moejax.simulate.routing import RoutingLaw
from moejax.simulate.runner import simulated_engine
from moejax.simulate.step import StepDurations


class Room(NamedTuple):
    """Memory of the fullest device: bytes of weights, of a cache block and of a step, and blocks that fit."""

    weights: float
    block: float
    step: float
    limit: float
    blocks: int

    def held(self, cache_use: float) -> float:
        """Returns the bytes in use where a share of the cache's blocks is."""
        return self.weights + self.step + cache_use * self.blocks * self.block


@dataclass(frozen=True)
class Deployment:
    """One layout of a model, ready to be simulated.

    Attributes:
        room: what its devices hold.
        step: its steps' durations.
        calibration: where the host's costs come from, and how far off each operation may be.
    """

    name: str
    model: ModelConfig
    parallel: ParallelConfig
    engine: EngineConfig
    room: Room
    step: StepDurations
    calibration: Calibration

    def backend(
        self, section: SimulateSection, scale: float = 1.0, slo: Slo | None = None
    ) -> SimulatedBackend:
        """Returns idle replicas whose steps take `scale` times as long; `slo` is what autoscaling aims at."""
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
        costs_of = FleetCosts(
            self._link(section),
            block_bytes=self.room.block,
            senders=self.parallel.num_devices // groups,
            devices=self.parallel.num_devices,
            load_s=self.room.weights / (section.autoscale.load_gb_per_s * 1e9),
            request_s=host.request_s,
            slo=slo or Slo(),
        )
        return SimulatedBackend(
            self.model,
            self.engine,
            lambda: simulated_engine(self.engine, step.time, sizes[0], groups=groups, block_bytes=sizes[1]),
            fleet=section,
            costs=costs_of,
        )

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
    kernels = section.kernels(kind)
    room = device_room(model, parallel, engine, kernels, section.memory_share)
    calibration = load_calibration(kind, section.stack)
    stages = split_layers(model, parallel.pp, parallel.stage_layers)
    step = StepDurations(model, parallel, kernels, law, calibration.host, section.seed, stages)
    return Deployment(name, model, parallel, engine, room, step, calibration)


def device_room(
    model: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, kernels: Kernels, share: float
) -> Room:
    """Returns what the devices of the fullest stage hold.

    Raises:
        ConfigError: not one sequence of the longest length fits beside the weights.
    """
    limit = share * (kernels.hardware.memory or math.inf)

    def held(blocks: int) -> StageMemory:
        stages = split_layers(model, parallel.pp, parallel.stage_layers)
        size, declared = engine.block_size, specs(Decoder(model))
        of = device_memory(model, parallel, declared, num_blocks=blocks, block_size=size, stages=stages)
        return largest(of)

    one, two = held(1), held(2)
    block = (two.cache - one.cache) * WEIGHTS[kernels.cache] / 2
    itemsize = 2  # of the model's own dtype
    weights = one.expert_weights * WEIGHTS[kernels.weights] / itemsize
    weights += one.other_weights * WEIGHTS[kernels.dense] / itemsize
    width = max(model.hidden_size * 4, 3 * model.num_experts_per_tok * model.moe_intermediate_size)
    step = 1.0 * engine.max_num_batched_tokens * width * itemsize
    step += 4.0 * engine.max_num_seqs * parallel.padded_vocab(model.vocab_size)
    longest = engine.max_model_len or model.max_position_embeddings
    needed = math.ceil(longest / engine.block_size)
    blocks = int((limit - weights - step) // block)
    if engine.num_blocks is not None:
        blocks = min(blocks, engine.num_blocks)
    if blocks < needed:
        more = math.ceil((weights + step + needed * block) / limit)
        parts = [byte_words(size) for size in (weights, step, needed * block)]
        raise ConfigError(
            "{} of weights, {} of a step and {} of cache for a sequence of {} tokens do not fit {} of a {}; "
            "split it over {} times as many devices, choose simulate.weights of fewer bits, or lower "
            "engine.max_model_len".format(*parts, longest, byte_words(limit), kernels.kind, more)
        )
    return Room(weights, block, step, limit, min(blocks, engine.max_num_seqs * needed * 4))
