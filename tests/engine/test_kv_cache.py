"""A quantized key/value cache gives what plain attention over the same rounded keys and values gives.

Rounding is not continuous: where a key computed in another order lies on the edge between two codes, it comes
out one code apart. So of two computations most results are equal but for rounding, and none is further off
than the cache's dtype moves it.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moejax.cache.pool import block_bytes
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.engine.step.ledger import CompileLedger
from tests.engine.mesh_models import ENGINE, FAMILIES, checkpoint, prompts
from tests.engine.paged import REDUCTIONS, SCARCE, TIGHT, OneByOne, assert_clean, greedy, prompt, tokens
from tests.engine.tiny import main_config, small_config
from tests.examples import slow_but
from tests.model_shapes import LATENT
from tests.numerics import assert_close, tolerance
from tests.plain.contiguous import ContiguousEngine

DTYPES = ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow), "float8_e5m2", "int4"]
DTYPES_ALONE = slow_but(["int4"], ["int8", "float8_e4m3fn", "float8_e5m2", "int4"])
PROMPTS = [prompt(n, 3) for n in (11, 3, 16, 1, 9, 14)]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=7, seed=5, n=2, ignore_eos=True)
STATIC = dataclasses.replace(SCARCE, batching="static")


def quantized(cache: str, engine: EngineConfig = SCARCE, **model: Any) -> LLM:
    return LLM(small_config(**model), load_format="dummy", engine=engine, quant=QuantConfig(kv_cache=cache))  # type: ignore[arg-type]


class Twin(OneByOne):
    """Each sample alone, over a float cache of rounded keys and values."""

    def __init__(self, llm: LLM, dtype: str) -> None:
        super().__init__(llm.model)
        self._engine = ContiguousEngine(llm.model, CompileLedger(), dtype)


@functools.cache
def pair(dtype: str) -> tuple[LLM, Twin]:
    llm = quantized(dtype)
    return llm, Twin(llm, dtype)


def assert_same_but_for_ties(got: list[RequestOutput], want: list[RequestOutput], bound: float) -> None:
    """Greedy tokens equal to those of `want`, whose two best lie within `bound` where a sample first differs;
    most samples do nowhere."""
    ties = 0
    for (a,), (b,) in zip((out.outputs for out in got), (out.outputs for out in want), strict=True):
        for token, other, scored in zip(a.token_ids, b.token_ids, b.logprobs or (), strict=True):
            if token != other:
                best, second = sorted(scored.top.values(), reverse=True)
                assert token in scored.top and best - second <= bound
                ties += 1
                break
    assert ties <= len(got) // 4


def assert_same_but_for_codes(got: np.ndarray, want: np.ndarray, plain: np.ndarray, limit: float) -> None:
    """Most entries within `limit` of their range; all within what the dtype does to `plain`."""
    got, want, plain = (np.asarray(x, np.float64) for x in (got, want, plain))
    off = np.abs(got - want)
    assert np.isfinite(got).all() and got.shape == want.shape
    assert (off <= limit * np.abs(want).max()).mean() > 0.5
    moved = np.abs(want - plain).max()
    assert moved > 10 * limit * np.abs(want).max(), "else the cache is not quantized"
    assert off.max() <= moved


@pytest.mark.parametrize("dtype", slow_but(["int8"], ["int8", "float8_e4m3fn", "float8_e5m2", "int4"]))
def test_chunks_preemption_and_forks_give_the_twins_tokens(dtype: str) -> None:
    """Codes written by chunks and by decodes, written again after preemption, copied for forks."""
    llm, twin = pair(dtype)
    outs = llm.generate(PROMPTS, greedy(12))
    assert tokens(outs) == [[twin.steps(ids, greedy(12))[0]] for ids in PROMPTS]
    assert llm.stats()["preemptions"] > 0
    sampled = llm.generate(PROMPTS[:3], SAMPLED)
    assert tokens(sampled) == [twin.samples(ids, SAMPLED) for ids in PROMPTS[:3]]
    assert_clean(llm)


@pytest.mark.parametrize("dtype", DTYPES_ALONE)
def test_scores_are_the_twins(dtype: str) -> None:
    llm, twin = pair(dtype)
    plain = OneByOne(llm.model)
    every = [ids for ids in PROMPTS if len(ids) > 1]
    got, want = np.concatenate(llm.score(every)), np.concatenate([twin.score(ids) for ids in every])
    assert_same_but_for_codes(
        got, want, np.concatenate([plain.score(ids) for ids in every]), tolerance(*REDUCTIONS)
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"sliding_windows": (5,)}, marks=pytest.mark.slow),
        pytest.param({"num_kv_heads": 1, "head_dim": 16, "sliding_windows": (7,)}, marks=pytest.mark.slow),
        pytest.param({"num_kv_heads": 4, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param(LATENT, marks=pytest.mark.slow),  # tests/engine/test_latent_forms.py has it
    ],
    ids=["window", "one key head, window", "bfloat16", "latent"],
)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_other_models(change: dict[str, Any], dtype: str) -> None:
    """In static batches, too."""
    if dtype == "int4" and change is LATENT:
        with pytest.raises(ConfigError, match="int4 does not go with latents"):
            quantized(dtype, **change)
        return
    llm = quantized(dtype, **change)
    twin = Twin(llm, dtype)
    for engine in (llm, llm.variant(STATIC)):
        outs = engine.generate(PROMPTS[:4], greedy(8))
        assert tokens(outs) == [[twin.steps(ids, greedy(8))[0]] for ids in PROMPTS[:4]]


def test_memory_is_what_is_held() -> None:
    """Codes and scales; blocks by memory; the decision among the others."""
    llm, _ = pair("int8")
    plain = LLM(small_config(), load_format="dummy", engine=SCARCE)
    for each in (llm, plain):
        each.generate([prompt(9)], greedy(2))
    model = llm.config
    held = {
        name: engine.stats()["kv_cache_allocated_bytes"]
        for name, engine in (("int8", llm), ("float32", plain))
    }
    assert held == {name: 12 * block_bytes(model, SCARCE.block_size, name) for name in held}
    assert held["int8"] == sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.pool._segments))
    assert held["float32"] / held["int8"] == 4 * model.head_dim / (model.head_dim + 4)
    found = {r.key: r.value for r in llm.resolutions}
    assert (found["quant.kv_cache"], llm.stats()["cache_dtype"]) == ("int8", "int8")
    memory = dataclasses.replace(
        SCARCE, num_blocks=None, block_buckets=None, kv_cache_memory_gb=10 * held["float32"] / 12 / 1e9
    )
    sizes = [each.variant(memory).stats()["num_blocks"] for each in (plain, llm)]
    assert sizes == [10, 10 * 32 // 12]


def test_nothing_is_compiled_after_warmup() -> None:
    llm = pair("int8")[0].variant(dataclasses.replace(SCARCE, strict_compile=True))
    params = [greedy(9), dataclasses.replace(greedy(9), n=2)]
    llm.warmup(max_total_len=25, sampling_params=params)
    compiled = llm.stats()["compiles"]
    for asked in params:
        llm.generate(PROMPTS, asked)
    stats = llm.stats()
    assert (stats["compiles"], stats["recompiles_after_warmup"]) == (compiled, 0)
    assert stats["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_kernels_give_the_same(dtype: str) -> None:
    """The GPU kernels, interpreted, with codes and scales of their own making."""
    config = dataclasses.replace(TIGHT, block_size=8, num_blocks=12, block_buckets=None, max_model_len=48)
    plain, kernels = (
        quantized(dtype, dataclasses.replace(config, kernels=name)) for name in ("xla", "pallas_triton")
    )
    # Kernels multiply codes by queries and weights rounded to float16: over Dh terms, then over the keys.
    bound = tolerance(8, 16, dtype="float16")
    outs = [llm.generate(PROMPTS, greedy(20, logprobs=2)) for llm in (plain, kernels)]
    assert_same_but_for_ties(outs[1], outs[0], bound)
    assert kernels.stats()["preemptions"] > 0
    forks = [llm.generate(PROMPTS[:2], SAMPLED) for llm in (plain, kernels)]
    assert tokens(forks[1]) == tokens(forks[0])
    every = [ids for ids in PROMPTS if len(ids) > 1]
    unquantized = np.concatenate([OneByOne(plain.model).score(ids) for ids in every])
    scores = [np.concatenate(llm.score(every)) for llm in (kernels, plain)]
    assert_close(*scores, bound)
    assert np.abs(scores[0] - scores[1]).max() <= np.abs(scores[1] - unquantized).max()
    assert kernels.runner.pool._segments[0][0].keys.dtype == jax.numpy.dtype(dtype)
    assert_clean(kernels)


# -- meshes --------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp8": {"tp": 8},
    "dp_attention_ep4_tp2": {"ep": 4, "tp": 2, "attention": "data"},
    "pp2_ep4": {"pp": 2, "ep": 4},
}
# As in test_mesh: sums of up to 64 terms in other orders, over three layers.
RELATIVE = 1e-5
FORKS = SamplingParams(max_tokens=8, temperature=0.9, seed=5, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(FAMILIES["qwen3_moe"], tmp_path_factory.mktemp("kv"))


@functools.cache
def outcome(directory: Path, dtype: str, layout: str | None) -> Any:
    """Greedy tokens, samples, scores, and the bytes that were held."""
    parallel = ParallelConfig(**LAYOUTS[layout]) if layout else None
    quant = QuantConfig(kv_cache=dtype)  # type: ignore[arg-type]
    llm = LLM(str(directory), engine=ENGINE, parallel=parallel, quant=quant)
    asked = prompts(6)
    done = [llm.generate(asked, params) for params in (greedy(8), FORKS)]
    scores = np.concatenate(llm.score([ids for ids in asked if len(ids) > 1]))
    llm.engine.scheduler.check_integrity()
    return [tokens(outs) for outs in done], scores, llm.stats()["kv_cache_allocated_bytes"]


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("dp_attention_ep4_tp2", "int8"),
        ("tp8", "float8_e4m3fn"),
        ("pp2_ep4", "int8"),
        ("dp_attention_ep4_tp2", "int4"),
    ],
)
def test_a_mesh_gives_what_one_device_gives(layout: str, dtype: str, on_disk: Path) -> None:
    got, want = outcome(on_disk, dtype, layout), outcome(on_disk, dtype, None)
    assert got[0] == want[0]
    assert_same_but_for_codes(got[1], want[1], outcome(on_disk, "auto", None)[1], RELATIVE)
    model: ModelConfig = FAMILIES["qwen3_moe"]
    groups = 4 if layout.startswith("dp") else 1
    blocks = groups * (ENGINE.num_blocks or 0)
    assert got[2] == blocks * block_bytes(model, ENGINE.block_size, dtype)


@pytest.mark.slow
def test_two_layers_stay_close_to_the_twin() -> None:
    """A second layer's keys depend on what the first one's codes gave."""
    llm = LLM(main_config(), load_format="dummy", engine=SCARCE, quant=QuantConfig(kv_cache="float8_e4m3fn"))
    twin = Twin(llm, "float8_e4m3fn")
    outs = llm.generate(PROMPTS[:4], greedy(12))
    assert tokens(outs) == [[twin.steps(ids, greedy(12))[0]] for ids in PROMPTS[:4]]
