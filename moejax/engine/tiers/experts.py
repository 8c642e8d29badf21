"""The experts of a model that are not all on the device: slots there, all of them in the store below."""

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.cache.pool import memory_of
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError, refuse
from moejax.core.files import cache_root, content_hash
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.core.resolve import Resolution
from moejax.core.tiers import ExpertsConfig, TiersConfig
from moejax.core.words import byte_words
from moejax.engine.tiers.codes import FLOATS
from moejax.engine.tiers.host import HostExperts
from moejax.engine.tiers.layers import LayerTier
from moejax.engine.tiers.pinned import PinnedStore, choose_host_memory, to_device
from moejax.engine.tiers.store import DiskStore, HostStore, Records, Store
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, specs
from moejax.routing.capture import Floats, Ints
from moejax.routing.residency import ReplayOptions, Residency
from moejax.routing.source import check_trace, open_trace
from moejax.sharding.rules import shardings
from moejax.sharding.spmd import MeshDevices, SingleDevice

_REMEMBERED = 4096  # steps


def split_layer(layer: nnx.Module) -> tuple[Any, Any, Any]:
    """Returns a decoder layer's structure, the arrays of its routed experts and all others."""
    split: Any = nnx.split
    return split(layer, lambda path, _: tuple(path[:2]) == ("moe", "experts"), ...)


class ExpertTiers:
    """Slots on the device for some of the experts, whichever layers they are of, and who is in which.

    A step asks layer by layer for the experts that its tokens visit (`require`): those without a slot are
    fetched from the store and written into slots, which are donated to the program that does so. What runs
    before reads the slots as they were.

    Args:
        model: without values; its experts' arrays are alike in all layers.
        tokens: the most that a step computes (`check_room`).
        devices: where the slots are, as many on each expert-parallel rank; an expert may be in any of them.

    Attributes:
        layers: numbers of the layers with experts.
        arrays: the slots `[slots, ...]` of each array of an expert; shapes until `open`.
        table: int32 `[layers, E + 1]`, each expert's slot, and `slots` for none.
        streamed: layers whose other weights come and go as well; None: none do.
        host: runs experts where they lie; None: nobody does.
        foresees: whether experts are fetched ahead; in the host's memory there is nothing to fetch.
        lock: whoever runs a step holds it, since several engines may share the weights.
        reader: what the program gives that was launched last, and reads the slots.
        most_below: bytes of the host's memory that experts take at the most.
        history: of the newest steps, instant, hits, misses, seconds waited and those that the host computed
            when each began.
        in_place: experts are written into the slots' memory, not by a program that has it donated.
        host_memory: which memory of the host experts lie in, and why; None: they are on disk.

    Raises:
        ConfigError: layers that differ, slots that do not hold what one step may need in one layer, or too
            little memory of the host.
    """

    def __init__(
        self, config: ExpertsConfig, tiers: TiersConfig, model: Decoder, tokens: int, devices: SingleDevice
    ) -> None:
        self.config, self.tiers = config, tiers
        self.lock, self.reader = RLock(), None
        self.layers = [i for i, sparse in enumerate(model.config.moe_layers) if sparse]
        self.num_experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
        self._places: dict[str, tuple[int, int]] = {}
        shapes: list[Any] = []
        for place, number in enumerate(self.layers):
            _, experts, _ = split_layer(model.in_order()[number])
            for leaf, (path, _) in enumerate(nnx.to_flat_state(experts)):
                name = ".".join(map(str, ("layers", number, *path)))
                self._places[name] = place, leaf
            mine = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(experts)]
            if place and mine != shapes:
                raise ConfigError(
                    f"engine.experts: the experts of layer {number} have other shapes or formats than those "
                    f"of layer {self.layers[0]} and could not share slots; quantize all of them alike"
                )
            shapes = mine
        if any(shape[0] != self.num_experts for shape, _ in shapes):
            raise ConfigError(
                "engine.experts: what the experts of a layer share, such as one scale for all, is no part of "
                "any expert; take a quant.format with scales for each"
            )
        sparse: Any = model.in_order()[self.layers[0]].moe
        self._width = model.config.hidden_size, np.dtype(model.config.dtype)
        self.host = HostExperts(config, sparse.experts, tokens) if config.on_host else None
        self._missing = set(self._places)
        self.foresees = config.prefetch == "next_router" and config.tier == "disk"
        self.streamed: LayerTier | None = None
        if tiers.resident_layers is not None:
            layers = model, tiers.resident_layers
            self.streamed = LayerTier(*layers, lambda layer: split_layer(layer)[2], self.foresees)
        every = len(self.layers) * self.num_experts
        one = [(shape[1:], dtype) for shape, dtype in shapes]
        lossy = {"tiers.codes": tiers.codes != "none", "experts.miss": config.miss == "low_bits"}
        for name in [name for name, asked in lossy.items() if asked]:
            if not all(str(dtype) in FLOATS for _, dtype in one):
                raise ConfigError(
                    f"engine.{name}: the experts are quantized, of few bits as it is; leave it or quant out"
                )
        self.records, lower = Records(every, one, tiers.codes), Records(every, one, "q4_k")
        self._lower = lower if config.miss == "low_bits" else None
        axes = devices.axes
        self._ranks = ranks = axes.size(axes.expert)
        key, each = "engine.experts.resident", int((config.resident or 1.0) * every) // ranks
        if tiers.device_gb is not None:
            held = self.records.held // axes.size(axes.tp)
            key, each = "engine.tiers.device_gb", int(tiers.device_gb * 1e9 // held)
        self.slots, self._key, self._top_k = min(ranks * each, every), key, top_k
        self.check_room(tokens)
        low = 0 if self._lower is None else every * self._lower.nbytes
        in_all = every * self.records.nbytes + (self.streamed.nbytes if self.streamed else 0)
        below = in_all * (config.tier == "host") + low
        if tiers.host_gb is not None and below > 1e9 * tiers.host_gb:
            raise ConfigError(
                f"engine.tiers.host_gb={tiers.host_gb:g} does not hold the {below / 1e9:.3g} GB that are to"
                " be in the host's memory; raise it, or have less there by engine.experts.tier or miss"
            )
        # What is left of it has room for what was read last.
        self._room = 0.0 if config.tier == "host" else max(0.0, 1e9 * (tiers.host_gb or 0) - low)
        self.most_below = below + self._room
        several, on_host = isinstance(devices, MeshDevices), config.tier == "host"
        self.host_memory = choose_host_memory(tiers, in_all, several) if on_host else None
        self._pinned = self.host_memory is not None and self.host_memory.value == "pinned"
        self.in_place = jax.default_backend() == "cpu" and not self._pinned
        where: Any = (
            shardings(specs(model), devices.mesh, devices.axes) if isinstance(devices, MeshDevices) else {}
        )
        first = {leaf: name for name, (at, leaf) in self._places.items() if not at}
        self.arrays: list[Any] = [
            jax.ShapeDtypeStruct((self.slots, *leaf.shape), leaf.dtype, sharding=where.get(first[number]))
            for number, leaf in enumerate(self.records.leaves)
        ]
        self._popularity: Ints | None = None
        if config.policy == "static" and config.popularity is not None:
            named = "engine.experts.popularity"
            trace = open_trace(named, check_trace(named, config.popularity), model.config)
            self._popularity = trace.counts()
        self.store: Store | None = None
        self._low_store: HostStore | None = None
        self.reset_stats()
        self.clear()

    def check_room(self, tokens: int) -> None:
        """Raises `ConfigError` unless the slots hold what one layer may need in a step of so many tokens."""
        least = min(self.num_experts, tokens * self._top_k)
        if self.slots < least:
            lower = "" if least == tokens * self._top_k else ", or lower engine.max_num_batched_tokens"
            size = byte_words(self.records.held)
            raise ConfigError(
                f"{self._key}: {self.slots} slots of {size} do not hold the {least} "
                f"experts that a step of up to {tokens} tokens may visit in one layer; raise it{lower}"
            )
        if self.host is not None and tokens > self.host.most:
            raise ConfigError(
                f"engine.max_num_batched_tokens={tokens}: the host computes experts for steps of up to"
                f" {self.host.most} tokens, as the engine that opened the weights; lower it, or build another"
                " LLM"
            )

    def open(self, identity: Callable[[], Any]) -> None:
        """Makes slots, and the store, to which `take` then brings the experts.

        Args:
            identity: tells by what weights in a file are known again.

        Raises:
            OutputError, CheckpointError: the file cannot be written, or read.
        """
        tiers, on_disk = self.tiers, self.config.tier == "disk"
        if self._lower is not None:
            self._low_store = HostStore(self._lower)
        folder = Path(tiers.disk_dir) if tiers.disk_dir else cache_root() / "experts"

        def make(records: Records, name: str, limit: float = 0.0) -> Store:
            options: dict[str, Any] = {"queue_depth": tiers.queue_depth, "direct": tiers.direct}
            if on_disk:
                return DiskStore(records, folder, name, limit=limit, **options)
            return PinnedStore(records) if self._pinned else HostStore(records)

        known = identity() if on_disk else None
        self.store = make(self.records, content_hash(known), self._room)
        if self.streamed is not None:
            self.streamed.open(make, known)
        self._make_slots()

    def _make_slots(self) -> None:
        self.arrays = [jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in self.arrays]
        jax.block_until_ready(self.arrays)
        self._memory = [
            [
                (
                    part.index[0].start or 0,
                    part.index[1:],
                    memory_of(part.data, part.data.unsafe_buffer_pointer()),
                )
                for part in array.addressable_shards
            ]
            for array in self.arrays
            if self.in_place
        ]

    def clear(self) -> None:
        """Empties all slots."""
        config = self.config
        options = ReplayOptions(
            config.a2cr, popularity=self._popularity, popularity_steps=config.popularity_steps
        )
        shape = len(self.layers), self.num_experts
        self.residency = Residency(config.policy, *shape, self.slots, options)
        self.table = np.full((shape[0], shape[1] + 1), self.slots, np.int32)
        # By turns of each rank, so that the ranks' loads are alike.
        self._free = np.arange(self.slots).reshape(self._ranks, -1).T.reshape(-1)[::-1].tolist()
        self._coming: dict[int, Any] = {}
        self._zeros: dict[tuple[int, ...], jax.Array] = {}
        self._lowered = set[int]()  # residents that are copies of few bits

    def reset(self) -> None:
        """Starts with empty slots after a step that failed, wherever it was; those it took along are new."""
        self.clear()
        if self.streamed is not None:
            self.streamed.clear()
        if not self.in_place or any(array.is_deleted() for array in self.arrays):
            self._make_slots()

    def take(self, name: str, value: jax.Array) -> bool:
        """Puts an array into the store where it lies, if it is no resident."""
        if self.streamed is not None and self.streamed.take(name, value):
            return True
        if name not in self._places:
            return False
        assert self.store is not None
        place, leaf = self._places[name]
        self._missing.discard(name)
        for expert, part in enumerate(np.asarray(value)):
            self.store.write(place * self.num_experts + expert, leaf, part)
        return True

    def holds(self, name: str) -> bool:
        """Tells whether a weight, by its path, is one of those that are no residents."""
        return self._has_experts(name) or (self.streamed is not None and self.streamed.holds(name))

    def _has_experts(self, name: str) -> bool:
        return any(path.startswith(f"{name}.") for path in self._places)

    def has(self, name: str) -> bool:
        """Tells whether the store has an array, or a whole weight, from an earlier engine."""
        if self.streamed is not None and self.streamed.has(name):
            return True
        found = self.store is not None and self.store.written
        return found and (name in self._places or self._has_experts(name))

    def finish(self) -> list[Resolution]:
        """Ends the filling of the store; returns how many slots there are and what lies where."""
        if self.store is not None:
            assert self.store.written or not self._missing, f"no values of {sorted(self._missing)}"
            self.store.finish()
        if self.streamed is not None:
            self.streamed.finish()
        if self.store is not None and self._low_store is not None:
            for key in range(self.records.count):
                for leaf, array in enumerate(self.records.arrays(self.store.fetch(key).result())):
                    self._low_store.write(key, leaf, array)
            self.store.bytes_read = 0
        if self.store is not None and self.host is not None:
            arrays = self.records.arrays(self.store.fetch(0).result())
            self.host.measure(arrays, *self._width, lambda: self._put(0, arrays, wait=True))
            self.store.bytes_read = 0
        size = byte_words(self.records.held)
        share = f"{self.slots / self.records.count:.1%} of {self.records.count} experts of {size}"
        what = f"{share}; the others in the host's memory"
        if self.config.tier == "disk":
            path = getattr(self.store, "path", None)
            what = f"{share}; the others {'on disk' if path is None else f'in {path}'}"
        slots = Resolution("engine.experts.resident", str(self.slots), what)
        return [slots] if self.host_memory is None else [slots, self.host_memory]

    def step(self) -> None:
        """Begins a step."""
        now = time.perf_counter()
        if self.host is not None and self.history:
            then, _, _, waited, ran = self.history[-1]
            self.host.used(now - then, self.wait_s - waited, self.host_s - ran)
        self.history.append((now, self.hits, self.misses, self.wait_s, self.host_s))
        self._release(self.residency.step())

    def require(self, place: int, ids: Ints, weights: Floats) -> np.ndarray:
        """Gives slots to the experts that `ids` `[N, k]` visit in the layer with experts of that place.

        Args:
            ids: E for none.
            weights: of the router.

        Returns:
            int32 `[E + 1]`, the layer's row of `table`.

        Raises:
            CheckpointError: an expert cannot be read; `reset` must follow.
        """
        E, first = self.num_experts, place * self.num_experts
        flat = ids.reshape(-1)
        needed = np.zeros(E + 1, bool)
        needed[flat] = True
        mass = np.bincount(flat, weights.reshape(-1), E + 1)[:E]
        needed = needed[:E]
        absent = self.residency.absent(place, needed).tolist()
        low, again = self._in_low_bits(place, ids, weights, absent)
        self.misses += len(absent) + len(again)
        self.hits += int(needed.sum()) - len(absent) - len(again)
        start = time.perf_counter()
        arrays, self._coming = self._fetch([*absent, *again], low), {}
        self._release(self.residency.turn(place, needed, mass))
        if arrays and self.in_place:
            jax.block_until_ready(self.reader)
        fetched = time.perf_counter()
        for key, expert in zip([*absent, *again], arrays, strict=True):
            slot = int(self.table[place, key - first]) if key in again else self._free.pop()
            self._put(slot, expert)
            self.table[place, key - first] = slot
        self._lowered = self._lowered - set(again) | low
        if arrays:
            now = time.perf_counter()
            self.wait_s += now - start
            if self.host is not None and self.in_place:  # elsewhere the device writes later
                self.host.moved((now - fetched) / len(arrays))
        return self.table[place].copy()

    def _in_low_bits(
        self, place: int, ids: Ints, weights: Floats, absent: list[int]
    ) -> tuple[set[int], list[int]]:
        """Returns which of the absent experts are to be copies of few bits, and which residents that are
        such copies are to be so no longer."""
        if self._lower is None:
            return set(), []
        share = np.zeros(self.num_experts + 1)
        total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
        np.maximum.at(share, ids.reshape(-1), (weights / total).reshape(-1))
        first = place * self.num_experts
        wanted = set((np.flatnonzero(share[:-1] >= self.config.low_bits_below) + first).tolist())
        return set(absent) - wanted, sorted(self._lowered & wanted)

    def run_on_host(self, place: int, ids: Ints, weights: Floats, rows: jax.Array) -> tuple[Ints, Any]:
        """Has the host compute some of the absent experts of a layer's turn.

        Args:
            ids, weights: `[N, k]`, see `require`.
            rows: `[N, D]`, what the experts take.

        Returns:
            ids with E for what is done, and the weighted sum of outputs `[N, D]` for the layer to add.
        """
        assert self.host is not None and self.store is not None
        E, first = self.num_experts, place * self.num_experts
        counts = np.bincount(ids.reshape(-1), minlength=E + 1)[:E]
        absent = self.residency.absent(place, counts > 0) - first
        absent = absent[np.argsort(-counts[absent], kind="stable")][len(self._free) :]
        chosen = absent[self.host.choose(counts[absent])] if len(absent) else absent
        if not len(chosen):
            return ids, self._nothing(rows)
        start, given = time.perf_counter(), np.asarray(rows)
        total = np.zeros(given.shape, np.float32)
        arrays = self._fetch((chosen + first).tolist(), set())
        fetched = time.perf_counter()
        self.wait_s += fetched - start
        for expert, parts in zip(chosen.tolist(), arrays, strict=True):
            at, k = np.nonzero(ids == expert)
            total[at] += self.host.run(parts, given[at], weights[at, k])
        self.misses += len(chosen)
        self.on_host += len(chosen)
        self.host_s += time.perf_counter() - fetched
        return np.where(np.isin(ids, chosen), E, ids), total.astype(given.dtype)

    def _nothing(self, rows: jax.Array) -> jax.Array:
        """Returns zeros like `rows`, the same array each time."""
        if rows.shape not in self._zeros:
            self._zeros[rows.shape] = jax.device_put(np.zeros(rows.shape, rows.dtype), rows.sharding)
        return self._zeros[rows.shape]

    def _put(self, slot: int, arrays: list[Any], *, wait: bool = False) -> None:
        """Writes an expert into a slot, and may wait until it is there.

        On a CPU straight into the memory of `arrays`, once nothing reads them any more: a program would take
        ten times as long. What is pinned is copied by the device, for which nobody waits here.
        """
        if self.in_place:
            for parts, array in zip(self._memory, arrays, strict=True):
                for first, rest, memory in parts:
                    if 0 <= slot - first < len(memory):
                        memory[slot - first] = array[rest]
        else:
            if self._pinned:
                arrays = to_device(arrays)
            write = _writer(tuple(array.sharding for array in self.arrays))
            self.arrays = write(self.arrays, np.int32(slot), arrays)
            if wait:
                jax.block_until_ready(self.arrays)

    def foresee(self, place: int, ids: Ints) -> None:
        """Has the experts fetched that a layer is thought to visit at its coming turn."""
        assert self.store is not None
        needed = np.zeros(self.num_experts + 1, bool)
        needed[ids.reshape(-1)] = True
        for key in self.residency.absent(place, needed[:-1]).tolist():
            self._coming[key] = self.store.fetch(key)
            self.foreseen += 1

    def _fetch(self, keys: list[int], low: set[int]) -> list[list[np.ndarray]]:
        """Returns these experts' arrays, those of `low` from the copies of few bits."""
        assert self.store is not None
        coming = self._coming
        self.foreseen_used += sum(key in coming and key not in low for key in keys)
        self.lowered += len(low)
        stores = [self._low_store if key in low and self._low_store else self.store for key in keys]
        promises = [
            coming[key] if key in coming and store is self.store else store.fetch(key)
            for key, store in zip(keys, stores, strict=True)
        ]
        return [
            store.records.arrays(promise.result()) for store, promise in zip(stores, promises, strict=True)
        ]

    def _release(self, keys: Ints) -> None:
        """Takes the slots of experts that were evicted."""
        for key in keys.tolist():
            at = divmod(key, self.num_experts)
            self._free.append(int(self.table[at]))
            self.table[at] = self.slots
            self._lowered.discard(key)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every slot is free or one resident expert's."""
        held = self.table[:, :-1].reshape(-1)
        resident = held < self.slots
        assert (self.table[:, -1] == self.slots).all(), "an id that is no expert's has a slot"
        assert (resident == self.residency.resident).all(), "the table and the policy differ"
        assert sorted([*held[resident].tolist(), *self._free]) == list(range(self.slots)), (
            "slots lost or shared"
        )

    def close(self) -> None:
        """Frees slots and store."""
        for array in self.arrays:
            if isinstance(array, jax.Array):
                array.delete()
        for store in (self.store, self._low_store, self.streamed):
            if store is not None:
                store.close()

    def declared(self, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """Returns a model's declarations with the slots, under the first layer's names, for the experts."""
        if self.streamed is not None:
            specs = self.streamed.declared(specs)
        first = {name for name, (place, _) in self._places.items() if not place}
        return {
            name: replace(spec, shape=(self.slots, *spec.shape[1:])) if name in first else spec
            for name, spec in specs.items()
            if name in first or name not in self._places
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.slots * self.records.held

    def reset_stats(self) -> None:
        """Starts the counts afresh."""
        self.hits = self.misses = self.on_host = self.foreseen = self.foreseen_used = self.lowered = 0
        self.wait_s = self.host_s = 0.0
        self.history = deque[tuple[float, int, int, float, float]](maxlen=_REMEMBERED)
        if self.store is not None:
            self.store.bytes_read = 0
        if self.streamed is not None:
            self.streamed.reset_stats()

    def stats(self) -> dict[str, Any]:
        """Returns counts since the start or `reset_stats`, for `LLM.stats`."""
        used, told = self.hits + self.misses, self.store.describe() if self.store else {}
        if self.streamed is not None:
            told |= self.streamed.stats()
        if self._low_store is not None:
            told["experts_host_bytes"] += self._low_store.describe()["experts_host_bytes"]
        return {
            "experts_slots": self.slots,
            "experts_share": self.slots / self.records.count,
            "experts_slot_bytes": self.nbytes,
            "experts_hits": self.hits,
            "experts_misses": self.misses,
            "experts_hit_rate": self.hits / used if used else None,
            "experts_moved_bytes": (self.misses - self.on_host) * self.records.held,
            "experts_wait_s": self.wait_s,
            "experts_on_host": self.on_host,
            "experts_host_s": self.host_s,
            "experts_low_bits": self.lowered,
            "experts_foreseen": self.foreseen,
            "experts_foreseen_used": self.foreseen_used,
            **told,
        }


@functools.cache
def _writer(where: tuple[jax.sharding.Sharding, ...]) -> Any:
    """Returns the program that writes an expert into its slot of arrays that lie so."""

    def write(slots: list[jax.Array], at: jax.Array, new: list[jax.Array]) -> list[jax.Array]:
        return [array.at[at].set(values) for array, values in zip(slots, new, strict=True)]

    return jax.jit(write, donate_argnums=0, out_shardings=list(where))


def check_tiers(
    engine: EngineConfig, parallel: ParallelConfig, config: ModelConfig, quant: QuantConfig
) -> None:
    """Raises `ConfigError` for what experts in tiers do not go with."""
    moe, speculation, key = engine.moe, engine.speculation, "engine.experts.resident"
    refusals = {
        "a model without experts": not any(config.moe_layers),
        f"parallel.pp={parallel.pp}: parts of a step are no stages": parallel.pp > 1,
        "parallel.redundant_experts, which have places of their own": parallel.redundant_experts > 0,
        "parallel.exchange_capacity: what is dropped would depend on where experts are": (
            parallel.exchange_capacity is not None
        ),
        f"engine.experts.miss={engine.experts.miss} on several devices": (
            engine.experts.on_host and parallel.num_devices > 1
        ),
        "parallel: layers come and go on one device": (
            engine.tiers.resident_layers is not None and parallel.num_devices > 1
        ),
        "several processes": jax.process_count() > 1,
        f"engine.moe.execution={moe.execution}, which runs all experts": moe.execution != "grouped",
        f"engine.moe.routing.method={moe.routing.method}, whose biases no part of a step has": (
            moe.routing.method == "bias"
        ),
        "engine.adapters.slots: a part of a step has no adapters": engine.adapters.slots > 0,
        f"engine.speculation.method={speculation.method}, which drafts in steps of its own": (
            speculation.on_device
        ),
        f"engine.kv_policy.method={engine.kv_policy.method}, which weighs what attention gives": (
            engine.kv_policy.weighs
        ),
        f"engine.deterministic={engine.deterministic} with engine.experts.miss={engine.experts.miss},"
        " whose sums depend on what is resident": engine.deterministic != "none" and engine.experts.on_host,
        f"quant.method={quant.what}, which calibrates the whole model": (
            quant.what not in ("none", "rtn", "magnitude") or quant.experts.method != "none"
        ),
    }
    if engine.tiers.device_gb is not None:
        key = "engine.tiers.device_gb"
    elif engine.experts.resident in (None, 1):
        key = "engine.tiers.resident_layers"
    refuse(key, engine.experts_in_tiers, refusals)


def identity_of_files(folder: str | os.PathLike[str]) -> list[Any]:
    """Returns names, sizes and times of a checkpoint's files: what tells that they have not changed."""
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".safetensors", ".json"))
    return [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
