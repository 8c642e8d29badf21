"""Hugging Face model directories: `config.json` plus safetensors, single or sharded.

Reading goes file by file and tensor by tensor into host buffers that move to the device when complete, so
that at no time there are two copies of the model.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moejax.checkpoint.maps import TABLES
from moejax.checkpoint.maps.rules import apply_transform
from moejax.checkpoint.plan import Faults, LoadPlan, canonical_key, plan_load
from moejax.core.config import DTYPES, ModelConfig, MoeConfig, check_choice
from moejax.core.errors import CheckpointError, ConfigError, OutputError, unknown
from moejax.core.files import atomic_write_text
from moejax.models.decoder import Decoder
from moejax.models.registry import config_from_hf, config_to_hf
from moejax.nn.param import iter_params, specs

ASSETS = Path(__file__).resolve().parent.parent / "assets"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED_DTYPES = ("F32", "BF16", "F16")


def shipped_models() -> list[str]:
    """Names of the models that come with the package."""
    return (
        sorted(p.name for p in ASSETS.iterdir() if (p / "config.json").is_file()) if ASSETS.is_dir() else []
    )


def resolve_model_dir(model: str | os.PathLike[str]) -> Path:
    """A shipped model's name or a directory → its directory.

    Raises:
        ConfigError: neither; the message names the shipped models.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if str(model) in shipped_models():
        return ASSETS / str(model)
    if path.exists():
        raise ConfigError(f"model.path: {str(model)!r} is a file, not a Hugging Face directory")
    hint = unknown("model", str(model), shipped_models())
    raise ConfigError(f"model.path: {hint}; it is not a directory either")


def read_json(path: Path) -> Any:
    """Raises `CheckpointError` for a file that is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; a Hugging Face directory needs it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """`ModelConfig` of a model directory or shipped name.

    Raises:
        ConfigError, CheckpointError: see `moejax.models.registry.config_from_hf`.
    """
    path = resolve_model_dir(directory) / "config.json"
    return config_from_hf(read_json(path), str(path))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all present.

    Raises:
        CheckpointError: none, or a shard that the index names is missing.
    """
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{directory / INDEX}: no weight_map from tensors to files")
        files = [directory / name for name in sorted(set(names))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{directory}: missing shard(s) {', '.join(missing)} that {INDEX} names; copy them there"
            )
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    other = sorted(p.name for p in directory.glob("*.bin"))
    hint = f"; {other[0]} is in PyTorch's format, save it as safetensors" if other else ""
    raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX}{hint}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file, truncated or corrupted ({error}); copy it again"
        ) from None


def _tensor_shapes(files: list[Path]) -> tuple[dict[str, tuple[int, ...]], Faults]:
    """Shape of every stored tensor; keys that two files hold and dtypes that are not read are faults."""
    shapes: dict[str, tuple[int, ...]] = {}
    home: dict[str, Path] = {}
    faults = Faults()
    for path in files:
        with _open(path) as handle:
            for key in handle.keys():
                stored = handle.get_slice(key)
                if key in home:
                    faults.add("doubly mapped", f"{key} in {home[key].name} and {path.name}")
                if (dtype := stored.get_dtype()) not in STORED_DTYPES:
                    faults.add(f"of a dtype other than {', '.join(STORED_DTYPES)}", f"{key} is {dtype}")
                shapes[key], home[key] = tuple(stored.get_shape()), path
    return shapes, faults


class Loaded(NamedTuple):
    """A model with its weights, and its configuration (dtype as loaded)."""

    model: Decoder
    config: ModelConfig


def load_pretrained(
    directory: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    moe: MoeConfig | None = None,
    kernels: str = "xla",
) -> Loaded:
    """Reads a Hugging Face directory, or a shipped model by name.

    Args:
        directory: holds `config.json` and safetensors (bf16, f16 or f32).
        dtype: what the weights are kept in; "auto" is what the configuration says.
        moe: how the expert layers are executed.
        kernels: what norms and router run on, see `moejax.models.decoder.Decoder`.

    Raises:
        ConfigError: unknown model, unsupported architecture or field.
        CheckpointError: damaged or missing file, or keys that do not fit; all are listed.
    """
    path = resolve_model_dir(directory)
    config = load_config(path)
    if dtype != "auto":
        check_choice("dtype", dtype, DTYPES)
        config = config.replace(dtype=dtype)
    model = Decoder(config, moe=moe, kernels=kernels)
    files = weight_files(path)
    shapes, faults = _tensor_shapes(files)
    plan = plan_load(
        shapes,
        specs(model),
        TABLES[config.family],
        num_experts=config.num_experts,
        tied=config.tie_word_embeddings,
        source=str(path),
        faults=faults,
    )
    _fill(model, files, plan)
    return Loaded(model, config)


def _fill(model: Decoder, files: list[Path], plan: LoadPlan) -> None:
    params = dict(iter_params(model))
    buffers: dict[str, np.ndarray] = {}
    left = dict(plan.parts)
    faults = Faults()
    for path in files:
        with _open(path) as handle:
            for key in handle.keys():
                if key not in plan.fills:
                    continue  # a tied lm_head
                value = _read(handle, key, path)
                if not _usable(key, value, model.config.dtype, faults):
                    continue  # the rest is still looked at, so that the error names every such tensor
                for fill in plan.fills[key]:
                    spec = params[fill.param].get_metadata("spec")
                    part = apply_transform(fill.target.transform, value)
                    if spec.transposed:
                        part = part.swapaxes(-1, -2)
                    if fill.expert is None:
                        buffers[fill.param] = aligned_empty(spec.shape, spec.dtype)
                        buffers[fill.param][...] = part
                    else:
                        if fill.param not in buffers:
                            buffers[fill.param] = aligned_empty(spec.shape, spec.dtype)
                        buffers[fill.param][fill.expert] = part
                    left[fill.param] -= 1
                    if not left[fill.param]:
                        params[fill.param].set_value(jax.device_put(buffers.pop(fill.param), may_alias=True))
    faults.check(str(files[0].parent))


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that starts at a multiple of 64 bytes.

    On CPU, JAX takes such an array over without a copy.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _usable(key: str, value: np.ndarray, dtype: str, faults: Faults) -> bool:
    if not np.isfinite(value).all():
        faults.add("with NaN or infinite values", key)
        return False
    if dtype == "float16" and np.abs(value).max(initial=0) > np.finfo(np.float16).max:
        faults.add("with values too large for float16 (load as bfloat16 or float32)", key)
        return False
    return True


def _read(handle: Any, key: str, path: Path) -> np.ndarray:
    try:
        return handle.get_tensor(key)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read {key!r} ({error}); copy the file again") from None


def save_pretrained(
    model: Decoder,
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes `config.json` and safetensors that transformers loads. Files appear only when complete.

    Args:
        dtype: storage dtype; None keeps the model's.
        max_shard_bytes: a larger model is split into shards with an index.

    Raises:
        ConfigError: the family's `config.json` cannot describe the model.
        OutputError: the directory cannot be written; nothing half-written is left.
    """
    out = Path(directory)
    config = model.config if dtype is None else model.config.replace(dtype=dtype)
    text = json.dumps(config_to_hf(config), indent=2) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            shards = _write_shards(model, out, jnp.dtype(config.dtype), max_shard_bytes)
            atomic_write_text(out / "config.json", text)
            _commit_shards(out, shards)
        finally:
            for left in out.glob(".shard-*.tmp"):
                left.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{out}: cannot write the model ({reason})") from error


def _tensors(model: Decoder, dtype: Any) -> Any:
    """(key, array) in the layout of the family's table, one at a time."""
    rules = TABLES[model.config.family]
    transposed = {
        target.param.split(".", 2)[-1]: target.transform == "transpose"
        for rule in rules
        if rule.canonical
        for target in rule.targets
    }
    for name, param in iter_params(model):
        key, per_expert = canonical_key(name, rules)
        flip = transposed[name.split(".", 2)[-1]]
        value = np.asarray(param[...]).astype(dtype, copy=False)
        if param.get_metadata("spec").transposed:
            value = value.swapaxes(-1, -2)
        for expert in range(value.shape[0]) if per_expert else (None,):
            part = value if expert is None else value[expert]
            yield key.replace("{e}", str(expert)), np.ascontiguousarray(part.T if flip else part)


def _write_shards(
    model: Decoder, out: Path, dtype: Any, limit: int
) -> list[tuple[Path, dict[str, np.ndarray], int]]:
    """Temporary shard files with the keys that each holds."""
    shards: list[tuple[Path, dict[str, np.ndarray], int]] = []
    current: dict[str, np.ndarray] = {}
    size = 0

    def flush() -> None:
        nonlocal current, size
        path = out / f".shard-{len(shards)}.tmp"
        save_file(current, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner can read
        shards.append((path, dict.fromkeys(current, np.empty(0)), size))
        current, size = {}, 0

    for key, value in _tensors(model, dtype):
        if current and size + value.nbytes > limit:
            flush()
        current[key] = value
        size += value.nbytes
    flush()
    return shards


def _commit_shards(out: Path, shards: list[tuple[Path, dict[str, np.ndarray], int]]) -> None:
    """Moves the shards to their final names and writes, or removes, the index."""
    if len(shards) == 1:
        os.replace(shards[0][0], out / SINGLE)
        (out / INDEX).unlink(missing_ok=True)
        return
    weight_map: dict[str, str] = {}
    for i, (path, keys, _) in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(path, out / name)
        weight_map.update(dict.fromkeys(keys, name))
    index = {"metadata": {"total_size": sum(size for _, _, size in shards)}, "weight_map": weight_map}
    atomic_write_text(out / INDEX, json.dumps(index, indent=2) + "\n")
    (out / SINGLE).unlink(missing_ok=True)
