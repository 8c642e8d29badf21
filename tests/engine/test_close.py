"""A closed engine: its memory goes back, what ran has ended, and whoever asks it for more is told."""

import copy
import dataclasses
import gc
import threading
from collections.abc import Callable

import jax
import pytest

from moejax import LLM, ParallelConfig
from moejax.core.errors import RequestError
from tests.engine.conftest import ENGINE
from tests.engine.paged import greedy, prompt
from tests.engine.tiny import main_config, small_config
from tests.examples import slow_but

MESHES = {"one": None, "tp": ParallelConfig(tp=2), "pp": ParallelConfig(pp=2)}


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def variant(bare_llm: LLM) -> LLM:
    """An engine with weights and programs that are not its own alone."""
    return bare_llm.variant(ENGINE)


@pytest.mark.parametrize("name", slow_but(["one"], list(MESHES)))
def test_memory_goes_back(name: str) -> None:
    """With the last of those that share weights, though somebody holds its parts; and another engine of the
    same model computes as before."""
    config = small_config() if name == "one" else main_config()
    params = dataclasses.replace(greedy(3), repetition_penalty=1.3)
    before, tokens = live_bytes(), []
    for first in (0, 1):
        with LLM(config, load_format="dummy", parallel=MESHES[name], engine=ENGINE) as llm:
            pair = llm, llm.variant(ENGINE)
            dropped = llm.variant(ENGINE)
            llm.generate([prompt(9, 3)], params)
            pair[first].close()
            pair[first].close()  # counts once
            last = pair[1 - first]
            tokens.append(last.generate([prompt(9, 3)], params)[0].outputs[0].token_ids)
            held, last.engine.on_step = last.stages, lambda record: None
            assert live_bytes() > before
            del dropped  # never closed, and holds nothing any more
            last.close()
            del llm, pair, last
        assert live_bytes() == before, held
    assert tokens[0] == tokens[1]


def test_what_runs_and_waits_is_aborted(variant: LLM) -> None:
    stream = variant.generate_stream(prompt(5, 1), greedy(30))
    first = next(stream)
    waiting = variant.submit(prompt(4, 2), greedy(30))
    closer = threading.Thread(target=variant.close)
    closer.start()
    closer.join()
    assert waiting.finished and waiting.outputs[0].finish_reason == "abort"
    rest = list(stream)
    assert first.token_ids and rest[-1].finish_reason == "abort"
    variant.close()


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate([[5]]),
    "stream": lambda llm: llm.generate_stream([5]),
    "score": lambda llm: llm.score([[5, 6]]),
    "submit": lambda llm: llm.submit([5]),
    "step": lambda llm: llm.step(),
    "abort": lambda llm: llm.abort("0"),
    "stats": lambda llm: llm.stats(),
    "variant": lambda llm: llm.variant(ENGINE),
    "model": lambda llm: llm.model,
    "warmup": lambda llm: llm.warmup(max_total_len=8),
    "routing": lambda llm: llm.routing,
    "rebalance": lambda llm: llm.rebalance(),
    "replay": lambda llm: llm.replay_routing(None),
    "copy": lambda llm: copy.copy(llm).generate([[5]]),
}


def test_later_calls_are_one_line(variant: LLM) -> None:
    llm = variant
    engine, requests = llm.engine, llm.builder.to_generate([[5]], None)
    llm.close()
    for name, call in CALLS.items():
        with pytest.raises(RequestError, match=r"^this LLM is closed; open another one$"):
            call(llm)
            pytest.fail(name)
    with pytest.raises(RequestError, match="closed"):
        engine.add(requests)  # by a thread that was about to
    assert repr(llm) == llm._repr_html_() == f"<LLM {llm.config.family}: closed>"
    with pytest.raises(AttributeError):
        llm.no_such_thing  # noqa: B018


def test_not_from_within_a_step(variant: LLM) -> None:
    variant.engine.on_step = lambda record: variant.close()
    with pytest.raises(RequestError, match=r"^pause and close: not from within a step"):
        variant.generate([[5]])
    variant.engine.on_step = None
    assert variant.generate([[5]])[0].finished
