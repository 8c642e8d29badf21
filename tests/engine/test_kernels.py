"""The engine on GPU kernels, interpreted here: the same tokens as on XLA."""

import dataclasses

import jax
import pytest

from moejax.core.config import EngineConfig, LatentConfig, RopeConfig, RouterConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.quant import QuantConfig, QuantRule
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.nn import param
from moejax.ops.kv_segments import Segment
from pallas_kernels import work_list
from tests.engine.mesh_models import checkpoint
from tests.engine.paged import TIGHT, assert_clean, greedy, prompt, tokens
from tests.engine.tiny import small_config
from tests.engine.traces import by_place, experts
from tests.model_shapes import DENSE, GEMMA, GLM, GRANITE, LATENT, LLAMA, SINKS

# Kernels take blocks of 8 tokens and more. Twelve blocks do not hold four of the longest sequences.
CONFIG = dataclasses.replace(TIGHT, block_size=8, num_blocks=12, block_buckets=[12], max_model_len=64)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=7, seed=5, n=2, ignore_eos=True, top_k=20)


@pytest.fixture(scope="module", autouse=True)
def short_parts():
    """Contexts of a few tokens are split, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_list, "LEAST_KEYS", 8)
        yield


@pytest.fixture
def nothing_is_zero(monkeypatch):
    """Biases and offsets are drawn as well: what they do is to be seen."""
    real = param._initial_value

    def drawn(spec, *rest, **options):
        spec = dataclasses.replace(spec, init="normal", scale=0.3) if spec.init == "zeros" else spec
        return real(spec, *rest, **options)

    monkeypatch.setattr(param, "_initial_value", drawn)


def engines(**model) -> tuple[LLM, LLM]:
    """One model's weights behind XLA and behind kernels."""
    config = small_config(**model)
    kernels = dataclasses.replace(CONFIG, kernels="pallas_triton")
    return tuple(LLM(config, load_format="dummy", engine=engine) for engine in (CONFIG, kernels))


@pytest.fixture(scope="module")
def both() -> tuple[LLM, LLM]:
    return engines()


def test_same_greedy_tokens(both):
    """Prompts cut into chunks, decodes beside them, more requests than fit: preemption."""
    prompts = [prompt(n, 3) for n in (11, 3, 16, 1, 9, 14)]
    plain, kernels = (llm.generate(prompts, greedy(20)) for llm in both)
    assert tokens(kernels) == tokens(plain)
    assert both[1].stats()["preemptions"] > 0
    assert_clean(both[1])


@pytest.mark.slow
def test_same_samples_and_scores(both):
    """Forks share blocks and copy them on writing; sampling sees the same logits within its own margin."""
    plain, kernels = (llm.generate([prompt(13), prompt(6)], SAMPLED) for llm in both)
    assert tokens(kernels) == tokens(plain)
    plain_scores, scores = (llm.score([prompt(15)])[0] for llm in both)
    assert scores.tolist() == pytest.approx(plain_scores.tolist(), abs=1e-4)
    assert_clean(both[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"sliding_windows": (5,)},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1, "head_dim": 16},
        {"norm_topk_prob": False},
        {"hidden_size": 512, "head_dim": 128},
        {"qk_norm": "projection"},
        {"qk_norm": "projection", "clip_qkv": 0.5},
        {"rope": RopeConfig(partial_rotary_factor=0.5, interleaved=True)},
        {**LLAMA, "moe_layers": (False,)},
        GRANITE,
        {**GLM, "family": "dots1", "rope": RopeConfig(), "sliding_windows": (5,)},
        {
            "qk_norm": "projection",
            "rope": RopeConfig(partial_rotary_factor=0.5),
            "router": RouterConfig("sigmoid", True),
        },
        {"router": RouterConfig(correction_bias=True, norm_min=0.6), "rope": RopeConfig(interleaved=True)},
        {"router": RouterConfig(groups=4, top_groups=2, scaling=1.5), "norm_topk_prob": False},
        {"num_experts": 600, "num_experts_per_tok": 4, "moe_intermediate_size": 8},
        {"norm": "layer", "qk_norm": "none", "router": RouterConfig("sparsemixer"), "norm_topk_prob": False},
        {"router": RouterConfig(groups=4, top_groups=2, group_gate=True)},
    ],
    ids=[
        "window",
        "one query head a key head",
        "one key head",
        "weights as they are",
        "products in parts",
        "norms of all heads",
        "norms of all heads, clipped",
        "half of a head rotated, in pairs of neighbours",
        "dense, with biases",
        "factors",
        "sigmoid router of groups, window",
        "sigmoid router, norms of all heads, half of a head rotated",
        "softmax with a correction bias",
        "softmax of groups",
        "many experts",
        "layer norms, SparseMixer without a kernel",
        "two levels without a kernel",
    ],
)
def test_other_models(change, nothing_is_zero):
    plain, kernels = (llm.generate([prompt(17), prompt(4)], greedy(6)) for llm in engines(**change))
    assert tokens(kernels) == tokens(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        GLM,
        {**GEMMA, "moe_layers": (False,), "sliding_windows": (5,)},
    ],
    ids=["sigmoid router of groups, half of a head rotated", "norms with an offset, and after"],
)
def test_newer_families(change, nothing_is_zero):
    plain, kernels = (llm.generate([prompt(9)], greedy(5)) for llm in engines(**change))
    assert tokens(kernels) == tokens(plain)


@pytest.mark.slow
def test_routing_is_captured_and_replayed(nothing_is_zero):
    """The kernels' router has the plain one's experts; a trace runs again on kernels as it was recorded."""
    plain, kernels = (
        llm.variant(dataclasses.replace(llm.engine_config, capture_routing=True)) for llm in engines(**GLM)
    )
    traces, outs = [], []
    for llm, replayed in ((plain, False), (kernels, False), (kernels, True)):
        if replayed:
            llm.replay_routing(traces[1])
        outs.append(tokens(llm.generate([prompt(17), prompt(4)], greedy(6))))
        traces.append(llm.routing_capture())
        llm.reset_capture()
    assert outs[0] == outs[1] == outs[2]
    assert experts(traces[0]) == experts(traces[1])
    assert by_place(traces[1]) == by_place(traces[2])


DEEPSEEK = LATENT | {
    "family": "deepseek_v2", "head_dim": 16, "norm_topk_prob": False, "router": RouterConfig(),
    "latent": LatentConfig(kv_rank=24, rope_dim=8, nope_dim=8, value_dim=12),
}  # fmt: skip


@pytest.mark.parametrize(
    "change,cache,params",
    [
        (DENSE | {"moe_layers": (False,)}, "auto", greedy(7)),
        pytest.param({}, "auto", SAMPLED, marks=pytest.mark.slow),
        pytest.param({}, "int8", greedy(12), marks=pytest.mark.slow),
        pytest.param({"router": LATENT["router"]}, "auto", greedy(12), marks=pytest.mark.slow),
    ],
    ids=["dense", "experts, forks", "experts, int8", "sigmoid router of groups"],
)
def test_latents(change, cache, params):
    """Pages of keys alone: decodes beside chunks, forks that copy blocks."""
    config, quant = small_config(**DEEPSEEK | change), QuantConfig(kv_cache=cache)
    plain, kernels = (
        LLM(config, load_format="dummy", engine=dataclasses.replace(CONFIG, kernels=name), quant=quant)
        for name in ("xla", "pallas_triton")
    )
    prompts = [prompt(n, 3) for n in (11, 3, 16, 1, 9)]
    assert tokens(kernels.generate(prompts, params)) == tokens(plain.generate(prompts, params))
    segments = jax.tree.leaves(kernels.runner.pool.take(1), is_leaf=lambda x: isinstance(x, Segment))
    assert {segment.values for segment in segments} == {None}
    assert_clean(kernels)


EXPERTS = QuantRule("*.experts.*", "rtn", "mxfp4")


@pytest.mark.slow
@pytest.mark.parametrize("codes", [True, False])
def test_gpt_oss(tmp_path, codes):
    """Sinks, a window, biased experts with a clamped SwiGLU, in floats or on codes of MXFP4."""
    config = small_config(**SINKS, sliding_windows=(5,), hidden_size=64, moe_intermediate_size=64)
    directory, found = checkpoint(config, tmp_path), []
    for kernels in ("xla", "pallas_triton"):
        quant = QuantConfig(rules=[EXPERTS], implementation=kernels) if codes else None
        llm = LLM(directory, engine=dataclasses.replace(CONFIG, kernels=kernels), quant=quant)
        found.append(tokens(llm.generate([prompt(9)], greedy(5))))
        values = {r.key: r.value for r in llm.resolutions}
        assert values["engine.kernels"] == kernels
        if kernels != "xla":
            assert values["engine.moe.grouped_matmul"] == "pallas_triton"
            assert not codes or (values["quant.implementation"], values["quant.layout"]) == (kernels, "tiled")
    assert found[0] == found[1]


def test_the_choice_is_recorded(both):
    for llm, value in zip(both, ("xla", "pallas_triton"), strict=True):
        found = {r.key: r for r in llm.resolutions}
        assert found["engine.kernels"].value == value
        if value != "xla":
            assert found["engine.kernels"].reason == "asked for"
            assert found["engine.moe.grouped_matmul"].value == "pallas_triton"
            assert found["engine.moe.expert_layout"].value == "edf"


def test_the_step_calls_kernels_and_not_xla(both, monkeypatch):
    """What was asked for runs: norms, router, experts and attention, in the traced program."""
    called = []
    from jax.experimental import pallas as pl

    real = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **kw: called.append(kw["name"]) or real(*a, **kw))
    llm = LLM(
        small_config(), load_format="dummy", engine=dataclasses.replace(CONFIG, kernels="pallas_triton")
    )
    llm.generate([prompt(3)], greedy(2))
    parts = ("rms_norm_sum", "router", "paged_decode", "rope", "swiglu", "grouped_matmul", "permute")
    for part in (*parts, "paged_decode_reduce"):
        assert any(part in name for name in called), (part, sorted(set(called)))
    # Only the first layer's norm has no residual: those of heads are part of the write to the cache.
    assert llm.config.qk_norm == "head" and llm.config.num_layers == 1
    assert called.count("rms_norm") == called.count("rope_kv_write") > 0


@pytest.mark.parametrize(
    "engine,model,text",
    [
        (
            {"block_size": 12},
            {},
            r"engine.block_size=12 \(a power of two, at least 8\); use engine.kernels=xla",
        ),
        ({"block_size": 4}, {}, "engine.block_size=4"),
        ({}, {"head_dim": 12}, "head_dim=12"),
        ({}, {"num_experts": 4097}, r"2 of 4097 experts a token \(at most 16 of 4096\)"),
        ({}, LATENT, r"latents of kv_lora_rank=16 and qk_rope_head_dim=6 \(multiples of 8"),
        ({}, {"qk_norm": "rotated"}, "norms of queries and keys after rotary embedding"),
    ],
)
def test_what_kernels_do_not_take(engine, model, text):
    config = dataclasses.replace(CONFIG, kernels="pallas_triton", **engine)
    with pytest.raises(ConfigError, match=text):
        LLM(small_config(**model), load_format="dummy", engine=config)


def test_names():
    with pytest.raises(ConfigError, match=r"engine\.kernels: unknown value 'triton'"):
        EngineConfig(kernels="triton")
    with pytest.raises(ConfigError, match="a variant shares its weights"):
        LLM(small_config(), load_format="dummy", engine=CONFIG).variant(
            dataclasses.replace(CONFIG, kernels="pallas_triton")
        )
    assert MoeConfig(grouped_matmul="pallas_triton").grouped_matmul == "pallas_triton"
    assert jax.default_backend() != "cpu" or EngineConfig().kernels == "auto"
