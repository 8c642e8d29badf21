"""LoRA adapters in an engine's slots: many in one batch, each as the model that it is merged into."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from moejax import (
    LLM,
    EngineConfig,
    MoeConfig,
    ParallelConfig,
    PrefixCacheConfig,
    QuantConfig,
    RequestOptions,
    SamplingParams,
    SpeculationConfig,
)
from moejax.checkpoint.hf import save_pretrained
from moejax.checkpoint.peft import merge_adapter, read_adapter, save_adapter
from moejax.core.adapters import AdaptersConfig
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.api import RequestOutput
from moejax.models.decoder import Decoder
from moejax.routing.capture import load_capture
from tests.adapters import write_adapter
from tests.decoding import forward, random_model
from tests.examples import slow_but
from tests.model_shapes import DENSE, EIGHT_WAY, GLM, LATENT, LINEAR, ONE_LAYER, SINKS, TWO_LAYERS
from tests.numerics import tolerance

FAMILIES = {
    "gqa": TWO_LAYERS,
    "one_layer": ONE_LAYER,
    "latents": ONE_LAYER.replace(**LATENT),
    "windows_with_sinks": ONE_LAYER.replace(**SINKS, sliding_windows=(5,)),
    "linear": TWO_LAYERS.replace(**LINEAR),
    "shared_expert": TWO_LAYERS.replace(**GLM),
    "dense": TWO_LAYERS.replace(**DENSE, family="qwen3"),
    "eight_way": EIGHT_WAY,
    "eight_way_one_layer": EIGHT_WAY.replace(num_layers=1, moe_layers=(True,), sliding_windows=(None,)),
}
SLOTS = AdaptersConfig(slots=3, rank=4)
ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[32], block_buckets=[8], max_model_len=40,
    max_num_seqs=4, adapters=SLOTS, autotune="rules",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
# Two layers of sums of at most 48 terms; an adapter's are of as many, and of its rank.
LIMIT = 20 * tolerance(*[32, 48, 16, 8, 4] * 4)  # of log-probabilities, which go down to about -20
NAMES = ("one", "two", None, "three")
PROMPTS = [[7, 11 + i, 13, 17, 19 + i, 23, 29] for i in range(4)]


class Made(NamedTuple):
    """A model's directory, its adapters' (of ranks 2, 3 and 4) by name, and what the models that each is
    merged into answer: tokens → log-probabilities `[tokens, V]`."""

    config: ModelConfig
    directory: Path
    adapters: dict[str, Path]
    merged: Callable[[str | None, list[int]], np.ndarray]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @functools.cache
    def make(family: str) -> Made:
        config, folder = FAMILIES[family], tmp_path_factory.mktemp(family)
        save_pretrained(random_model(config), folder / "model")
        adapters = {
            name: write_adapter(folder / name, config, seed, rank=seed + 1)
            for seed, name in enumerate(("one", "two", "three"), 1)
        }

        @functools.cache
        def model(name: str | None) -> Decoder:
            plain = random_model(config)
            if name is not None:
                merge_adapter(plain, read_adapter(adapters[name], config))
            return plain

        def merged(name: str | None, tokens: list[int]) -> np.ndarray:
            logits, _ = forward(model(name), np.array([tokens + [0] * (32 - len(tokens))]))
            return np.asarray(jax.nn.log_softmax(logits[0, : len(tokens)]))

        return Made(config, folder / "model", adapters, merged)

    return make


def engine(made: Made, names: tuple[str, ...] = ("one", "two", "three"), **options: Any) -> LLM:
    """An engine with adapters loaded; `options` are of `LLM` or of its `EngineConfig`."""
    parts = {name: options.pop(name) for name in ("parallel", "quant") if name in options}
    llm = LLM(made.directory, engine=dataclasses.replace(ENGINE, **options), **parts)
    for name in names:
        llm.load_adapter(name, made.adapters[name])
    return llm


@pytest.fixture(scope="module")
def loaded(made: Callable[[str], Made]) -> LLM:
    """An engine with all three adapters. Tests may use it, not change it."""
    return engine(made("gqa"))


def of(*names: str | None) -> list[RequestOptions]:
    return [RequestOptions(adapter=name) for name in names]


def assert_merged(made: Made, output: RequestOutput, name: str | None) -> None:
    """A request's tokens are the likeliest of the merged model, where the two best lie further apart than
    rounding explains, and its log-probabilities that model's."""
    prompt = output.prompt_token_ids
    for sample in output.outputs:
        expected = made.merged(name, [*prompt, *sample.token_ids])[len(prompt) - 1 : -1]
        for token, told, logprobs in zip(sample.token_ids, sample.logprobs or [], expected, strict=True):
            best = np.sort(logprobs)[::-1]
            assert token == logprobs.argmax() or best[0] - logprobs[token] < 2 * LIMIT
            assert abs(told.logprob - logprobs[token]) < LIMIT


def assert_all_merged(made: Made, llm: LLM) -> None:
    """Requests with each adapter, and one without, in one batch."""
    outputs = llm.generate(PROMPTS, GREEDY, options=of(*NAMES))
    for name, output in zip(NAMES, outputs, strict=True):
        assert_merged(made, output, name)


@pytest.mark.parametrize(
    "family",
    slow_but(["gqa"], [name for name in FAMILIES if not name.startswith("eight_way")]),
)
def test_adapters_in_one_batch_are_the_merged_models(
    made: Callable[[str], Made], loaded: LLM, family: str
) -> None:
    assert_all_merged(made(family), loaded if family == "gqa" else engine(made(family)))


def test_adapters_change_what_is_generated(loaded: LLM) -> None:
    outputs = loaded.generate([PROMPTS[0]] * 4, GREEDY, options=of(*NAMES))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"moe": MoeConfig(grouped_matmul="ragged_dot")},
        pytest.param(
            {"moe": MoeConfig(grouped_matmul="blocks_uniform", block_rows=2)}, marks=pytest.mark.slow
        ),
        pytest.param({"moe": MoeConfig(expert_layout="edf")}, marks=pytest.mark.slow),
        pytest.param({"overlap": False, "max_num_batched_tokens": 5}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_other_products_and_loops(made: Callable[[str], Made], options: dict[str, Any]) -> None:
    assert_all_merged(made("one_layer"), engine(made("one_layer"), **options))


@pytest.mark.parametrize("preemption", slow_but([], ["recompute", "swap"]))
def test_several_samples_that_are_preempted(made: Callable[[str], Made], preemption: Any) -> None:
    scarce = {"block_size": 4, "num_blocks": 12, "block_buckets": [12], "preemption": preemption}
    llm = engine(made("one_layer"), **scarce)
    two = dataclasses.replace(GREEDY, n=2, max_tokens=14)
    outputs = llm.generate(PROMPTS, two, options=of(*NAMES))
    stats = llm.stats()
    assert stats["preemptions"] > 0 and (stats["swapped_tokens"] > 0) == (preemption == "swap")
    for name, output in zip(NAMES, outputs, strict=True):
        assert [len(sample.token_ids) for sample in output.outputs] == [14, 14]
        assert_merged(made("one_layer"), output, name)


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "layout", slow_but([], [{"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}]), ids=lambda x: "-".join(x)
)
def test_on_meshes(made: Callable[[str], Made], layout: dict[str, int]) -> None:
    case = made("eight_way" if "pp" in layout else "eight_way_one_layer")
    assert_all_merged(case, engine(case, parallel=ParallelConfig(**layout)))


@pytest.mark.slow
def test_beside_quantized_weights(made: Callable[[str], Made]) -> None:
    """What is added to a quantized matrix's product is what is added to the plain one's."""
    quant = QuantConfig(method="rtn", format="int8")
    plain, quantized = engine(made("gqa")), engine(made("gqa"), quant=quant)
    differences = [llm.score(PROMPTS, adapter="one")[0] for llm in (plain, quantized)]
    assert np.abs(differences[0] - differences[1]).max() < 0.5
    base = quantized.score(PROMPTS)[0]
    assert np.abs(base - differences[1]).max() > 1.0


@pytest.mark.parametrize("method", slow_but([], ["ngram", "self_experts", "self_layers"]))
def test_with_drafts(made: Callable[[str], Made], method: Any) -> None:
    """What drafts, where it is the model, has the adapters, too."""
    case = made("gqa" if method == "self_layers" else "one_layer")
    llm = engine(case, speculation=SpeculationConfig(method=method, k=3, min_ngram=1))
    assert_all_merged(case, llm)
    assert llm.stats()["drafted"] > 0


def test_another_model_drafts_without_adapters(made: Callable[[str], Made]) -> None:
    draft = SpeculationConfig(method="draft", draft=str(made("gqa").directory))
    with pytest.raises(ConfigError, match=r"method=draft does not go with engine.adapters.slots, of which"):
        engine(made("gqa"), speculation=draft)


@pytest.mark.slow
def test_scores_are_the_adapters(made: Callable[[str], Made], loaded: LLM) -> None:
    for name in NAMES:
        for prompt, mine in zip(PROMPTS, loaded.score(PROMPTS, adapter=name), strict=True):
            expected = made("gqa").merged(name, prompt)[np.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(mine, expected, atol=LIMIT)


def test_adapters_come_and_go_while_requests_run(made: Callable[[str], Made]) -> None:
    case = made("one_layer")
    llm = engine(case, ("one",), adapters=AdaptersConfig(slots=2, rank=4), strict_compile=True)
    llm.warmup(max_total_len=24, sampling_params=[GREEDY])
    first = llm.submit(PROMPTS[0], GREEDY, options=RequestOptions(adapter="one"))
    base = llm.submit(PROMPTS[2], GREEDY)
    llm.step()
    llm.load_adapter("two", case.adapters["two"])
    second = llm.submit(PROMPTS[1], GREEDY, options=RequestOptions(adapter="two"))
    llm.step()
    llm.unload_adapter("one")
    assert llm.adapters == ["two"]
    with pytest.raises(
        ConfigError, match=r"all 2 slots are taken \(loaded: two; unloaded and still in use: one\)"
    ):
        llm.load_adapter("three", case.adapters["three"])
    with pytest.raises(RequestError, match=r"unknown adapter 'one'"):
        llm.submit(PROMPTS[0], GREEDY, options=RequestOptions(adapter="one"))
    while llm.step():
        pass
    llm.load_adapter("three", case.adapters["three"])  # in the slot that "one" had
    (third,) = llm.generate([PROMPTS[3]], GREEDY, options=of("three"))
    for output, name in ((first, "one"), (second, "two"), (base, None), (third, "three")):
        assert_merged(case, output, name)
    assert not llm.stats()["recompiles_after_warmup"]


def test_a_slot_keeps_nothing_of_the_adapter_before(made: Callable[[str], Made], tmp_path: Path) -> None:
    """An adapter of attention alone, in the slot of one of everything."""
    case, path = made("one_layer"), write_adapter(tmp_path, ONE_LAYER, 9, rank=1, only="q_proj")
    fresh, used = engine(case, ()), engine(case, ("one", "two", "three"))
    used.unload_adapter("one")
    for llm in (fresh, used):
        llm.load_adapter("small", path)
    (mine,), (theirs,) = (llm.score(PROMPTS[:1], adapter="small") for llm in (used, fresh))
    np.testing.assert_array_equal(mine, theirs)


def test_prefixes_are_an_adapters_own(made: Callable[[str], Made]) -> None:
    """Also after it has been loaded anew: what is remembered goes by its contents, not by name or slot."""
    case, prompt = made("one_layer"), [*range(3, 21)]
    cache = PrefixCacheConfig(enabled=True)
    llm = engine(case, ("one", "two"), prefix_cache=cache, block_size=8, block_buckets=[16])
    hits = []
    for name in ("one", "two", None, "one", "two", None):
        (output,) = llm.generate([prompt], GREEDY, options=of(name))
        assert_merged(case, output, name)
        hits.append(output.metrics.cached_tokens)
    assert hits[:3] == [0, 0, 0] and min(hits[3:]) >= 16
    llm.unload_adapter("one")
    llm.load_adapter("again", case.adapters["one"])
    llm.unload_adapter("two")
    llm.load_adapter("one", case.adapters["three"])
    again, other = (llm.generate([prompt], GREEDY, options=of(name))[0] for name in ("again", "one"))
    assert again.metrics.cached_tokens >= 16 and other.metrics.cached_tokens == 0


def test_an_interrupted_request_goes_on_with_its_adapter_only(loaded: LLM) -> None:
    llm = loaded
    (whole,) = llm.generate([PROMPTS[0]], GREEDY, options=of("one"))
    output = llm.submit(PROMPTS[0], GREEDY, options=RequestOptions(adapter="one"))
    for _ in range(3):
        llm.step()
    kept = llm.interrupt(output.request_id)
    with pytest.raises(RequestError, match=r"resume: the checkpoint is of model \w+\+\w+, and this is \w+$"):
        llm.resume(kept)
    resumed = llm.resume(kept, options=RequestOptions(adapter="one"))
    while llm.step():
        pass
    assert resumed.outputs[0].token_ids == whole.outputs[0].token_ids


def test_captured_routing_by_adapter(made: Callable[[str], Made], tmp_path: Path) -> None:
    llm = engine(made("one_layer"), capture_routing=True)
    llm.generate([PROMPTS[0]] * 4, GREEDY, options=of(*NAMES))
    trace = load_capture(llm.routing_capture().save(tmp_path / "routing.npz"))
    assert [request.adapter for request in trace.requests] == list(NAMES)
    parts = [trace.of_adapter(name) for name in NAMES]
    assert sum(part.num_rows for part in parts) == trace.num_rows and len({p.num_rows for p in parts}) == 1
    assert not np.array_equal(parts[0].counts(), parts[1].counts())


def test_an_engine_without_slots_has_nothing_of_them(made: Callable[[str], Made]) -> None:
    plain = engine(made("gqa"), (), adapters=AdaptersConfig())
    assert plain.model.token_slots is None and plain.runner.limits.adapters == 0
    assert {path for path, _ in nnx.iter_graph(plain.model) if "lora" in path} == set()
    with pytest.raises(ConfigError, match=r"the engine has no slots; set engine.adapters.slots"):
        plain.load_adapter("one", made("gqa").adapters["one"])


def test_what_cannot_be_loaded(made: Callable[[str], Made], tmp_path: Path) -> None:
    case = made("gqa")
    llm = LLM(
        case.directory, engine=dataclasses.replace(ENGINE, adapters=AdaptersConfig(1, 3, ["attention"]))
    )
    with pytest.raises(
        ConfigError, match=r"engine.adapters.targets=\['attention'\] leaves '(experts|router)' out"
    ):
        llm.load_adapter("one", case.adapters["one"])
    with pytest.raises(ConfigError, match=r"rank 4 exceeds engine.adapters.rank=3; raise it"):
        llm.load_adapter("three", case.adapters["three"])
    path = write_adapter(tmp_path, case.config, 0, only="attention")
    llm.load_adapter("small", path)
    with pytest.raises(ConfigError, match=r"load_adapter: name must be a string that is not empty, got ''"):
        llm.load_adapter("", path)
    with pytest.raises(ConfigError, match=r"there is an adapter 'small'"):
        llm.load_adapter("small", path)
    with pytest.raises(RequestError, match=r"unload_adapter: unknown adapter 'smal'; did you mean 'small'"):
        llm.unload_adapter("smal")
    with pytest.raises(ConfigError, match=r"a variant shares its weights.*engine.adapters"):
        llm.variant(ENGINE)


def test_latents_are_made_by_no_adapter(made: Callable[[str], Made], tmp_path: Path) -> None:
    factors = {"layers.0.attention.kv_b_proj.kernel": (np.ones((16, 1)), np.ones((1, 4 * 20)))}
    save_adapter(factors, FAMILIES["latents"], tmp_path)
    with pytest.raises(ConfigError, match=r"kv_b_proj.kernel takes no adapter: .* merge the adapter"):
        engine(made("latents"), ()).load_adapter("latent", tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe": MoeConfig(execution="capacity")}, "engine.moe.execution=capacity"),
        ({"moe": MoeConfig(grouped_matmul="batched")}, "engine.moe.grouped_matmul=batched"),
        ({"parallel": ParallelConfig(ep=2)}, "parallel.ep: rows that travel"),
    ],
)
def test_what_experts_slots_do_not_go_with(options: dict[str, Any], words: str) -> None:
    parallel = options.pop("parallel", None)
    with pytest.raises(ConfigError, match=f"engine.adapters.targets: experts do not go with {words}"):
        LLM(ONE_LAYER, load_format="dummy", engine=dataclasses.replace(ENGINE, **options), parallel=parallel)
