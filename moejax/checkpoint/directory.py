"""A Hugging Face model directory as files: where it is, its configuration, how its weights are stored and in
which files. No tensor is read here."""

import json
import os
from pathlib import Path
from typing import Any

from moejax.core.config import ModelConfig
from moejax.core.errors import CheckpointError, ConfigError, unknown
from moejax.models.registry import config_from_hf

ASSETS = Path(__file__).resolve().parent.parent / "assets"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")  # AutoGPTQ's and AutoAWQ's, of old


def shipped_models() -> list[str]:
    """Returns the names of the models that come with the package."""
    return (
        sorted(p.name for p in ASSETS.iterdir() if (p / "config.json").is_file()) if ASSETS.is_dir() else []
    )


def resolve_model_dir(model: str | os.PathLike[str]) -> Path:
    """Returns the directory of a shipped model's name, or of a directory itself.

    Raises:
        ConfigError: neither; the message names the shipped models.
    """
    path = Path(model)
    if path.suffix == ".gguf" or (any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))):
        raise ConfigError(f"model.path: {path} is GGUF, which is not read; give its model's safetensors")
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


def read_raw_config(model: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of `config.json` of a model directory or shipped name.

    Raises:
        ConfigError, CheckpointError: it is not there, or no JSON object.
    """
    path = resolve_model_dir(model) / "config.json"
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: no 'model_type'; is this a Hugging Face model configuration?")
    return raw


def reduced_shape(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns a `config.json` of the first `layers` layers, with a name that says so.

    Raises:
        ConfigError: the model has fewer.
    """
    every = raw.get("num_hidden_layers")
    if not isinstance(every, int) or layers > every:
        raise ConfigError(f"model.num_hidden_layers={layers}: the model has {every}")
    kept = {
        name: value[:layers] if isinstance(value, list) and len(value) == every else value
        for name, value in raw.items()
    }
    if isinstance(dense := raw.get("mlp_only_layers"), list):
        kept["mlp_only_layers"] = [layer for layer in dense if layer < layers]
    name = f"{raw.get('_name_or_path', 'custom')}-{layers}layers"
    return {**kept, "num_hidden_layers": layers, "_name_or_path": name}


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """Returns `ModelConfig` of a model directory or shipped name.

    Raises:
        ConfigError, CheckpointError: see `moejax.models.registry.config_from_hf`.
    """
    # How weights are stored is not of the model; `load_pretrained` reads it.
    raw = {k: v for k, v in read_raw_config(directory).items() if k not in QUANTIZATION_KEYS}
    return config_from_hf(raw, str(resolve_model_dir(directory) / "config.json"))


def stored_quantization(directory: Path) -> tuple[Any, Path] | None:
    """Returns a directory's `quantization_config`, under any name, and its file; None where there is none."""
    path = directory / "config.json"
    config = read_json(path)
    for key in QUANTIZATION_KEYS:
        if config.get(key) is not None:
            return config[key], path
    beside = [directory / name for name in QUANTIZATION_FILES if (directory / name).is_file()]
    return (read_json(beside[0]), beside[0]) if beside else None


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint, all present.

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
    if len(autogptq := list(directory.glob("gptq_model-*g.safetensors"))) == 1:
        return autogptq
    other = sorted(p.name for p in directory.glob("*.bin"))
    hint = f"; {other[0]} is in PyTorch's format, save it as safetensors" if other else ""
    if not other and (directory / "config.json").is_file():
        hint = "; load_format=dummy (model.load_format on the command line) makes random ones of its shape"
    raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX}{hint}")
