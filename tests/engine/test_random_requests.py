"""Random requests on the real engine, under every policy, memory of prefixes and way of preemption, get the
tokens that each gets alone from the plain loop over a contiguous cache."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from moejax import LLM, RequestOptions, SamplingParams
from moejax.core.config import PrefixCacheConfig
from moejax.core.scheduling import SchedulingConfig, Tenant
from moejax.engine.requests.api import RequestOutput
from moejax.engine.scheduling.policies import POLICIES
from tests.engine.paged import SCARCE, OneByOne, assert_clean
from tests.engine.tiny import VOCAB

REQUESTS = 17
CASES = [
    (policy, place, preemption)
    for policy in POLICIES
    for place in (None, "device", "host")
    for preemption in ("recompute", "swap", "auto")
    if policy != "lpm" or place is not None
]
assert REQUESTS * len(CASES) >= 1_000

Drawn = tuple[list[int], SamplingParams, RequestOptions]


@pytest.fixture(scope="module")
def one_by_one(bare_llm: LLM) -> OneByOne:
    return OneByOne(bare_llm.model)


def draw(rng: np.random.Generator, penalties: list[float]) -> Drawn:
    """A prompt that begins as others do, sampled or not, with an end that may come early."""
    shared = (
        np.random.default_rng(int(rng.integers(2))).integers(1, VOCAB, 12)[: rng.integers(0, 13)].tolist()
    )
    prompt = [*shared, *rng.integers(1, VOCAB, rng.integers(1, 6)).tolist()]
    params = SamplingParams(
        max_tokens=int(rng.integers(1, 15)),
        temperature=float(rng.choice([0.0, 0.9])),
        seed=int(rng.integers(3)),
        n=int(rng.choice([1, 1, 1, 2])),
        stop_token_ids=tuple(rng.integers(1, VOCAB, 20).tolist()) if rng.random() < 0.3 else (),
        repetition_penalty=float(rng.choice(penalties)),
        ignore_eos=True,
    )
    options = RequestOptions(
        priority=int(rng.integers(-1, 2)),
        deadline_ms=float(rng.choice([1.0, 50.0, 5e3])) if rng.random() < 0.7 else None,
        tenant=str(rng.choice(["", "few", "other"])),
        slo_class=str(rng.choice(["interactive", "standard", "batch"])),
    )
    return prompt, params, options


def check(asked: Drawn, out: RequestOutput, aborted: bool, plain: OneByOne) -> None:
    prompt, params, _ = asked
    for got, want in zip((s.token_ids for s in out.outputs), plain.samples(prompt, params), strict=True):
        assert got == (want[: len(got)] if aborted else want)


@pytest.mark.slow  # the fast lane has them without a device: tests/engine/test_state_machine.py
@pytest.mark.parametrize(("policy", "place", "preemption"), CASES)
def test_random_requests_get_their_own_tokens(
    policy: Any, place: Any, preemption: Any, bare_llm: LLM, one_by_one: OneByOne
) -> None:
    llm = bare_llm.variant(
        dataclasses.replace(
            SCARCE,
            policy=policy,
            preemption=preemption,
            prefix_cache=PrefixCacheConfig(enabled=place is not None, place=place or "auto"),
            scheduling=SchedulingConfig(quantum_tokens=2, tenants={"few": Tenant(max_seqs=3)}),
        )
    )
    # One kind of step for all that they ask of the sampler.
    number = CASES.index((policy, place, preemption))
    penalties = [1.0, 1.0, 1.2] if number % 3 == 0 else [1.0]
    most = SamplingParams(temperature=0.9, seed=0, n=2, repetition_penalty=penalties[-1])
    llm.warmup(max_total_len=32, sampling_params=[most])
    rng = np.random.default_rng(number)
    events: Counter[str] = Counter()
    live: list[tuple[Drawn, RequestOutput]] = []
    ended: list[tuple[Drawn, RequestOutput, bool]] = []
    waiting = [draw(rng, penalties) for _ in range(REQUESTS)]
    while waiting or live:
        for _ in range(int(rng.integers(4)) if waiting else 0):
            if waiting:
                prompt, params, options = asked = waiting.pop()
                live.append((asked, llm.submit(prompt, params, options=options)))
        if live and rng.random() < 0.01:
            asked, out = live.pop(int(rng.integers(len(live))))
            llm.abort(out.request_id)
            ended.append((asked, out, True))
        llm.step()
        events["swapped"] += any(s.swapped for s in llm.engine.scheduler.waiting())
        llm.engine.scheduler.check_integrity()
        ended += [(asked, out, False) for asked, out in live if out.finished]
        live = [(asked, out) for asked, out in live if not out.finished]
    while llm.step():
        pass
    assert_clean(llm)
    assert len(ended) == REQUESTS and llm.stats()["preemptions"] > 0
    assert preemption != "swap" or events["swapped"]
    for asked, out, aborted in ended:
        check(asked, out, aborted, one_by_one)
