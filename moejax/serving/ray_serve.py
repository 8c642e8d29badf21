"""Replicas as a deployment of Ray Serve, which starts, watches, replaces and scales them, here or on the
cluster of RAY_ADDRESS. The HTTP front stays in the process that starts them."""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from moejax.core.errors import DeviceError, MoejaxError, StepError, refuse
from moejax.core.words import one_line
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Checkpoint, RequestOptions
from moejax.serving.config import ServeSection
from moejax.serving.replicas import Part, Replica, Replicas, ReplicaServer, choose
from moejax.simulate.routers import ROUTERS, Load, desired_replicas


class PolicyRouter(RequestRouter):
    """Gives requests to replicas as the simulator's router of a name does."""

    def initialize_state(self, *, router: str) -> None:
        self._router = ROUTERS[router]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the one chosen. Requests are counted here as they come and go, caches by the replicas."""
        replicas, loads = {each.replica_id.unique_id: each for each in candidate_replicas}, {}
        for name, replica in replicas.items():
            told = Load(0, 0, 0.0)._replace(**replica.routing_stats)
            here = self.replica_queue_len_cache.get(replica.replica_id)
            loads[name] = told if here is None else told._replace(running=here, waiting=0)
        asked, *_, left_out = pending_request.args if pending_request else (None, ())
        return [[replicas[choose(self._router, loads, asked.prompt_token_ids if asked else (), left_out)]]]


class QueuePolicy:
    """Has so many replicas that requests wait for `queue_ms` on average, see `desired_replicas`."""

    def __init__(self, queue_ms: float) -> None:
        self.queue_ms = queue_ms

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waits, uses = (list(told.get(name, {}).values()) or [0.0] for name in ("queue_ms", "use"))
        pressure, use = max(waits) / self.queue_ms, sum(uses) / len(uses)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return desired_replicas(context.target_num_replicas, pressure, use, least=least, most=most), {}


class RayReplica(Replica):
    """A replica that goes by Ray Serve's name."""

    def __init__(self, arguments: Mapping[str, Any], config: ServeSection) -> None:
        super().__init__(arguments, config, serve.get_replica_context().replica_id.unique_id)


@contextlib.asynccontextmanager
async def serving_replicas(
    arguments: Mapping[str, Any], config: ServeSection
) -> AsyncIterator[ReplicaServer]:
    """Starts replicas of `LLM(**arguments)`, and Ray where none runs, and opens the endpoints over them.

    Raises:
        ConfigError: the engine's settings do not go with replicas.
        DeviceError: they do not start.
    """
    engine = arguments["engine"]
    refuse("serve.replicas", True, {"engine.adapters.slots": engine.adapters.slots})
    ours, app = not (ray.is_initialized() or os.environ.get("RAY_ADDRESS")), f"moejax-{uuid.uuid4().hex[:8]}"
    with LLM(**{**arguments, "parallel": None}, fill=False) as llm:
        name = config.name or (llm.model_dir.name if llm.model_dir else llm.config.family)
        try:
            try:
                handle = await asyncio.to_thread(_start, arguments, config, app, ours)
            except (RayError, RayServeException, RuntimeError, OSError) as error:
                raise DeviceError(
                    f"the replicas do not start: {one_line(error)}; Ray's log has more"
                ) from error
            asking = handle.options(method_name="stream", stream=True)

            async def ask(
                asked: Checkpoint, options: RequestOptions, interval: int, out: list[str]
            ) -> AsyncGenerator[Part, None]:
                parts = asking.remote(asked, options, interval, out)
                try:
                    async for part in parts:
                        yield part
                except (RayError, RayServeException) as error:
                    raise StepError(f"the replica is lost ({type(error).__name__})") from error
                finally:
                    parts.cancel()

            async def everywhere(method: str, *given: Any) -> list[Any]:
                try:
                    return await handle.broadcast(method, *given).results_async()
                except RayTaskError as error:
                    raise error.cause if isinstance(error.cause, MoejaxError) else error from None

            front = Replicas(llm, ask, everywhere, config)
            with contextlib.closing(ReplicaServer(front, config, name, lambda: _running(app))) as server:
                yield server
        finally:
            if ours:
                await asyncio.to_thread(serve.shutdown)
                ray.shutdown()
            elif ray.is_initialized():
                await asyncio.to_thread(serve.delete, app)


def _start(arguments: Mapping[str, Any], config: ServeSection, app: str, ours: bool) -> Any:
    """Starts the replicas, and returns who hands requests to them."""
    most = max(config.replicas, config.max_replicas)
    if not ray.is_initialized():
        here = {"num_cpus": max(most, os.cpu_count() or 1), "object_store_memory": 100_000_000}
        ray.init(logging_level=logging.WARNING, **({**here, "include_dashboard": False} if ours else {}))
    devices = getattr(arguments.get("parallel"), "num_devices", 1)
    policy = AutoscalingPolicy(policy_function=QueuePolicy, policy_kwargs={"queue_ms": config.queue_ms})
    scaling = AutoscalingConfig(min_replicas=config.replicas, max_replicas=most, policy=policy)
    deployment = serve.deployment(RayReplica).options(
        name="replica", max_ongoing_requests=config.max_requests, health_check_period_s=5,
        ray_actor_options={"num_gpus": devices} if ray.cluster_resources().get("GPU") else {"num_cpus": 1},
        request_router_config=RequestRouterConfig(
            request_router_class=PolicyRouter, request_router_kwargs={"router": config.router},
            request_routing_stats_period_s=1,
        ),
        graceful_shutdown_timeout_s=config.drain_s, max_constructor_retry_count=2,
        **({"autoscaling_config": scaling} if config.max_replicas else {"num_replicas": config.replicas}),
    )  # fmt: skip
    serve.start(proxy_location="Disabled")
    return serve.run(deployment.bind(arguments, config), name=app, route_prefix=None)


def _running(app: str) -> int:
    """Returns how many replicas run."""
    (deployment,) = serve.status().applications[app].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)
