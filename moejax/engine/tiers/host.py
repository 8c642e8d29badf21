"""Experts that are computed where they lie, by the host, and which of them are."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.tiers import HOST_SHARES, ExpertsConfig
from moejax.moe.router import Routing
from moejax.nn.quantized import QuantizedWeight
from moejax.routing.capture import Ints
from moejax.routing.residency import Bools

_QUEUE = 0.2  # what the experts before weigh in the score of a side
_SHARE = 0.1  # what the newest time counts in a mean


class HostExperts:
    """Runs single experts on the host's processor, and chooses whether an absent one is.

    "host": all are. "cheaper": those that take less time so than to be moved into a slot, by means of both
    that begin when the engine opens, and go on with what the host can see. "score": the side with less of
    0.5 s + 0.3 u for the host and 0.5 (1 - s) + 0.3 u for the device takes it, s being the task's number, u
    the side's utilisation in the last step, and to each 0.2 times the share of the turn's experts that it has
    already.

    Args:
        experts: those of a layer, without values; of the others they are alike.
        most: rows of a step.

    Raises:
        ConfigError: JAX has no CPU here, or the weights are coded for GPU kernels.
    """

    def __init__(self, config: ExpertsConfig, experts: nnx.Module, most: int) -> None:
        self.config, self.share, self.most = config, HOST_SHARES[config.task], most
        module: Any = experts
        for weight in module.weights():
            if isinstance(weight, QuantizedWeight) and weight.implementation != "xla":
                raise ConfigError(
                    f"engine.experts.miss={config.miss}: the experts are coded for GPU kernels, which the"
                    " host does not run; take engine.kernels=xla, or engine.experts.miss=wait"
                )
        try:
            self.device = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            raise ConfigError(
                f"engine.experts.miss={config.miss} computes on JAX's CPU, which is not there; set"
                " JAX_PLATFORMS=cuda,cpu"
            ) from None
        graph, state = nnx.split(module)
        self._run = jax.jit(functools.partial(_run, graph, jax.tree.structure(state)))
        self._sizes = [1 << i for i in range((most - 1).bit_length() + 1)]
        self._bucket = np.searchsorted(self._sizes, np.arange(most + 1))
        self.host_s, self.move_s = np.zeros(len(self._sizes)), 0.0
        self.host_used = self.device_used = 0.0

    def measure(self, arrays: list[np.ndarray], width: int, dtype: Any, move: Callable[[], None]) -> None:
        """Compiles for all numbers of rows, and times them and a `move`, the least of five each."""
        for at, size in enumerate(self._sizes):
            rows, weights = np.zeros((size, width), dtype), np.zeros(size, np.float32)
            self.host_s[at] = _least_time(functools.partial(self.run, arrays, rows, weights))
        self.move_s = _least_time(move)

    def run(self, arrays: list[np.ndarray], rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Returns an expert's output `[n, D]` of rows `[n, D]`, times float32 weights `[n]`."""
        n = len(rows)
        more = self._sizes[self._bucket[n]] - n
        padded = np.pad(rows, ((0, more), (0, 0))), np.pad(weights, (0, more))
        start = time.perf_counter()
        with jax.default_device(self.device):
            out = np.asarray(self._run([np.asarray(array)[None] for array in arrays], *padded))[:n]
        self.host_s[self._bucket[n]] += _SHARE * (time.perf_counter() - start - self.host_s[self._bucket[n]])
        return out

    def moved(self, seconds: float) -> None:
        """Says how long it took to write an expert into a slot."""
        self.move_s += _SHARE * (seconds - self.move_s)

    def used(self, step_s: float, wait_s: float, host_s: float) -> None:
        """Says how long the last step took, and what of that it waited for experts and the host computed."""
        self.host_used = min(1.0, host_s / max(step_s, 1e-9))
        self.device_used = max(0.0, 1 - (wait_s + host_s) / max(step_s, 1e-9))

    def choose(self, rows: Ints) -> Bools:
        """Returns which of the experts with so many rows each `[m]` the host computes."""
        if self.config.miss == "host":
            return np.ones(len(rows), bool)
        if self.config.miss == "cheaper":
            return np.asarray(self.host_s[self._bucket[rows]] < self.move_s)
        # By turns once both sides are level; so many of the device's are before the host's first one.
        m = len(rows)
        host = 0.5 * self.share + 0.3 * self.host_used
        ahead = (host - 0.5 * (1 - self.share) - 0.3 * self.device_used) * m / _QUEUE
        if ahead >= 0:
            count = max(0, m - int(ahead)) // 2
        else:
            count = (first := min(m, math.ceil(-ahead))) + (m - first) // 2
        chosen = np.zeros(m, bool)
        chosen[np.argsort(rows, kind="stable")[:count]] = True  # who has the fewest rows
        return chosen


def _run(graph: Any, treedef: Any, arrays: list[jax.Array], x: jax.Array, weights: jax.Array) -> jax.Array:
    experts: Any = nnx.merge(graph, jax.tree.unflatten(treedef, arrays))
    ids = jnp.zeros((len(x), 1), jnp.int32)
    routing = Routing(ids, weights[:, None], jnp.zeros((len(x), 0), jnp.float32))
    return experts(x, routing, MoeConfig(execution="dense")).out


def _least_time(call: Callable[[], Any]) -> float:
    times = [time.perf_counter()]
    for _ in range(6):  # the first compiles
        call()
        times.append(time.perf_counter())
    return min(np.diff(times[1:]).tolist())
