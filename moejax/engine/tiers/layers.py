"""Layers whose weights are copied to the device while the layer before them runs, and left there no longer
(ZeRO-Inference, arXiv 2207.00032)."""

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from flax import nnx

from moejax.core.errors import ConfigError
from moejax.core.files import content_hash
from moejax.engine.tiers.pinned import to_device
from moejax.engine.tiers.store import Records, Store
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec


class LayerTier:
    """What layers have besides routed experts, of all but the first `resident` ones, in stores below.

    Args:
        model: without values.
        rest_of: returns the arrays of a layer that are no routed experts', as a state.
        foresees: whether a part of a step reads the next router, too.

    Attributes:
        numbers: the layers that come and go.
        most: bytes of the layers that the device holds of these at a time.
        wait_s, moved: seconds that steps waited for layers, and bytes copied.
    """

    def __init__(
        self, model: Decoder, resident: int, rest_of: Callable[[nnx.Module], Any], foresees: bool
    ) -> None:
        layers = model.in_order()
        if resident >= len(layers):
            raise ConfigError(
                f"engine.tiers.resident_layers={resident}: the model has {len(layers)} layers; lower it, or"
                " leave it null to keep all on the device"
            )
        self.numbers = range(resident, len(layers))
        self._at: dict[int, tuple[int, int]] = {}  # of a layer: records, and its place there
        self._names: dict[str, tuple[int, int]] = {}  # of an array: its layer, and its place there
        alike: list[list[tuple[tuple[int, ...], Any]]] = []
        counts: list[int] = []
        for number in self.numbers:
            rest = rest_of(layers[number])
            for leaf, (path, _) in enumerate(nnx.to_flat_state(rest)):
                self._names[".".join(map(str, ("layers", number, *path)))] = number, leaf
            shapes = [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(rest)]
            if shapes not in alike:
                alike.append(shapes)
                counts.append(0)
            kind = alike.index(shapes)
            self._at[number] = kind, counts[kind]
            counts[kind] += 1
        self.records = [Records(count, shapes) for count, shapes in zip(counts, alike, strict=True)]
        self.nbytes = sum(records.held * records.count for records in self.records)
        # Two parts of a step at a time: one that runs, and one that is copied.
        ends = [0, *(i for i, sparse in enumerate(model.config.moe_layers) if sparse), len(layers) - 1]
        last = [*ends[3 if foresees else 2 :], *[ends[-1]] * 3]
        spans = [range(first, end + 1) for (first, _), end in zip(pairwise(ends), last, strict=False)]
        self.most = max(sum(map(self._size, span)) for span in spans)
        self.stores: list[Store] = []
        self._missing = set(self._names)
        self._coming: dict[int, Future[Any]] = {}
        self._here: dict[int, list[jax.Array]] = {}
        self.reset_stats()

    def _size(self, number: int) -> int:
        return self.records[self._at[number][0]].held if number in self._at else 0

    def open(self, make: Callable[[Records, str], Store], identity: Any) -> None:
        """Makes the stores, each known again by its name."""
        for kind, records in enumerate(self.records):
            self.stores.append(make(records, content_hash([identity, "layers", self.numbers[0], kind])))

    def has(self, name: str) -> bool:
        """Tells whether an array, or a whole weight, is there from an earlier engine."""
        paths = (
            [name] if name in self._names else [each for each in self._names if each.startswith(f"{name}.")]
        )
        return bool(self.stores and paths) and self._store_of(paths[0]).written

    def _store_of(self, path: str) -> Store:
        return self.stores[self._at[self._names[path][0]][0]]

    def holds(self, name: str) -> bool:
        """Tells whether a weight, by its path, is one of these layers'."""
        return any(path.startswith(f"{name}.") for path in self._names)

    def take(self, name: str, value: jax.Array) -> bool:
        """Puts an array of a layer into its store, if it is one."""
        if name not in self._names:
            return False
        number, leaf = self._names[name]
        kind, place = self._at[number]
        self._missing.discard(name)
        self.stores[kind].write(place, leaf, np.asarray(value))
        return True

    def finish(self) -> None:
        """Ends the filling."""
        missing = [path for path in sorted(self._missing) if self.stores and not self._store_of(path).written]
        assert not missing, f"no values of {missing}"
        for store in self.stores:
            store.finish()

    def fetch(self, numbers: Collection[int]) -> None:
        """Has these layers read, and lets all others go."""
        self._here = {number: arrays for number, arrays in self._here.items() if number in numbers}
        for number in numbers:
            if number in self._at and number not in self._here and number not in self._coming:
                kind, place = self._at[number]
                self._coming[number] = self.stores[kind].fetch(place)

    def copy(self) -> None:
        """Copies to the device what was read, waiting for the disk but not for the device.

        Raises:
            CheckpointError: it cannot be read.
        """
        start, coming = time.perf_counter(), self._coming
        self._coming = {}
        for number, promise in coming.items():
            records = self.records[self._at[number][0]]
            self._here[number] = to_device(records.arrays(promise.result()))
            self.moved += records.held
        self.wait_s += time.perf_counter() - start

    def leaves(self, number: int) -> list[jax.Array]:
        """Returns the weights of a layer that was fetched and copied."""
        return self._here[number]

    def clear(self) -> None:
        """Lets all go."""
        self._here, self._coming = {}, {}

    def close(self) -> None:
        """Frees memory and files."""
        self.clear()
        for store in self.stores:
            store.close()

    def declared(self, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """Returns declarations without these layers' but for as many bytes as the device holds at a time."""
        here, left = set[int](), self.most
        for number in sorted(self.numbers, key=self._size, reverse=True):
            if left > 0:
                here.add(number)
                left -= self._size(number)
        return {
            name: spec
            for name, spec in specs.items()
            if name not in self._names or self._names[name][0] in here
        }

    def reset_stats(self) -> None:
        """Starts the counts afresh."""
        self.wait_s, self.moved = 0.0, 0
        for store in self.stores:
            store.bytes_read = 0

    def stats(self) -> dict[str, Any]:
        """Returns counts since the start or `reset_stats`, for `LLM.stats`."""
        return {
            "layers_in_tiers": len(self.numbers),
            "layers_moved_bytes": self.moved,
            "layers_read_bytes": sum(store.bytes_read for store in self.stores),
            "layers_wait_s": self.wait_s,
        }
