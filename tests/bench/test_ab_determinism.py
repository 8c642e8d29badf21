"""The table of determinism: what it says of answers that differ, and of a small model's engines."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from moejax import LLM, EngineConfig, QuantConfig
from moejax.bench.ab.determinism import Answers, _beside, answer, determinism_rows, largest_batch, rows_of
from moejax.bench.ab.measure import BatchLoad, TrafficLoad
from moejax.bench.ab.mismatch import TrainingForward, check_mismatch, mismatch_rows
from moejax.bench.ab.mismatch import _beside as beside_training
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.traffic import ThroughputWorkload
from moejax.bench.workload import WorkloadConfig
from moejax.core.errors import ConfigError
from moejax.report.determinism import determinism_table, mismatch_table
from moejax.routing.capture import CapturedRequest, RoutingCapture, hash_tokens
from tests.model_shapes import ONE_LAYER

PROMPTS = [[1, 2, 3], [4, 5]]


def capture(ids: list[list[int]]) -> RoutingCapture:
    """Returns one layer's routing of four positions of each request."""
    requests = [CapturedRequest(str(i), hash_tokens(prompt), len(prompt)) for i, prompt in enumerate(PROMPTS)]
    rows = len(ids)
    return RoutingCapture(
        ids=np.asarray(ids, np.uint8)[:, None],
        weights=np.full((rows, 1, 2), 0.5, np.float32),
        request=np.repeat(np.arange(2, dtype=np.int32), 4),
        sample=np.zeros(rows, np.int32),
        position=np.tile(np.arange(4, dtype=np.int32), 2),
        prefill=np.zeros(rows, np.bool_),
        step=np.zeros(rows, np.int32),
        layers=(0,),
        num_experts=8,
        requests=tuple(requests),
        meta={},
    )


def test_only_what_has_the_same_context_is_compared() -> None:
    ids = [[0, 1]] * 8
    alone = Answers([[7, 8], [7, 9]], [np.float32([-1, -2]), np.float32([-1, -3])], capture(ids), None)
    mine = [*ids]
    mine[1] = [1, 2]  # flipped
    mine[2] = [1, 0]  # the same set
    mine[7] = [5, 6]  # after another token: not compared
    bit = np.nextafter(np.float32(-2), np.float32(0))
    other = Answers([[7, 8], [7, 5]], [np.float32([-1, bit]), np.float32([-1, -9])], capture(mine), None)
    row = _beside(PROMPTS, alone, other)
    assert (row["compared_tokens"], row["equal_requests"], row["equal_logprobs"]) == (3, 0.5, 2 / 3)
    assert row["largest_logprob_difference"] == pytest.approx(bit + 2) and row["router_flips"] == 1 / 7
    same = _beside(PROMPTS, alone, alone)
    assert (same["equal_logprobs"], same["largest_logprob_difference"], same["router_flips"]) == (1, 0, 0)


def test_engines_beside_their_answers_alone() -> None:
    config = EngineConfig(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=32, compile_cache=False)
    llm = LLM(ONE_LAYER, dtype="float32", load_format="dummy", engine=config)
    engines = {"none": config, CONTROL: config, "tiles": dataclasses.replace(config, deterministic="tiles")}
    arms = [Arm(name, [], MoejaxBackend(llm.variant(engine))) for name, engine in engines.items()]
    workload = WorkloadConfig(batch_size=[1, 3], prompt_len=10, output_len=4)
    load = BatchLoad(workload, [arm.backend for arm in arms])
    rows = determinism_rows(arms, load)
    ways = [(row["variant"], row["batched"]) for row in rows]
    assert ways == [(name, way) for name in ("none", "tiles") for way in ("3 at once", "in chunks")]
    assert all(row["compared_tokens"] == 12 and row["router_flips"] == 0 for row in rows)
    assert all(row["largest_logprob_difference"] < 1e-4 for row in rows)
    assert [row["equal_logprobs"] for row in rows[2:]] == [1.0, 1.0]
    assert determinism_rows(arms[:2], load) == []
    console = Console(width=160, record=True)
    console.print(determinism_table(rows))
    assert "in chunks" in console.export_text()


def test_equal_prompts_are_told_apart() -> None:
    trace = capture([[0, 1]] * 8)
    same = dataclasses.replace(trace, requests=(trace.requests[0],) * 2)
    assert rows_of(same, [PROMPTS[0]] * 2).tolist() == [0] * 4 + [1] * 4
    swapped = dataclasses.replace(trace, requests=trace.requests[::-1])
    assert rows_of(swapped, PROMPTS).tolist() == [1] * 4 + [0] * 4


@pytest.mark.slow
def test_training_forward_beside_the_engine() -> None:
    """It computes what the engine does, and what it is given to replay: nothing differs, unless that does."""
    config = EngineConfig(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32, compile_cache=False)
    llm = LLM(ONE_LAYER, dtype="float32", load_format="dummy", engine=config)
    arms = [Arm("base", [], MoejaxBackend(llm)), Arm(CONTROL, [], MoejaxBackend(llm))]
    load = BatchLoad(WorkloadConfig(batch_size=[1, 3], prompt_len=10, output_len=5), [arms[0].backend])
    rows = mismatch_rows(arms, load)
    assert [(row["variant"], row["batched"]) for row in rows] == [
        ("base", "1 at once"),
        ("base", "3 at once"),
    ]
    for row in rows:
        assert row["router_flips"] == 0 and row["compared_tokens"] == 15
        assert row["largest_logprob_difference"] < 1e-5 > row["replayed_largest_logprob_difference"]
        assert 0 <= row["sampled_kl"] < 1e-9
    console = Console(width=160, record=True)
    console.print(mismatch_table(rows))
    assert "replayed" in console.export_text()

    _, prompts, params = largest_batch(load)
    params = [dataclasses.replace(each, max_tokens=3 + i) for i, each in enumerate(params)]  # padding
    [given] = answer(llm, prompts, params, [3])
    assert given.routing is not None
    forward = TrainingForward(llm)
    row = beside_training(forward, prompts, given)
    assert row["largest_logprob_difference"] < 1e-5 and row["router_flips"] == 0
    other = dataclasses.replace(given.routing, ids=(given.routing.ids + 1) % given.routing.num_experts)
    row = beside_training(forward, prompts, given._replace(routing=other))
    assert row["largest_logprob_difference"] < 1e-5 < 1e-3 < row["replayed_largest_logprob_difference"]
    assert row["router_flips"] > 0.5 and row["replayed_sampled_kl"] > 1e-6
    told = given._replace(logprobs=[each + np.float32(0.1) for each in given.logprobs])
    row = beside_training(forward, prompts, told)
    assert row["logprob_difference"] == pytest.approx(0.1, rel=1e-3)
    assert row["sampled_kl"] == pytest.approx(np.exp(-0.1) - 1 + 0.1, rel=1e-3)


def test_what_no_training_forward_can_compute() -> None:
    llm = LLM(
        ONE_LAYER, dtype="float32", load_format="dummy", quant=QuantConfig(method="rtn"),
        engine=EngineConfig(max_model_len=32, compile_cache=False),
    )  # fmt: skip
    arms = [Arm("codes", [], MoejaxBackend(llm))]
    load = BatchLoad(WorkloadConfig(batch_size=1, prompt_len=4, output_len=2), [arms[0].backend])
    with pytest.raises(ConfigError, match=r"^ab\.mismatch: .* and codes is a peer's, .*; put one before it"):
        check_mismatch(arms, load)
    traffic = TrafficLoad(ThroughputWorkload(num_requests=1, prompt_len=4, output_len=2), [arms[0].backend])
    with pytest.raises(ConfigError, match=r"^ab\.mismatch needs fixed batches: experiments\.latency$"):
        check_mismatch(arms, traffic)
