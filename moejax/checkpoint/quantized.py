"""Fills a model from a checkpoint with quantized weights, of whatever convention.

`plan_quantized` finds, before any weight is read, which parameters are quantized and how, and everything in
which configuration and tensors disagree. `fill_quantized` then reads matrix by matrix, on each process those
of the experts that its devices hold, and keeps their codes as they are (in our order), or their values.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from moejax.checkpoint.load import Block, Spans, empty_blocks, expert_parts, expert_slots, to_array, usable
from moejax.checkpoint.maps.rules import Rule
from moejax.checkpoint.plan import Faults, canonical_key
from moejax.checkpoint.tensors import STORED_DTYPES, TensorFiles
from moejax.core.errors import CheckpointError, ConfigError
from moejax.models.decoder import Decoder
from moejax.nn.param import ExpertOf, OnValue, ParamSpec, Skip, assign, iter_params
from moejax.nn.quantized import quantized_weights
from moejax.quantization.arithmetic import dequantize_stored
from moejax.quantization.checkpoints.convention import Convention, Role
from moejax.quantization.checkpoints.parse import MARKS, parse_quantization
from moejax.quantization.checkpoints.scheme import Arrays, Scheme
from moejax.quantization.formats import QTensor, WeightFormat

logger = logging.getLogger(__name__)

_dequantize_stored = jax.jit(dequantize_stored)


class Matrix(NamedTuple):
    """One quantized matrix of a checkpoint.

    Attributes:
        module: its tensors' common name.
        tensors: their last names, those that are read.
    """

    module: str
    scheme: Scheme
    tensors: tuple[str, ...]


@dataclass
class QuantizedPlan:
    """Quantized part of a checkpoint.

    Attributes:
        formats: path of each quantized parameter → its format.
        matrices: path → expert (None for the whole) → where it is stored.
        taken: the tensors of quantized weights, of other pipeline stages too; the rest are in full precision.
    """

    formats: dict[str, WeightFormat] = field(default_factory=dict)
    matrices: dict[str, dict[int | None, Matrix]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


def convention_of(raw: Any, path: Path) -> Convention:
    """Returns what a `quantization_config`, found in the file at `path`, means.

    Raises:
        ConfigError, CheckpointError: see `moejax.quantization.checkpoints.parse.parse_quantization`.
    """
    convention = parse_quantization(raw, str(path))
    for note in convention.notes:
        logger.warning("%s: %s", path.parent, note)
    return convention


def refuse_quantized(keys: Iterable[str], source: str) -> None:
    """Raises `CheckpointError` where tensors can only be of quantized weights, and nothing says of which."""
    marked = [key for key in keys if key.rpartition(".")[2] in MARKS]
    if marked:
        raise CheckpointError(
            f"{source}: {len(marked)} tensors are of quantized weights, {marked[0]} the first, and "
            "config.json has no quantization_config; add the one that the checkpoint was published with"
        )


def plan_quantized(
    files: TensorFiles,
    specs: Mapping[str, ParamSpec],
    rules: Iterable[Rule],
    convention: Convention,
    *,
    num_experts: int,
    tied: bool,
    elsewhere: Collection[str] = (),
) -> QuantizedPlan:
    """Plans which parameters are quantized, how, and where their tensors are.

    Args:
        files: whatever is wrong is added to its faults.
        specs: parameter path → declaration in floating point.
        elsewhere: paths of parameters that other pipeline stages have.
    """
    plan, rules = QuantizedPlan(), tuple(rules)
    files.rename(convention.parts(files.shapes))
    for module, names in _modules(files).items():
        place = _place(module, rules)
        if place is None:  # of no module that we know: `plan_load` lists them
            continue
        param, expert = place
        vector = param in specs and len(specs[param].shape) < 2
        coded = files.dtypes.get(f"{module}.weight", STORED_DTYPES[0]) not in STORED_DTYPES
        marked = bool(names & MARKS) or (coded and not vector)
        mine = {f"{module}.{name}" for name in names - {"bias"}}
        if (tied and module == "lm_head") or param in elsewhere:
            plan.taken |= mine if marked else set()
        elif param in specs and (expert is None or expert < num_experts):
            if marked:
                plan.taken |= mine
            _judge(plan, files, convention, param, expert, Module(module, names, marked), specs[param])
        bias = f"{param.removesuffix('.kernel')}.bias"
        if marked and "bias" in names and bias not in specs and bias not in elsewhere:
            plan.taken.add(f"{module}.bias")  # AutoGPTQ writes zeros where a layer has none
            if files.read(f"{module}.bias", ()).any():
                files.faults.add("biases other than 0, which the architecture lacks", f"{module}.bias")
    _settle(plan, files, specs, rules, num_experts)
    rest = files.shapes.keys() - plan.taken  # `plan_load` lists those that no rule names
    files.check_dtypes(sorted(key for key in rest if any(rule.pattern.fullmatch(key) for rule in rules)))
    if not plan.taken:
        method = f"quantized tensors that quant_method {convention.method!r} says there are"
        files.faults.add("missing", f"all {method}")
    return plan


class Module(NamedTuple):
    """A module's tensors, and whether some of them say that it is quantized."""

    name: str
    tensors: set[str]
    marked: bool


def _modules(files: TensorFiles) -> dict[str, set[str]]:
    """Returns the last names of each module's tensors."""
    names: dict[str, set[str]] = defaultdict(set)
    for key in files.shapes:
        module, _, name = key.rpartition(".")
        names[module].add(name)
    return names


def _place(module: str, rules: Sequence[Rule]) -> tuple[str, int | None] | None:
    """Returns the parameter that a module's weight fills, and the expert; None for what is no matrix."""
    for rule in rules:
        match = rule.pattern.fullmatch(f"{module}.weight")
        if match and len(rule.targets) == 1:
            groups = match.groupdict()
            param = rule.targets[0].param.replace("{l}", groups.get("l") or "")
            return param, int(groups["e"]) if rule.per_expert else None
    return None


def role_of(param: str) -> Role:
    """Returns the role that the conventions give to a parameter."""
    if param.startswith("embedding"):
        return "embedding"
    named: dict[str, Role] = {"router": "router", "shared_gate": "shared_gate", "lm_head": "head"}
    named["eh_proj"] = "router"  # which may be left in full precision, too
    return next((role for part, role in named.items() if part in param.split(".")), "linear")


def _judge(
    plan: QuantizedPlan,
    files: TensorFiles,
    convention: Convention,
    param: str,
    expert: int | None,
    module: Module,
    spec: ParamSpec,
) -> None:
    """Compares one module with what the configuration says of it."""
    if len(spec.shape) < 2:
        if module.marked:
            files.faults.add("quantized, although they are vectors", module.name)
        return
    role = role_of(param)
    verdict = convention.verdict(module.name, role)
    if not module.marked:
        if verdict.scheme is not None and verdict.must:
            files.faults.add("in full precision, although config.json has them quantized", module.name)
        return
    weight = f"{module.name}.weight"
    plain = verdict.scheme and verdict.scheme.main == "weight" and files.dtypes.get(weight) in STORED_DTYPES
    if plain and not verdict.must:  # transformers leaves scales beside what it did not quantize
        plan.taken.discard(weight)
        return
    if role == "embedding" or verdict.scheme is None:
        left_out = "quantized, although config.json leaves them in full precision"
        unread = "quantized embeddings, not supported"
        files.faults.add(unread if role == "embedding" else left_out, module.name)
        plan.matrices.setdefault(param, {})  # not missing, too
        return
    matrices = plan.matrices.setdefault(param, {})
    if expert in matrices:
        files.faults.add("doubly mapped", f"{module.name} and {matrices[expert].module}")
    matrices[expert] = _matrix(module, verdict.scheme, files, spec)


def _matrix(module: Module, scheme: Scheme, files: TensorFiles, spec: ParamSpec) -> Matrix:
    """Returns a matrix whose tensors are as its scheme says, or else the faults."""
    D, F = spec.canonical_shape[-2:]
    needs = scheme.needs(D, F)
    read = []
    for name, need in needs.items():
        key = f"{module.name}.{name}"
        if name not in module.tensors:
            if not need.optional:
                files.faults.add("missing", key)
            continue
        if need.unread:
            continue
        read.append(name)
        shape, dtype = files.shapes[key], files.dtypes[key]
        if shape not in need.shapes:
            shapes = " or ".join(str(list(other)) for other in need.shapes)
            hint = scheme.hint(name, shape, D, F)
            files.faults.add("misshapen", f"{key} is {list(shape)}, expected {shapes}{hint}")
        if dtype not in need.dtypes:
            kind = "of a dtype that config.json does not mean"
            files.faults.add(kind, f"{key} is {dtype}, expected {' or '.join(need.dtypes)}")
    for name in sorted(module.tensors - needs.keys() - {"bias"}):
        files.faults.add("unmapped", f"{module.name}.{name}")
    return Matrix(module.name, scheme, tuple(read))


def _settle(
    plan: QuantizedPlan,
    files: TensorFiles,
    specs: Mapping[str, ParamSpec],
    rules: Sequence[Rule],
    num_experts: int,
) -> None:
    """Settles each parameter's format; its experts must all be there, in the same."""
    for param, matrices in plan.matrices.items():
        key, per_expert, _ = canonical_key(param, rules, stacked=False)
        experts: Iterable[int | None] = range(num_experts) if per_expert else (None,)
        formats: dict[WeightFormat, str] = {}
        for expert in experts:
            module = key.removesuffix(".weight").replace("{e}", str(expert))
            matrix = matrices.get(expert)
            if matrix is None:
                whole = f"{module}.weight"
                if matrices and whole in files.shapes:
                    files.faults.add("in full precision beside quantized experts", whole)
                elif matrices:
                    files.faults.add("missing", f"{module}.{next(iter(matrices.values())).scheme.main}")
                plan.taken.add(whole)
                continue
            dtype = files.dtypes.get(f"{matrix.module}.{matrix.scheme.scale}")
            need = matrix.scheme.needs(*specs[param].canonical_shape[-2:])[matrix.scheme.scale]
            if dtype in need.dtypes:
                formats.setdefault(matrix.scheme.settled(dtype), matrix.module)
        if len(formats) > 1:
            one, other = (f"{f.name} with {f.scale_dtype} scales ({module})" for f, module in
                          list(formats.items())[:2])  # fmt: skip
            files.faults.add("with experts in several formats", f"{param}: {one} and {other}")
        for fmt in formats:
            plan.formats[param] = fmt
            try:
                fmt.check(key.removesuffix(".weight"), *specs[param].canonical_shape[-2:])
            except ConfigError as error:
                files.faults.add("of unfit shape for their format", str(error))


def fill_quantized(
    model: Decoder,
    files: TensorFiles,
    plan: QuantizedPlan,
    *,
    shardings: Mapping[str, Sharding] | None,
    expert_of: ExpertOf | None,
    faults: Faults,
    store: OnValue = assign,
    skip: Skip = lambda name: False,
) -> None:
    """Gives the quantized parameters of the plan their values: a `QuantizedWeight` its arrays, any other
    parameter the floating-point values.

    Args:
        shardings: path → sharding, of the model as it is (with the arrays of quantized weights).
        faults: values that are no weights, or that the configuration rules out, are added.
        store: takes each array when it is on its devices.
        skip: weights that are not read, by the path of the whole.
    """
    weights, params = dict(quantized_weights(model)), dict(iter_params(model))

    def where(key: str) -> Sharding | None:
        return None if shardings is None else shardings[key]

    for path, matrices in plan.matrices.items():
        if skip(path):
            continue
        weight, fmt = weights.get(path), plan.formats[path]
        declared = weight.stands_for if weight is not None else params[path].get_metadata("spec")
        slots = expert_slots(path, declared, expert_of, model.config.num_experts)
        # Path and parameter of each part; "" is of floating-point values.
        parts = {} if weight is None else weight.parts()
        targets = {name: (f"{path}.{name}", param) for name, param in parts.items()}
        targets = targets or {"": (path, params[path])}
        blocks = {
            name: empty_blocks(param.get_metadata("spec"), where(key))
            for name, (key, param) in targets.items()
        }
        for expert, places in _destinations(blocks, slots if None not in matrices else ()).items():
            arrays = _read(matrices[expert], fmt, files, declared, faults, whole=weight is None)
            for out, name, spans in places:
                if name in arrays:
                    out[...] = arrays[name][tuple(slice(*span) for span in spans)]
        if faults.by_kind:
            continue
        for name, (key, param) in targets.items():
            spec = param.get_metadata("spec")
            value = to_array(spec, where(key), blocks.pop(name))
            store(key, param, jax.block_until_ready(value))


def _destinations(
    blocks: Mapping[str, Sequence[Block]], slots: Sequence[int]
) -> dict[int | None, list[tuple[np.ndarray, str, Spans]]]:
    """Returns the places that each expert's matrix fills: array, part, and spans of it. None is the whole."""
    destinations: dict[int | None, list[tuple[np.ndarray, str, Spans]]] = defaultdict(list)
    for name, parts in blocks.items():
        for expert, spans, out in expert_parts(parts, slots):
            destinations[expert].append((out, name, spans))
    return destinations


def _read(
    matrix: Matrix, fmt: WeightFormat, files: TensorFiles, declared: ParamSpec, faults: Faults, *, whole: bool
) -> Arrays:
    """Reads the parts of one matrix; with `whole` its values, in the declaration's order and dtype, as "".

    Nothing where they are unusable.
    """
    D, F = declared.canonical_shape[-2:]
    unfit: list[str] = []

    def complain(name: str, what: str) -> None:
        unfit.append(name)
        faults.add("with values that do not fit config.json", f"{matrix.module}.{name}: {what}")

    tensors = {name: files.read(f"{matrix.module}.{name}", ()) for name in matrix.tensors}
    parts = matrix.scheme.read(tensors, D, F, complain)
    if unfit or not whole:
        return {} if unfit else parts
    values = np.asarray(_dequantize_stored(QTensor.of(parts, fmt, D)))
    if not usable(matrix.module, values, declared.dtype, faults):
        return {}
    return {"": (values if declared.transposed else values.T).astype(declared.dtype)}
