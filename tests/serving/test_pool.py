"""`EnginePool`: models by name within a budget, the least recently used closed, weights shared."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import jax
import pytest

from moejax import LLM, EngineConfig, SamplingParams
from moejax.core.errors import ConfigError, RequestError
from moejax.serving.async_llm import AsyncLLM, Overloaded
from moejax.serving.config import ServeSection
from moejax.serving.pool import EnginePool
from moejax.serving.pool_server import PoolServer
from tests.model_shapes import ONE_LAYER

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[16], block_buckets=[32], max_model_len=48,
    max_num_seqs=4, block_size=4, num_blocks=24, max_num_batched_tokens=16, autotune="rules",
)  # fmt: skip
OTHER = dataclasses.replace(ENGINE, policy="priority")
MODEL: dict[str, Any] = {"model": ONE_LAYER, "load_format": "dummy", "engine": ENGINE}
MODELS = {"a": MODEL, "a2": MODEL | {"engine": OTHER}, "b": MODEL | {"seed": 1}}
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
PROMPT = [7, 11, 13]


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[int]]:
    tokens = {}
    for name in ("a", "b"):
        with LLM(**MODELS[name]) as llm:
            tokens[name] = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    return tokens | {"a2": tokens["a"]}


def in_pool(body: Callable[[EnginePool], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Runs a coroutine with a pool of `MODELS`."""

    async def run() -> None:
        pool = EnginePool(MODELS, **options)
        try:
            await body(pool)
        finally:
            await pool.close()
        assert not opened(pool)

    asyncio.run(run())


def opened(pool: EnginePool) -> dict[str, AsyncLLM]:
    return {model.name: model.engine for model in pool._opened() if model.engine}


def bytes_of(*names: str) -> float:
    async def run() -> float:
        pool = EnginePool(MODELS)
        return pool._bytes([pool._models[name] for name in names])

    return asyncio.run(run())


def test_models_open_on_demand_share_weights_and_the_least_recently_used_closes(
    wanted: dict[str, list[int]],
) -> None:
    budget = bytes_of("a", "a2")
    assert bytes_of("a") < budget < bytes_of("a") + bytes_of("a2"), "shared weights count once"
    assert budget < bytes_of("a", "b")

    async def ask(pool: EnginePool, name: str) -> None:
        async with pool.lease(name) as engine:
            output = await engine.generate(PROMPT, GREEDY)
            assert output.outputs[0].token_ids == wanted[name]

    async def body(pool: EnginePool) -> None:
        assert not opened(pool)
        await asyncio.gather(ask(pool, "a"), ask(pool, "a"), ask(pool, "a2"))
        first, second = (pool.llms[name] for name in ("a", "a2"))
        leaves = [jax.tree.leaves(llm._weights.functions[0].leaves) for llm in (first, second)]
        assert all(x is y for x, y in zip(*leaves, strict=True))
        await ask(pool, "a")
        async with pool.lease("a"):
            with pytest.raises(Overloaded, match=r"model b has found no room within 0.2 s"):
                await ask(pool, "b")
            assert "a" in opened(pool)
        closed: list[str] = []
        pool.on_close = closed.append
        await ask(pool, "b")
        assert list(opened(pool)) == ["b"] and closed == ["a"]  # a2 had made room for b's first try
        with pytest.raises(RequestError, match="closed"):
            first.generate([PROMPT], GREEDY)
        with pytest.raises(RequestError, match="unknown model 'c'"):
            await ask(pool, "c")
        pool._wait_s = 30.0
        async with pool.lease("b") as engine:
            waiting = asyncio.create_task(ask(pool, "a"))
            assert (await engine.generate(PROMPT, GREEDY)).outputs[0].token_ids == wanted["b"]
            assert not waiting.done()
        await waiting
        assert list(opened(pool)) == ["a"]

    in_pool(body, memory_bytes=budget, wait_s=0.2)
    with pytest.raises(ConfigError, match=r"model a alone needs .* of a device, over the pool's 1.0 kB"):
        in_pool(body, memory_bytes=1000)


def test_requests_go_to_the_model_they_name(wanted: dict[str, list[int]], tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")

    async def body(pool: EnginePool) -> None:
        server = PoolServer(pool, ServeSection(admin_keys_file=str(keys)))
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(model["id"], model["max_model_len"]) for model in listed] == [
                (name, 48) for name in MODELS
            ]
            assert not opened(pool)
            asked = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
            asked |= {"return_token_ids": True, "detokenize": False}
            for name in ("a", "b"):
                told = (await client.post("/v1/completions", json=asked | {"model": name})).json()
                assert told["model"] == name and told["choices"][0]["token_ids"] == wanted[name]
            told = (await client.post("/v1/completions", json=asked)).json()
            assert told["choices"][0]["token_ids"] == wanted["a"], "the first model is that of no name"
            streamed = await client.post("/v1/completions", json=asked | {"model": "b", "stream": True})
            parts = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
            assert [token for part in parts for token in part["choices"][0]["token_ids"]] == wanted["b"]
            for wrong in ("c", ["a"]):
                none = await client.post("/v1/completions", json=asked | {"model": wrong})
                assert none.status_code == 404 and "known: a, a2, b" in none.json()["error"]["message"]
            assert (await client.post("/v1/completions", content=b"{")).status_code == 400
            head = {"Authorization": "Bearer secret"}
            done = await client.post("/admin/pause", json={"model": "b"}, headers=head)
            assert done.json() == {"done": "pause"} and pool.llms["b"].engine.stopped
            assert not pool.llms["a"].engine.stopped
            assert (await client.post("/admin/pause", json={"model": "b"})).status_code == 401
            metrics = (await client.get("/metrics")).text
            assert 'model_name="a"' in metrics and 'model_name="b"' in metrics
            for own, _ in server._servers.values():
                own.monitor.check()
            health = await client.get("/health")
            assert health.status_code == 200 and health.json()["state"] == "degraded", "b is paused"
            async with pool._changing:
                await pool._close(pool._models["b"])
            health = await client.get("/health")
            assert health.json()["state"] == "healthy", "what the pool has closed is not ill"
        server.close()

    in_pool(body)
