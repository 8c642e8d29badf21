"""The engine on a mesh of eight virtual devices gives what one device gives."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, MoeConfig, ParallelConfig, SamplingParams
from moejax.core.config import RouterConfig
from moejax.engine.step.sampler import SamplerMode
from tests.engine.mesh_models import ENGINE, FAMILIES, checkpoint, prompts
from tests.examples import slow_but

pytestmark = pytest.mark.multidevice

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_attention_ep2": {"ep": 2, "attention": "data"},
    "tp8": {"tp": 8},
    "ep8": {"ep": 8},
    "ep4_tp2": {"ep": 4, "tp": 2},
    "dp_attention_ep8": {"ep": 8, "attention": "data"},
    "dp_attention_ep4_tp2": {"ep": 4, "tp": 2, "attention": "data"},
    "dp2_ep2_tp2": {"dp": 2, "ep": 2, "tp": 2},
    "pp2_ep4": {"pp": 2, "ep": 4},
    "nodes2_ep8": {"ep": 8, "nodes": 2, "attention": "data", "exchange": "hierarchical"},
    "dp_attention_ep8_all_to_all": {"ep": 8, "attention": "data", "exchange": "all_to_all"},
    "dp_attention_ep8_allgather": {"ep": 8, "attention": "data", "exchange": "allgather"},
    "dp_attention_ep8_halves": {
        "ep": 8, "attention": "data", "exchange": "all_to_all", "dispatch_microbatches": 2,
        "overlap_shared": False,
    },
}  # fmt: skip

# A layout's sums run over up to eight parts in another order: with D, F and Dh·H of at most 64 terms, over
# three layers, the residual stream moves by some 10 roundings of 2^-24 (6e-7); logits are held to
# 1e-5 of their range.
RELATIVE = 1e-5

# More log-probabilities than tokens: those of all.
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=128)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def made(family: str, skewed: bool = False) -> Path:
        directory = tmp_path_factory.mktemp(f"{family}-{skewed}")
        return checkpoint(FAMILIES[family], directory, skewed=skewed)

    return made


@pytest.fixture(scope="session")
def single(model: Any) -> Any:
    """What one device gives: tokens, log-probabilities of the whole vocabulary, scores."""

    @functools.cache
    def run(family: str, skewed: bool, count: int) -> Any:
        return outcome(LLM(str(model(family, skewed)), engine=ENGINE), count)

    return run


def outcome(llm: LLM, count: int) -> Any:
    asked = prompts(count)
    done = llm.generate(asked, GREEDY)
    tokens = [out.outputs[0].token_ids for out in done]
    steps = [step.top for out in done for step in out.outputs[0].logprobs or []]
    every = range(llm.config.vocab_size)
    assert all(sorted(top) == list(every) for top in steps)
    top = [[values[token] for token in every] for values in steps]
    scores = llm.score([p for p in asked if len(p) > 1])
    return tokens, np.asarray(top), np.concatenate(scores)


def agree(got: Any, want: Any) -> None:
    assert got[0] == want[0]
    for a, b in zip(got[1:], want[1:], strict=True):
        assert np.abs(a - b).max() <= RELATIVE * np.abs(b).max()


def check(layout: str, family: str, model: Any, single: Any, *, skewed: bool = False, count: int = 10) -> LLM:
    llm = LLM(str(model(family, skewed)), engine=ENGINE, parallel=ParallelConfig(**LAYOUTS[layout]))
    agree(outcome(llm, count), single(family, skewed, count))
    llm.engine.scheduler.check_integrity()
    assert llm.stats()["used_blocks"] == 0
    return llm


# Each layout with another family; all of them with all are below.
@pytest.mark.parametrize(
    ("layout", "family", "skewed"),
    [
        pytest.param("tp8", "olmoe", False, marks=pytest.mark.slow),
        pytest.param("ep8", "qwen3_moe", False, marks=pytest.mark.slow),
        pytest.param("ep4_tp2", "qwen2_moe", False, marks=pytest.mark.slow),
        pytest.param("dp_attention_ep4_tp2", "deepseek_v3", False, marks=pytest.mark.slow),
        pytest.param("tp8", "minimax_m2", False, marks=pytest.mark.slow),
        pytest.param("ep4_tp2", "hunyuan_v1_moe", False, marks=pytest.mark.slow),
        pytest.param("tp8", "gemma3_text", False, marks=pytest.mark.slow),
        pytest.param("dp_attention_ep4_tp2", "llama", False, marks=pytest.mark.slow),
        pytest.param("ep4_tp2", "granitemoe", False, marks=pytest.mark.slow),
        ("dp2_ep2_tp2", "gpt_oss", False),
        pytest.param("dp_attention_ep8", "mixtral", False, marks=pytest.mark.slow),
        pytest.param("nodes2_ep8", "qwen3_moe", True, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_gives_what_one_device_gives(
    layout: str, family: str, skewed: bool, model: Any, single: Any
) -> None:
    check(layout, family, model, single, skewed=skewed)


@pytest.mark.slow
def test_fewer_requests_than_devices(model: Any, single: Any) -> None:
    check("dp_attention_ep8_all_to_all", "qwen2_moe", model, single, count=1)


@pytest.mark.slow
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_every_family(
    layout: str, family: str, skewed: bool, model: Any, single: Any
) -> None:
    check(layout, family, model, single, skewed=skewed)


@pytest.mark.parametrize("layout", slow_but([], ["dp_attention_ep2", "ep4_tp2", "dp_attention_ep4_tp2"]))
def test_sampling_forks_penalties_and_preemption_on_a_mesh(layout: str, model: Any) -> None:
    params = [
        SamplingParams(max_tokens=10, temperature=0.9, seed=5, n=3, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(
            max_tokens=6, temperature=0.7, top_p=0.9, seed=1, repetition_penalty=1.3, frequency_penalty=0.5,
            logit_bias={3: 2.0, 5: -100.0}, prompt_logprobs=2,
        ),
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    ]  # fmt: skip
    asked = prompts(6)
    wanted = [params[i % 3] for i in range(6)]
    scarce = dataclasses.replace(
        ENGINE, max_num_batched_tokens=8, block_size=4, num_blocks=13, token_buckets=[8], block_buckets=[13]
    )
    directory = str(model("qwen2_moe" if layout == "dp_attention_ep2" else "qwen3_moe"))
    found, prompt_logprobs = [], []
    for config in (None, ParallelConfig(**LAYOUTS[layout])):
        llm = LLM(directory, engine=scarce, parallel=config)
        # Else each mix of these in a step is a program.
        llm.runner.builder.warm_modes = [SamplerMode(greedy=False, filters=True, penalty=True, biases=128)]
        llm.runner.builder.warm_prompt_logprobs = [-1, 5]
        done = llm.generate(asked, wanted)
        entries = [[entry for entry in out.prompt_logprobs or [] if entry is not None] for out in done]
        found.append(
            (
                [[sample.token_ids for sample in out.outputs] for out in done],
                [[(entry.rank, list(entry.top)) for entry in mine] for mine in entries],
            )
        )
        prompt_logprobs.append([[entry.logprob for entry in mine] for mine in entries])
        llm.engine.scheduler.check_integrity()
        if config is None:  # as they are without penalties, biases and temperature
            prompt_logprobs.append([scores.tolist() for scores in llm.score(asked)])
    assert found[0] == found[1]
    every, scores, on_mesh = prompt_logprobs
    assert [len(mine) for mine in every] == [len(ids) - 1 if i % 3 < 2 else 0 for i, ids in enumerate(asked)]
    for mine, scored, theirs in zip(every, scores, on_mesh, strict=True):
        if mine:
            assert np.abs(np.subtract([mine, theirs], scored)).max() <= RELATIVE * np.abs(scored).max()


@pytest.mark.slow
def test_routing_counts_and_drops_are_the_whole_batchs(model: Any) -> None:
    """Counts are summed over groups; with too little room what is dropped is counted, else nothing is."""
    asked, params = prompts(10), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    directory = str(model("mixtral", True))

    def run(**parallel: Any) -> LLM:
        llm = LLM(directory, engine=ENGINE, parallel=ParallelConfig(**parallel))
        llm.generate(asked, params, record_routing=True)
        return llm

    alone, wide = run(), run(ep=8, attention="data", exchange="all_to_all")
    # Which phase a token counts for depends on what else is in its step, and groups are stepped together.
    totals = [sum(llm.routing.counts.values()) for llm in (wide, alone)]
    assert np.sum(totals[1]) > 0
    np.testing.assert_array_equal(*totals)
    assert wide.routing.overflow == alone.routing.overflow == {"dropped": 0, "rerouted": 0}
    # The skewed router sends all to two ranks of eight: four times the mean.
    bounded = run(ep=8, attention="data", exchange="all_to_all", exchange_capacity=1.0)
    assert bounded.routing.overflow["dropped"] > 0


def test_a_step_does_not_compile_after_warmup(model: Any) -> None:
    llm = LLM(
        str(model("mixtral")),
        engine=EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, block_size=8, num_blocks=8,
                            seq_buckets=[2], token_buckets=[16], block_buckets=[8], strict_compile=True),
        parallel=ParallelConfig(ep=8, attention="data"),
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    llm.warmup(max_total_len=24, sampling_params=[greedy])
    llm.generate(prompts(9), greedy)
    assert not llm.ledger.recompiles


def test_a_step_that_counts_loads_does_not_compile_after_warmup(model: Any) -> None:
    llm = LLM(str(model("mixtral")), engine=dataclasses.replace(ENGINE, strict_compile=True))
    window = llm.track_load(window_steps=8)
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    llm.warmup(max_total_len=24, sampling_params=[greedy])
    assert not window.sum().any()  # a rehearsal is no load
    llm.generate(prompts(3), greedy)
    assert not llm.ledger.recompiles and window.sum().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2, "attention": "data"}])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "gpt_oss"])
def test_kernels_on_a_mesh(family: str, parallel: dict[str, Any], model: Any, single: Any) -> None:
    """Interpreted; each device runs them on its own heads and experts. OLMoE's norm over all heads is within
    the write to the cache only where a device has them all; of gpt-oss's down biases in parts one has all."""
    config = dataclasses.replace(
        ENGINE, max_num_seqs=2, seq_buckets=[2], token_buckets=[16], max_num_batched_tokens=16,
        kernels="pallas_triton", moe=MoeConfig(),
    )  # fmt: skip
    asked, greedy = prompts(2), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    directory = str(model(family))
    plain = LLM(directory, engine=ENGINE)
    kernels = LLM(directory, engine=config, parallel=ParallelConfig(**parallel))
    found = [[o.outputs[0].token_ids for o in llm.generate(asked, greedy)] for llm in (plain, kernels)]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2, "attention": "data"}])
def test_kernels_of_latents_on_a_mesh(parallel: dict[str, Any], tmp_path: Path) -> None:
    """Every device has the latents whole, and queries of its own heads, or of all."""
    known = FAMILIES["deepseek_v2"]
    assert known.latent is not None
    wide = dataclasses.replace(known.latent, rope_dim=8)  # as kernels take them
    config = known.replace(latent=wide, head_dim=16, router=RouterConfig())
    directory = str(checkpoint(config, tmp_path))
    engine = dataclasses.replace(
        ENGINE, max_num_seqs=2, seq_buckets=[2], token_buckets=[16], max_num_batched_tokens=16,
        kernels="pallas_triton", moe=MoeConfig(),
    )  # fmt: skip
    asked, greedy = prompts(2), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    llms = LLM(directory, engine=ENGINE), LLM(directory, engine=engine, parallel=ParallelConfig(**parallel))
    found = [[o.outputs[0].token_ids for o in llm.generate(asked, greedy)] for llm in llms]
    assert found[0] == found[1]


def test_a_kernel_that_a_split_axis_rules_out_is_named(model: Any) -> None:
    """OLMoE's QK norm is over the whole projection: asked for by name or not, what ran is in the record."""
    engine = dataclasses.replace(ENGINE, kernels="pallas_triton", moe=MoeConfig())
    directory = str(model("olmoe"))
    found = [
        {r.key: r.value for r in LLM(directory, engine=engine, parallel=ParallelConfig(**p)).resolutions}
        for p in ({"tp": 2}, {"ep": 2, "attention": "data"})
    ]
    assert found[0]["engine.kernels"] == found[1]["engine.kernels"] == "pallas_triton"
    assert found[0]["engine.kernels (QK norm)"] == "xla" and "engine.kernels (QK norm)" not in found[1]
