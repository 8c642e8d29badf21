"""Pipeline parallelism: which stage has which layers, and how activations move on.

Each stage is a program of its own on a mesh of its own (`moejax.engine.pipeline.runner`). What runs between
two stages is one program with one collective, a collective-permute along axis "pp" of a joint mesh of both:
each device of a stage sends what it has to the one in its place in the next, so its pairs are (d, d + devices
of a stage). With G data groups, S rows and T chunk tokens of a group's microbatch (padding included), D =
hidden size, and `slots` = `engine.max_num_seqs`, a device's operand is

    stage s → s + 1     `[S + T, D]` in the model's dtype      once a microbatch, for each s but the last
    last stage → first  int32 `[slots + 1]`, each slot's       at most once a microbatch, and only in the
                        newest token                           overlapped loop (a row decodes a token that the
                                                               host has not read yet); never in the plain loop

The layer's output and its residual travel as their sum (`Decoder.run`). Devices of a tensor group hold and
send the same rows, each to its own peer. Nothing else moves between stages; within one, collectives are those
of a model without stages, once a microbatch.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.perf.sizes import attention_params, expert_params
from moejax.sharding.spmd import MeshDevices

DECODE_TOKENS = 64
"""Rows of the decode step that stages are balanced for."""

# -- layers ----------------------------------------------------------------------------------------------


def layer_costs(model: ModelConfig) -> list[float]:
    """Counts the weights that each layer reads in a step of `DECODE_TOKENS` rows, experts chosen evenly."""
    E, k = model.num_experts, model.num_experts_per_tok
    hit = E * (1.0 - (1.0 - k / E) ** DECODE_TOKENS)
    D = model.hidden_size
    sparse = hit * expert_params(model) + D * (E + 3 * model.shared_expert_intermediate_size)
    dense = 3.0 * D * model.intermediate_size
    kinds = zip(model.moe_layers, model.paged_layers, strict=True)
    return [attention_params(model, not paged) + (sparse if moe else dense) for moe, paged in kinds]


def split_layers(model: ModelConfig, pp: int, stage_layers: Sequence[int] | None = None) -> tuple[range, ...]:
    """Returns contiguous layers for each of `pp` stages.

    The dearest stage is as cheap as can be, and of all such splits the one whose costs have the least sum of
    squares is taken. A stage costs what its layers read (`layer_costs`), the first also `DECODE_TOKENS`
    rows of the embedding and the last the output projection.

    Args:
        stage_layers: how many each is to have, instead.

    Raises:
        ConfigError: there are fewer layers than stages, or `stage_layers` does not fit.
    """
    L = model.num_layers
    if stage_layers is not None:
        if len(stage_layers) != pp or sum(stage_layers) != L or min(stage_layers) < 1:
            raise ConfigError(
                f"parallel.stage_layers must be pp={pp} numbers of at least 1 that add up to {L} layers, got "
                f"{list(stage_layers)}"
            )
        ends = np.cumsum([0, *stage_layers]).tolist()
    elif pp > L:
        raise ConfigError(f"parallel.pp={pp} stages need as many layers, and the model has {L}")
    else:
        first, last = float(DECODE_TOKENS * model.hidden_size), float(model.hidden_size * model.vocab_size)
        ends = _balance(layer_costs(model), pp, first=first, last=last)
    return tuple(range(a, b) for a, b in itertools.pairwise(ends))


def _balance(costs: Sequence[float], parts: int, first: float, last: float) -> list[int]:
    """Ends `[0, …, L]` of the contiguous parts with the least maximum, then the least sum of squares."""
    L = len(costs)
    sums = np.concatenate([[0.0], np.cumsum(costs)])

    def cost(part: int, a: int, b: int) -> float:
        return float(sums[b] - sums[a]) + (first if part == 0 else 0.0) + (last if part == parts - 1 else 0.0)

    def best(join: Callable[[float, float], float], limit: float) -> tuple[float, list[int]]:
        # least[b]: the least of parts 0 … p that end at b, and their ends.
        least: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for part in range(parts):
            new: dict[int, tuple[float, list[int]]] = {}
            for a, (value, ends) in least.items():
                for b in range(a + 1, L - (parts - part - 1) + 1):
                    part_cost = cost(part, a, b)
                    total = join(value, part_cost)
                    if part_cost <= limit and (b not in new or total < new[b][0]):
                        new[b] = (total, [*ends, b])
            least = new
        return least[L]

    most, _ = best(max, np.inf)
    _, ends = best(lambda value, cost: value + cost * cost, most)
    return ends


def stage_config(model: ModelConfig, layers: range) -> ModelConfig:
    """Returns the configuration with these layers only: of a stage's cache, and of what it records."""
    return model.of_layers(layers)


# -- moving ----------------------------------------------------------------------------------------------

Programs = Callable[[str, Any, Callable[[], Any], Callable[[], tuple[Any, ...]]], Callable[..., Any]]
"""Finds or compiles a program: `moejax.engine.step.ledger.CompileLedger.get`."""


class TransferKey(NamedTuple):
    """Shape and dtype of the whole array that moves."""

    shape: tuple[int, ...]
    dtype: str


class Transfer:
    """Moves arrays whose first dimension is by data group from one stage's mesh to another's.

    It is one program, a collective-permute over both stages' devices; it works as well where these belong to
    different processes, each of which then gives and takes what is on its own devices.

    Args:
        source, target: meshes with the same axes and no device in common.
        programs: where programs are compiled.
        name: of the program.
    """

    def __init__(self, source: MeshDevices, target: MeshDevices, programs: Programs, name: str) -> None:
        self.source, self.target, self.name = source, target, name
        self._programs = programs
        self._empty: dict[TransferKey, list[jax.Array]] = {}
        data = source.axes.data or None
        self._arrived = NamedSharding(target.mesh, PartitionSpec(data))
        names = source.mesh.axis_names
        self._mesh = Mesh(
            np.stack([source.mesh.devices, target.mesh.devices]),
            ("pp", *names),
            axis_types=(AxisType.Auto,) * (1 + len(names)),
        )
        self._spec = PartitionSpec(("pp", *source.axes.data))
        self._joint = NamedSharding(self._mesh, self._spec)
        self._receiving = set(self._arrived.addressable_devices)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the array on the target's devices. On the source's it stays."""
        if not self._joint.addressable_devices:
            return _assemble(x, self._arrived, [])
        key = TransferKey(x.shape, str(x.dtype))
        program = self.program(key)
        if key not in self._empty:
            self._empty[key] = self._zeros(key)
        shards = [shard.data for shard in x.addressable_shards] + self._empty[key]
        shape = (2 * x.shape[0], *x.shape[1:])
        joint = jax.make_array_from_single_device_arrays(shape, self._joint, shards, dtype=x.dtype)
        moved = program(joint)
        arrived = [shard.data for shard in moved.addressable_shards if shard.device in self._receiving]
        return _assemble(x, self._arrived, arrived)

    def program(self, key: TransferKey) -> Any:
        """Returns the compiled program."""
        shape = (2 * key.shape[0], *key.shape[1:])
        struct = jax.ShapeDtypeStruct(shape, key.dtype, sharding=self._joint)

        def move(x: jax.Array) -> jax.Array:
            return jax.lax.ppermute(x, "pp", [(0, 1)])

        def build() -> jax.stages.Wrapped:
            return jax.jit(
                jax.shard_map(
                    move, mesh=self._mesh, in_specs=self._spec, out_specs=self._spec, check_vma=False
                )
            )

        return self._programs(self.name, key, build, lambda: (struct,))

    def _zeros(self, key: TransferKey) -> list[jax.Array]:
        """Returns zeros in the target's places of the joint array, on this process's devices of it."""
        if not self._receiving:
            return []
        shape = self._arrived.shard_shape(key.shape)
        return [shard.data for shard in self.target.zeros(shape, key.dtype).addressable_shards]


def _assemble(x: jax.Array, sharding: NamedSharding, shards: list[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)
