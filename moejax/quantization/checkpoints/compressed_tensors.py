"""The `quantization_config` of compressed-tensors: groups of modules with a scheme each.

A group's targets are names of modules, patterns ("re:…") or classes ("Linear"); the most specific counts, in
that order. Its `weights` and `input_activations` say what the numbers are; how they are stored follows from
`format`, of the group or of all.
"""

import re
from dataclasses import dataclass
from typing import Any, get_args

from moejax.core.errors import CheckpointError, ConfigError
from moejax.quantization.checkpoints.convention import Convention, QuantFields, Role, Verdict
from moejax.quantization.checkpoints.layouts import LAYOUTS
from moejax.quantization.checkpoints.scheme import Scheme
from moejax.quantization.formats import MXFP4, NVFP4, Activations, Granularity, WeightFormat

METHOD = "compressed-tensors"
SUPPORTED = ", ".join(
    f"{name} ({', '.join(f'{kind}{bits}' for kind, bits in stored)})" for name, (_, stored) in LAYOUTS.items()
)


@dataclass(frozen=True)
class Args:
    """One `QuantizationArgs`, of weights or of input activations."""

    bits: int
    type: str
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int] | None
    dynamic: bool | str
    order: str | None

    @classmethod
    def parse(cls, raw: Any, where: str) -> "Args":
        if not isinstance(raw, dict):
            raise CheckpointError(f"{where} must be an object, got {raw!r}")
        size = raw.get("group_size")
        strategy = raw.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
        block = raw.get("block_structure")
        if isinstance(block, str):
            block = [int(part) for part in block.split("x")]
        order = raw.get("actorder")
        order = {"dynamic": "group", "static": "weight", True: "group", False: None}.get(order, order)
        return cls(
            bits=int(raw.get("num_bits", 8)),
            type=str(raw.get("type", "int")).lower(),
            symmetric=bool(raw.get("symmetric", True)),
            strategy=str(strategy).lower(),
            group=size if size and size > 0 else 0,
            block=tuple(block) if block else None,
            dynamic=raw.get("dynamic", False),
            order=order,
        )


@dataclass(frozen=True)
class CompressedTensors(Convention):
    """A checkpoint of compressed-tensors.

    Attributes:
        groups: targets and scheme of each; None for one that leaves its modules in full precision.
    """

    groups: tuple[tuple[tuple[str, ...], Scheme | None], ...]
    ignore: tuple[str, ...]

    def verdict(self, module: str, role: Role) -> Verdict:
        classes = {"embedding": ("Embedding",), "router": ()}.get(role, ("Linear",))
        if any(_named(module, name) or name in classes for name in self.ignore):
            return Verdict(None)
        exact = [scheme for targets, scheme in self.groups if module in targets]
        pattern = [s for targets, s in self.groups if any(_named(module, name) for name in targets)]
        kind = [s for targets, s in self.groups if any(name in classes for name in targets)]
        if schemes := exact or pattern or kind:
            return Verdict(schemes[0])
        # A router is a `Linear` to some writers only.
        loose = [s for targets, s in self.groups if role == "router" and "Linear" in targets]
        return Verdict(loose[0], must=False) if loose else Verdict(None)


def _named(module: str, target: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def parse_compressed(fields: QuantFields) -> CompressedTensors:
    """Raises `ConfigError` for what is not read here and `CheckpointError` for what is malformed."""
    where = fields.source
    status = fields.take("quantization_status", default="compressed")
    fields.one_of("quantization_status", status, ("compressed", "frozen"), METHOD)  # the tensors decide
    cache = fields.take("kv_cache_scheme")
    notes = []
    if cache is not None:
        if not Args.parse(cache, f"{where}.kv_cache_scheme").dynamic:
            raise ConfigError(
                f"{where}.kv_cache_scheme asks for static scales of the key/value cache, which are not "
                "supported; remove it (and the tensors k_scale and v_scale) and set quant.kv_cache, whose "
                "scales are found for each token and head"
            )
        notes.append("kv_cache_scheme is not applied; set quant.kv_cache")
    sparsity = fields.take("sparsity_config", default={})
    fields.one_of("sparsity_config.format", sparsity.get("format", "dense"), ("dense",), METHOD)
    if fields.take("transform_config", default={}).get("config_groups"):
        raise ConfigError(
            f"{where}.transform_config: rotations are not supported; use a checkpoint without them"
        )
    raw = fields.take("config_groups", default={})
    if not isinstance(raw, dict) or not raw:
        raise CheckpointError(f"{where}.config_groups names no groups")
    groups = []
    for name, group in raw.items():
        if not isinstance(group, dict):
            raise ConfigError(f"{where}.config_groups.{name} must be an object; presets by name are not read")
        parsed = QuantFields(group, f"{where}.config_groups.{name}")
        scheme, more = _scheme(parsed, str(fields.take("format", default="dense")))
        groups.append((parsed.names("targets"), scheme))
        notes += more
    return CompressedTensors(METHOD, tuple(groups), fields.names("ignore"), notes=tuple(dict.fromkeys(notes)))


def _scheme(fields: QuantFields, whole: str) -> tuple[Scheme | None, list[str]]:
    """Returns a group's scheme, and what it asks for and does not get."""
    where = fields.source
    if fields.take("weights") is None:
        if fields.take("input_activations") is not None:
            raise ConfigError(f"{where}: activations without weights are not supported")
        return None, []
    if fields.take("output_activations") is not None:
        raise ConfigError(f"{where}.output_activations are not supported; remove them")
    weights = Args.parse(fields.raw["weights"], f"{where}.weights")
    inputs = fields.take("input_activations")
    inputs = None if inputs is None else Args.parse(inputs, f"{where}.input_activations")
    name = str(fields.take("format", default=whole))
    if name == "mixed-precision":
        name = _inferred(weights, inputs)
    if name not in LAYOUTS:
        raise ConfigError(f"{where}.format={name!r} is not supported; supported: {SUPPORTED}")
    fmt = _format(name, weights, where)
    activations, note = _activations(fmt, inputs)
    fmt = WeightFormat(**(vars(fmt) | {"activations": activations}))
    return LAYOUTS[name][0](fmt), [note] if note else []


def _inferred(weights: Args, inputs: Args | None) -> str:
    """Returns the format of a group that does not say, as compressed-tensors infers it."""
    if weights.type == "float" and weights.bits == 4:
        return "mxfp4-pack-quantized" if weights.group == 32 else "nvfp4-pack-quantized"
    if weights.type == "int":
        return "pack-quantized" if inputs is None else "int-quantized"
    return "naive-quantized" if inputs is None else "float-quantized"


def _format(name: str, weights: Args, where: str) -> WeightFormat:
    """Returns the format without the activations; scales that are floats are taken for float32."""
    if (weights.type, weights.bits) not in LAYOUTS[name][1]:
        raise ConfigError(
            f"{where}: {weights.type} of {weights.bits} bits in {name} is not supported; "
            f"supported: {SUPPORTED}"
        )
    if weights.bits == 4 and weights.type == "float":
        fmt = NVFP4 if name.startswith("nvfp4") else MXFP4
        strategy = "tensor_group" if fmt == NVFP4 else "group"
        if (weights.strategy, weights.group, weights.symmetric) != (strategy, fmt.group, True):
            raise ConfigError(
                f"{where}.weights: {name} is symmetric in groups of {fmt.group} (strategy {strategy!r}), not "
                f"{weights.strategy!r} of {weights.group}"
            )
        return fmt
    QuantFields({}, f"{where}.weights").one_of("strategy", weights.strategy, get_args(Granularity), METHOD)
    group = weights.group if weights.strategy == "group" else 0
    if weights.strategy == "block":
        rows, columns = weights.block or (0, 0)
        if rows != columns or rows < 1:
            raise ConfigError(
                f"{where}.weights.block_structure: blocks are squares here, not {weights.block}"
            )
        group = rows
    if weights.strategy == "group" and group < 1:
        raise CheckpointError(f"{where}.weights: strategy 'group' without a group_size")
    return WeightFormat(
        "float8_e4m3fn" if weights.type == "float" else "int4" if weights.bits == 4 else "int8",
        weights.strategy,  # type: ignore[arg-type]
        group,
        symmetric=weights.symmetric or weights.type == "float",
        scale_dtype="e8m0" if name == "mxfp8-quantized" else "float32",
        indexed=weights.order == "group" and weights.strategy == "group",
    )


def _activations(fmt: WeightFormat, inputs: Args | None) -> tuple[Activations, str]:
    """Returns the other operand's quantization, and a note on what was asked for but is not done."""
    if inputs is None:
        return "none", ""
    same = inputs.bits == 8 == fmt.bits and inputs.type == ("int" if fmt.numbers == "int8" else "float")
    if same and inputs.symmetric and inputs.dynamic is True and inputs.strategy == "token":
        return "dynamic", ""
    if same and inputs.symmetric and inputs.dynamic is False and inputs.strategy == "tensor":
        return "static", ""
    kind = "asymmetric " if not inputs.symmetric else ""
    when = "static" if inputs.dynamic is False else "dynamic"
    return "none", (
        f"activations of {fmt.name} weights are not quantized ({kind}{inputs.type} of {inputs.bits} bits, "
        f"{when} by {inputs.strategy}, is asked for): products take them in the model's dtype"
    )
