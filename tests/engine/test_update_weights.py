"""New values in a running engine's weights: tokens are the new model's, and nothing is compiled again."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, ParallelConfig, PrefixCacheConfig, QuantConfig, SamplingParams
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from tests.examples import slow_but
from tests.model_shapes import EIGHT_WAY, LATENT, ONE_LAYER, SINKS, TWO_LAYERS

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[32], block_buckets=[8], max_model_len=40,
    max_num_seqs=4, block_size=4, autotune="rules", prefix_cache=PrefixCacheConfig(enabled=True),
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 11 + i, 13, 17, 19 + i, 23, 29, 31, 37] for i in range(3)]
FAMILIES = {
    "gqa": ONE_LAYER,
    "latents": ONE_LAYER.replace(**LATENT),
    "windows_with_sinks": TWO_LAYERS.replace(**SINKS, sliding_windows=(5, None)),
}


def engine(config: Any, seed: int = 0, **options: Any) -> LLM:
    parallel = options.pop("parallel", None)
    quant = options.pop("quant", None)
    made = LLM(
        config, load_format="dummy", seed=seed, parallel=parallel, quant=quant,
        engine=dataclasses.replace(ENGINE, **options),
    )  # fmt: skip
    return made


@functools.cache
def kept(seed: int) -> LLM:
    """The one-layer model's engine, whose weights no test changes."""
    return engine(ONE_LAYER, seed=seed)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("family", slow_but(["gqa"], list(FAMILIES)))
def test_tokens_are_those_of_an_engine_of_the_new_weights(family: str) -> None:
    llm, other = engine(FAMILIES[family], strict_compile=True), engine(FAMILIES[family], seed=1)
    llm.warmup(max_total_len=24, sampling_params=[GREEDY])
    before = tokens(llm)
    llm.update_weights(other.model)
    assert tokens(llm) == tokens(other) != before
    assert llm.stats()["recompiles_after_warmup"] == 0
    llm.engine.scheduler.check_integrity()


@pytest.mark.slow
def test_either_layout_of_experts_and_single_parameters() -> None:
    llm, other = engine(ONE_LAYER, moe=MoeConfig(expert_layout="edf")), kept(1)
    llm.update_weights(other.model)
    assert tokens(llm) == tokens(other)
    fresh = engine(ONE_LAYER)
    name = next(name for name, _ in iter_params(fresh.model) if name.endswith("o_proj.kernel"))
    value = np.zeros(dict(iter_params(fresh.model))[name].get_metadata("spec").canonical_shape, np.float32)
    for each in (llm, fresh):
        each.update_weights({name: value})
    assert not np.asarray(dict(iter_params(llm.model))[name][...]).any()
    assert tokens(llm) != tokens(other) and tokens(llm) != tokens(fresh)


@pytest.mark.multidevice
@pytest.mark.parametrize("layout", slow_but([], [{"tp": 2}, {"pp": 2}, {"ep": 2}]), ids=str)
def test_on_meshes(layout: dict[str, int]) -> None:
    stages = layout.get("pp", 1)
    model = EIGHT_WAY.replace(
        num_layers=stages, moe_layers=(True,) * stages, sliding_windows=(None,) * stages
    )
    llm, other = engine(model, parallel=ParallelConfig(**layout)), engine(model, seed=1)
    tokens(llm)
    llm.update_weights(other.model)
    assert tokens(llm) == tokens(other)


@pytest.mark.parametrize("running", slow_but(["keep"], ["wait", "keep", "abort"]))
def test_what_becomes_of_running_requests(running: Any) -> None:
    old, new, llm = kept(0), kept(1), engine(ONE_LAYER)
    twin = llm.variant(llm.engine_config)
    outputs = [each.submit(prompt, GREEDY) for prompt in PROMPTS for each in (llm, twin)]
    for _ in range(3):
        assert llm.step() and twin.step()
    llm.update_weights(new.model, running=running)
    had = [len(output.outputs[0].token_ids) for output in outputs]
    while llm.step() or twin.step():
        pass
    before = [made for made in tokens(old) for _ in range(2)]
    for output, expected, first in zip(outputs, before, had, strict=True):
        made = list(output.outputs[0].token_ids)
        if running == "keep":  # the rest is what the new model says behind the tokens that there were
            rest = dataclasses.replace(GREEDY, max_tokens=8 - first)
            (go_on,) = new.generate([[*output.prompt_token_ids, *made[:first]]], rest)
            assert 0 < first < 8 and made[:first] == expected[:first]
            assert made[first:] == list(go_on.outputs[0].token_ids)
        else:
            assert made == expected[: len(made)] and len(made) == (8 if running == "wait" else first)
    assert tokens(llm) == tokens(twin) == tokens(new)
    for each in (llm, twin):
        each.engine.scheduler.check_integrity()


def test_what_it_was_given_stays_the_givers() -> None:
    llm, model = engine(ONE_LAYER), kept(1).model
    llm.update_weights(model)
    llm.close()
    assert not any(param[...].is_deleted() for _, param in iter_params(model))


def test_a_paused_engine_stays_paused() -> None:
    llm = engine(ONE_LAYER)
    llm.pause()
    llm.update_weights(kept(1).model)
    llm.submit(PROMPTS[0], GREEDY)
    assert not llm.step()
    llm.unpause()
    assert llm.step()


def test_wrong_values_change_nothing() -> None:
    llm = engine(ONE_LAYER)
    before, norm = tokens(llm), "norm.weight"
    known: Decoder = llm.model
    name = next(name for name, _ in iter_params(known) if name.endswith("o_proj.kernel"))
    size = dict(iter_params(known))[name].get_metadata("spec").canonical_shape
    good = {name: np.zeros(size, np.float32)}
    for bad, words in (
        ({norm + "s": np.ones(3)}, "unknown parameter 'norm.weights'"),
        ({name: np.ones((3, 3))}, rf"{name} has shape \(3, 3\), expected \({size[0]}, {size[1]}\)"),
    ):
        with pytest.raises(ConfigError, match=f"update_weights: {words}"):
            llm.update_weights(good | bad)
    with pytest.raises(ConfigError, match="quantized weights take no new values"):
        engine(ONE_LAYER, quant=QuantConfig(method="rtn", format="int8")).update_weights(known)
    assert tokens(llm) == before
