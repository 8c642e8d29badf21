"""Every family with every feature, and every two features together, give what the plain engine gives.

A covering array: of any two factors each two values meet in at least one case, but for the pairs that are
refused, which raise. Triples are not promised."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, ParallelConfig, SamplingParams
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.quant import QuantConfig
from tests.engine.mesh_models import ENGINE, FAMILIES, checkpoint

Case = tuple[str, ...]

FACTORS: dict[str, tuple[str, ...]] = {
    "family": tuple(FAMILIES),
    "layout": ("one", "tp2", "ep2", "dp_attention_ep2", "pp2"),
    "schedule": ("whole", "scarce"),
    "routing": ("free", "replayed"),
    "weights": ("float", "int8"),
    "cache": ("auto", "int8"),
    "kernels": ("xla", "pallas_triton"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {}, "tp2": {"tp": 2}, "ep2": {"ep": 2}, "dp_attention_ep2": {"ep": 2, "attention": "data"},
    "pp2": {"pp": 2},
}  # fmt: skip
# Prompts are cut, sequences preempted, and samples of one prompt share its blocks.
SCARCE = dataclasses.replace(
    ENGINE, max_model_len=32, max_num_batched_tokens=8, num_blocks=6, token_buckets=[8], block_buckets=[6]
)
ASKED = [np.random.default_rng(n).integers(1, 96, n).tolist() for n in (3, 19, 16, 1, 18)]
PARAMS = [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, n=1 + i % 2) for i in range(5)]


def refusal(family: str, value: str) -> str | None:
    """What the engine answers where a family cannot have such routing or kernels."""
    config = FAMILIES[family]
    if value == "replayed" and not any(config.moe_layers):
        return "the model has no MoE layer, and so no routing to capture"
    if value == "pallas_triton":
        if config.latent is not None:
            return r"latents of kv_lora_rank=16 and qk_rope_head_dim=6 \(multiples of 8"
        if config.qk_norm == "rotated":
            return "norms of queries and keys after rotary embedding"
    return None


def pairs(case: Case) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def covering() -> list[Case]:
    """Cases until all pairs that are not refused are in one: each begins with the first that is left, and
    takes the values that bring most of the others, of equals the rarer one (of kernels XLA, which is
    faster)."""
    values = list(FACTORS.values())
    left = {
        (one, two): None
        for (i, first), (j, second) in itertools.combinations(enumerate(values), 2)
        for one, two in itertools.product(((i, x) for x in first), ((j, y) for y in second))
        if i or not refusal(one[1], two[1])
    }
    cases: list[Case] = []

    def best(place: int, chosen: dict[int, str]) -> str:
        def worth(value: str) -> tuple[int, int]:
            met = (tuple(sorted(((place, value), other))) for other in chosen.items())
            rare = 0 if place == len(values) - 1 else sum(case[place] == value for case in cases)
            return sum(pair in left for pair in met), -rare

        def allowed(value: str) -> bool:
            if place:
                return 0 not in chosen or not refusal(chosen[0], value)
            return not any(refusal(value, other) for other in chosen.values())

        return max(filter(allowed, values[place]), key=worth)

    while left:
        chosen = dict(next(iter(left)))
        for place in range(len(values)):
            if place not in chosen:
                chosen[place] = best(place, chosen)
        cases.append(tuple(chosen[place] for place in range(len(values))))
        for pair in pairs(cases[-1]):
            left.pop(pair, None)
    return cases


CASES = covering()
REFUSED = [
    (family, factor, value)
    for family in FAMILIES
    for factor, values in list(FACTORS.items())[1:]
    for value in values
    if refusal(family, value)
]


def test_the_cases_have_every_pair() -> None:
    found = set().union(*map(pairs, CASES))
    refused = {((0, family), (list(FACTORS).index(factor), value)) for family, factor, value in REFUSED}
    values = list(FACTORS.values())
    wanted = {pair for i, j in itertools.combinations(range(7), 2) for pair in
              itertools.product(((i, x) for x in values[i]), ((j, y) for y in values[j]))}  # fmt: skip
    assert found == wanted - refused and len(CASES) < 120 and len(REFUSED) > 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda family: checkpoint(FAMILIES[family], tmp_path_factory.mktemp(family)))


def opened(directory: Path, weights: str, cache: str, **how: Any) -> LLM:
    quant = QuantConfig(kv_cache=cache) if weights == "float" else QuantConfig("rtn", "int8", kv_cache=cache)
    return LLM(str(directory), quant=quant, **how)


def outcome(llm: LLM) -> list[list[list[int]]]:
    done = llm.generate(ASKED, PARAMS)
    llm.engine.scheduler.check_integrity()
    assert llm.stats()["used_blocks"] == 0
    return [[sample.token_ids for sample in out.outputs] for out in done]


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    return functools.cache(
        lambda family, weights, cache: outcome(opened(model(family), weights, cache, engine=ENGINE))
    )


def engine_of(schedule: str, routing: str, kernels: str) -> Any:
    engine = ENGINE if schedule == "whole" else SCARCE
    moe = engine.moe if kernels == "xla" else MoeConfig()
    return dataclasses.replace(engine, kernels=kernels, moe=moe, capture_routing=routing == "replayed")


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_case_gives_what_the_plain_engine_gives(case: Case, model: Any, plain: Any) -> None:
    family, layout, schedule, routing, weights, cache, kernels = case
    llm = opened(
        model(family), weights, cache, engine=engine_of(schedule, routing, kernels),
        parallel=ParallelConfig(**LAYOUTS[layout]),
    )  # fmt: skip
    wanted = plain(family, weights, cache)
    assert outcome(llm) == wanted
    if schedule == "scarce" and layout != "dp_attention_ep2":
        assert llm.stats()["preemptions"] > 0
    if routing == "replayed":
        trace = llm.routing_capture()
        assert trace.num_rows > 0
        llm.replay_routing(trace)
        assert outcome(llm) == wanted


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize(("family", "factor", "value"), REFUSED)
def test_a_pair_is_refused(family: str, factor: str, value: str, model: Any) -> None:
    how = {"routing": "free", "kernels": "xla", "layout": "one"} | {factor: value}
    with pytest.raises(ConfigError, match=refusal(family, value)) as error:
        opened(
            model(family), "float", "auto", engine=engine_of("whole", how["routing"], how["kernels"]),
            parallel=ParallelConfig(**LAYOUTS[how["layout"]]),
        )  # fmt: skip
    assert "\n" not in str(error.value)
