"""Models read from Hugging Face directories, and written: `config.json` plus safetensors, single or sharded.

What is read and where it goes is decided by `moejax.checkpoint.plan` and `moejax.checkpoint.load`.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError
from safetensors.numpy import save_file

from moejax.checkpoint.directory import (
    INDEX,
    SINGLE,
    load_config,
    resolve_model_dir,
    stored_quantization,
    weight_files,
)
from moejax.checkpoint.load import expert_slots, fill_model
from moejax.checkpoint.maps import TABLES
from moejax.checkpoint.maps.mtp import mtp_prefix, mtp_rules
from moejax.checkpoint.maps.rules import Rule, Transform, apply_transform
from moejax.checkpoint.plan import Faults, LoadPlan, canonical_key, plan_load
from moejax.checkpoint.quantized import (
    MARKS,
    QuantizedPlan,
    convention_of,
    fill_quantized,
    plan_quantized,
    refuse_quantized,
)
from moejax.checkpoint.quantized_save import QuantizedSave, plan_save
from moejax.checkpoint.tensors import QUANTIZED_DTYPES, STORED_DTYPES, TensorFiles
from moejax.core.checked import check
from moejax.core.config import DType, ModelConfig
from moejax.core.errors import CheckpointError, OutputError
from moejax.core.files import atomic_write_text, whole_folder
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.models.mtp import MtpDecoder
from moejax.models.registry import config_to_hf
from moejax.moe.replicas import held_experts
from moejax.nn.param import ExpertOf, OnValue, ParamSpec, Skip, assign, iter_params, specs
from moejax.nn.quantized import replace_weights
from moejax.quantization.checkpoints.convention import Convention
from moejax.sharding.distributed import broadcast

logger = logging.getLogger(__name__)

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files of a model directory that text and its generation need, beside weights and configuration."""

Tensors = Iterator[tuple[str, np.ndarray]]


class LoadStats(NamedTuple):
    """Amount of data that this process read to load a model.

    Attributes:
        bytes_read: of the slices of weights that its devices hold, as stored.
        tensors: of the checkpoint, of which something was read.
        seconds: from opening the files until the weights are on the devices.
    """

    bytes_read: int
    tensors: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """A model with its weights, and its configuration (dtype as loaded).

    Unpacks to these two; `stats` says what was read.
    """

    model: Decoder
    config: ModelConfig
    stats: LoadStats

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.config))


def load_pretrained(
    directory: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    moe: MoeConfig | None = None,
    build: Callable[[ModelConfig], Decoder] | None = None,
    shardings: Callable[[Mapping[str, ParamSpec]], Mapping[str, Sharding]] | None = None,
    expert_of: ExpertOf | None = None,
    store: OnValue | None = assign,
    skip: Skip = lambda name: False,
    dequantize: bool = False,
) -> Loaded:
    """Reads a Hugging Face directory, or a shipped model by name.

    Quantized weights (GPTQ, AWQ, compressed-tensors, fp8, mxfp4, ours; `moejax.quantization.checkpoints`)
    become `QuantizedWeight`s with the codes and scales that are stored.

    Args:
        directory: holds `config.json` and safetensors (bf16, f16 or f32, or quantized).
        dtype: what weights in floating point are kept in; "auto" is what the configuration says.
        moe: how the expert layers are executed.
        build: makes the abstract model, or a pipeline stage of it, instead of `moe`; an `MtpDecoder` for the
            layer after the last one alone.
        shardings: declarations → sharding of every parameter (`moejax.sharding.rules.shardings`). Each
            process then reads only the slices that its devices hold. None: all on the default device.
        expert_of: for a model with replicas of experts, which one each slot holds.
        store: takes each value as soon as it is on its devices (`moejax.engine.opening.quantize`); None: no
            value is read, and the model has shapes only.
        skip: weights that are not read.
        dequantize: makes floating-point weights of quantized ones.

    Raises:
        ConfigError: unknown model, unsupported architecture, field or quantization; `expert_of` does not fit.
        CheckpointError: damaged or missing file, keys that do not fit, or a `quantization_config` that the
            tensors do not follow; all are listed.
    """
    path = resolve_model_dir(directory)
    config = load_config(path)
    if dtype != "auto":
        check("dtype", dtype, DType)
        config = config.replace(dtype=dtype)
    model = Decoder(config, moe=moe) if build is None else build(config)
    declared = specs(model)
    mtp = isinstance(model, MtpDecoder)
    whole = declared if mtp or len(model.stage) == config.num_layers else specs(Decoder(config))
    start = time.perf_counter()
    stored = stored_quantization(path)
    convention = None if stored is None else convention_of(*stored)
    accept = STORED_DTYPES if convention is None else QUANTIZED_DTYPES
    with TensorFiles(weight_files(path), accept) as files:
        elsewhere = whole.keys() - declared.keys()
        if mtp:
            _keep_mtp(files, config, str(path))
            rules = mtp_rules(TABLES[config.family], config.num_layers)
            # Those who quantize a model may leave the layer as it is.
            marked = any(key.rpartition(".")[2] in MARKS for key in files.shapes)
            convention = convention if marked else None
        else:
            rules = TABLES[config.family]
            _pass_over(files, config, str(path))
        quantized, plan = _plan(files, declared, config, rules, convention, elsewhere, str(path))
        if not dequantize:
            replace_weights(model, quantized.formats)
        placed, faults = None if shardings is None else shardings(specs(model)), Faults()
        where: Any = {
            "shardings": placed,
            "expert_of": expert_of,
            "faults": faults,
            "store": store,
            "skip": skip,
        }
        if store is not None:
            fill_quantized(model, files, quantized, **where)
            fill_model(model, files, plan, **where, source=str(path))
        stats = LoadStats(files.bytes_read, len(files.keys_read), time.perf_counter() - start)
    return Loaded(model, config, stats)


def _keep_mtp(files: TensorFiles, config: ModelConfig, source: str) -> None:
    """Leaves the layer after the last one alone.

    Raises:
        CheckpointError: it is not there.
    """
    prefix = mtp_prefix(config.num_layers)
    for key in [key for key in files.shapes if not key.startswith(prefix)]:
        del files.shapes[key]
    if not files.shapes:
        raise CheckpointError(
            f"{source}: there is no tensor {prefix}*, although config.json has num_nextn_predict_layers="
            f"{config.mtp_layers}; use another engine.speculation.method, or the checkpoint as published"
        )


def _pass_over(files: TensorFiles, config: ModelConfig, source: str) -> None:
    """Leaves out the layers that predict further tokens."""
    further = range(config.num_layers, config.num_layers + config.mtp_layers)
    prefixes = (*map(mtp_prefix, further), *(["model.mtp_"] if further else []))
    passed = [key for key in files.shapes if key.startswith(prefixes)]
    if passed:
        names = ", ".join(sorted({".".join(key.split(".")[:3]) for key in passed}))
        logger.info(
            "%s: passed over %s, which predict further tokens (tensors: %d)", source, names, len(passed)
        )
    for key in passed:
        del files.shapes[key]


def _plan(
    files: TensorFiles,
    declared: Mapping[str, ParamSpec],
    config: ModelConfig,
    rules: tuple[Rule, ...],
    convention: Convention | None,
    elsewhere: Collection[str],
    source: str,
) -> tuple[QuantizedPlan, LoadPlan]:
    """Plans where quantized weights come from, and where the others do."""
    known: Any = {
        "num_experts": config.num_experts,
        "tied": config.tie_word_embeddings,
        "elsewhere": elsewhere,
    }
    quantized = QuantizedPlan()
    if convention is None:
        refuse_quantized(files.shapes, source)
    else:
        quantized = plan_quantized(files, declared, rules, convention, **known)
    shapes = {key: shape for key, shape in files.shapes.items() if key not in quantized.taken}
    rest = {name: spec for name, spec in declared.items() if name not in quantized.matrices}
    return quantized, plan_load(shapes, rest, rules, **known, source=source, faults=files.faults)


def save_pretrained(
    model: Decoder,
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    expert_of: ExpertOf | None = None,
    quantized_format: str = "auto",
    text_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a directory that transformers loads, whole or not at all: `config.json`, safetensors and, where
    `text_from` names the directory that has them, tokenizer and generation settings.

    A sharded model is gathered tensor by tensor. Where it is spread over several processes, all must call
    this; process 0 writes, and they leave together.

    Args:
        dtype: storage dtype of weights in floating point; None keeps the model's.
        max_shard_bytes: a larger model is split into shards with an index.
        expert_of: for a model whose experts are not in order, or have replicas, which one each slot holds;
            each is written once. None: as its replica tables say.
        quantized_format: of quantized weights: "compressed-tensors", which has words for most formats and is
            read by transformers and vLLM; "moejax", which has them for all; "auto" is the first that does.
        text_from: a model directory, whose `TEXT_FILES` are copied; `LLM.save_pretrained` gives its own.
        overwrite: replaces a model directory that is there, with all its files.

    Raises:
        ConfigError: the family's `config.json` cannot describe the model, or `expert_of` or the
            `quantized_format` does not fit.
        OutputError: the directory is in use, or cannot be written; nothing half-written is left.
    """
    out = Path(directory)
    if fault := broadcast(in_use(out, overwrite)):
        raise OutputError(fault)
    config = model.config if dtype is None else model.config.replace(dtype=dtype)
    quantized = plan_save(model, TABLES[config.family], quantized_format, _gathered)
    fields = config_to_hf(config) | ({"quantization_config": quantized.config} if quantized else {})
    text = json.dumps(fields, indent=2) + "\n"
    tensors = _tensors(model, jnp.dtype(config.dtype), expert_of or held_experts(model), quantized)
    if jax.process_index() == 0:
        _write(out, text, tensors, max_shard_bytes, None if text_from is None else Path(text_from))
    else:
        for _ in tensors:
            pass  # takes part in the gathering
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"save_pretrained {out}")


def in_use(out: Path, overwrite: bool, what: str = "model", file: str = "config.json") -> str:
    """Returns a line on what saving into a directory would lose, the empty string for nothing: `what` is
    saved, and has a `file`."""
    if not out.is_file() and not (out.is_dir() and any(out.iterdir())):
        return ""
    if not (out / file).is_file():
        return f"{out} exists and is no {what} directory; move it away, or save elsewhere"
    return "" if overwrite else f"{out} holds a model; save elsewhere, or replace it with overwrite=True"


def _write(out: Path, config: str, tensors: Tensors, limit: int, text_from: Path | None) -> None:
    try:
        with whole_folder(out) as folder:
            _commit_shards(folder, _write_shards(tensors, folder, limit))
            atomic_write_text(folder / "config.json", config)
            for path in () if text_from is None else map(text_from.joinpath, TEXT_FILES):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{out}: cannot write the model ({reason})") from error


def _tensors(
    model: Decoder, dtype: Any, expert_of: ExpertOf | None, quantized: QuantizedSave | None
) -> Tensors:
    """Yields (key, array) in the layout of the family's table, one at a time."""
    rules, E = TABLES[model.config.family], model.config.num_experts
    halves: dict[str, dict[str, np.ndarray]] = {}
    if quantized is not None:
        yield from quantized.tensors(_gathered, E, expert_of)
    for name, param in iter_params(model):
        if quantized is not None and name in quantized.paths:
            continue
        key, _, transform = canonical_key(name, rules)
        spec = param.get_metadata("spec")
        slots = expert_slots(name, spec, expert_of, E)
        value = spec.canonical(_gathered(param[...])).astype(dtype, copy=False)
        if not transform.startswith(("fused", "stacked")):
            yield from _by_expert(key, transform, value, slots)
            continue
        pair = halves.setdefault(key, {})
        pair[name] = value[[slots.index(expert) for expert in range(E)]]
        if transform in ("fused_down", "stacked") or len(pair) == 2:
            parts = [pair[half] for half in sorted(halves.pop(key))]  # gate before up
            if transform.startswith("fused"):
                whole = np.concatenate([part.swapaxes(1, 2) for part in parts], axis=1)
            else:
                whole = np.stack(parts, axis=-1).reshape(*value.shape[:-1], -1)
            yield key, np.ascontiguousarray(whole)
    for pair in halves.values():  # the other half is quantized
        for name, value in pair.items():
            key, _, transform = canonical_key(name, rules, stacked=False)
            yield from _by_expert(key, transform, value, range(E))


def _by_expert(key: str, transform: Transform, value: np.ndarray, slots: Sequence[int]) -> Tensors:
    """Yields a parameter as a checkpoint has it, one tensor for each expert where the key says so."""
    for expert in sorted(set(slots)) if "{e}" in key else (None,):
        part = value if expert is None else value[slots.index(expert)]
        yield key.replace("{e}", str(expert)), np.ascontiguousarray(apply_transform(transform, part))


def _gathered(x: jax.Array) -> np.ndarray:
    """Returns the whole array on the host, in process 0 at least, and no longer than the caller keeps it.

    `np.asarray(x)` of an array that lives on would leave its copy with it.
    """
    devices: Collection[Any] = x.sharding.device_set
    owners = {device.process_index for device in devices}
    here = jax.process_index() in owners
    value = np.zeros(x.shape, x.dtype)
    if here and len(owners) > 1:
        value = np.asarray(multihost_utils.process_allgather(x, tiled=True))
    elif here:
        shards = [shard.data for shard in x.addressable_shards]
        value = np.asarray(
            jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards, dtype=x.dtype)
        )
    if 0 in owners or isinstance(x.sharding, SingleDeviceSharding):
        return value
    # A pipeline stage that process 0 has no part in.
    sender = jax.process_index() == min(owners)
    return np.asarray(multihost_utils.broadcast_one_to_all(value, is_source=sender))


def _write_shards(tensors: Tensors, out: Path, limit: int) -> list[tuple[Path, list[str], int]]:
    """Returns temporary shard files with the keys that each holds."""
    shards: list[tuple[Path, list[str], int]] = []
    current: dict[str, np.ndarray] = {}
    size = 0

    def flush() -> None:
        nonlocal current, size
        path = out / f".shard-{len(shards)}.tmp"
        save_file(current, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner can read
        shards.append((path, list(current), size))
        current, size = {}, 0

    for key, value in tensors:
        if current and size + value.nbytes > limit:
            flush()
        current[key] = value
        size += value.nbytes
    flush()
    return shards


def _commit_shards(out: Path, shards: list[tuple[Path, list[str], int]]) -> None:
    """Moves the shards to their final names and writes the index."""
    if len(shards) == 1:
        os.replace(shards[0][0], out / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, (path, keys, _) in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(path, out / name)
        weight_map.update(dict.fromkeys(keys, name))
    index = {"metadata": {"total_size": sum(size for _, _, size in shards)}, "weight_map": weight_map}
    atomic_write_text(out / INDEX, json.dumps(index, indent=2) + "\n")
