"""`engine.deterministic`: the same bits however requests are batched, chunked, preempted or found cached."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, ParallelConfig, PrefixCacheConfig, QuantConfig, SamplingParams
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.scheduling import SpeculationConfig
from moejax.engine.pipeline.microbatches import tiles_of
from moejax.engine.requests.api import RequestOutput
from moejax.engine.scheduling.plan import Chunk, Draft, GroupPlan, StepPlan
from tests.model_shapes import DENSE, EIGHT_WAY, GLM, LATENT, LINEAR, ONE_LAYER, SINKS, TWO_LAYERS

ENGINE = EngineConfig(
    compile_cache=False, max_model_len=64, max_num_seqs=12, max_num_batched_tokens=96, block_size=4,
    autotune="rules", deterministic="tiles",
)  # fmt: skip
FAMILIES = {
    "gqa": TWO_LAYERS,
    "latents": TWO_LAYERS.replace(**LATENT),
    "windows_with_sinks": TWO_LAYERS.replace(**SINKS, sliding_windows=(5, None)),
    "glm": TWO_LAYERS.replace(**GLM),
    "dense": TWO_LAYERS.replace(**DENSE),
    "odd_sizes": TWO_LAYERS.replace(
        hidden_size=36, moe_intermediate_size=19, num_heads=3, num_kv_heads=3, vocab_size=83
    ),
}
RNG = np.random.default_rng(5)
PROMPTS: list[list[int]] = [RNG.integers(1, 80, int(size)).tolist() for size in RNG.integers(2, 30, 14)]
PROMPTS[3] = PROMPTS[9] + PROMPTS[3][:3]
PARAMS = [
    SamplingParams(
        max_tokens=6 + i % 5,
        ignore_eos=True,
        seed=i,
        temperature=0.9,
        top_p=0.8,
        logprobs=2,
        prompt_logprobs=(0, None)[i % 2],
    )
    for i in range(len(PROMPTS))
]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": None},
    {"temperature": 1.2, "min_p": 0.05, "prompt_logprobs": 2},
    {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {5: 1.5, 60: -2.0}, "prompt_logprobs": 0},
)
OF_KINDS = [dataclasses.replace(params, **KINDS[i % len(KINDS)]) for i, params in enumerate(PARAMS)]
"""Steps of other parameters are other programs, around the same model."""


def engine(model: Any, *, quant: QuantConfig | None = None, parallel: Any = None, **options: Any) -> LLM:
    config = dataclasses.replace(ENGINE, **options)
    kind = {} if isinstance(model, str) else {"load_format": "dummy"}
    return LLM(model, dtype="float32", engine=config, quant=quant, parallel=parallel, **kind)


def bits(output: RequestOutput) -> list[Any]:
    """Returns all numbers of a request: of its samples and of its prompt."""
    told = [*(sample.logprobs for sample in output.outputs), output.prompt_logprobs]
    numbers = [
        None if one is None else (np.float32(one.logprob).tobytes(), one.rank, sorted(one.top.items()))
        for each in told
        for one in each or []
    ]
    return [[sample.token_ids for sample in output.outputs], numbers]


def run(llm: LLM, order: list[int], params: list[SamplingParams] = PARAMS) -> dict[int, list[Any]]:
    outputs = llm.generate([PROMPTS[i] for i in order], [params[i] for i in order])
    return {i: bits(output) for i, output in zip(order, outputs, strict=True)}


EVERY = list(range(len(PROMPTS)))
NGRAM = SpeculationConfig(method="ngram", k=3, min_ngram=1)
OTHERS: dict[str, dict[str, Any]] = {
    "at_once": {
        "max_num_seqs": 5, "max_num_batched_tokens": 12, "num_blocks": 24, "speculation": NGRAM,
        "prefix_cache": PrefixCacheConfig(enabled=True),
    },
    "few_at_a_time": {"max_num_seqs": 3},
    "small_chunks": {"max_num_batched_tokens": 12},
    "preempted": {"num_blocks": 16, "overlap": False},
    "swapped": {"num_blocks": 16, "preemption": "swap"},
    "other_blocks": {"block_size": 8},
    "drafts": {"speculation": NGRAM},
    "prefixes": {"prefix_cache": PrefixCacheConfig(enabled=True)},
}  # fmt: skip
"""Engines that batch otherwise."""


def same_bits(model: Any) -> None:
    first, other = engine(model), engine(model, **OTHERS["at_once"])
    expected = run(first, EVERY)
    assert {i: run(first, [i])[i] for i in (0, 1, 3, 7, 13)} == {i: expected[i] for i in (0, 1, 3, 7, 13)}
    for order in (EVERY[::-1], EVERY):
        assert run(other, order) == expected
    stats = other.stats()
    assert stats["preemptions"] and stats["prefix_hit_rate"] and stats["drafted"]


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_whatever_else_runs(family: str) -> None:
    same_bits(FAMILIES[family])


def test_same_bits_of_the_plainest_programs() -> None:
    same_bits(ONE_LAYER)


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("others", list(OTHERS))
def test_same_bits_of_all_kinds_of_requests(others: str) -> None:
    expected = run(engine(TWO_LAYERS), EVERY, OF_KINDS)
    other = engine(TWO_LAYERS, **OTHERS[others])
    for order in (EVERY[::-1], EVERY):
        assert run(other, order, OF_KINDS) == expected
    assert run(other, [9], OF_KINDS) == {9: expected[9]}


@pytest.mark.slow
@pytest.mark.optimized
def test_without_it_bits_differ() -> None:
    """Says that what is compared here can differ."""
    plain = engine("tiny", deterministic="none", max_num_batched_tokens=512)
    expected = run(plain, EVERY)
    alone = {i: run(plain, [i])[i] for i in EVERY}
    assert sum(alone[i][1] != expected[i][1] for i in EVERY) > len(EVERY) // 2


@pytest.mark.optimized
@pytest.mark.parametrize("quant", [None, "w8a8", "int8 cache", "bfloat16"])
@pytest.mark.slow
def test_shipped_model(quant: str | None) -> None:
    config = {"w8a8": QuantConfig(method="rtn", format="w8a8"), "int8 cache": QuantConfig(kv_cache="int8")}
    options: dict[str, Any] = {"quant": config.get(str(quant)), "max_num_batched_tokens": 512}
    if quant == "bfloat16":
        first, other = (
            LLM("tiny", dtype="bfloat16", engine=dataclasses.replace(ENGINE, max_num_seqs=n)) for n in (12, 5)
        )
    else:
        first, other = engine("tiny", **options), engine("tiny", **options | {"max_num_batched_tokens": 19})
    expected = run(first, EVERY)
    assert run(other, EVERY[::-1]) == expected
    assert run(first, [4]) == {4: expected[4]}


@pytest.mark.optimized
@pytest.mark.parametrize("tile", [1, 3, 16])
@pytest.mark.slow
def test_other_tiles(tile: int) -> None:
    """Tokens are near those of any tile, and bits the same for each: rows alone too."""
    first, other = (engine(TWO_LAYERS, tile_tokens=tile, max_num_seqs=n) for n in (12, 4))
    expected = run(first, EVERY)
    assert run(other, EVERY[::-1]) == expected
    plain = run(engine(TWO_LAYERS, deterministic="none"), EVERY)
    assert [expected[i][0] for i in EVERY] == [plain[i][0] for i in EVERY]


@pytest.mark.slow
def test_samples_of_a_request() -> None:
    """More samples than a tile has rows: the prompt's last token is computed for each tileful."""
    params = [dataclasses.replace(each, n=11 if i == 2 else 1 + i % 3) for i, each in enumerate(PARAMS)]
    first, other = engine(TWO_LAYERS), engine(TWO_LAYERS, max_num_batched_tokens=24)
    expected = run(first, EVERY, params)
    assert run(other, EVERY[::-1], params) == expected
    plain = run(engine(TWO_LAYERS, deterministic="none"), EVERY, params)
    assert [expected[i][0] for i in EVERY] == [plain[i][0] for i in EVERY]


@pytest.mark.slow
def test_scores_captures_and_replays() -> None:
    first = engine(TWO_LAYERS, capture_routing=True)
    other = engine(TWO_LAYERS, capture_routing=True, max_num_batched_tokens=12)
    outputs = [run(llm, order) for llm, order in ((first, EVERY), (other, EVERY[::-1]))]
    assert outputs[0] == outputs[1]
    scores = [[np.float32(x).tobytes() for x in llm.score(PROMPTS)] for llm in (first, other)]
    assert scores[0] == scores[1]
    traces = [llm.routing_capture() for llm in (first, other)]

    def rows(trace: Any) -> set[Any]:
        names = [trace.requests[r].prompt_hash for r in trace.request]
        columns = zip(names, trace.position.tolist(), trace.ids.tolist(), trace.weights.tolist(), strict=True)
        return {(name, position, str(ids), str(weights)) for name, position, ids, weights in columns}

    assert rows(traces[0]) == rows(traces[1])
    replayed = engine(TWO_LAYERS)
    replayed.replay_routing(traces[1])
    assert run(replayed, EVERY) == outputs[0]


@pytest.mark.slow
def test_gpu_kernels() -> None:
    """Interpreted: parts of contexts and tiles of experts are cut alike, whatever else there is."""
    params = [dataclasses.replace(each, max_tokens=3) for each in PARAMS]
    options: dict[str, Any] = {"kernels": "pallas_triton", "moe": MoeConfig(), "block_size": 8}
    few = EVERY[:5]
    expected = run(engine(TWO_LAYERS, **options), few, params)
    assert run(engine(TWO_LAYERS, **options, max_num_seqs=2), few[::-1], params) == expected


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"dp": 2, "ep": 2, "attention": "data"}],
    ids=str,
)
@pytest.mark.slow
def test_on_meshes(layout: dict[str, Any]) -> None:
    parallel = ParallelConfig(**layout)
    expected = run(engine(EIGHT_WAY, parallel=parallel), EVERY)
    other = engine(EIGHT_WAY, parallel=parallel, max_num_batched_tokens=12, overlap=False)
    assert run(other, EVERY[::-1]) == expected


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up() -> None:
    llm = engine(TWO_LAYERS, strict_compile=True)
    llm.warmup(max_total_len=48, sampling_params=PARAMS)
    run(llm, EVERY)
    assert llm.stats()["recompiles_after_warmup"] == 0


@pytest.mark.slow
def test_a_variant_beside_the_plain_engine() -> None:
    plain = engine(TWO_LAYERS, deterministic="none")
    tiles = plain.variant(dataclasses.replace(plain.engine_config, deterministic="tiles"))
    assert run(tiles, EVERY) == run(engine(TWO_LAYERS), EVERY)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"batching": "static"}, TWO_LAYERS, "engine.batching=static"),
        ({"moe": MoeConfig(execution="capacity")}, TWO_LAYERS, "execution=capacity"),
        ({"moe": MoeConfig(grouped_matmul="ragged_dot")}, TWO_LAYERS, "grouped_matmul=ragged_dot"),
        ({}, TWO_LAYERS.replace(**LINEAR), "linear attention"),
        ({"speculation": SpeculationConfig(method="self_layers", k=2)}, TWO_LAYERS, "method=self_layers"),
    ],
)
def test_refusals(options: dict[str, Any], model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="deterministic=tiles does not go with") as told:
        engine(model, **options)
    assert words in str(told.value) and "\n" not in str(told.value)


class Named:
    """Stands for a sequence."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def test_tiles_of_a_plan() -> None:
    a, b, c, *more = (Named(name) for name in "abcdefghij")
    drafts = {1: Draft((4,)), 4: Draft((5,))}
    plan = StepPlan(
        decodes=[a, a, b, b, b], positions=[3, 4, 7, 8, 9], drafts=drafts, judged={0: drafts[1]},
        copies=[(1, 2)],
        chunks=[Chunk(c, 2, 6, True, True, 2), Chunk(more[0], 0, 1, False, True)], forks=[more[1:6], []],
    )  # type: ignore[arg-type]  # fmt: skip
    parts = tiles_of(plan, 4)
    seen = [
        (part.rows, part.spans, [(str(x.sequence), x.start, x.count, x.last) for x in part.plan.chunks])
        for part in parts
    ]
    assert seen == [
        ([0, 1, 2, 3], [], []),
        ([4, 5], [(0, 3)], [("c", 2, 3, False)]),
        ([5, 6, 7, 8], [(3, 3)], [("c", 5, 3, True)]),
        ([5, 9, 10, 11], [(5, 1), (6, 1)], [("c", 7, 1, True), ("d", 0, 1, False)]),
    ]
    assert [[x.first for x in part.plan.chunks] for part in parts] == [[], [True], [False], [False, True]]
    assert [x.found for x in parts[1].plan.chunks] == [2]
    assert [part.plan.forks for part in parts[2:]] == [[more[1:4]], [more[4:6], []]]
    assert [part.plan.drafts for part in parts] == [{1: drafts[1]}, {0: drafts[4]}, {}, {}]
    assert parts[0].plan.judged == {0: drafts[1]} and parts[0].plan.groups[0].copies == [(1, 2)]
    assert not any(part.plan.groups[0].copies for part in parts[1:])
    joined = tiles_of(GroupPlan([plan, StepPlan(decodes=[a], positions=[1])]), 4)  # type: ignore[list-item]
    assert [len(part.plan.groups[1].decodes) for part in joined] == [1, 0, 0, 0]
    assert joined[0].rows == [0, 1, 2, 3, 12]
