"""The trace beside a result: cases one after another, as if one engine had run them all."""

from pathlib import Path

import numpy as np

from moejax.bench.common.trace_io import joined, start_capture, take_capture, write_capture
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.routing.capture import RoutingCapture, load_capture
from tests.engine.paged import TIGHT, tight
from tests.engine.tiny import small_config

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def taken(llm: LLM, prompts: list[list[int]], case: int) -> RoutingCapture:
    start_capture(llm)
    llm.generate(prompts, GREEDY)
    trace = take_capture(llm, case)
    assert trace is not None
    return trace


def test_cases_are_joined_and_written(tmp_path: Path) -> None:
    llm = LLM(small_config(), load_format="dummy", engine=tight(capture_routing=True))
    llm.generate([[9, 9]], GREEDY)  # a warm-up, which is in no trace
    cases = [taken(llm, prompts, case) for case, prompts in enumerate(([[1, 2], [3]], [[4, 5, 6]]))]
    assert llm.routing_capture().num_rows == 0
    said = write_capture([*cases, None], tmp_path, {"checkpoint_hash": "abc"})
    found = load_capture(tmp_path)
    file = tmp_path / "routing.npz"
    assert said == {"routing_trace": {"file": "routing.npz", "rows": 4 + 3 + 5, "bytes": file.stat().st_size}}
    assert found.meta["checkpoint_hash"] == "abc" and found.meta["family"] == "qwen3_moe"
    assert [(r.prompt_len, r.case) for r in found.requests] == [(2, 0), (1, 0), (3, 1)]
    # Each case starts a step of its own, and its rows are as they were.
    assert found.num_steps == sum(case.num_steps for case in cases)
    second = found.select(found.request == 2)
    np.testing.assert_array_equal(second.ids, cases[1].ids)
    np.testing.assert_array_equal(second.step - second.step[0], cases[1].step)
    assert joined(cases).num_rows == found.num_rows


def test_without_capture_there_is_nothing(tmp_path: Path) -> None:
    llm = LLM(small_config(), load_format="dummy", engine=TIGHT)
    for engine in (llm, None):  # a peer has no engine of ours
        start_capture(engine)
        assert take_capture(engine, 0) is None
    assert write_capture([None], tmp_path, {}) == {} and not list(tmp_path.iterdir())
