"""Layers with a state of fixed size a sequence: whatever shares its steps, a request gives the same."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, QuantConfig, SamplingParams
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.engine.opening.start import cache_blocks
from moejax.engine.step.limits import StepKey
from moejax.engine.step.sampler import SamplerMode
from moejax.perf.sizes import state_bytes
from tests.engine.mesh_models import ENGINE as MESH_ENGINE
from tests.engine.mesh_models import FAMILIES
from tests.engine.paged import SCARCE, TIGHT, assert_clean, greedy, prompt, tight
from tests.engine.tiny import VOCAB, FullForward, log_softmax, main_config
from tests.examples import slow_but
from tests.model_shapes import LINEAR
from tests.numerics import relative_error

CONFIG = main_config(**LINEAR)
ENGINES: dict[str, EngineConfig] = {
    "plain_loop": tight(overlap=False),
    "preempting": SCARCE,
    "static": dataclasses.replace(SCARCE, batching="static"),
}
LENGTHS = (3, 11, 1, 16, 8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CONFIG, load_format="dummy", engine=dataclasses.replace(TIGHT, capture_routing=True))


@pytest.fixture(scope="module")
def whole(llm: LLM) -> FullForward:
    return FullForward(llm.model)


def ids(outs: Any) -> list[list[int]]:
    return [sample.token_ids for out in outs for sample in out.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_every_way_of_batching(name: str, llm: LLM, whole: FullForward) -> None:
    engine = llm.variant(ENGINES[name])
    outs = engine.generate([prompt(n) for n in LENGTHS], greedy(9))
    assert ids(outs) == [whole.greedy(prompt(n), 9) for n in LENGTHS]
    assert (engine.stats()["preemptions"] > 0) == (name == "preempting")
    assert_clean(engine)


@pytest.mark.parametrize("name", slow_but(["preempting"], ["plain_loop", "preempting"]))
def test_forks_go_on_from_their_parents_state(name: str, llm: LLM) -> None:
    """Sample i draws from seed + i; alone it is a request of its own. Prompts of several chunks and of one
    token, and slots taken over from others."""
    engine = llm.variant(ENGINES[name])
    drawn = {"temperature": 1.0, "max_tokens": 9, "ignore_eos": True}
    asked = [(prompt(13), 3, 5), (prompt(2), 1, 9), (prompt(1), 2, 70), (prompt(10), 2, 20)]
    outs = engine.generate(
        [p for p, _, _ in asked], [SamplingParams(n=n, seed=s, **drawn) for _, n, s in asked]
    )
    alone = [
        ids(engine.generate([p], SamplingParams(seed=seed + i, **drawn)))[0]
        for p, n, seed in asked for i in range(n)
    ]  # fmt: skip
    assert ids(outs) == alone
    assert_clean(engine)


@pytest.mark.slow
def test_scores_capture_and_replay(llm: LLM, whole: FullForward) -> None:
    llm.reset_capture()
    outs = llm.generate([prompt(n) for n in LENGTHS], greedy(5, prompt_logprobs=1))
    for n, out in zip(LENGTHS, outs, strict=True):
        expected = log_softmax(whole.logits(prompt(n)))[np.arange(n - 1), prompt(n)[1:]]
        told = [entry.logprob for entry in out.prompt_logprobs[1:]]
        assert len(told) == n - 1 and relative_error(np.array(told), expected) < 1e-5 if told else n == 1
    trace = llm.routing_capture()
    replaying = llm.variant(SCARCE)
    replaying.replay_routing(trace)
    assert ids(replaying.generate([prompt(n) for n in LENGTHS], greedy(5))) == ids(outs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "quant", [QuantConfig("rtn", "int8"), QuantConfig(kv_cache="int8")], ids=["int8", "kv"]
)
def test_quantized_alone_and_together(quant: QuantConfig) -> None:
    """Weights in int8, and keys and values; states stay as they are, and the reason says so."""
    llm = LLM(CONFIG, load_format="dummy", engine=SCARCE, quant=quant)
    reason = next(item.reason for item in llm.resolutions if item.key == "quant.kv_cache")
    assert ("states of linear attention stay in float32" in reason) == (quant.kv_cache == "int8")
    prompts = [prompt(n) for n in LENGTHS]
    together = ids(llm.generate(prompts, greedy(9)))
    assert together == [ids(llm.generate([p], greedy(9)))[0] for p in prompts]


def test_states_are_counted() -> None:
    """Beside the blocks of the one layer that has any; both take of the memory that is allowed."""
    llm = LLM(CONFIG, load_format="dummy", engine=TIGHT)
    slots, a_state = TIGHT.max_num_seqs + 1, state_bytes(CONFIG)
    assert a_state == 4 * 8 * 8 * 4
    block = 2 * 2 * 8 * 4 * TIGHT.block_size
    assert llm.stats()["kv_cache_capacity_bytes"] == TIGHT.num_blocks * block + slots * a_state
    llm.generate([prompt(3)], greedy(2))
    assert llm.stats()["kv_cache_allocated_bytes"] == TIGHT.num_blocks * block + slots * a_state
    room = dataclasses.replace(
        TIGHT, num_blocks=None, kv_cache_memory_gb=(slots * a_state + 7.5 * block) / 1e9
    )
    found = cache_blocks(room, CONFIG, 32, ParallelConfig())
    assert found.value == "7" and "5.1 kB of states, 1.0 kB a sequence" in found.reason
    little = dataclasses.replace(room, kv_cache_memory_gb=slots * a_state / 1e9)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_memory_gb.*lower engine\.max_num_seqs or"):
        cache_blocks(little, CONFIG, 32, ParallelConfig())


@pytest.mark.optimized
@pytest.mark.parametrize(("rows", "tokens"), slow_but([(1, 8)], [(1, 0), (4, 0), (1, 8), (4, 8)]))
def test_steps_copy_no_states(rows: int, tokens: int) -> None:
    """They are written where they lie, of the rows of the step alone."""
    engine = tight(max_num_seqs=16, max_num_batched_tokens=16, seq_buckets=[1, 4], token_buckets=[8])
    llm = LLM(CONFIG, load_format="dummy", engine=engine)
    program = llm.runner.program(StepKey(rows, tokens, 32, 1, SamplerMode(), False, -1))
    text = program.as_text()
    assert "f32[17,4,8,8]" in text and not re.search(r"= f32\[17,4,8,8\]\S* copy\(", text)


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("layout", [{"pp": 2, "ep": 4}, {"ep": 4, "tp": 2, "attention": "data"}])
@pytest.mark.parametrize("quant", [None, QuantConfig("rtn", "int8")], ids=["full", "int8"])
def test_forks_and_chunks_on_meshes(layout: dict[str, Any], quant: QuantConfig | None) -> None:
    """Every stage and every data group has its own states; a chunk's parts are in several microbatches."""
    config = FAMILIES["minimax"].replace(vocab_size=VOCAB)
    engine = dataclasses.replace(MESH_ENGINE, max_num_batched_tokens=8, token_buckets=[8])
    asked = [prompt(13), prompt(2), prompt(21), prompt(1)]
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=6, ignore_eos=True)
    outs = [
        ids(LLM(config, load_format="dummy", engine=engine, quant=quant, **how).generate(asked, params))
        for how in ({}, {"parallel": ParallelConfig(**layout)})
    ]
    assert outs[0] == outs[1]


def test_a_model_without_pages_has_no_cache_to_quantize() -> None:
    config = CONFIG.replace(linear_layers=(True, True))
    with pytest.raises(ConfigError, match=r"quant\.kv_cache=int8: no layer keeps keys and values"):
        LLM(config, load_format="dummy", engine=TIGHT, quant=QuantConfig(kv_cache="int8"))
    found = cache_blocks(dataclasses.replace(TIGHT, num_blocks=None), config, 32, ParallelConfig())
    assert found.value == str(4 * 8)


def test_kernels_refuse_it_by_name() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kernels.*linear attention"):
        LLM(
            CONFIG,
            load_format="dummy",
            engine=dataclasses.replace(TIGHT, kernels="pallas_triton", block_size=8),
        )
