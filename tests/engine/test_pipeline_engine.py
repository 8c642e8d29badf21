"""The engine on pipeline stages of eight virtual devices gives what one device gives."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moejax import LLM, EngineConfig, ModelConfig, MoeConfig, ParallelConfig, SamplingParams
from moejax.core.errors import CompileError, ConfigError
from moejax.engine.pipeline.runner import Microbatch, PipelineRunner
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.scheduling.sequence import Bias
from moejax.engine.step.sampler import SamplerMode
from moejax.sharding.pipeline import Transfer
from tests.engine.mesh_models import BASE, checkpoint, prompts

pytestmark = pytest.mark.multidevice

# Three layers, one of them dense and one with a window; two stages are uneven.
MODEL = BASE.replace(
    num_layers=3, moe_layers=(True, False, True), sliding_windows=(None, 6, None), num_kv_heads=4
)
TIED = MODEL.replace(
    family="qwen2_moe", qk_norm="none", qkv_bias=True, shared_expert_intermediate_size=24,
    tie_word_embeddings=True, moe_layers=(True, True, True), sliding_windows=(None, None, None),
)  # fmt: skip
DEEP = MODEL.replace(
    num_layers=5, moe_layers=(False, True, True, True, False), sliding_windows=(None, 6, None, None, 6)
)
MODELS = {"mixed": MODEL, "deep": DEEP, "tied": TIED}
# Few buckets, each of which is a program a stage; half a step's prompt tokens have one of their own.
ENGINE = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=48,
    block_size=4,
    num_blocks=64,
    seq_buckets=[4],
    token_buckets=[8, 16],
    block_buckets=[64],
    # Compiles fastest; what runs in a stage makes no difference to what goes between them.
    moe=MoeConfig(grouped_matmul="ragged_dot"),
)
# Two sequences of up to 31 tokens do not fit into 12 blocks of 4.
SCARCE = dataclasses.replace(ENGINE, num_blocks=12, block_buckets=[12])
# The same sums as on one device but for those over tensor groups, see test_mesh.
RELATIVE = 1e-5


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 9, "temperature": 0.0, "ignore_eos": True} | changes))


GREEDY = params(logprobs=3, prompt_logprobs=3)


def greedy(llm: LLM) -> Any:
    """Tokens, log-probabilities, scores. Prompts of up to 19 tokens in steps of 16 are cut, and cut again."""
    llm.runner.builder.warm_prompt_logprobs = [-1, 5]  # else scores have programs of their own
    asked = prompts(7)
    done = llm.generate(asked, GREEDY)
    tokens = [out.outputs[0].token_ids for out in done]
    steps = [step for out in done for step in out.outputs[0].logprobs or []]
    assert [len(out.prompt_logprobs or []) for out in done] == [len(ids) for ids in asked]
    steps += [step for out in done for step in out.prompt_logprobs or [] if step is not None]
    values = [step.logprob for step in steps] + [p for step in steps for p in step.top.values()]
    scores = llm.score([p for p in asked if len(p) > 1])
    return tokens, [list(step.top) for step in steps], np.asarray(values), np.concatenate(scores)


def agree(got: Any, want: Any) -> None:
    assert got[:2] == want[:2]
    for a, b in zip(got[2:], want[2:], strict=True):
        assert np.abs(a - b).max() <= RELATIVE * np.abs(b).max()


def clean(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    assert llm.stats()["used_blocks"] == 0 and llm.stats()["failed_steps"] == 0


@pytest.fixture(scope="module")
def build() -> Callable[..., LLM]:
    @functools.cache
    def kept(config: ModelConfig, layout: Any) -> LLM:
        parallel = None if layout is None else ParallelConfig(**dict(layout))
        return LLM(config, load_format="dummy", engine=ENGINE, parallel=parallel)

    def made(config: ModelConfig = MODEL, engine: EngineConfig = ENGINE, **layout: Any) -> LLM:
        llm = kept(config, tuple(sorted(layout.items())) or None)
        return llm if engine is ENGINE else llm.variant(engine)

    return made


@pytest.fixture(scope="module")
def single(build: Callable[..., LLM]) -> Callable[..., Any]:
    """What one device gives."""
    known: dict[Any, Any] = {}

    def run(config: ModelConfig = MODEL, engine: EngineConfig = ENGINE, what: Any = greedy) -> Any:
        key = config, repr(engine), what
        if key not in known:
            known[key] = what(build(config, engine))
        return known[key]

    return run


# -- equal to one device -------------------------------------------------------------------------------


def test_two_stages_give_what_one_device_gives(build: Any, single: Any) -> None:
    llm = build(pp=2)
    assert isinstance(llm.runner, PipelineRunner)
    assert [list(stage.stage) for stage in llm.stages] == [[0, 1], [2]]
    agree(greedy(llm), single())
    clean(llm)
    names = {row["function"] for row in llm.ledger.rows()}
    assert names == {"stage 0 step", "stage 1 step", "transfer 0 to 1", "transfer 1 to 0"}


@pytest.mark.slow
def test_the_plain_loop_gives_the_same(build: Any, single: Any) -> None:
    llm = build(engine=dataclasses.replace(ENGINE, overlap=False), pp=2)
    agree(greedy(llm), single())
    # The host knows every token before it is decoded: none is brought back.
    assert "transfer 1 to 0" not in {row["function"] for row in llm.ledger.rows()}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixed", {"pp": 2, "tp": 2}),
        ("mixed", {"pp": 2, "ep": 4}),
        ("mixed", {"pp": 2, "ep": 4, "attention": "data"}),
        ("mixed", {"pp": 2, "dp": 2, "ep": 2}),
        ("mixed", {"pp": 3}),
        ("deep", {"pp": 4}),
        ("deep", {"pp": 4, "tp": 2}),
        ("deep", {"pp": 2, "stage_layers": (1, 4)}),
        ("tied", {"pp": 3}),
        ("tied", {"pp": 2, "ep": 2, "tp": 2}),
    ],
    ids=str,
)
def test_layouts(name: str, layout: Any, microbatches: int, overlap: bool, single: Any) -> None:
    config = MODELS[name]
    parallel = ParallelConfig(**layout, microbatches=microbatches)
    engine = dataclasses.replace(ENGINE, overlap=overlap)
    llm = LLM(config, load_format="dummy", engine=engine, parallel=parallel)
    agree(greedy(llm), single(config))
    clean(llm)


@pytest.mark.slow
def test_stages_from_a_checkpoint(tmp_path: Path) -> None:
    directory = str(checkpoint(TIED, tmp_path))
    one, three = (LLM(directory, engine=ENGINE, parallel=p) for p in (None, ParallelConfig(pp=3)))
    asked = prompts(2)
    wanted = [out.outputs[0].token_ids for out in one.generate(asked, params(max_tokens=3))]
    assert [out.outputs[0].token_ids for out in three.generate(asked, params(max_tokens=3))] == wanted


@pytest.mark.slow
def test_stages_read_one_buffer() -> None:
    """A stage whose layers all have windows reads the plan where the others do."""
    runner: Any = LLM(MODEL, load_format="dummy", engine=ENGINE, parallel=ParallelConfig(pp=3)).runner
    assert runner.limits.context == ENGINE.max_model_len
    assert {stage.limits for stage in runner.stages} == {runner.limits}


def mixed(llm: LLM) -> Any:
    """Samples with forks and copies of shared blocks, penalties, preemption."""
    wanted = [
        params(max_tokens=10, temperature=0.9, seed=5, n=3),
        params(max_tokens=8, temperature=0.7, top_p=0.9, seed=1, repetition_penalty=1.3),
        params(
            max_tokens=12, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.2,
            logit_bias={1: 1.0},
        ),
    ]  # fmt: skip
    # What comes next goes by the newest token, which only the last stage may know.
    V = llm.config.vocab_size
    by_newest = [Bias((5 * token + 1) % V, 4.0, after=(token,)) for token in range(V)]
    llm.builder.biases = lambda params: by_newest if params.logit_bias else []
    # Else each mix of these in a batch is a program.
    llm.runner.builder.warm_modes = [SamplerMode(greedy=False, filters=True, penalty=True, biases=128)]
    asked = prompts(6)
    done = llm.generate(asked, [wanted[i % 3] for i in range(6)])
    return [[sample.token_ids for sample in out.outputs] for out in done]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overlap"),
    [
        ({"pp": 2}, True),
        ({"pp": 2}, False),
        ({"pp": 2, "dp": 2}, True),
        ({"pp": 2, "ep": 4, "attention": "data"}, True),
        ({"pp": 3, "microbatches": 2}, True),
    ],
    ids=str,
)
def test_samples_forks_penalties_and_preemption(layout: Any, overlap: bool, build: Any, single: Any) -> None:
    engine = dataclasses.replace(SCARCE, overlap=overlap)
    llm = build(engine=engine, **layout)
    assert mixed(llm) == single(MODEL, SCARCE, mixed)
    clean(llm)
    if llm.parallel_config.data_groups == 1:
        assert llm.stats()["preemptions"] > 0
        assert "stage 1 copy" in {row["function"] for row in llm.ledger.rows()}


def counted(llm: LLM) -> Any:
    llm.generate(prompts(7), params(), record_routing=True)
    return {phase: counts.tolist() for phase, counts in llm.routing.counts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2, "dp": 2}, {"pp": 2, "ep": 4, "attention": "data"}], ids=str)
def test_counts_of_data_groups(layout: Any, build: Any, single: Any) -> None:
    # Groups of their own compute prompts in other steps, so that the phases differ.
    got, want = (
        np.sum([np.asarray(counts) for counts in found.values()], axis=0)
        for found in (counted(build(**layout)), single(MODEL, ENGINE, counted))
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_counts_of_all_stages_are_those_of_one_device(build: Any, single: Any) -> None:
    # In the plain loop steps hold the same rows on one device and on many.
    plain = dataclasses.replace(ENGINE, overlap=False)
    assert counted(build(engine=plain, pp=2)) == single(MODEL, plain, counted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "dp": 2}])
def test_static_batching(layout: Any, build: Any, single: Any) -> None:
    engine = dataclasses.replace(ENGINE, batching="static")
    agree(greedy(build(engine=engine, **layout)), single(MODEL, engine))


@pytest.mark.slow
def test_moving_by_device_put_gives_the_same(
    build: Any, single: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = build(engine=dataclasses.replace(ENGINE, max_model_len=47), pp=2)
    monkeypatch.setattr(Transfer, "__call__", lambda transfer, x: jax.device_put(x, transfer._arrived))
    agree(greedy(llm), single())
    assert not any("transfer" in row["function"] for row in llm.ledger.rows())


# -- how it runs ---------------------------------------------------------------------------------------


@pytest.fixture
def ran(build: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine on two stages, and a list of (tick, stage, microbatch) that grows as programs are started."""
    llm = build(engine=dataclasses.replace(ENGINE, max_num_seqs=4), pp=2)
    runner, log, ticks = llm.runner, [], [0]
    tick, run = runner._tick, runner._run_stage

    def counted_tick(new: Microbatch | None = None) -> None:
        ticks[0] += 1
        tick(new)

    def logged(microbatch: Microbatch) -> None:
        log.append((ticks[0], microbatch.stage, microbatch.number))
        run(microbatch)

    monkeypatch.setattr(runner, "_tick", counted_tick)
    monkeypatch.setattr(runner, "_run_stage", logged)
    return llm, log


@pytest.mark.slow
def test_steps_follow_each_other_without_a_pause(ran: Any) -> None:
    llm, log = ran
    llm.generate([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 5, 7]], params(max_tokens=20))
    # A microbatch is in the next stage one tick later, and no stage runs two in a tick.
    assert {(tick - stage - number) for tick, stage, number in log if number > 4} == {
        log[-1][0] - log[-1][1] - log[-1][2]
    }
    busy = {(tick, stage) for tick, stage, _ in log}
    assert len(busy) == len(log)
    ticks = range(min(tick for tick, _ in busy), 1 + max(tick for tick, _ in busy))
    # 20 steps of two microbatches; the pipeline fills once, empties once, and once more after the prompts.
    idle = [(tick, stage) for tick in ticks for stage in (0, 1) if (tick, stage) not in busy]
    assert len(idle) <= 2 + 2


@pytest.mark.slow
def test_each_stage_runs_microbatches_in_order(ran: Any) -> None:
    llm, log = ran
    llm.generate(prompts(7), params())
    for stage in (0, 1):
        numbers = [number for _, s, number in log if s == stage]
        assert numbers == sorted(numbers)


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up(build: Any, single: Any) -> None:
    engine = dataclasses.replace(ENGINE, strict_compile=True, seq_buckets=[4], token_buckets=[16])
    llm = build(engine=engine, pp=2)
    llm.warmup(max_total_len=40, sampling_params=[GREEDY])
    before = len(llm.ledger.entries)
    assert {"transfer 0 to 1", "transfer 1 to 0"} <= {row["function"] for row in llm.ledger.rows()}
    agree(greedy(llm), single())
    assert len(llm.ledger.entries) == before and not llm.ledger.recompiles
    with pytest.raises(CompileError, match="stage 0 step"):
        llm.runner._run(
            llm.runner.builder.key(StepPlan())._replace(prompt_logprobs=7, tokens=1), np.zeros(1, np.int32)
        )


def test_a_failed_step_leaves_a_working_engine(
    build: Any, single: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = build(pp=2)
    last, calls = llm.runner.stages[1], [0]
    run = last.run

    def failing(*how: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise RuntimeError("no stage")
        return run(*how)

    monkeypatch.setattr(last, "run", failing)
    with pytest.raises(Exception, match="no stage"):
        llm.generate(prompts(7), GREEDY)
    monkeypatch.setattr(last, "run", run)
    agree(greedy(llm), single())


# -- configuration -------------------------------------------------------------------------------------


def test_errors_are_one_line(build: Any) -> None:
    def refused(
        match: str, config: ModelConfig = MODEL, engine: EngineConfig = ENGINE, **layout: Any
    ) -> None:
        with pytest.raises(ConfigError, match=match) as caught:
            LLM(config, load_format="dummy", engine=engine, parallel=ParallelConfig(**layout))
        assert "\n" not in str(caught.value)

    refused("num_hidden_layers 3 are fewer than pp=4", pp=4)
    refused("stage_layers .*add up to 4 of 3 layers", pp=2, stage_layers=[2, 2])
    refused("microbatches=5 exceeds engine.max_num_seqs=4", pp=2, microbatches=5)
    moe = MoeConfig(execution="capacity")
    refused(
        "parallel.pp=2 it needs parallel.microbatches=1", engine=dataclasses.replace(ENGINE, moe=moe), pp=2
    )
    with pytest.raises(ConfigError, match=r"parallel\.pp=2: there is no whole model"):
        _ = build(pp=2).model


def test_the_cache_is_as_large_as_the_largest_stage_allows(build: Any) -> None:
    sizes = {"num_blocks": None, "kv_cache_memory_gb": 1e-4, "block_buckets": None, "window_cache": "full"}
    engine = dataclasses.replace(ENGINE, **sizes)
    one, two = build(engine=engine), build(engine=engine, pp=2)
    blocks = [llm.engine.scheduler.allocator.num_blocks for llm in (one, two)]
    # 2 of 3 layers are in the largest stage; keys and values of 4 heads of 8 float32, blocks of 4.
    each = 2 * 4 * 8 * 4 * 4
    assert blocks == [int(1e5 / (3 * each)), int(1e5 / (2 * each))]
