"""Reads a resolved model's weights, or draws them, onto its devices, and quantizes them on the way."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import jax
from flax import nnx

from moejax.checkpoint.hf import load_pretrained
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.resolve import Resolution
from moejax.core.version import __version__
from moejax.engine.adapters import Adapters, attach
from moejax.engine.opening.quantize import choose_implementation
from moejax.engine.opening.resolve import ResolvedEngine
from moejax.engine.step.program import PagedFunctions
from moejax.engine.tiers.experts import ExpertTiers, identity_of_files
from moejax.engine.tiers.program import PartFunctions
from moejax.models.decoder import Decoder
from moejax.models.mtp import MtpDecoder
from moejax.moe.replicas import Placed, held_experts
from moejax.nn.param import OnValue, ParamSpec, Skip, initialize, iter_params, specs
from moejax.nn.quantized import quantized_weights, replace_weights, weight_size
from moejax.ptq.apply import Progress, quantize_model, rising
from moejax.ptq.on_load import QuantizeOnLoad, quant_report
from moejax.ptq.reduce import reduce_experts
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
        adapters: LoRA adapters beside them.
        tiers: the experts, where they are not all on the device; then they are no part of the rest.
        users: who computes with them, see `release`.
    """

    stages: list[Decoder]
    functions: list[PagedFunctions]
    quant_report: QuantReport | None
    resolutions: list[Resolution]
    adapters: Adapters
    tiers: ExpertTiers | None = None
    users: "WeakSet[Any]" = field(default_factory=WeakSet, compare=False, repr=False)

    def release(self, user: object) -> None:
        """Takes note that one of `users` is done, and frees the devices' memory after the last."""
        self.users.discard(user)
        if self.tiers is not None and not self.users:
            self.tiers.close()
        for leaf in [] if self.users else [x for functions in self.functions for x in functions.leaves]:
            if isinstance(leaf, jax.Array):
                leaf.delete()

    def whole(self) -> Decoder:
        """Returns the decoder. Raises `ConfigError` where it is nowhere whole."""
        if len(self.stages) > 1:
            raise ConfigError(
                f"parallel.pp={len(self.stages)}: there is no whole model; LLM.stages has its parts"
            )
        if self.tiers is not None:
            raise ConfigError(
                "engine.experts, engine.tiers: not all weights are on the device, there is no whole model; "
                "open another LLM without them"
            )
        return self.stages[0]

    @property
    def absent(self) -> int:
        """Bytes that the devices are still to take."""
        leaves = [leaf for functions in self.functions for leaf in functions.leaves]
        absent = sum(x.size * x.dtype.itemsize for x in leaves if not isinstance(x, jax.Array))
        if self.tiers is not None:
            absent -= self.tiers.records.count * self.tiers.records.held
            absent += self.tiers.nbytes if self.tiers.store is None else 0
            if (streamed := self.tiers.streamed) is not None:
                absent -= streamed.nbytes - streamed.most
        return absent


def load(
    resolved: ResolvedEngine,
    on_progress: Progress | None = None,
    *,
    fill: bool = True,
    tiers: ExpertTiers | None = None,
) -> Weights:
    """Returns the weights of all stages, quantized as planned.

    Args:
        on_progress: while methods calibrate, told the share that is done, 0 to 1, and what is being done.
        fill: False leaves the weights without values: shapes, for an engine that never runs.
        tiers: what it has planned so for experts that are not all on the device, to be filled now.

    Raises:
        CheckpointError: see `moejax.checkpoint.hf.load_pretrained`.
        ConfigError: a quantized checkpoint does not fit its devices, or the kernels asked for.
    """
    plan, parallel = resolved.quantization, resolved.parallel
    rounding = QuantizeOnLoad({} if plan.calibrates else plan.weights, resolved.quant)
    ranges = split_layers(resolved.config, parallel.pp, parallel.stage_layers)
    if fill and tiers is None and resolved.engine.experts_in_tiers:
        tiers = load(resolved, fill=False).tiers
    with contextlib.ExitStack() as failed:
        if tiers is not None:
            failed.callback(tiers.close)
            tiers.open(functools.partial(_identity, resolved))
        stages = [
            load_stage(
                resolved,
                place,
                layers,
                functools.partial(_store, rounding, tiers, place) if fill else None,
                **({} if tiers is None else {"skip": tiers.has}),
            )
            for place, layers in zip(resolved.places, ranges, strict=True)
        ]
        settled = [] if tiers is None else tiers.finish()
        failed.pop_all()
    report, fewer = None, []
    if plan.original is not None:
        (whole,), on_progress = stages, rising(on_progress)  # on one device
        stages = [Decoder(resolved.config, moe=resolved.moe, kernels=resolved.kernels)]
        if fill:
            fewer = reduce_experts(whole, stages[0], resolved.quant, plan.tokens, on_progress)
        gone = weight_size(whole)[0] - weight_size(stages[0])[0]
        del whole
    if not fill:
        for stage in stages:
            replace_weights(stage, {path: chosen.format for path, chosen in plan.weights.items()})
    elif plan.calibrates:
        (model,) = stages
        report = quantize_model(model, resolved.quant, plan.tokens, progress=on_progress)
        if fewer:
            seconds, method = report.seconds + sum(stage.seconds for stage in fewer), resolved.quant.what
            form, before = report.format or resolved.config.dtype, report.float_bytes + gone
            every: Any = {"format": form, "float_bytes": before, "stages": [*fewer, *report.stages]}
            report = dataclasses.replace(report, method=method, seconds=seconds, **every)
    elif plan.weights:
        rounding.put(stages, elsewhere=tiers is not None)
        done = rounding.report()
        report = quant_report(stages, resolved.quant, [done], done.seconds)
    resolutions = _settle_products(resolved, stages)
    for stage, place in zip(stages, resolved.places, strict=True):
        if not fill:
            _place_shapes(stage, place)
    pairs, config = zip(stages, resolved.places, strict=True), resolved.engine.adapters
    slots = ChainMap(*(dict(attach(stage, config, place, fill=fill)) for stage, place in pairs))
    if not fill and resolved.engine.experts_in_tiers:
        engine, (place,) = resolved.engine, resolved.places
        tokens = place.groups * engine.max_num_batched_tokens
        tiers = ExpertTiers(engine.experts, engine.tiers, stages[0], tokens, place)
        if tiers.slots == tiers.records.count and tiers.streamed is None:  # as if it had not been asked for
            tiers = None
    functions: list[PagedFunctions] = [PagedFunctions(stage) for stage in stages]
    if tiers is not None:
        functions = [PartFunctions(stages[0], foresees=tiers.foresees, on_host=tiers.host is not None)]
        resolutions = [*resolutions, *settled]
    return Weights(
        stages, functions, report, resolutions, Adapters(config, resolved.config, slots, functions), tiers
    )


def _store(
    rounding: QuantizeOnLoad,
    tiers: ExpertTiers | None,
    place: SingleDevice,
    name: str,
    param: nnx.Param,
    value: jax.Array,
) -> None:
    """Takes a parameter's value: experts into their tiers, the rest onto the device, rounded as planned."""
    if tiers is not None and tiers.take(name, value):
        return
    rounding.take(place, name, param, value)
    if tiers is not None and tiers.holds(name):
        for part, array in rounding.take_out(name):
            assert tiers.take(f"{name}.{part}", array), (name, part)


def _identity(resolved: ResolvedEngine) -> dict[str, Any]:
    """Returns what experts in a file are known again by."""
    source = resolved.source
    return {
        "weights": identity_of_files(source)
        if source
        else [dataclasses.asdict(resolved.config), resolved.seed],
        "dtype": resolved.config.dtype,
        "layout": resolved.moe.expert_layout,
        "quant": dataclasses.asdict(resolved.quant),
        "version": __version__,
    }


def load_stage(
    resolved: ResolvedEngine,
    place: SingleDevice,
    layers: range,
    store: OnValue | None,
    skip: Skip = lambda name: False,
) -> Decoder:
    """Returns a pipeline stage's part of the decoder with its weights.

    Args:
        store: takes each parameter's value when it is there; None: no value is made or read.
        skip: parameters that are neither made nor read.
    """

    def build(config: ModelConfig) -> Decoder:
        options: dict[str, Any] = {
            "moe": resolved.moe,
            "kernels": resolved.kernels,
            "parallel": resolved.parallel,
            "axes": place.axes,
            "layers": layers,
        }
        return MtpDecoder(resolved.config, **options) if resolved.is_mtp else Decoder(config, **options)

    def at(declared: Mapping[str, ParamSpec]) -> Mapping[str, jax.sharding.Sharding]:
        assert isinstance(place, MeshDevices)
        return shardings(declared, place.mesh, place.axes)

    spread = isinstance(place, MeshDevices)
    model = build(resolved.quantization.original or resolved.config)
    if resolved.source is None and store is not None:
        where = at(specs(model)) if spread else None
        initialize(model, resolved.seed, where, expert_of=held_experts(model), store=store, skip=skip)
    elif resolved.source is not None:
        loaded = load_pretrained(
            resolved.source,
            dtype=resolved.config.dtype,
            build=build,
            shardings=at if spread else None,
            expert_of=held_experts(model),
            store=store,
            skip=skip,
        )
        model, stats = loaded.model, loaded.stats
        if store is not None:
            told = resolved.source, stats.bytes_read / 1e6, stats.tensors, stats.seconds
            logger.info("%s: read %.1f MB of %d tensors in %.1f s", *told)
    put_tables(model, place)
    return model


def _place_shapes(stage: Decoder, place: SingleDevice) -> None:
    """Says of the weights without values where they would lie on a mesh."""
    where = shardings(specs(stage), place.mesh, place.axes) if isinstance(place, MeshDevices) else {}
    for path, param in iter_params(stage) if where else ():
        x = param.get_value()
        param.set_value(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[path]))


def _settle_products(resolved: ResolvedEngine, stages: Sequence[Decoder]) -> list[Resolution]:
    """Tells each quantized weight, planned or of a quantized checkpoint, what its products run on, and puts
    it into the order that these read.

    Returns:
        What is quantized and what it runs on; nothing for a model in full precision.
    """
    quant, axes = resolved.quant, resolved.places[0].axes
    weights = [item for stage in stages for item in quantized_weights(stage)]
    formats = [(path, weight.stands_for, weight.format) for path, weight in weights]
    implementation = choose_implementation(quant, formats, axes, resolved.platform, resolved.experts)
    kernels = implementation.value == "pallas_triton"
    layout = Resolution("quant.layout", "plain", "tiles are of four-bit codes, for the GPU kernels alone")
    numbers_held = {fmt.numbers for _, _, fmt in formats}
    if quant.layout == "plain":
        layout = layout._replace(reason="asked for")
    elif kernels and resolved.engine.experts_in_tiers:
        layout = layout._replace(reason="experts that move one by one are not tiled")
    elif kernels and any(fmt.packed for _, _, fmt in formats):
        layout = layout._replace(value="tiled", reason="the GPU kernels read four-bit codes in whole lines")
    elif resolved.platform == "cpu" and not kernels and numbers_held & {"float8_e4m3fn", "float8_e5m2"}:
        layout = layout._replace(value="bits", reason="XLA on a CPU converts float8 number by number")
    if not weights:
        return []
    bits = numbers = 0
    for _, weight in weights:
        weight.implementation = implementation.value
        if layout.value == "tiled" and weight.format.packed:
            weight.tile()
        if layout.value == "bits" and weight.format.numbers.startswith("float8"):
            weight.keep_bits()
        shape = weight.stands_for.canonical_shape
        bits, numbers = bits + weight.format.bits_held(shape), numbers + math.prod(shape)
    counts = sorted(Counter(fmt.name for _, _, fmt in formats).items())
    each = f"{bits / numbers:.3f} bits a weight over {len(weights)} weights, scales included"
    source = "asked for" if resolved.quantization.weights else "the checkpoint's weights are quantized"
    return [
        Resolution("quant.method", quant.method, source),
        Resolution("quant.format", ", ".join(f"{count} × {name}" for name, count in counts), each),
        implementation,
        layout,
    ]


def put_tables(model: nnx.Module, place: SingleDevice) -> None:
    """Moves the tables that no checkpoint holds onto all devices."""
    if isinstance(place, MeshDevices):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, Placed):
                node.set_value(place.everywhere(node[...]))
