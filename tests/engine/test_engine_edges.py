"""What lies between requests: idle time, full pools, broken sequences, aborts in the middle of a turn."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cache.allocator import BlockAllocator
from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence
from moejax.ops.kv_segments import DecodePlan, Segment
from moejax.ops.paged_attention import decode_attention
from tests.engine.paged import SCARCE, TIGHT, assert_clean, greedy, prompt, tokens
from tests.engine.tiny import FullForward

pytestmark = pytest.mark.usefixtures("equal_steps_once")


@pytest.fixture(scope="module")
def tight(bare_llm: LLM) -> LLM:
    return bare_llm.variant(TIGHT)


@pytest.fixture(scope="module")
def whole(bare_llm: LLM) -> FullForward:
    return FullForward(bare_llm.model)


def test_no_step_is_left_in_flight_and_idle_time_is_nobodys(
    tight: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence ends by a stop token while the overlapped loop has its next step on the device already. On a
    clock that moves by 1 at each look and by 1,000 in each pause."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(tight.engine, "clock", clock)
    ids = prompt(5)
    stop = whole.greedy(ids, 3)[-1]
    records = []
    tight.engine.on_step = records.append
    for _ in range(2):
        out = tight.generate([ids], greedy(20, stop_token_ids=[stop]))[0].outputs[0]
        assert out.finish_reason == "stop" and out.token_ids[-1] == stop
        assert_clean(tight)
        now[0] += 1000.0
    tight.engine.on_step = None
    assert records and max(record.seconds for record in records) < 10


def test_the_default_pool_holds_all_that_may_run(bare_llm: LLM) -> None:
    """Three sequences of one block each in a pool of three: no reserve keeps the third out."""
    config = EngineConfig(compile_cache=False, max_num_seqs=3, block_size=64)
    llm = bare_llm.variant(config)
    assert llm.stats()["num_blocks"] == 3
    running = []
    llm.engine.on_step = lambda record: running.append(record.running)
    llm.generate([prompt(4)] * 3, greedy(6))
    assert max(running) == 3 and llm.stats()["preemptions"] == 0


def test_preemptions_of_an_empty_plan_are_reported_with_the_next() -> None:
    """One sequence takes the last block and waits to be read; the other preempts itself for want of one."""
    scheduler = Scheduler(BlockAllocator(4, 2), 2, 16)
    scheduler.watermark = 0
    params = SamplingParams(max_tokens=4)
    first = Sequence([1] * 3, 3, params, 4, 0)
    second = Sequence([1] * 4, 4, params, 8, 1)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert plan is not None and len(plan.chunks) == 2
    assert scheduler.schedule() is None and second.preemptions == 1
    scheduler.postprocess(plan, [5, 5])
    again = scheduler.schedule()
    assert again is not None and again.preempted == 1


def test_static_batches_take_many_samples_in_groups(bare_llm: LLM) -> None:
    llm = bare_llm.variant(dataclasses.replace(SCARCE, batching="static"))
    params = SamplingParams(temperature=1.0, max_tokens=8, n=6, seed=3, ignore_eos=True)
    assert tokens(llm.generate([prompt(10)], params)) == tokens(bare_llm.generate([prompt(10)], params))
    assert_clean(llm)


def test_warmup_covers_scores_and_recorded_routing(bare_llm: LLM) -> None:
    llm = bare_llm.variant(dataclasses.replace(TIGHT, strict_compile=True))
    llm.warmup(
        max_total_len=16,
        sampling_params=[greedy(4), greedy(4, prompt_logprobs=5)],
        score=True,
        record_routing=True,
    )
    llm.score([prompt(12), prompt(3)])
    llm.generate([prompt(9)], greedy(4), record_routing=True)
    llm.generate([prompt(9)], greedy(4))
    # Fewer likeliest tokens come from the program that was compiled, here beside a prompt without any.
    (out, plain) = llm.generate([prompt(6), prompt(2)], [greedy(4, prompt_logprobs=1), greedy(4)])
    assert [len(entry.top) for entry in out.prompt_logprobs or [] if entry] == [1] * 5
    assert plain.prompt_logprobs is None
    assert llm.stats()["recompiles_after_warmup"] == 0


def test_an_abort_in_the_middle_of_a_turn_waits_for_its_end(tight: LLM) -> None:
    """As from a stream that the garbage collector closes while the engine is scheduling."""
    stream = tight.generate_stream(prompt(6), greedy(20))
    other = tight.submit(prompt(7), greedy(6))
    held = [stream]
    del stream

    def close(record: object) -> None:
        if held:
            held.pop().close()  # type: ignore[attr-defined]

    tight.engine.on_step = close
    while tight.step():
        pass
    tight.engine.on_step = None
    assert other.finished and len(other.outputs[0].token_ids) == 6
    assert_clean(tight)


def test_what_is_not_finite_stays_with_its_sequence() -> None:
    """Two rows; the first one's query and values are NaN."""
    S, K, G, Dh, size = 2, 1, 2, 4, 2
    rng = np.random.default_rng(0)
    shapes = ((S, K, G, Dh), (2, K, Dh, size), (2, K, size, Dh))
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    zeros = jnp.zeros(S, jnp.int32)
    plan = DecodePlan(
        jnp.array([1, 1], jnp.int32), jnp.array([[0], [1]], jnp.int32), zeros, zeros, zeros, zeros, zeros[:1]
    )

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.asarray(
            decode_attention(jnp.asarray(q), (Segment(jnp.asarray(k), jnp.asarray(v)),), plan, None)[0]
        )

    clean = attend(q, k, v)
    for array in (q, k, v):
        array[0] = np.nan
    np.testing.assert_array_equal(attend(q, k, v)[1], clean[1])
