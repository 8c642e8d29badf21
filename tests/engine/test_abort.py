"""An abort in any state gives everything back, and the neighbours do not notice."""

from moejax.engine.scheduling.sequence import State
from tests.engine.asks import Ask, Group
from tests.engine.host_engine import LOOPS, HostEngine, Limits


def _crowd(overlap: bool, **limits: int) -> tuple[HostEngine, Group, Group]:
    """An engine with a neighbour that must not notice, and the group to abort."""
    engine = HostEngine(Limits(overlap=overlap, **limits))
    return engine, engine.submit(Ask(5, max_tokens=12, n=2, first=50)), engine.submit(Ask(9, 12, n=2))


@LOOPS
def test_abort_while_waiting(overlap: bool):
    engine, _, group = _crowd(overlap)
    engine.abort(group)
    assert engine.events["abort waiting"] and engine.scheduler.num_waiting == 2
    engine.abort(group)  # again: nothing happens
    engine.drain()
    assert [len(tokens) for tokens in group.tokens] == [9, 9]


@LOOPS
def test_abort_in_the_middle_of_the_prompt(overlap: bool):
    engine, _, group = _crowd(overlap, max_num_batched_tokens=8)
    engine.step()
    engine.abort(group)
    assert engine.events["abort mid-prompt"] == engine.events["abort with unstarted forks"] == 1
    assert all(sample.state is State.FINISHED for sample in group.samples)
    engine.drain()


@LOOPS
def test_abort_while_running(overlap: bool):
    engine, _, group = _crowd(overlap)
    for _ in range(4):
        engine.step()
    engine.abort(group)
    assert engine.events["abort running"] == 2
    assert bool(engine.events["abort in flight"]) == overlap
    lengths = [len(tokens) for tokens in group.tokens]
    engine.drain()
    assert lengths == [len(tokens) for tokens in group.tokens], "a token came after the abort"


@LOOPS
def test_one_sample_ends_and_its_sibling_goes_on(overlap: bool):
    engine, _, group = _crowd(overlap)
    for _ in range(3):
        engine.step()
    engine.abort(group, [0])
    engine.drain()
    assert len(group.tokens[0]) < 21 and len(group.tokens[1]) == 21


@LOOPS
def test_abort_after_a_preemption(overlap: bool):
    engine = HostEngine(Limits(num_blocks=7, overlap=overlap))
    engine.submit(Ask(4, max_tokens=20))
    group = engine.submit(Ask(4, max_tokens=20))
    engine.step_until(lambda: group.samples[0].preemptions)
    engine.abort(group)
    assert engine.events["abort preempted"] == 1 and engine.scheduler.num_waiting == 0
    engine.drain()
