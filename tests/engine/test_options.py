"""Request options on a real engine: they change who goes first, and no token."""

import dataclasses

import numpy as np
import pytest

from moejax import LLM
from moejax.core.config import EngineConfig, PrefixCacheConfig
from moejax.core.errors import RequestError
from moejax.core.scheduling import SchedulingConfig, Tenant
from moejax.engine.requests.api import RequestOptions, RequestOutput, SamplingParams
from moejax.engine.scheduling.policies import POLICIES
from tests.engine.tiny import small_config

ENGINE = EngineConfig(
    max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, block_size=8, num_blocks=14, seq_buckets=[2],
    token_buckets=[16], block_buckets=[14],
    scheduling=SchedulingConfig(
        quantum_tokens=2, ageing_s=1e3, tenants={"b": Tenant(weight=2.0, max_seqs=1)}
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def engines():
    plain = LLM(small_config(), load_format="dummy", engine=ENGINE)
    cache = PrefixCacheConfig(enabled=True)
    return {
        name: plain.variant(
            dataclasses.replace(
                ENGINE, policy=name, prefix_cache=cache if name == "lpm" else PrefixCacheConfig()
            )
        )
        for name in POLICIES
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_tokens(engines, policy: str):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 60, size).tolist() for size in (20, 3, 9, 15, 4, 12)]
    params = [
        SamplingParams(max_tokens=n, temperature=0.7, seed=n, ignore_eos=True) for n in (20, 9, 16, 5, 12, 3)
    ]
    options = [
        RequestOptions(priority=-i, deadline_ms=1e3 * (9 - i), tenant="ab"[i % 2], slo_class=name)
        for i, name in enumerate(("batch", "standard", "interactive", None, "interactive", "standard"))
    ]
    wanted = [one.outputs[0].token_ids for one in engines["fcfs"].generate(prompts, params)]
    llm = engines[policy]
    outputs = []
    for index, (prompt, asked, option) in enumerate(zip(prompts, params, options, strict=True)):
        outputs.append(llm.submit(prompt, asked, options=option))
        for _ in range(9 if index == 1 else 0):  # the first two run when the others come
            llm.step()
    while llm.step():
        pass
    assert [one.outputs[0].token_ids for one in outputs] == wanted
    if policy in ("priority", "edf"):
        assert outputs[0].metrics.preemptions > 0


def waits(output: RequestOutput) -> float:
    assert output.metrics.scheduled_time is not None
    return output.metrics.scheduled_time - output.metrics.arrival_time


def test_bad_options(engines):
    llm = engines["fcfs"]
    with pytest.raises(RequestError, match="unknown slo_class 'fast'"):
        llm.generate([1, 2], options=RequestOptions(slo_class="fast"))
    with pytest.raises(RequestError, match="2 options for 1 prompts"):
        llm.generate([1, 2], options=[RequestOptions()] * 2)
    with pytest.raises(RequestError, match="options must be RequestOptions or a list"):
        llm.generate([1, 2], options={"priority": 1})
    with pytest.raises(RequestError, match="deadline_ms must be a positive number"):
        RequestOptions(deadline_ms=0)
    with pytest.raises(RequestError, match=r"tenants\.b\.max_seqs=1"):
        llm.generate([1, 2], SamplingParams(n=2), options=RequestOptions(tenant="b"))


def test_a_rate_makes_its_tenant_wait(engines):
    """And the engine with it, where nobody else has anything to do."""
    slow = SchedulingConfig(tenants={"slow": Tenant(tokens_per_s=200, burst_tokens=8)})
    llm = engines["fcfs"].variant(dataclasses.replace(ENGINE, scheduling=slow))
    params, option = SamplingParams(max_tokens=10, ignore_eos=True), RequestOptions(tenant="slow")
    *_, third = llm.generate([[1, 2, 3, 4, 5]] * 3, params, options=option)
    assert waits(third) >= (30 - 8 - 15) / 200
    assert len(third.outputs[0].token_ids) == 10
    assert llm.stats()["tenant_service"] == {"slow": 3 * (5 + 2 * 10)}
    left = [llm.submit([1, 2, 3, 4, 5], params, options=option) for _ in range(5)]
    llm.pause("wait")  # which does not wait for a rate
    assert not left[-1].finished
    llm.unpause()
    llm.engine.run_until(lambda: left[-1].finished)


def test_what_would_come_too_late_is_refused_before_anything_is_queued(engines):
    """A call's requests are judged by the queue before it, all or none."""
    strict = SchedulingConfig(admission="refuse")
    llm = engines["fcfs"].variant(dataclasses.replace(ENGINE, scheduling=strict))
    params, soon = SamplingParams(max_tokens=4, ignore_eos=True), RequestOptions(deadline_ms=60_000)
    assert len(llm.generate([[1, 2, 3]] * 6, params, options=soon)) == 6
    llm.submit([1, 2, 3], params)
    with pytest.raises(RequestError, match=r"refused: its first token is expected after .* wanted after 0"):
        llm.generate([[4, 5, 6]] * 3, params, options=[soon, RequestOptions(deadline_ms=1e-6), soon])
    assert llm.stats()["waiting"] == 1
    while llm.step():
        pass
