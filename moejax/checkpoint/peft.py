"""LoRA adapters (Hu et al., arXiv 2106.09685) in PEFT's format: read, merged into a model, and written.

A module that PEFT wraps has `lora_A.weight` `[r, in]` and `lora_B.weight` `[out, r]`. A stack of experts,
which `target_parameters` names, has those of all in two matrices, A `[E·r, in]` and B `[out, r·E]`; where one
module has two such stacks, the first is further inside (`base_layer`).
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from moejax.checkpoint.directory import read_json
from moejax.checkpoint.load import usable
from moejax.checkpoint.maps import TABLES
from moejax.checkpoint.maps.rules import Rule, Target
from moejax.checkpoint.plan import Faults, canonical_key
from moejax.checkpoint.tensors import TensorFiles
from moejax.core.config import ModelConfig
from moejax.core.errors import CheckpointError, ConfigError
from moejax.core.files import atomic_write_text, whole_folder
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, iter_params, specs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<inside>(\.base_layer)*)\.lora_(?P<half>[AB])\.weight"
)

_SAID_ELSEWHERE = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
"""Fields that say how an adapter was made, or what the tensors' keys say again."""
_READ = {
    "alpha_pattern", "bias", "lora_alpha", "peft_type", "r", "rank_pattern", "target_parameters", "use_rslora"
}  # fmt: skip

Factors = tuple[np.ndarray, np.ndarray]
"""A `[in, r]` and B `[r, out]`, or `[E, in, r]` and `[E, r, out]`; `x @ A @ B` is added."""


class _Model(NamedTuple):
    """What adapters must fit: a model's parameters, its key table, and E."""

    declared: Mapping[str, ParamSpec]
    rules: tuple[Rule, ...]
    num_experts: int


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in host memory.

    Attributes:
        path: its directory.
        digest: of what is in its files.
        factors: path of a parameter → A and B in float32, B with the adapter's scale.
    """

    path: Path
    digest: str
    factors: Mapping[str, Factors]

    @property
    def rank(self) -> int:
        """The largest of its matrices'."""
        return max(a.shape[-1] for a, _ in self.factors.values())


def read_adapter(directory: str | os.PathLike[str], config: ModelConfig) -> Adapter:
    """Reads a PEFT directory for a model.

    Raises:
        CheckpointError: it is none, or its tensors do not fit the model; all that do not are listed.
        ConfigError: it asks for what is more than LoRA (DoRA, biases, whole modules, …).
    """
    path = Path(directory)
    settings = _settings(path / CONFIG)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path}: no {WEIGHTS}; PEFT's save_pretrained writes it")
    parts: dict[str, dict[int | None, Factors]] = {}
    model = _Model(specs(Decoder(config)), TABLES[config.family], config.num_experts)
    with TensorFiles([path / WEIGHTS]) as files:
        faults, wrapped = files.faults, _wrapped(files)
        for module, pairs in wrapped.items():
            names = _weights_of(module, settings, model.rules)
            if len(names) != len(pairs):
                faults.add("of no matrix that the model and target_parameters name", module)
                continue
            # The innermost first.
            for weight, inside in zip(names, sorted(pairs, key=len, reverse=True), strict=True):
                halves = [pairs[inside].get(half) for half in "AB"]
                if None in halves:
                    faults.add("without their other half", next(filter(None, halves)) or "")
                    continue
                a, b = (files.read(str(key), (slice(None), slice(None))) for key in halves)
                if all(usable(weight, half, np.float32, faults) for half in (a, b)):
                    factors = a.astype(np.float32), b.astype(np.float32)
                    _take(parts, weight, factors, settings, model, faults)
    faults.check(str(path), "the adapter does not fit the model")
    if not parts:
        raise CheckpointError(f"{path / WEIGHTS}: there is no tensor in it")
    digest = hashlib.sha256((path / WEIGHTS).read_bytes() + (path / CONFIG).read_bytes()).hexdigest()[:16]
    return Adapter(path, digest, {name: _whole(some, config.num_experts) for name, some in parts.items()})


def _settings(path: Path) -> dict[str, Any]:
    """Returns `adapter_config.json`."""
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else None
        raise ConfigError(f"{path}: peft_type {kind!r}; only LORA is read")
    init = raw.get("init_lora_weights", True)
    beyond = [f"{name}={raw[name]!r}" for name in sorted(raw.keys() - _READ - _SAID_ELSEWHERE) if raw[name]]
    beyond += [] if raw.get("bias", "none") == "none" else [f"bias={raw['bias']!r}"]
    beyond += [] if init in (True, False, "gaussian", "eva") else [f"init_lora_weights={init!r}"]
    if beyond:
        raise ConfigError(
            f"{path}: {', '.join(beyond)} is more than LoRA's two matrices, which alone are read"
        )
    for name in ("r", "lora_alpha"):
        if not isinstance(raw.get(name), int | float) or raw[name] <= 0:
            raise ConfigError(f"{path}: {name} must be a positive number, got {raw.get(name)!r}")
    return raw


def _wrapped(files: TensorFiles) -> dict[str, dict[str, dict[str, str]]]:
    """Returns the keys by module, by how far inside of it, and by half."""
    modules: dict[str, dict[str, dict[str, str]]] = {}
    for key in files.shapes:
        if match := _KEY.fullmatch(key):
            modules.setdefault(match["module"], {}).setdefault(match["inside"], {})[match["half"]] = key
        else:
            files.faults.add("that are no LoRA matrix", key)
    return modules


def _weights_of(module: str, settings: Mapping[str, Any], rules: tuple[Rule, ...]) -> list[str]:
    """Returns the checkpoint keys of a module's matrices that the adapter changes, in the module's order."""
    asked = settings.get("target_parameters") or []
    last = dict.fromkeys(["weight", *(rule.key.rpartition(".")[2] for rule in rules)])
    names = [f"{module}.{name}" for name in last if _rule(f"{module}.{name}", rules)]
    return [
        name
        for name in names
        if name == f"{module}.weight" or any(f".{name}".endswith(f".{target}") for target in asked)
    ]


def _rule(key: str, rules: tuple[Rule, ...]) -> tuple[Rule, re.Match[str]] | None:
    return next(((rule, match) for rule in rules if (match := rule.pattern.fullmatch(key))), None)


def _take(
    parts: dict[str, dict[int | None, Factors]],
    weight: str,
    factors: Factors,
    settings: Mapping[str, Any],
    model: _Model,
    faults: Faults,
) -> None:
    """Adds what PEFT's A and B of one of the checkpoint's tensors are of our parameters."""
    found = _rule(weight, model.rules)
    assert found is not None
    rule, match = found
    expert = int(match["e"]) if rule.per_expert else None
    for target in rule.targets:
        param = target.param.replace("{l}", match.groupdict().get("l") or "")
        spec = model.declared.get(param)
        if spec is None or len(spec.matrix_shape) != 2 or (expert or 0) >= max(model.num_experts, 1):
            faults.add("of no matrix that the model and target_parameters name", weight)
            continue
        oriented = _oriented(*factors, target, spec, model.num_experts, "peft_version" in settings)
        if oriented is None:
            shapes = " and ".join(str(list(half.shape)) for half in factors)
            faults.add("misshapen", f"{weight} of {list(spec.matrix_shape)} has {shapes}")
            continue
        a, b = oriented
        parts.setdefault(param, {})[expert] = a, b * np.float32(_scale(weight, a.shape[-1], settings))


def _oriented(
    a: np.ndarray, b: np.ndarray, target: Target, spec: ParamSpec, num_experts: int, dated: bool
) -> Factors | None:
    """Returns our A and B, from PEFT's of a tensor of which a parameter is a part; None if shapes differ.

    Early PEFT, whose files do not say its version, gave A the first axis of a stack, inputs or outputs.
    """
    folded = target.transform.startswith(("fused", "stacked"))
    rows, columns = spec.matrix_shape
    halves = {
        "fused_gate": slice(columns), "fused_up": slice(columns, None),
        "stacked_even": slice(None, None, 2), "stacked_odd": slice(1, None, 2),
    }  # fmt: skip
    part = halves.get(target.transform)
    stored = columns if part is None else 2 * columns
    rank = a.shape[0] // (num_experts if folded else 1)
    if not rank or b.shape[1] != a.shape[0] or (folded and a.shape[0] % num_experts):
        return None
    if folded:
        a = a.reshape(num_experts, rank, -1)
        b = b.reshape(-1, rank, num_experts).transpose(2, 0, 1)
    sizes, early = (a.shape[-1], b.shape[-2]), target.transform.startswith("fused") and not dated
    if sizes == (rows, stored) and not (early and rows == stored):
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    elif early and sizes == (stored, rows):
        a, b = b, a
    else:
        return None
    return a, b if part is None else b[..., part]


def _scale(weight: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Returns what B is multiplied by."""
    name = weight.removesuffix(".weight")
    patterns = settings.get("alpha_pattern") or {}
    alpha = next(
        (x for key, x in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name)), settings["lora_alpha"]
    )
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _whole(parts: Mapping[int | None, Factors], num_experts: int) -> Factors:
    """Joins the experts' factors; those that have none get zeros, and smaller ranks too."""
    if None in parts:
        return parts[None]
    rank = max(a.shape[-1] for a, _ in parts.values())
    a, b = next(iter(parts.values()))
    whole = (
        np.zeros((num_experts, len(a), rank), np.float32),
        np.zeros((num_experts, rank, b.shape[1]), np.float32),
    )
    for expert, (a, b) in parts.items():
        whole[0][expert, :, : a.shape[1]], whole[1][expert, : len(b)] = a, b
    return whole


def merge_adapter(model: Decoder, adapter: Adapter) -> None:
    """Adds an adapter to a model's weights, in float32 and in place: the plain twin of an engine's slots.

    Raises:
        ConfigError: a weight that it changes is quantized, or has replicas of experts; nothing is changed.
    """
    params = dict(iter_params(model))
    for name, (a, b) in adapter.factors.items():
        spec = params[name].get_metadata("spec") if name in params else None
        if spec is None or spec.canonical_shape != (*a.shape[:-1], b.shape[-1]):
            raise ConfigError(
                f"{adapter.path}: {name} cannot be merged: it is quantized, or has replicas of experts"
            )
    for name, (a, b) in adapter.factors.items():
        spec = params[name].get_metadata("spec")
        whole = spec.canonical(params[name][...]).astype(jnp.float32)
        params[name].set_value(spec.stored(whole + a @ b))


def save_adapter(
    factors: Mapping[str, Factors],
    config: ModelConfig,
    directory: str | os.PathLike[str],
    base: str | None = None,
) -> None:
    """Writes a PEFT directory, whole or not at all; experts' matrices one by one, as `target_modules`.

    Args:
        factors: path of a parameter → A and B, scale included.
        base: what PEFT is told of the model's name or directory.

    Raises:
        ConfigError: there are several ranks, or no matrix.
        OutputError: it cannot be written.
    """
    tensors, ranks = {}, set()
    for name, (a, b) in factors.items():
        key, per_expert, _ = canonical_key(name, TABLES[config.family], stacked=False)
        ranks.add(a.shape[-1])
        for expert in range(config.num_experts) if per_expert else (None,):
            module = f"base_model.model.{key.removesuffix('.weight').replace('{e}', str(expert))}"
            for half, matrix in (("A", a), ("B", b)):
                part = np.asarray(matrix if expert is None else matrix[expert], np.float32)
                tensors[f"{module}.lora_{half}.weight"] = np.ascontiguousarray(part.T)
    if len(ranks) != 1:
        raise ConfigError(
            f"save_adapter: all matrices must have one rank, got {sorted(ranks) or 'no matrix'}"
        )
    rank = ranks.pop()
    modules = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings |= {"base_model_name_or_path": base}
    with whole_folder(Path(directory)) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        atomic_write_text(
            folder / CONFIG, json.dumps(settings | {"target_modules": modules}, indent=2) + "\n"
        )
