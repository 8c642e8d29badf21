"""`engine.moe.routing` in the engine: the experts and log-probabilities that the model gives by itself."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import (
    LLM,
    EngineConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    PrefixCacheConfig,
    SamplingParams,
)
from moejax.core.errors import ConfigError, RequestError
from moejax.core.moe import RoutingPolicy
from moejax.core.scheduling import SpeculationConfig
from moejax.engine.routing.load_bias import moved
from moejax.models.decoder import Decoder
from tests.decoding import forward
from tests.examples import slow_but
from tests.model_shapes import EIGHT_WAY, LATENT, ONE_LAYER, SINKS, TWO_LAYERS
from tests.numerics import assert_close, tolerance

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[16], block_buckets=[12], max_model_len=40,
    max_num_seqs=4, block_size=4, max_num_batched_tokens=16, autotune="rules", capture_routing=True,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 11 + i, 13, 17, 19 + i, 23, 29, 31, 37] for i in range(4)]
POLICIES = {
    "top_p": RoutingPolicy("top_p", threshold=0.4),
    "top_p_of_six": RoutingPolicy("top_p", threshold=0.7, max_experts=6),
    "two": RoutingPolicy(max_experts=2),
    "confidence": RoutingPolicy("confidence", threshold=0.3),
    "ratio": RoutingPolicy("ratio", threshold=0.6),
    "batch": RoutingPolicy("batch"),
}
WIDE = TWO_LAYERS.replace(num_experts_per_tok=4)
FAMILIES = {
    "gqa": WIDE,
    "latents": ONE_LAYER.replace(num_experts_per_tok=4, **LATENT),
    "windows_with_sinks": WIDE.replace(**SINKS, sliding_windows=(5, None)),
}


def engine(config: ModelConfig, policy: RoutingPolicy, **options: Any) -> LLM:
    parallel, moe = options.pop("parallel", None), MoeConfig(routing=policy, **options.pop("moe", {}))
    made = dataclasses.replace(ENGINE, moe=moe, **options)
    return LLM(config, load_format="dummy", seed=0, parallel=parallel, engine=made)


def scored(model: Decoder, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The model's own log-probabilities of tokens after the first `[T - 1]`, and its experts `[L, T, k]`."""
    logits, traces = forward(model, np.array([tokens]))
    told = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))[np.arange(len(tokens) - 1), tokens[1:]]
    return told, np.stack([np.asarray(trace.ids[0]) for trace in traces if trace is not None])


@pytest.mark.parametrize(
    ("family", "name"),
    slow_but(
        [("gqa", "top_p_of_six")],
        # The latents' router has groups, of which a token's hold four experts.
        [
            (family, name)
            for family in FAMILIES
            for name in POLICIES
            if (family, name) != ("latents", "top_p_of_six")
        ],
    ),
)
def test_what_the_model_gives_with_the_same_policy(family: str, name: str) -> None:
    """Log-probabilities of a prompt that is one step; token by token also those of outputs, and routing."""
    policy, tol = POLICIES[name], tolerance(32, 32, 32)
    model = Decoder(FAMILIES[family], moe=MoeConfig(routing=policy, expert_layout="efd"), seed=0)
    with engine(FAMILIES[family], policy) as llm:
        told, _ = scored(model, PROMPTS[0])
        assert_close(llm.score([PROMPTS[0]])[0], told, tol)
        assert np.abs(told - scored(Decoder(FAMILIES[family], seed=0), PROMPTS[0])[0]).max() > 100 * tol
        llm.routing_capture()
        outputs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, logprobs=0))
        capture = llm.routing_capture()
        E = llm.config.num_experts
        assert (capture.ids == E).any() or name in ("batch", "two")
        assert capture.ids.shape[-1] == llm.config.num_experts_per_tok == (policy.max_experts or 4)
        for output in () if policy.by_batch else outputs:
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            told, ids = scored(model, tokens)
            assert_close([each.logprob for each in output.outputs[0].logprobs], told[8:], tol)
            mine = capture.request == int(output.request_id)
            for row, position in zip(capture.ids[mine], capture.position[mine], strict=True):
                assert np.array_equal(row, ids[:, position])


@pytest.mark.slow
def test_a_step_visits_only_what_some_token_needs_in_any_case() -> None:
    with engine(WIDE, RoutingPolicy("batch")) as llm:
        llm.generate(PROMPTS, GREEDY)
        capture = llm.routing_capture()
    with engine(WIDE, RoutingPolicy()) as llm:
        llm.generate(PROMPTS, GREEDY)
        plain = llm.routing_capture()
    E, hits = WIDE.num_experts, []
    for trace in (capture, plain):
        by_step = [trace.ids[trace.step == step] for step in np.unique(trace.step)]
        hits.append(np.mean([len(np.setdiff1d(step[:, layer], [E])) for step in by_step for layer in (0, 1)]))
        if trace is capture:  # the first place of some token has every expert that any place has
            for step in by_step:
                for layer in (0, 1):
                    assert set(step[:, layer].ravel()) - {E} <= set(step[:, layer, 0])
    assert hits[0] < 0.9 * hits[1]


@pytest.mark.parametrize("overlap", slow_but([True], [False, True]))
def test_the_bias_follows_the_steps_loads(overlap: bool) -> None:
    policy, counted = RoutingPolicy("bias", rate=0.05), []
    with engine(WIDE, policy, overlap=overlap, strict_compile=True) as llm:
        llm.warmup(max_total_len=24, sampling_params=[GREEDY, dataclasses.replace(GREEDY, prompt_logprobs=0)])
        routing = llm.routing
        step = routing.listener

        def listen(counts: np.ndarray) -> None:
            counted.append(counts.copy())
            step(counts)

        routing.listener = listen
        llm.generate(PROMPTS, GREEDY)
        routers = [layer.moe.router for layer in llm.model.in_order() if layer.moe is not None]
        expected = np.zeros((2, WIDE.num_experts), np.float32)
        for counts in counted:
            expected = moved(expected, counts, policy.rate)
        biases = np.stack([np.asarray(router.load_bias[...]) for router in routers])
        assert len(counted) >= 6 and np.array_equal(biases, expected) and biases.any()
        model = Decoder(WIDE, moe=MoeConfig(routing=policy, expert_layout="efd"), seed=0)
        before, _ = scored(model, PROMPTS[0])
        for layer, bias in zip(model.in_order(), biases, strict=True):
            layer.moe.router.load_bias.set_value(jnp.asarray(bias))
        told, _ = scored(model, PROMPTS[0])
        assert_close(llm.score([PROMPTS[0]])[0], told, tolerance(32, 32, 32))
        assert not np.allclose(told, before, atol=1e-3)


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("name", ["top_p", "top_p_of_six", "ratio", "bias"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_on_meshes(layout: dict[str, int], name: str) -> None:
    policy = POLICIES.get(name, RoutingPolicy("bias", rate=1e-4))
    shape, found = EIGHT_WAY.replace(num_experts_per_tok=4), []
    for parallel in (ParallelConfig(), ParallelConfig(**layout)):
        with engine(shape, policy, parallel=parallel, overlap=False) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("batch", {"deterministic": "tiles"}, "routing.method=batch: who is chosen depends on the batch"),
        ("bias", {"prefix_cache": PrefixCacheConfig(enabled=True)}, "routing.method=bias: who is chosen"),
        ("batch", {"speculation": SpeculationConfig(method="ngram", k=2)}, "engine.speculation.method=ngram"),
        (
            RoutingPolicy("top_p", max_experts=9),
            {},
            "max_experts=9: num_experts_per_tok 9 exceeds num_experts 8; give fewer",
        ),
        ("batch", {"parallel": ParallelConfig(ep=2)}, "which experts on several devices do not see"),
    ],
)
def test_what_does_not_go_together(policy: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(WIDE, policy if isinstance(policy, RoutingPolicy) else RoutingPolicy(policy), **options)


def test_neither_interrupted_nor_resumed() -> None:
    with engine(WIDE, RoutingPolicy("batch")) as llm, pytest.raises(RequestError, match="routing by batch"):
        llm.interrupt("0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top_p", "top_p_of_six", "batch", "bias"])
def test_with_gpu_kernels(name: str) -> None:
    """Interpreted: the experts' kernels leave out what a policy leaves out."""
    policy, found = POLICIES.get(name, RoutingPolicy("bias", rate=0.05)), []
    for kernels in ("xla", "pallas_triton"):
        with engine(WIDE, policy, kernels=kernels, overlap=False, block_size=8) as llm:
            outputs = llm.generate(PROMPTS[:2], dataclasses.replace(GREEDY, max_tokens=4))
            found.append(([list(o.outputs[0].token_ids) for o in outputs], llm.routing_capture().ids))
    assert found[0][0] == found[1][0] and np.array_equal(found[0][1], found[1][1])
