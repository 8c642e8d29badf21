"""Replicas on Ray Serve: one that is killed loses no request, and tokens are `LLM`'s to the bit."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moejax import LLM, EngineConfig, SamplingParams
from moejax.serving.config import ServeSection
from tests.model_shapes import TWO_LAYERS

pytest.importorskip("ray", reason="needs moejax[ray]: pip install 'moejax[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own, of its threads and sockets

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[16], block_buckets=[32], max_model_len=64,
    max_num_seqs=4, block_size=4, num_blocks=96, max_num_batched_tokens=16, autotune="rules",
    deterministic="tiles",
)  # fmt: skip
ARGUMENTS: dict[str, Any] = {"model": TWO_LAYERS, "load_format": "dummy", "engine": ENGINE}
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)
PROMPTS = [[7, 11 + i, 13, 17, 19 + i, 23] for i in range(4)]


@contextlib.asynccontextmanager
async def replicated(**section: Any) -> AsyncIterator[Any]:
    from moejax.serving.ray_serve import replicas

    os.environ["JAX_PLATFORMS"] = "cpu"
    with LLM(**ARGUMENTS, fill=False) as planned:
        async with replicas(planned, ARGUMENTS, ServeSection(**section), "toy") as server:
            yield server


def test_kill_9(tmp_path: Any) -> None:
    with LLM(**ARGUMENTS) as llm:
        wanted = [output.outputs[0] for output in llm.generate(PROMPTS, SAMPLED)]

    async def run() -> None:
        began = time.time()
        async with replicated(replicas=2, router="round_robin") as server:
            print("up", time.time() - began)
            pids = dict(await server.replicas.everywhere("pid"))
            print(pids)
            killed = False

            async def ask(i: int) -> None:
                nonlocal killed
                tokens, logprobs = [], []
                async for chunk in server.replicas.stream(PROMPTS[i], SAMPLED):
                    tokens += chunk.token_ids
                    logprobs += chunk.logprobs
                    if len(tokens) == 5 and not killed:
                        killed = True
                        os.kill(list(pids.values())[0], signal.SIGKILL)
                        print("killed")
                assert tokens == wanted[i].token_ids
                assert logprobs == wanted[i].logprobs

            await asyncio.gather(*map(ask, range(4)))
            print("done", time.time() - began)

    asyncio.run(run())
