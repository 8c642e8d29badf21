"""Replicas on Ray Serve: kill -9 loses no request, and tokens are `LLM`'s to the bit."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from moejax import LLM, EngineConfig, SamplingParams
from moejax.serving.config import ServeSection
from moejax.simulate.routers import ROUTERS, Load
from tests.model_shapes import TWO_LAYERS

pytest.importorskip("ray", reason="needs Ray Serve: pip install 'moejax[ray]'")
# Ray's own: threads and sockets that it leaves to the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore")

ENGINE: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "deterministic": "tiles"}
HTTP_ENGINE: dict[str, Any] = {**ENGINE, "max_model_len": 128}
PROMPTS = ["The router", "def route(", "A token", "This class"]
SAMPLED: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}


def replica_processes(of: int) -> list[psutil.Process]:
    """The replicas among the processes of a driver."""
    every = psutil.Process(of).children(recursive=True)
    return [process for process in every if "ray::ServeReplica" in " ".join(process.cmdline())]


def test_the_router_and_the_scaling_policy_are_the_simulator_s() -> None:
    from moejax.serving.ray_serve import PolicyRouter, QueuePolicy

    told = {"a": Load(4, 0, 0.1), "b": Load(0, 0, 0.9), "c": Load(1, 0, 0.5)}
    replicas = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=load._asdict())
        for name, load in told.items()
    ]
    replicas.append(SimpleNamespace(replica_id=SimpleNamespace(unique_id="d"), routing_stats={}))
    counted = {"b": 3, "d": 2}  # requests that this router has sent, where it knows

    def chosen(name: str, *left_out: str) -> str:
        router: Any = PolicyRouter.__new__(PolicyRouter)
        router._replica_queue_len_cache = SimpleNamespace(get=lambda replica: counted.get(replica.unique_id))
        router.initialize_state(router=name)
        request = SimpleNamespace(args=[SimpleNamespace(prompt_token_ids=(1, 2)), None, 0, left_out])
        (((choice,),)) = asyncio.run(router.choose_replicas(replicas, request))
        return str(choice.replica_id.unique_id)

    assert (chosen("least_loaded"), chosen("least_loaded", "c")) == ("c", "d")
    assert (chosen("least_cache"), chosen("round_robin"), chosen("round_robin", "a")) == ("d", "a", "b")
    loads = [told["a"], told["b"]._replace(running=3), told["c"], Load(2, 0, 0.0)]
    assert chosen("prefix") == "abcd"[ROUTERS["prefix"]().choose(loads, (1, 2))]

    def wanted(queue_ms: float, use: float, replicas: int = 2) -> int:
        metrics = {"queue_ms": {"a": 0.0, "b": queue_ms}, "use": {"a": use, "b": use}}
        limits = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 3}
        context: Any = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=replicas, **limits)
        return QueuePolicy(100.0)(context)[0]

    assert [wanted(*now) for now in ((150.0, 0.9), (400.0, 0.9), (60.0, 0.1), (10.0, 0.1), (10.0, 0.9))] == [
        3, 3, 2, 1, 2,
    ]  # fmt: skip


@contextlib.contextmanager
def serving(folder: Path, *overrides: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address; it must end by itself once it is told to."""
    engine = [f"engine.{key}={value}" for key, value in HTTP_ENGINE.items()]
    command = [sys.executable, "-m", "experiments.serve", "serve.port=0", *engine, *overrides]
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command.append(f"hydra.run.dir={folder / 'out'}")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**inherited, **environ}
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving tiny at "))
        yield process, line.split()[3].rstrip(";")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def ask(address: str, prompt: str, on_token: Callable[[], None] = lambda: None, **more: Any) -> str:
    """A streamed completion's text."""
    text, body = "", {**SAMPLED, "prompt": prompt, "stream": True, **more}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=300) as response:
        for event in response.iter_lines():
            if event.startswith("data: {"):
                text += json.loads(event[6:])["choices"][0]["text"]
                on_token()
    return text


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with LLM("tiny", engine=EngineConfig(**HTTP_ENGINE)) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, SamplingParams(**SAMPLED))]


@pytest.mark.slow
def test_a_replica_killed_under_http_streams(tmp_path: Path, texts: list[str]) -> None:
    with serving(tmp_path, "serve.replicas=2", "serve.router=round_robin") as (process, address):
        first, _ = replica_processes(process.pid)

        def kill() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                first.kill()

        with ThreadPoolExecutor() as pool:
            assert list(pool.map(lambda prompt: ask(address, prompt, kill), PROMPTS)) == texts
        assert "replica=" in httpx.get(f"{address}/metrics", timeout=60).text
        everyone = psutil.Process(process.pid).children(recursive=True)
    assert not psutil.wait_procs(everyone, 30)[1], "processes of Ray are left"


@pytest.mark.slow
def test_a_node_of_a_cluster_lost_under_http_streams(tmp_path: Path, texts: list[str]) -> None:
    """The replicas are on nodes of their own, as far as one machine can be several nodes."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
    try:
        lost, _ = cluster.add_node(**node), cluster.add_node(**node)
        once = threading.Lock()

        def lose() -> None:
            if once.acquire(blocking=False):
                cluster.remove_node(lost, allow_graceful=False)

        with serving(tmp_path, "serve.replicas=2", RAY_ADDRESS=cluster.address) as (_, address):
            assert httpx.get(f"{address}/health", timeout=60).json()["state"] == "healthy"
            with ThreadPoolExecutor() as pool:
                assert list(pool.map(lambda prompt: ask(address, prompt, lose), PROMPTS)) == texts
            until(lambda: httpx.get(f"{address}/health", timeout=60).json()["state"] == "degraded")
            cluster.add_node(**node)  # Ray Serve starts the missing one there
            until(lambda: httpx.get(f"{address}/health", timeout=60).json()["state"] == "healthy")
            assert ask(address, PROMPTS[0]) == texts[0]
        ray.init(address=cluster.address)  # it is not the server's, and stays
        assert serve.status().applications == {}
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_replicas_are_added_while_requests_wait(tmp_path: Path, texts: list[str]) -> None:
    scaled = ("serve.replicas=1", "serve.max_replicas=2", "serve.queue_ms=50", "engine.max_num_seqs=1")
    with serving(tmp_path, *scaled) as (process, address), ThreadPoolExecutor(8) as pool:
        assert len(replica_processes(process.pid)) == 1
        enough = threading.Event()

        def go_on(_: int) -> list[str]:
            told = []
            while not enough.is_set():
                told.append(ask(address, PROMPTS[0]))
            return told

        asking = [pool.submit(go_on, i) for i in range(8)]
        try:
            until(lambda: len(replica_processes(process.pid)) == 2)
            until(lambda: len(set(re.findall(r'steps_total.*replica="(\w+)"', metrics(address)))) == 2)
        finally:
            enough.set()
        assert {text for each in asking for text in each.result()} == {texts[0]}


def metrics(address: str) -> str:
    return httpx.get(f"{address}/metrics", timeout=60).text


def until(so: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "it has not become so"
        time.sleep(0.5)


@pytest.mark.slow
def test_a_lone_replica_is_started_again_and_its_requests_go_on(caplog: pytest.LogCaptureFixture) -> None:
    from moejax.serving.ray_serve import serving_replicas

    arguments: dict[str, Any] = {"model": TWO_LAYERS, "load_format": "dummy"}
    arguments["engine"] = EngineConfig(**ENGINE, max_model_len=64, block_size=4, compile_cache=False)
    prompts, params = [[7, 11, 13 + i, 17] for i in range(3)], SamplingParams(**SAMPLED, logprobs=1)
    with LLM(**arguments) as llm:
        wanted = [output.outputs for output in llm.generate(prompts, params)]

    async def run() -> None:
        async with serving_replicas(arguments, ServeSection(name="toy")) as server:
            assert server.health().state == "healthy"
            (process,) = replica_processes(os.getpid())

            async def ask(prompt: list[int]) -> list[int]:
                tokens: list[int] = []
                async for chunk in server.replicas.stream(prompt, params):
                    tokens += chunk.token_ids
                    if len(tokens) == 5:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                return tokens

            told = await asyncio.gather(*map(ask, prompts))
            assert told == [outputs[0].token_ids for outputs in wanted]
            output = await server.replicas.generate(prompts[0], params)
            assert output.outputs == wanted[0], "log-probabilities, too"
            assert replica_processes(os.getpid())[0].pid != process.pid

    with caplog.at_level(logging.WARNING, "moejax"):
        asyncio.run(run())
    assert "goes on elsewhere: the replica is lost (ActorDiedError)" in caplog.text
