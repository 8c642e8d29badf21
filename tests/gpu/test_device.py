"""On a CUDA device the XLA paths give what the CPU gives. `make gpu-test` runs it, else it is skipped."""

import jax
import numpy as np
import pytest

import moejax
from moejax.core.config import EngineConfig
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_products():
    """float32 products without TF32, so that a float32 tolerance applies."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(
    "moe", [MoeConfig(), MoeConfig(grouped_matmul="blocks_uniform", block_rows=4)], ids=["auto", "loop"]
)
def test_grouped_experts_equal_dense(tiny_config, moe):
    tokens = np.random.default_rng(0).integers(0, tiny_config.vocab_size, (2, 9))
    dense = np.asarray(Decoder(tiny_config, moe=MoeConfig(execution="dense"), seed=0)(tokens))
    grouped = np.asarray(Decoder(tiny_config, moe=moe, seed=0)(tokens))
    np.testing.assert_allclose(grouped, dense, rtol=0, atol=2e-5 * np.abs(dense).max())


def test_same_greedy_tokens_as_on_the_host():
    """The shipped model in float32, on the device and on the CPU that is beside it."""
    params = moejax.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = ["The function returns", "class Path"]
    engine = EngineConfig(moe=MoeConfig(expert_layout="edf"))
    on_device = moejax.LLM("tiny", dtype="float32", engine=engine).generate(prompts, params)
    with jax.default_device(jax.devices("cpu")[0]):
        on_host = moejax.LLM("tiny", dtype="float32", engine=engine).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in on_device] == [o.outputs[0].token_ids for o in on_host]
