"""A policy only ranks; the scheduler admits, decodes and preempts by it."""

import pytest

from moejax.core.errors import ConfigError
from moejax.engine.scheduling.scheduler import POLICIES, FirstComeFirstServed, make_policy
from tests.engine.host_engine import LOOPS, Ask, HostEngine, Limits, ShortestFirst


def test_policies_are_made_by_name():
    assert isinstance(make_policy("fcfs"), FirstComeFirstServed)
    assert all(type(make_policy(name)) is kind for name, kind in POLICIES.items())


def test_an_unknown_policy_is_one_line_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        make_policy("fcsf")
    text = str(caught.value)
    assert text == "engine.policy: unknown policy 'fcsf'; did you mean 'fcfs'? (known: fcfs)"


def test_first_come_first_served_ranks_by_arrival():
    policy = FirstComeFirstServed()
    early, late = Ask(9).sequence(0), Ask(1).sequence(1)
    assert policy.key(early) < policy.key(late)


def test_first_come_first_served_is_the_default():
    assert isinstance(HostEngine().scheduler.policy, FirstComeFirstServed)


@LOOPS
@pytest.mark.parametrize("static", [False, True], ids=["continuous", "static"])
def test_shortest_first(overlap: bool, static: bool):
    """The interface is enough for another order: it decides on admission, decoding and preemption."""
    limits = Limits(max_num_seqs=2, policy=ShortestFirst, overlap=overlap, static=static)
    engine = HostEngine(limits)
    groups = [engine.submit(Ask(length, max_tokens=5)) for length in (9, 2, 5, 2)]
    assert [s.order for s in engine.scheduler.waiting()] == [1, 3, 2, 0]
    engine.step()
    assert [s.order for s in engine.scheduler.running] == [1, 3]
    engine.step_until(lambda: not groups[1].live)
    engine.step()
    engine.drain()


def test_shortest_first_preempts_the_longest():
    engine = HostEngine(Limits(num_blocks=7, policy=ShortestFirst))
    long, short = engine.submit(Ask(5, max_tokens=18)), engine.submit(Ask(3, max_tokens=18))
    engine.drain()
    assert long.samples[0].preemptions and not short.samples[0].preemptions
