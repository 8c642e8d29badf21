"""Instants of tokens, and waiting, on a clock that only launches, the device and deliveries move."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moejax.cache.allocator import BlockAllocator
from moejax.engine.core import Engine
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.plan import Plan
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.stats import StepRecord
from moejax.engine.step.bucket_runner import is_sampled
from moejax.engine.step.program import PagedOutput
from moejax.engine.step.sampler import Sampled
from tests.engine.test_group_scheduler import request
from tests.plain.fake_runner import FakeRunner


class TimedRunner(FakeRunner):
    """A launch takes the host `host` seconds, the step then the device `device`, one after the other."""

    def __init__(self, clock: SimpleNamespace, host: float, device: float) -> None:
        super().__init__(64, 4)
        self.clock, self.host, self.device, self.free = clock, host, device, 0.0

    def launch(self, plan: Plan) -> Any:
        self.clock.now += self.host
        self.free = max(self.free, self.clock.now) + self.device
        return super().launch(plan), self.free

    def ready(self, handle: Any) -> bool:
        return self.clock.now >= handle[1]

    def collect(self, handle: Any) -> Any:
        self.clock.now = max(self.clock.now, handle[1])
        return handle[0]


def served(overlap: bool, host: float, device: float, requests: list[RequestState]) -> list[StepRecord]:
    """Runs requests, the second submitted after two steps of the first; a delivery takes 3 seconds."""
    clock, records = SimpleNamespace(now=1.0), []
    scheduler, runner = Scheduler(BlockAllocator(64, 4), 8, 32), TimedRunner(clock, host, device)
    engine = Engine(scheduler, runner, overlap=overlap, clock=lambda: clock.now)

    def on_step(record: StepRecord) -> None:
        clock.now += 3.0
        records.append(record)

    engine.on_step = on_step
    waiting = list(requests)
    engine.add([waiting.pop(0)])
    while engine.step():
        if waiting and len(records) == 2:
            engine.add([waiting.pop(0)])
    return records


@pytest.mark.parametrize(("host", "device", "gap"), [(4.0, 2.0, 7.0), (4.0, 10.0, 10.0), (0.5, 2.0, 3.5)])
def test_the_last_gap_is_as_long_as_the_others(host: float, device: float, gap: float) -> None:
    """Nothing is launched behind the last step. Where the device waits for the host, the tokens before it
    were there before the launch that they were read after."""
    asked = request(0, 5, 9)
    served(True, host, device, [asked])
    gaps = np.diff(asked.output.metrics.token_times)
    assert len(gaps) == 8 and gaps[1:].tolist() == [gap] * 7


def test_the_plain_loops_instants_are_when_it_has_waited() -> None:
    asked = request(0, 5, 4)
    records = served(False, 4.0, 2.0, [asked])
    assert np.diff(asked.output.metrics.token_times).tolist() == [9.0] * 3
    assert [record.time for record in records] == asked.output.metrics.token_times


def test_a_request_that_comes_during_a_step_has_waited() -> None:
    """It is admitted by the next step's scheduling, and waited until then."""
    records = served(True, 4.0, 10.0, [request(0, 5, 9), request(1, 5, 3)])
    assert [record.waiting for record in records][:4] == [1, 0, 0, 1]
    assert {record.left_waiting for record in records} == {0}


def test_gathered_tokens_can_be_read() -> None:
    """Stages in several processes give NumPy arrays, which have no `is_ready`."""
    gathered: Any = np.zeros(2, np.int32)
    assert is_sampled(PagedOutput(Sampled(gathered, None, None, None, None), None, None, None))
