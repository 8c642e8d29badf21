"""The routing trace costs nothing when it is off: what is not returned is not computed."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.config import MoeConfig
from moejax.moe import layer as layer_module
from tests.decoding import random_model

OPCODE = re.compile(r"= [^ ]+ ([a-z\-]+)\(")


def compile_model(config, moe, return_routing):
    graph, state = nnx.split(random_model(config, moe, seed=0))
    tokens = jnp.zeros((2, 8), jnp.int32)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, return_routing=return_routing))
    return run.lower(state, tokens).compile()


def operations(compiled) -> Counter:
    return Counter(OPCODE.findall(compiled.as_text()))


@pytest.mark.optimized
@pytest.mark.parametrize("execution", ["dense", "grouped"])
def test_without_trace_the_program_is_that_of_a_model_that_has_none(tiny_config, monkeypatch, execution):
    moe = MoeConfig(execution)
    off = compile_model(tiny_config, moe, return_routing=False)
    on = compile_model(tiny_config, moe, return_routing=True)

    class NoTrace(tuple):
        def __new__(cls, *_):
            return super().__new__(cls)

    # A layer that neither counts nor reports.
    monkeypatch.setattr(layer_module, "RoutingTrace", NoTrace)
    monkeypatch.setattr(layer_module, "expert_counts", lambda *_: None)
    bare = compile_model(tiny_config, moe, return_routing=False)

    assert operations(off) == operations(bare) and len(operations(off)) > 5
    assert off.cost_analysis()["flops"] == bare.cost_analysis()["flops"]
    assert off.cost_analysis()["bytes accessed"] == bare.cost_analysis()["bytes accessed"]
    assert off.memory_analysis().output_size_in_bytes == bare.memory_analysis().output_size_in_bytes
    # The comparison can tell: with the trace there is more to do and to return.
    assert on.cost_analysis()["bytes accessed"] > off.cost_analysis()["bytes accessed"]
    traced = (
        2 * tiny_config.num_layers * 8 * (tiny_config.num_experts + 2 * tiny_config.num_experts_per_tok) * 4
    )
    assert on.memory_analysis().output_size_in_bytes - off.memory_analysis().output_size_in_bytes >= traced


@pytest.mark.optimized
def test_asking_for_the_trace_does_not_change_the_logits(tiny_config):
    model = random_model(tiny_config, seed=0)
    graph, state = nnx.split(model)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 8), dtype=np.int32)
    off = jax.jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens)
    on, _ = jax.jit(lambda s, t: nnx.merge(graph, s)(t, return_routing=True))(state, tokens)
    np.testing.assert_allclose(off, on, rtol=0, atol=1e-5 * float(np.abs(on).max()))
