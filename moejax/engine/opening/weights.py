"""Puts a model onto its devices: the mesh, the decoder written for it, the weights where they belong."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from flax import nnx

from moejax.checkpoint.hf import load_pretrained
from moejax.core.config import ModelConfig, MoeConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig, check_parallel
from moejax.models.decoder import Decoder
from moejax.moe.replicas import Placed, held_experts
from moejax.nn.param import OnValue, ParamSpec, initialize, keep, specs
from moejax.sharding.mesh import make_mesh
from moejax.sharding.pipeline import split_layers
from moejax.sharding.rules import shardings
from moejax.sharding.spmd import MeshDevices, SingleDevice

logger = logging.getLogger(__name__)


def make_places(parallel: ParallelConfig, model: ModelConfig, moe: MoeConfig) -> list[SingleDevice]:
    """The devices of each pipeline stage that an engine runs on.

    Raises:
        ConfigError: the model cannot be spread so, or there are too few devices.
    """
    if parallel.is_single:
        return [SingleDevice()]
    check_parallel(parallel, model, jax.device_count())
    if moe.execution == "capacity" and (parallel.ep > 1 or parallel.redundant_experts):
        raise ConfigError(
            "engine.moe.execution=capacity counts an expert's rows over the whole batch, which experts on "
            "several devices do not see; use parallel.exchange_capacity to bound what is exchanged"
        )
    if moe.execution == "capacity" and parallel.pp > 1 and parallel.microbatches != 1:
        raise ConfigError(
            "engine.moe.execution=capacity counts an expert's rows over the whole batch, which microbatches "
            f"cut; with parallel.pp={parallel.pp} it needs parallel.microbatches=1"
        )
    plan = make_mesh(parallel, model.num_kv_heads)
    return [MeshDevices(mesh, plan.axes) for mesh in plan.stages]


def build_stages(
    config: ModelConfig,
    parallel: ParallelConfig,
    places: list[SingleDevice],
    moe: MoeConfig,
    kernels: str,
    source: Path | None,
    seed: int,
    store: Callable[[SingleDevice], OnValue] = lambda place: keep,
) -> list[Decoder]:
    """Each pipeline stage's part of the decoder, see `build_model`; where there is one stage, all of it.

    Args:
        store: of a stage's place, what takes the values there.
    """
    if len(places) == 1:
        return [build_model(config, parallel, places[0], moe, kernels, source, seed, store=store(places[0]))]
    return [
        build_model(config, parallel, place, moe, kernels, source, seed, layers, store=store(place))
        for place, layers in zip(
            places, split_layers(config, parallel.pp, parallel.stage_layers), strict=True
        )
    ]


def build_model(
    config: ModelConfig,
    parallel: ParallelConfig,
    place: SingleDevice,
    moe: MoeConfig,
    kernels: str,
    source: Path | None,
    seed: int,
    layers: range | None = None,
    *,
    store: OnValue = keep,
) -> Decoder:
    """The decoder, or a stage's layers of it, with its weights: from a directory, or random for None.

    Args:
        store: takes each parameter's value when it is there.

    Raises:
        CheckpointError: see `moejax.checkpoint.hf.load_pretrained`.
    """

    def build(config: ModelConfig) -> Decoder:
        return Decoder(config, moe=moe, kernels=kernels, parallel=parallel, axes=place.axes, layers=layers)

    def at(declared: Mapping[str, ParamSpec]) -> Mapping[str, jax.sharding.Sharding]:
        assert isinstance(place, MeshDevices)
        return shardings(declared, place.mesh, place.axes)

    spread = isinstance(place, MeshDevices)
    if source is None:
        model = build(config)
        where = at(specs(model)) if spread else None
        initialize(model, seed, where, expert_of=held_experts(model), store=store)
    else:
        held = held_experts(build(config))
        loaded = load_pretrained(
            source,
            dtype=config.dtype,
            build=build,
            shardings=at if spread else None,
            expert_of=held,
            store=store,
        )
        model, stats = loaded.model, loaded.stats
        logger.info(
            "%s: read %.1f MB of %d tensors in %.1f s",
            source,
            stats.bytes_read / 1e6,
            stats.tensors,
            stats.seconds,
        )
    put_tables(model, place)
    return model


def put_tables(model: nnx.Module, place: SingleDevice) -> None:
    """Moves the replica tables, which no checkpoint holds, onto all devices."""
    if isinstance(place, MeshDevices):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, Placed):
                node.set_value(jax.device_put(node[...], place.sharding()))
