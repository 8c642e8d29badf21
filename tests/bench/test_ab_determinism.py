"""The table of determinism: what it says of answers that differ, and of a small model's engines."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from moejax import LLM, EngineConfig
from moejax.bench.ab.determinism import _Answers, _beside, determinism_rows
from moejax.bench.ab.measure import BatchLoad
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.workload import WorkloadConfig
from moejax.report.determinism import determinism_table
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
    alone = _Answers([[7, 8], [7, 9]], [np.float32([-1, -2]), np.float32([-1, -3])], capture(ids))
    mine = [*ids]
    mine[1] = [1, 2]  # flipped
    mine[2] = [1, 0]  # the same set
    mine[7] = [5, 6]  # after another token: not compared
    bit = np.nextafter(np.float32(-2), np.float32(0))
    other = _Answers([[7, 8], [7, 5]], [np.float32([-1, bit]), np.float32([-1, -9])], capture(mine))
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
