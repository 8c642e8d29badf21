"""Replicas as a deployment of Ray Serve, which starts, watches, replaces and scales them, here or on the cluster
of RAY_ADDRESS. The HTTP front stays in the process that starts them."""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from moejax.core.errors import DeviceError, StepError
from moejax.core.words import one_line
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Checkpoint, RequestOptions
from moejax.serving.config import ServeSection
from moejax.serving.replicas import Part, Replica, Replicas, ReplicaServer, choose
from moejax.simulate.routers import ROUTERS, Load, desired_replicas

logger = logging.getLogger(__name__)

_STORE_BYTES = 100_000_000
"""Of Ray's object store where it is started here: messages are small."""


class PolicyRouter(RequestRouter):
    """Gives requests to replicas by one of `moejax.simulate.routers.ROUTERS`, as the simulator does."""

    def initialize_state(self, *, router: str) -> None:
        self._router = ROUTERS[router]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the one that is chosen. Requests are counted here as they go, the cache by each replica."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        loads = {}
        for name, replica in replicas.items():
            told = Load(**(replica.routing_stats or {"running": 0, "waiting": 0, "cache_use": 0.0}))
            here = self.replica_queue_len_cache.get(replica.replica_id)
            loads[name] = told if here is None else told._replace(running=here, waiting=0)
        asked: Checkpoint | None = (
            pending_request.args[0] if pending_request and pending_request.args else None
        )
        left_out = pending_request.args[2] if asked is not None and pending_request is not None else ()
        return [[replicas[choose(self._router, loads, asked.prompt_token_ids if asked else (), left_out)]]]


class QueuePolicy:
    """Has so many replicas that requests wait for `queue_ms` at most, by `desired_replicas`."""

    def __init__(self, queue_ms: float) -> None:
        self.queue_ms = queue_ms

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        waits, uses = ([*told.get(name, {}).values()] for name in ("queue_ms", "use"))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        if not waits or not uses:
            return min(max(context.target_num_replicas, least), most), {}
        pressure, use = max(waits) / self.queue_ms, sum(uses) / len(uses)
        return desired_replicas(context.target_num_replicas, pressure, use, least=least, most=most), {}


class RayReplica(Replica):
    """A replica that goes by Ray Serve's name."""

    def __init__(self, arguments: Mapping[str, Any], config: ServeSection) -> None:
        super().__init__(arguments, config, serve.get_replica_context().replica_id.unique_id)

    async def pid(self) -> tuple[str, int]:
        """Returns its name and its process."""
        return self.name, os.getpid()


@contextlib.asynccontextmanager
async def replicas(
    llm: LLM, arguments: Mapping[str, Any], config: ServeSection, name: str
) -> AsyncIterator[ReplicaServer]:
    """Starts replicas, and Ray where none runs, and yields the endpoints over them; ends what it has started.

    Args:
        llm: their model, without values.
        arguments: of each replica's `LLM`.
        name: of the model.

    Raises:
        DeviceError: they do not start.
    """
    ours = not (ray.is_initialized() or os.environ.get("RAY_ADDRESS"))
    app = f"moejax-{uuid.uuid4().hex[:8]}"
    try:
        try:
            handle = await asyncio.to_thread(_start, arguments, config, app, ours)
        except (RayError, RayServeException, RuntimeError, OSError) as error:
            raise DeviceError(f"the replicas do not start: {one_line(error)}; Ray's log has more") from error
        asking = handle.options(method_name="stream", stream=True)

        async def ask(
            asked: Checkpoint, options: RequestOptions, out: list[str]
        ) -> AsyncGenerator[Part, None]:
            try:
                parts = asking.remote(asked, options, out)
                try:
                    async for part in parts:
                        yield part
                finally:
                    parts.cancel()
            except (RayError, RayServeException) as error:
                raise StepError(f"the replica is lost: {type(error).__name__}") from error

        async def all_of(method: str, *given: Any) -> list[Any]:
            return await handle.broadcast(method, *given).results_async()

        front = Replicas(llm, ask, all_of, config)
        with contextlib.closing(ReplicaServer(front, config, name, lambda: _running(app))) as server:
            yield server
    finally:
        await asyncio.to_thread(_end, app, ours)


def _start(arguments: Mapping[str, Any], config: ServeSection, app: str, ours: bool) -> Any:
    if not ray.is_initialized():
        most = max(config.replicas, config.max_replicas, os.cpu_count() or 1)
        here = {"num_cpus": most, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        ray.init(logging_level=logging.WARNING, **(here if ours else {}))
    serve.start(proxy_location="Disabled")
    return serve.run(_deployment(arguments, config), name=app, route_prefix=None)


def _end(app: str, ours: bool) -> None:
    if ours:
        serve.shutdown()
        ray.shutdown()
    elif ray.is_initialized():
        serve.delete(app)


def _running(app: str) -> int:
    """Returns how many replicas run."""
    deployments: Iterable[Any] = serve.status().applications[app].deployments.values()
    return sum(
        count for each in deployments for state, count in each.replica_states.items() if state == "RUNNING"
    )


def _deployment(arguments: Mapping[str, Any], config: ServeSection) -> Any:
    devices = getattr(arguments.get("parallel"), "num_devices", 1)
    resource = {"num_gpus": devices} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
    scaling: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_replicas:
        policy = AutoscalingPolicy(policy_function=QueuePolicy, policy_kwargs={"queue_ms": config.queue_ms})
        scaling = {"autoscaling_config": AutoscalingConfig(
            min_replicas=config.replicas, max_replicas=config.max_replicas, policy=policy)}  # fmt: skip
    deployment = serve.deployment(RayReplica).options(
        name="replica", max_ongoing_requests=config.max_requests, ray_actor_options=resource,
        health_check_period_s=5, graceful_shutdown_timeout_s=config.drain_s, max_constructor_retry_count=2,
        request_router_config=RequestRouterConfig(
            request_router_class=PolicyRouter, request_router_kwargs={"router": config.router},
            request_routing_stats_period_s=1,
        ),
        **scaling,
    )  # fmt: skip
    return deployment.bind(arguments, config)
