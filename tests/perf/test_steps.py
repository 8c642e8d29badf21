"""Prompts in steps, and routing traces step by step."""

import dataclasses

import numpy as np
import pytest

from moejax.cache.allocator import BlockAllocator
from moejax.core.errors import ConfigError
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence
from moejax.perf.operation_costs import attribute, total
from moejax.perf.steps import captured_steps, prefill, prefill_steps
from moejax.routing.capture import CapturedRequest, RoutingCapture
from tests.perf.models import small_model

CONFIG = small_model()


def test_steps_are_filled_in_order() -> None:
    assert prefill_steps([10, 7, 3], 8) == [
        ([8], [8], 0),
        ([2, 6], [10, 6], 1),
        ([1, 3], [7, 3], 2),
    ]
    assert prefill_steps([4, 4], 8) == [([4, 4], [4, 4], 2)]
    with pytest.raises(ConfigError, match="at least one token"):
        prefill_steps([4], 0)


def test_the_scheduler_cuts_a_prompt_the_same_way() -> None:
    scheduler = Scheduler(BlockAllocator(64, 4), 4, 8)
    scheduler.add(Sequence(list(range(19)), 19, SamplingParams(), 20, 0))
    found = []
    while len(found) < 3 and (plan := scheduler.schedule()) is not None:
        found += [(chunk.count, chunk.start + chunk.count) for chunk in plan.chunks]
    assert found == [(new[0], context[0]) for new, context, _ in prefill_steps([19], 8)]


def test_prefill_is_the_sum_of_its_steps() -> None:
    hits = [6.0, 0.0, 4.0]
    steps = [
        attribute(CONFIG, new_tokens=new, context=context, phase="prefill", hits=hits, logits=ended)
        for new, context, ended in prefill_steps([10, 7, 3], 8)
    ]
    found = total(prefill(CONFIG, [10, 7, 3], 8, hits=hits))
    for field in ("flops", "weight_bytes", "cache_bytes", "activation_bytes"):
        assert getattr(found, field) == pytest.approx(sum(getattr(total(ops), field) for ops in steps))


def capture() -> RoutingCapture:
    """Two prompts of 3 and 2 tokens in two steps, the second with the first's first decode; then both decode.

    Rows: (step, request, position, prefill, experts in both layers).
    """
    rows = [
        (4, 0, 0, True, (0, 1)), (4, 0, 1, True, (0, 2)), (4, 0, 2, True, (0, 1)),
        (5, 0, 3, False, (7, 8)), (5, 1, 0, True, (7, 9)), (5, 1, 1, True, (3, 16)),
        (7, 0, 4, False, (1, 2)), (7, 1, 2, False, (1, 2)),
    ]  # fmt: skip
    step, request, position, prompt, ids = zip(*rows, strict=True)
    chosen = np.repeat(np.array(ids, np.uint8)[:, None, :], 2, axis=1)
    return RoutingCapture(
        ids=chosen,
        weights=np.full(chosen.shape, 0.5, np.float32),
        step=np.array(step, np.int32),
        request=np.array(request, np.int32),
        sample=np.zeros(len(rows), np.int32),
        position=np.array(position, np.int32),
        prefill=np.array(prompt),
        requests=(CapturedRequest("a", "x", 3), CapturedRequest("b", "y", 2)),
        layers=(0, 2),
        num_experts=16,
    )


def test_captured_steps_have_their_own_lengths_and_hits() -> None:
    found = list(captured_steps(CONFIG, capture()))
    assert [(number, ops[0].phase) for number, ops in found] == [(4, "prefill"), (5, "mixed"), (7, "decode")]
    cases = [
        ({"new_tokens": [3], "context": [3]}, [3, 0, 3], [6, 0, 6], 1),
        # An id of 16 is no expert.
        ({"new_tokens": [1, 2], "context": [4, 2]}, [4, 0, 4], [5, 0, 5], 2),
        ({"new_tokens": [1, 1], "context": [5, 3]}, [2, 0, 2], [4, 0, 4], 2),
    ]
    for (_, ops), (rows, hits, ran, logits) in zip(found, cases, strict=True):
        how = {"phase": ops[0].phase, "hits": hits, "assignments": ran, "logits": logits}
        assert ops == attribute(CONFIG, **rows, **how)  # type: ignore[arg-type]


def test_a_part_of_a_prompt_samples_nothing() -> None:
    part = capture().select(np.array([0, 1]))
    ((_, ops),) = captured_steps(CONFIG, part)
    assert [op.weight_bytes for op in ops if op.operation == "lm_head"] == [0]


def test_what_is_computed_again_samples_one_token() -> None:
    """A preempted request's prompt and its two outputs, all as prefill, in two steps."""
    first, again = capture().select(np.array([0, 1])), capture().select(np.array([2, 3, 6]))
    for part, logits in ((first, 0), (again, 1)):
        rows = dataclasses.replace(part, step=np.zeros_like(part.step), prefill=np.ones_like(part.prefill))
        ((_, ops),) = captured_steps(CONFIG, rows)
        (head,) = (op for op in ops if op.operation == "lm_head")
        assert head.flops == 2 * logits * CONFIG.hidden_size * CONFIG.vocab_size


def test_another_models_trace() -> None:
    with pytest.raises(ConfigError, match="it has 16 experts and the model has 8"):
        next(captured_steps(small_model(num_experts=8), capture()))
