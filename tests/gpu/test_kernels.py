"""On a CUDA device the engine on compiled kernels gives what XLA gives there. `make gpu-test` runs it."""

import dataclasses

import jax
import pytest

from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from tests.engine.paged import greedy, prompt, tokens
from tests.engine.tiny import small_config
from tests.numerics import relative_l2, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no CUDA device"),
]
ENGINE = EngineConfig(
    compile_cache=False,
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    block_size=16,
    num_blocks=24,
    seq_buckets=[4],
    token_buckets=[32],
)


def engine(kernels: str) -> EngineConfig:
    return dataclasses.replace(ENGINE, kernels=kernels)


@pytest.fixture(autouse=True)
def exact_products():
    """float32 products without TF32, so that greedy tokens can be compared."""
    with jax.default_matmul_precision("highest"):
        yield


def test_auto_takes_the_kernels():
    llm = LLM(small_config(), load_format="dummy", dtype="float32", engine=ENGINE)
    assert {r.key: r.value for r in llm.resolutions}["engine.kernels"] == "pallas_triton"


def test_same_greedy_tokens_as_xla():
    """Chunks, decodes beside them, and more requests than fit."""
    prompts = [prompt(n, 3) for n in (40, 3, 17, 1, 64, 31)]
    both = [
        LLM(small_config(), load_format="dummy", dtype="float32", engine=engine(kernels))
        for kernels in ("xla", "pallas_triton")
    ]
    plain, ours = (llm.generate(prompts, greedy(24)) for llm in both)
    assert tokens(ours) == tokens(plain)


# What a number goes through in bfloat16 in one layer: norm, projection, head norm, rotation, attention's
# weights and result, projection, sum; norm, gate and up, down, combination, sum.
ROUNDINGS = 13


def test_the_shipped_model_in_bfloat16():
    """Rounding may part two greedy continuations, but the prompt's log-probabilities stay close."""
    text = "The function returns the number of items in the sequence."
    scores, layers = [], 0
    for kernels in ("xla", "pallas_triton"):
        llm = LLM("tiny", dtype="bfloat16", engine=EngineConfig(kernels=kernels))
        ids = llm.generate([text], SamplingParams(max_tokens=1, temperature=0.0))[0].prompt_token_ids
        scores.append(llm.score([ids])[0])
        layers = llm.config.num_layers
    # Sums are in float32; what parts the two are the roundings to bfloat16 on the way through the layers,
    # which grow as a sum of that many terms. `tolerance` is for the largest of thousands of elements, about
    # twice the norm that is compared here. A log-probability errs as its logit does, and is of its size.
    assert relative_l2(scores[1], scores[0]) < tolerance(ROUNDINGS * layers, dtype="bfloat16") / 2
