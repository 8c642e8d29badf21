"""Requests go on where a lost replica was, without a gap or a repeat; who gets them, and who none."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from moejax import LLM, EngineConfig, RequestOutput, SamplingParams
from moejax.core.errors import DeviceError, RequestError, StepError
from moejax.engine.requests.api import Checkpoint, RequestOptions
from moejax.serving.config import ServeSection
from moejax.serving.replicas import Breaker, Part, Replica, Replicas, ReplicaServer, choose
from moejax.simulate.routers import ROUTERS, Load
from tests.model_shapes import ONE_LAYER

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[16], block_buckets=[32], max_model_len=48,
    max_num_seqs=4, block_size=4, num_blocks=64, max_num_batched_tokens=16, autotune="rules",
    deterministic="tiles",
)  # fmt: skip
ARGUMENTS: dict[str, Any] = {"model": ONE_LAYER, "load_format": "dummy", "engine": ENGINE}
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)
PROMPT = [7, 11, 13, 17, 19]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**ARGUMENTS) as opened:
        yield opened


class Fragile:
    """Replicas in this process; after `lost[i]` messages of turn i no more come: first one that says who has
    the request, then one for each chunk, however many of them the reader's pace has put into one."""

    def __init__(self, llm: LLM, *lost: int, **section: Any) -> None:
        self.config, self.lost = ServeSection(**section), list(lost)
        self.asked: list[tuple[int, list[str]]] = []
        self.front = Replicas(llm, self.ask, self.everywhere, self.config)
        self.replicas: dict[str, Replica] = {}
        for name in ("a", "b"):
            replica = Replica.__new__(Replica)  # both on the file's engine
            replica.__dict__ |= {"name": name, "llm": llm}
            self.replicas[name] = replica

    async def ask(
        self, asked: Checkpoint, options: RequestOptions, interval: int, out: list[str]
    ) -> AsyncGenerator[Part, None]:
        self.asked.append((sum(map(len, asked.samples)), out))
        name = choose(ROUTERS["least_loaded"](), {n: Load(0, 0, 0.0) for n in self.replicas}, [], out)
        left = self.lost.pop(0) if self.lost else 1000
        async with contextlib.aclosing(self.replicas[name].stream(asked, options, interval)) as parts:
            async for part in parts:
                for one in [part._replace(chunks=[chunk]) for chunk in part.chunks] or [part]:
                    if (left := left - 1) < 0:
                        raise StepError("the replica is lost")
                    yield one

    async def everywhere(self, method: str, *given: Any) -> list[Any]:
        return [await getattr(replica, method)(*given) for replica in self.replicas.values()]


def run(llm: LLM, body: Any, *lost: int, **section: Any) -> Fragile:
    """Runs a coroutine with a front whose replicas are lost so."""
    fragile = Fragile(llm, *lost, **section)

    async def main() -> None:
        from moejax.serving.async_llm import AsyncLLM

        async with AsyncLLM(llm) as engine:
            for replica in fragile.replicas.values():
                replica.engine = engine
            await body(fragile)

    asyncio.run(main())
    return fragile


@pytest.mark.parametrize(
    "lost, known", [((0,), [0, 0]), ((1,), [0, 0]), ((5, 4), [0, 4, 7]), ((12,), [0, 11]), ((13,), [0])]
)
def test_a_stream_goes_on_as_if_nothing_had_been(llm: LLM, lost: tuple[int, ...], known: list[int]) -> None:
    (wanted,) = llm.generate([PROMPT], SAMPLED)

    async def body(fragile: Fragile) -> None:
        outputs: list[RequestOutput] = []
        chunks = [chunk async for chunk in fragile.front.stream(PROMPT, SAMPLED, on_begin=outputs.append)]
        assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
        assert [token for chunk in chunks for token in chunk.token_ids] == wanted.outputs[0].token_ids
        assert [x for chunk in chunks for x in chunk.logprobs or []] == wanted.outputs[0].logprobs
        assert outputs[0].outputs == wanted.outputs and outputs[0].finished

    fragile = run(llm, body, *lost)
    assert [tokens for tokens, _ in fragile.asked] == known
    assert fragile.front.num_requests == 0


@pytest.mark.parametrize("more", [{"n": 2}, {"n": 1, "best_of": 2}, {"prompt_logprobs": 0}])
def test_several_samples_the_best_of_them_and_prompts(llm: LLM, more: dict[str, Any]) -> None:
    params = dataclasses.replace(SAMPLED, **more)
    (wanted,) = llm.generate([PROMPT], params)

    async def body(fragile: Fragile) -> None:
        output = await fragile.front.generate(PROMPT, params)
        assert output.outputs == wanted.outputs and output.prompt_logprobs == wanted.prompt_logprobs

    assert len(run(llm, body, 2).asked) == 2  # one message has come, and the next would have the rest


def test_who_fails_again_and_again_gets_nothing_and_no_request_is_tried_for_ever(llm: LLM) -> None:
    async def body(fragile: Fragile) -> None:
        with pytest.raises(StepError, match="the replica is lost"):
            await fragile.front.generate(PROMPT, SAMPLED)
        assert [set(out) for _, out in fragile.asked] == [set(), {"a"}, {"a", "b"}]
        fragile.asked.clear()
        await fragile.front.generate(PROMPT, SAMPLED)
        assert [set(out) for _, out in fragile.asked] == [{"a", "b"}], (
            "all are left out: one has it all the same"
        )
        with pytest.raises(RequestError, match="over the limit"):  # the request's own fault
            await fragile.front.generate([1] * 48, SAMPLED)

    run(llm, body, 1, 1, 1, retries=2, failures=1)
    now = [0.0]
    breaker = Breaker(2, 10.0, lambda: now[0])
    for worked in (False, True, False):
        breaker.told("a", worked)
    assert breaker.left_out() == []
    breaker.told("a", False)
    assert breaker.left_out() == ["a"]
    now[0] = 11.0
    assert breaker.left_out() == []
    breaker.told("a", False)
    assert breaker.left_out() == ["a"], "it has not worked since"


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_among_replicas_as_in_the_simulator(name: str) -> None:
    loads = {"c": Load(1, 0, 0.9), "a": Load(3, 1, 0.2), "b": Load(2, 0, 0.5)}
    router, plain = ROUTERS[name](), ROUTERS[name]()
    for prompt in ([1, 2], [3], [4, 5]):
        place = plain.choose([loads[n] for n in "abc"], prompt)
        assert choose(router, loads, prompt, []) == "abc"[place]
    assert choose(ROUTERS[name](), loads, [1], ["a", "b"]) == "c"
    assert choose(ROUTERS[name](), loads, [1], "abc") in loads


def test_endpoints_over_replicas(llm: LLM) -> None:
    async def body(fragile: Fragile) -> None:
        running = 1
        server = ReplicaServer(fragile.front, ServeSection(replicas=2), "toy", lambda: running)
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            asked = {"prompt": PROMPT, "max_tokens": 4, "seed": 5, "ignore_eos": True, "detokenize": False}
            told = (await client.post("/v1/completions", json=asked)).json()
            assert told["usage"]["completion_tokens"] == 4
            metrics = (await client.get("/metrics")).text
            assert metrics.count("# TYPE moejax:engine_steps_total counter") == 1
            for name in fragile.replicas:
                assert f'moejax:engine_steps_total{{model_name="toy",replica="{name}"}}' in metrics
            health = (await client.get("/health")).json()
            assert health == {"state": "degraded", "reasons": ["peer replica 2 is gone"]}
            running = 0
            server.monitor.check()
            answer = await client.get("/health")
            assert answer.status_code == 503 and answer.json()["state"] == "unhealthy"
        server.close()

    run(llm, body)


def test_a_replica_tells_how_it_is(llm: LLM) -> None:
    async def body(fragile: Fragile) -> None:
        from moejax.serving.health import HealthMonitor

        replica = fragile.replicas["a"]
        replica.monitor = HealthMonitor(llm, probes=())
        await replica.check_health()
        assert await replica.record_routing_stats() == Load(0, 0, 0.0)._asdict()
        stats = await replica.record_autoscaling_stats()
        assert stats["queue_ms"] > 0 and 0 <= stats["use"] <= 1
        replica.monitor.close()
        await replica.engine.close()
        with pytest.raises(DeviceError, match="the engine's thread has ended"):
            await replica.check_health()

    run(llm, body)
