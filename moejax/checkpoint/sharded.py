"""A model as it lies on a mesh, saved by shards and restored onto any other mesh.

A folder holds `config.json`, as a Hugging Face directory does, and `weights/`, which Orbax writes
(`moejax.checkpoint.orbax`). Weights are kept as the model stores them: restoring neither transposes nor moves
experts between slots, so both must be as they were. Quantized weights are kept so, too, with their formats.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding

from moejax.checkpoint.orbax import describe_tree, load_tree, save_tree
from moejax.checkpoint.plan import Faults
from moejax.core.errors import CheckpointError, ConfigError
from moejax.core.files import atomic_write_text, ensure_writable
from moejax.models.decoder import Decoder
from moejax.models.registry import config_to_hf
from moejax.moe.replicas import held_experts
from moejax.nn.param import ExpertOf, ParamSpec, iter_params, slots_of, specs
from moejax.nn.quantized import PARTS, quantized_weights, replace_weights
from moejax.quantization.checkpoints.scheme import fields_of
from moejax.quantization.formats import WeightFormat

WEIGHTS = "weights"

Placed = Mapping[str, Sharding] | Callable[[Mapping[str, ParamSpec]], Mapping[str, Sharding]]


def save_sharded(
    model: Decoder,
    directory: str | os.PathLike[str],
    *,
    expert_of: ExpertOf | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model, each process its shards. All processes must call it, for a folder that all of them see.

    Args:
        expert_of: which expert each slot holds; kept with the weights. None: as its tables say.
        overwrite: an older checkpoint in the folder may go before this one is complete.

    Raises:
        ConfigError: the family's `config.json` cannot describe the model, or a part of it lies on some
            processes only.
        OutputError: the folder cannot be written, or holds a checkpoint and `overwrite` is not set.
    """
    text = json.dumps(config_to_hf(model.config), indent=2) + "\n"
    tree = {name: param[...] for name, param in iter_params(model)}
    _check_owners({name: value.sharding for name, value in tree.items()})
    expert_of = expert_of or held_experts(model)
    stored = {name: _as_stored(name, spec, expert_of) for name, spec in specs(model).items()}
    formats = {path: fields_of(weight.format) for path, weight in quantized_weights(model)}
    # Orbax would leave threads behind that wait for a folder which nobody can make.
    out = ensure_writable(directory)
    save_tree(tree, out / WEIGHTS, {"stored": stored, "quantized": formats}, overwrite=overwrite)
    if jax.process_index() == 0:
        atomic_write_text(out / "config.json", text)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"save_sharded {out}")


def restore_sharded(
    directory: str | os.PathLike[str],
    model: Decoder,
    shardings: Placed | None = None,
    *,
    expert_of: ExpertOf | None = None,
) -> None:
    """Fills a model in place with the weights of `save_sharded`, rounded to its dtype.

    Where quantized weights were saved, they take the place of the model's.

    Each process reads what its devices need. All processes must call it.

    Args:
        model: may be abstract; `Decoder(load_config(directory))` fits.
        shardings: path → sharding, of this mesh, or what makes that of the declarations (as for
            `load_pretrained`; quantized weights are among them then). None: all on the default device.
        expert_of: which expert each slot holds; as it was saved. None: as the model's tables say.

    Raises:
        ConfigError: a part of the model would lie on some processes only.
        CheckpointError: missing, damaged, or not this model's weights; all that does not fit is listed.
    """
    path = Path(directory) / WEIGHTS
    if not path.is_dir():
        raise CheckpointError(f"{directory}: no {WEIGHTS} folder, which a sharded checkpoint has")
    tree, metadata = describe_tree(path)
    stored = metadata.get("stored")
    if not isinstance(tree, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{path}: not a readable checkpoint of a model's weights")
    _replace(model, metadata.get("quantized", {}), str(path))
    declared = specs(model)
    placed = shardings(declared) if callable(shardings) else shardings
    if placed is not None:
        _check_owners(placed)
    _check(tree, stored, declared, expert_of or held_experts(model), str(path))
    here = SingleDeviceSharding(jax.local_devices()[0])
    like = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=placed[name] if placed else here)
        for name, spec in declared.items()
    }
    values = load_tree(path, like)
    for name, param in iter_params(model):
        param.set_value(values[name])


def _replace(model: Decoder, stored: Mapping[str, Any], source: str) -> None:
    """Puts quantized weights where some were saved; those that the model has must be in the same formats."""
    try:
        formats = {path: WeightFormat(**fields) for path, fields in stored.items()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: not a readable checkpoint ({error})") from error
    faults, held = Faults(), {path: weight.format for path, weight in quantized_weights(model)}
    for path, fmt in held.items():
        if formats.get(path) != fmt:
            found = formats[path].name if path in formats else "not quantized"
            faults.add("of another format", f"{path} is {found}, expected {fmt.name}")
    faults.check(source, "the model")
    replace_weights(model, {path: fmt for path, fmt in formats.items() if path not in held})


def _check_owners(shardings: Mapping[str, Sharding]) -> None:
    """Raises `ConfigError` for tensors that Orbax has no way for: those that not all processes share."""
    apart = []
    for name, sharding in shardings.items():
        devices: Collection[Any] = sharding.device_set
        if len({device.process_index for device in devices}) != jax.process_count():
            apart.append(name)
    if apart:
        raise ConfigError(
            f"{len(apart)} parameters, {apart[0]} the first, lie on some of {jax.process_count()} processes "
            "only, as pipeline stages do; Orbax has no way for that: use save_pretrained and load_pretrained"
        )


def _as_stored(name: str, spec: ParamSpec, expert_of: ExpertOf | None) -> dict[str, Any]:
    """What a shape does not tell."""
    weight, _, last = name.rpartition(".")  # of a quantized weight, all arrays have its experts
    slots = slots_of(weight if last in PARTS else name, spec, expert_of)
    plain = slots is None or slots == tuple(range(len(slots)))
    return {"transposed": spec.transposed, "expert_of": None if plain else list(slots or ())}


def _check(
    tree: Mapping[str, Any],
    stored: Mapping[str, Any],
    declared: Mapping[str, ParamSpec],
    expert_of: ExpertOf | None,
    source: str,
) -> None:
    """Raises `CheckpointError` with all that the model and the folder do not share."""
    faults = Faults()
    for name, spec in declared.items():
        wanted, found = _as_stored(name, spec, expert_of), stored.get(name, {})
        if name not in tree:
            faults.add("missing", f"{name} {list(spec.shape)}")
        elif tuple(tree[name].shape) != spec.shape:
            faults.add("misshapen", f"{name} is {list(tree[name].shape)}, expected {list(spec.shape)}")
        elif found.get("transposed") != wanted["transposed"]:
            faults.add("of another moe.expert_layout", name)
        elif found.get("expert_of") != wanted["expert_of"]:
            faults.add("with other experts in the slots", name)
    for name, leaf in tree.items():
        if name not in declared:
            faults.add("unknown", f"{name} {list(leaf.shape)}")
    faults.check(source, "the model")
