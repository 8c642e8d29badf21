"""LoRA adapters of a running engine: slots beside its weights, and which adapter has which.

A slot is written between two steps, in place, while requests with other adapters go on; no step is compiled
again. Steps that were launched before have taken the arrays as they were.
"""

import functools
import gc
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.checkpoint.peft import Adapter, Factors, read_adapter
from moejax.core.adapters import AdaptedMatrices, AdaptersConfig
from moejax.core.checked import Name, check
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, RequestError, unknown
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.engine.step.functions import ModelFunctions
from moejax.models.decoder import Decoder
from moejax.moe.experts import Experts
from moejax.moe.router import Router
from moejax.nn.linear import Linear
from moejax.nn.lora import AdapterArray, Lora, StackLora, TokenSlots, Write
from moejax.nn.param import ParamSpec, path_name
from moejax.nn.quantized import QuantizedWeight, Weight
from moejax.sharding.rules import shardings
from moejax.sharding.spmd import MeshDevices, SingleDevice

Slots = Mapping[str, Lora | StackLora]
"""Path of a parameter → its slots."""


class LoadedAdapter:
    """An adapter on the devices.

    Attributes:
        name: what requests call it.
        digest: of its files.
        slot: its place.
        users: the requests that have it; it stays where it is until the last has ended.
    """

    def __init__(self, name: str, digest: str, slot: int) -> None:
        self.name, self.digest, self.slot = name, digest, slot
        self.users: WeakSet[Any] = WeakSet()

    @property
    def busy(self) -> bool:
        return any(not request.finished for request in self.users)


class Adapters:
    """The adapters of an engine's weights, which all its variants share.

    Args:
        slots: of all stages.
        functions: each stage's weight leaves.
    """

    def __init__(
        self, config: AdaptersConfig, model: ModelConfig, slots: Slots, functions: Sequence[ModelFunctions]
    ) -> None:
        self.config, self.model, self.slots = config, model, slots
        self.loaded: dict[str, LoadedAdapter] = {}
        self._held: list[LoadedAdapter | None] = [None] * config.slots
        self._lock = threading.Lock()
        self.succeed(self, functions)

    def succeed(self, other: "Adapters", functions: Sequence[ModelFunctions]) -> None:
        """Has the adapters that another has had, whose arrays these weight leaves have now."""
        self.loaded, self._held = other.loaded, other._held
        self._leaves = {id(leaf): (one.leaves, i) for one in functions for i, leaf in enumerate(one.leaves)}

    def claim(self, name: str, request: Any) -> LoadedAdapter:
        """Returns an adapter, which then stays until `request` has ended.

        Raises:
            RequestError: there is none of that name.
        """
        with self._lock:
            if name not in self.loaded:
                raise RequestError(
                    f"options: {unknown('adapter', name, self.loaded)}; LLM.load_adapter loads it"
                )
            self.loaded[name].users.add(request)
            return self.loaded[name]

    def load(self, name: str, path: str | os.PathLike[str] | Adapter) -> None:
        """See `LLM.load_adapter`. To be called between two steps."""
        config = self.config
        check("load_adapter: name", name, Name)
        if not config.slots:
            raise ConfigError("load_adapter: the engine has no slots; set engine.adapters.slots")
        if name in self.loaded:
            raise ConfigError(f"load_adapter: there is an adapter {name!r}; unload_adapter takes it away")
        adapter = path if isinstance(path, Adapter) else read_adapter(path, self.model)
        path = adapter.path
        if adapter.rank > config.rank:
            raise ConfigError(
                f"{path}: rank {adapter.rank} exceeds engine.adapters.rank={config.rank}; raise it"
            )
        for parameter in adapter.factors.keys() - self.slots.keys():
            raise ConfigError(f"{path}: {parameter} {_why_no_slots(parameter, config)}")
        with self._lock:
            slot = self._free()
            for parameter, lora in self.slots.items():
                for write in lora.write(*adapter.factors.get(parameter, lora.nothing), slot):
                    self._write(write)
            self.loaded[name] = self._held[slot] = LoadedAdapter(name, adapter.digest, slot)

    def unload(self, name: str) -> None:
        """See `LLM.unload_adapter`."""
        with self._lock:
            if name not in self.loaded:
                raise RequestError(f"unload_adapter: {unknown('adapter', name, self.loaded)}")
            del self.loaded[name]

    def _free(self) -> int:
        """Returns a slot that nobody has; raises `ConfigError` where there is none."""
        for _ in range(2):
            for slot, held in enumerate(self._held):
                if held is None or (self.loaded.get(held.name) is not held and not held.busy):
                    return slot
            gc.collect()  # requests that were built and never queued
        leaving = [held.name for held in self._held if held and self.loaded.get(held.name) is not held]
        text = f"; unloaded and still in use: {', '.join(leaving)}" if leaving else ""
        raise ConfigError(
            f"load_adapter: all {len(self._held)} slots are taken (loaded: {', '.join(self.loaded) or 'none'}"
            f"{text}); unload one, or raise engine.adapters.slots"
        )

    def _write(self, write: Write) -> None:
        old = write.array[...]
        leaves, place = self._leaves.pop(id(old))
        new = _writer(old.sharding)(old, write.values.astype(old.dtype), np.asarray(write.start, np.int32))
        write.array.set_value(new)
        leaves[place], self._leaves[id(new)] = new, (leaves, place)


@functools.lru_cache(maxsize=64)
def _writer(sharding: jax.sharding.Sharding) -> jax.stages.Wrapped:
    def write(array: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(array, values, tuple(start))

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _why_no_slots(parameter: str, config: AdaptersConfig) -> str:
    if parameter.endswith("kv_b_proj.kernel"):
        return "takes no adapter: keys and values are cached as latents, before it; merge the adapter"
    if (kind := _kind(parameter)) is None or kind in config.targets:
        return "takes no adapter; merge it into the model (moejax.checkpoint.peft.merge_adapter)"
    return f"has no slots: engine.adapters.targets={list(config.targets)} leaves {kind!r} out"


def _kind(parameter: str) -> str | None:
    """Returns which of `AdaptersConfig.targets` a parameter belongs to."""
    places = {".attention.": "attention", ".router.": "router", ".experts.": "experts"}
    places |= {".mlp.": "mlp", ".shared_": "mlp"}
    return next((kind for place, kind in places.items() if place in parameter), None)


def attach(stage: Decoder, config: AdaptersConfig, place: SingleDevice, *, fill: bool = True) -> Slots:
    """Puts empty slots beside a stage's matrices and returns them; without `fill` their shapes only."""
    slots: dict[str, Lora | StackLora] = {}
    if not config.slots:
        return slots
    none = jnp.full((1,), config.slots, jnp.int32)
    tokens = TokenSlots(place.everywhere(none) if isinstance(place, MeshDevices) else none)
    stage.token_slots, sizes = tokens, (config.slots, config.rank)
    for path, node in list(nnx.iter_graph(stage)):
        name = path_name(path)
        if isinstance(node, Experts) and "experts" in config.targets:
            node.tokens = tokens
            stacks = {part: StackLora(_declared(getattr(node, part)), *sizes) for part in _PARTS}
            node.lora = nnx.Dict(stacks)
            slots |= {f"{name}.{part}": lora for part, lora in stacks.items()}
        elif isinstance(node, Linear | Router) and _takes(name, node, config):
            node.lora = Lora(_declared(node.kernel), *sizes, tokens)
            slots[f"{name}.kernel"] = node.lora
    where = shardings(adapter_specs(stage), place.mesh, place.axes) if isinstance(place, MeshDevices) else {}
    for name, array in adapter_arrays(stage).items():
        spec, sharding = array.get_metadata("spec"), where.get(name)
        if fill:
            made = jax.jit(functools.partial(jnp.zeros, spec.shape, spec.dtype), out_shardings=sharding)
            array.set_value(made())
        else:
            array.set_value(jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding))
    return slots


_PARTS = ("gate_proj", "up_proj", "down_proj")


def _takes(name: str, node: Linear | Router, config: AdaptersConfig) -> bool:
    two_levels = isinstance(node, Router) and node.group_kernel is not None
    absorbed = name.endswith("kv_b_proj")
    return _kind(f"{name}.kernel") in config.targets and not two_levels and not absorbed


def _declared(weight: Weight) -> ParamSpec:
    spec: ParamSpec = (
        weight.stands_for if isinstance(weight, QuantizedWeight) else weight.get_metadata("spec")
    )
    return spec


def adapter_arrays(stage: Decoder) -> dict[str, AdapterArray]:
    """Returns the arrays of all slots by dotted path."""
    return {path_name(path): node for path, node in nnx.iter_graph(stage) if isinstance(node, AdapterArray)}


def adapter_specs(stage: Decoder) -> dict[str, ParamSpec]:
    """Returns the declarations of the arrays of all slots by dotted path."""
    return {name: array.get_metadata("spec") for name, array in adapter_arrays(stage).items()}


def check_adapters(
    config: AdaptersConfig, parallel: ParallelConfig, model: ModelConfig, moe: MoeConfig, product: str
) -> None:
    """Raises `ConfigError` where slots do not go with the rest; `product` is what experts run on."""
    if not config.slots:
        return
    if jax.process_count() > 1:
        raise ConfigError("engine.adapters.slots does not go with several processes")
    if not (config.experts and any(model.moe_layers)):
        return
    refusals = {
        "parallel.ep: rows that travel do not take their adapter along": (
            parallel.ep > 1 or parallel.redundant_experts > 0
        ),
        f"engine.moe.execution={moe.execution}": moe.execution != "grouped",
        f"engine.moe.grouped_matmul={product}": product in ("batched", "pallas_triton"),
    }
    for reason, holds in refusals.items():
        if holds:
            raise ConfigError(
                f"engine.adapters.targets: experts do not go with {reason}; leave experts out, or change that"
            )


def random_factors(
    config: ModelConfig, seed: int, rank: int, targets: Collection[AdaptedMatrices], scale: float = 0.02
) -> dict[str, Factors]:
    """Returns A and B, drawn at random with deviation `scale`, of all matrices that have slots in an engine
    of these `targets`."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape, np.float32)).astype(np.float32)

    slots = attach(Decoder(config), AdaptersConfig(1, rank, list(targets)), SingleDevice(), fill=False)
    shapes = {name: [half.shape for half in slots[name].nothing] for name in sorted(slots)}
    return {name: (draw(*a[:-1], rank), draw(*b[:-2], rank, b[-1])) for name, (a, b) in shapes.items()}
