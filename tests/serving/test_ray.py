"""Replicas on Ray Serve: kill -9 loses no request, and tokens are `LLM`'s to the bit."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
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
        request = SimpleNamespace(args=[SimpleNamespace(prompt_token_ids=(1, 2)), None, left_out])
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


@pytest.mark.slow
def test_a_replica_killed_under_http_streams(tmp_path: Path) -> None:
    engine = {**ENGINE, "max_model_len": 128}
    overrides = ["serve.port=0", "serve.replicas=2", "serve.router=round_robin"]
    overrides += [f"engine.{key}={value}" for key, value in engine.items()]
    command = [sys.executable, "-m", "experiments.serve", *overrides, f"hydra.run.dir={tmp_path / 'out'}"]
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    prompts = ["The router", "def route(", "A token", "This class"]
    with LLM("tiny", engine=EngineConfig(**engine)) as llm:
        texts = [output.outputs[0].text for output in llm.generate(prompts, SamplingParams(**SAMPLED))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving tiny at "))
        address, (first, _) = line.split()[3].rstrip(";"), replica_processes(process.pid)

        def ask(prompt: str) -> str:
            text, body = "", {**SAMPLED, "prompt": prompt, "stream": True}
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=300) as response:
                for event in response.iter_lines():
                    if event.startswith("data: {"):
                        text += json.loads(event[6:])["choices"][0]["text"]
                        with contextlib.suppress(psutil.NoSuchProcess):
                            first.kill()
            return text

        with ThreadPoolExecutor() as pool:
            assert list(pool.map(ask, prompts)) == texts
        assert "replica=" in httpx.get(f"{address}/metrics", timeout=60).text
        everyone = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert not psutil.wait_procs(everyone, 30)[1], "processes of Ray are left"


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
