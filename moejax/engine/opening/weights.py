"""Reads a resolved model's weights, or draws them, onto its devices, and quantizes them on the way."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from flax import nnx

from moejax.checkpoint.hf import load_pretrained
from moejax.core.config import ModelConfig
from moejax.core.resolve import Resolution
from moejax.engine.opening.quantize import settle_products
from moejax.engine.opening.resolve import ResolvedEngine
from moejax.engine.pipeline.stage import StageFunctions
from moejax.engine.step.program import PagedFunctions
from moejax.models.decoder import Decoder
from moejax.moe.replicas import Placed, held_experts
from moejax.nn.param import OnValue, ParamSpec, initialize, specs
from moejax.ptq.apply import Progress, quantize_model
from moejax.ptq.on_load import QuantizeOnLoad, quant_report
from moejax.ptq.report import QuantReport
from moejax.sharding.pipeline import split_layers
from moejax.sharding.rules import shardings
from moejax.sharding.spmd import MeshDevices, SingleDevice

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """A model's weights, in place.

    Attributes:
        stages: the decoder's part in each pipeline stage; without a pipeline there is one, the whole.
        functions: each stage's weight leaves and step.
        quant_report: what was quantized while they were read; None if nothing was.
        resolutions: what quantized weights there are and what their products run on.
    """

    stages: list[Decoder]
    functions: list[PagedFunctions | StageFunctions]
    quant_report: QuantReport | None
    resolutions: list[Resolution]


def load(resolved: ResolvedEngine, on_progress: Progress | None = None) -> Weights:
    """Returns the weights of all stages, quantized as planned.

    Args:
        on_progress: while methods calibrate, told the share that is done, 0 to 1, and what is being done.

    Raises:
        CheckpointError: see `moejax.checkpoint.hf.load_pretrained`.
        ConfigError: a quantized checkpoint does not fit its devices, or the kernels asked for.
    """
    plan, parallel = resolved.quantization, resolved.parallel
    rounding = QuantizeOnLoad({} if plan.calibrates else plan.weights, resolved.quant)
    ranges = split_layers(resolved.config, parallel.pp, parallel.stage_layers)
    stages = [
        load_stage(resolved, place, layers, rounding.at(place))
        for place, layers in zip(resolved.places, ranges, strict=True)
    ]
    report = None
    if plan.calibrates:
        (model,) = stages
        report = quantize_model(model, resolved.quant, plan.tokens, progress=on_progress)
    elif plan.weights:
        rounding.put(stages)
        done = rounding.report()
        report = quant_report(stages, resolved.quant, [done], done.seconds)
    resolutions = settle_products(
        plan, resolved.quant, stages, resolved.places[0].axes, resolved.platform, resolved.experts
    )
    whole = len(stages) == 1
    functions = [PagedFunctions(stage) if whole else StageFunctions(stage) for stage in stages]
    return Weights(stages, functions, report, resolutions)


def load_stage(resolved: ResolvedEngine, place: SingleDevice, layers: range, store: OnValue) -> Decoder:
    """Returns a pipeline stage's part of the decoder with its weights.

    Args:
        store: takes each parameter's value when it is there.
    """

    def build(config: ModelConfig) -> Decoder:
        return Decoder(
            config,
            moe=resolved.moe,
            kernels=resolved.kernels,
            parallel=resolved.parallel,
            axes=place.axes,
            layers=layers,
        )

    def at(declared: Mapping[str, ParamSpec]) -> Mapping[str, jax.sharding.Sharding]:
        assert isinstance(place, MeshDevices)
        return shardings(declared, place.mesh, place.axes)

    spread = isinstance(place, MeshDevices)
    model = build(resolved.config)
    if resolved.source is None:
        where = at(specs(model)) if spread else None
        initialize(model, resolved.seed, where, expert_of=held_experts(model), store=store)
    else:
        loaded = load_pretrained(
            resolved.source,
            dtype=resolved.config.dtype,
            build=build,
            shardings=at if spread else None,
            expert_of=held_experts(model),
            store=store,
        )
        model, stats = loaded.model, loaded.stats
        logger.info(
            "%s: read %.1f MB of %d tensors in %.1f s",
            resolved.source,
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
