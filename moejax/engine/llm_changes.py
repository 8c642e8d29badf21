"""The part of `LLM` that changes what a running engine computes with."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.checkpoint.peft import Adapter
from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.engine.core import Engine, PauseMode
from moejax.engine.opening.resolve import ResolvedEngine
from moejax.engine.opening.weights import Weights
from moejax.engine.pipeline.runner import PipelineRunner
from moejax.engine.reconfigure import KvMove, Reconfigured, reconfigure
from moejax.engine.routing.expert_counts import LoadWindow
from moejax.engine.routing.rebalance import Rebalanced, rebalance, track_load, tracked
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.update import update_weights
from moejax.models.decoder import Decoder
from moejax.routing.capture import RoutingCapture


class Changes:
    """Weights, LoRA adapters, places of experts; a base of `LLM`, whose attributes these are."""

    config: ModelConfig
    engine: Engine
    runner: DeviceRunner | PipelineRunner
    _resolved: ResolvedEngine
    _weights: Weights

    def reconfigure(self, parallel: ParallelConfig | None, *, kv: KvMove = "move") -> Reconfigured:
        """Spreads the running engine over devices in another way; no request is lost, and tokens are those
        that there would have been.

        A second copy of the weights, a cache and programs are made beside the running engine, which goes on
        meanwhile if other threads wait for it; requests move between two steps. Statistics, captured routing,
        adapters and requests' numbers go on. Forgotten are prefixes, `rebalance`'s placement, and what swaps
        and prefixes counted. Variants stay as they are. The first step is taken here.

        Args:
            kv: "move" takes keys and values of running requests along. "recompute" computes them anew, as is
                done in any case with penalties, linear attention, windows with blocks of their own, evicted
                blocks, for what was swapped out, and where there is no room.

        Raises:
            ConfigError: the model, its settings or a request that is here do not go with the layout, or there
                is no memory for both; nothing has changed then.
            RequestError: it is called from within a step, or another call has changed the engine meanwhile.
        """
        return reconfigure(self, parallel, kv)

    def update_weights(self, values: Decoder | Mapping[str, Any], running: PauseMode = "wait") -> None:
        """Puts new values in place of weights, for variants of this engine too; nothing is compiled again,
        and cached prefixes are forgotten.

        Args:
            values: another decoder of this configuration, or path of a parameter → `[..., in, out]`.
            running: "wait" runs what has begun to its end first; with "keep" it goes on from the tokens that
                it has, whose keys and values are computed anew; "abort" ends all.

        Raises:
            ConfigError: a parameter that is not there (quantized ones are not), or of another shape.
            RequestError: it is called from within a step.
        """
        update_weights([llm.engine for llm in self._weights.users], self._weights, values, running)

    def load_adapter(self, name: str, path: str | os.PathLike[str] | Adapter) -> None:
        """Loads a LoRA adapter (PEFT's format) for requests with `RequestOptions(adapter=name)`, while others
        run and without compiling anything again. Variants of this engine have it, too.

        Raises:
            ConfigError: no slot is left (`engine.adapters`), or is for one of its matrices; too large a rank;
                the name is taken; or it is more than LoRA.
            CheckpointError: it is damaged, or does not fit the model.
        """
        with self.engine.lock:
            self._weights.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Lets no further request have an adapter; those that have it go on, and then its slot is free.
        Raises `RequestError` where there is none of that name."""
        with self.engine.lock:
            self._weights.adapters.unload(name)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests can have."""
        return list(self._weights.adapters.loaded)

    def track_load(self, window_steps: int = 256) -> LoadWindow:
        """Counts every expert's assignments over the latest steps from now on.

        Steps that count are programs of their own: call it before `warmup`, or warm up with `record_routing`.
        """
        with self.engine.lock:
            return track_load(self.runner, self.config, window_steps)

    def rebalance(
        self, loads: np.ndarray | RoutingCapture | None = None, *, min_gain: float = 0.05, factor: float = 1.0
    ) -> Rebalanced:
        """Places the experts anew for these loads and moves their weights, while requests go on: outputs do
        not change, and nothing is compiled again.

        Args:
            loads: `[L, E]` assignments of all layers, or a trace; None: what `track_load` has counted.
            min_gain: how much less balanced than the best placement a layer may stay so that less is moved.
            factor: nothing is moved while no device has more than this times the mean load.

        Raises:
            ConfigError: the experts are on one device, nothing was counted, or the trace does not fit.
        """
        with self.engine.lock:
            loads = tracked(self.runner) if loads is None else loads
            return rebalance(self._resolved, self._weights, loads, min_gain, factor)
