"""What tracing costs: a routing trace nothing when it is off, equal layers no more than one."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.bench.profile.program import read_program
from moejax.core.moe import MoeConfig
from moejax.models import decoder
from moejax.moe import layer as layer_module
from tests.decoding import random_model
from tests.examples import slow_but

OPCODE = re.compile(r"= [^ ]+ ([a-z\-]+)\(")


def compile_model(config, moe, return_routing):
    graph, state = nnx.split(random_model(config, moe, seed=0))
    tokens = jnp.zeros((2, 8), jnp.int32)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, return_routing=return_routing))
    return run.lower(state, tokens).compile()


def operations(compiled) -> Counter:
    return Counter(OPCODE.findall(compiled.as_text()))


@pytest.mark.optimized
@pytest.mark.parametrize("execution", slow_but(["grouped"], ["dense", "grouped"]))
def test_without_trace_the_program_is_that_of_a_model_that_has_none(tiny_config, monkeypatch, execution):
    moe = MoeConfig(execution)
    off = compile_model(tiny_config, moe, return_routing=False)
    on = compile_model(tiny_config, moe, return_routing=True)

    # A layer that neither counts nor reports.
    monkeypatch.setattr(layer_module, "RoutingTrace", lambda *_: ())
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


@pytest.mark.parametrize("kind", ["sliding_windows", "linear_layers"])
def test_equal_layers_are_traced_and_lowered_once(tiny_config, monkeypatch, kind):
    """Seven layers of three kinds: the first, which has no residual; with a window, or a state; without."""
    lists = {"sliding_windows": (None,) * 7, "linear_layers": ()}
    lists[kind] = (
        (None, 4, None, 4, None, 4, None) if kind == "sliding_windows" else (False, True) * 3 + (False,)
    )
    config = tiny_config.replace(num_layers=7, moe_layers=(True,) * 7, **lists)
    graph, state = nnx.split(decoder.Decoder(config))
    traced, call = [], decoder.DecoderLayer.run
    monkeypatch.setattr(decoder.DecoderLayer, "run", lambda *args: (traced.append(1), call(*args))[1])
    for programs in (1, 2):  # no trace is another program's, which may have been made for another platform
        run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, return_routing=True))
        text = run.lower(state, jax.ShapeDtypeStruct((2, 8), jnp.int32)).as_text()
        assert len(traced) == 3 * programs
        assert text.count("func.func private @decoder_layer") == 3
        assert text.count("call @decoder_layer") == 7


@pytest.mark.optimized
@pytest.mark.parametrize("execution", slow_but(["grouped"], ["dense", "grouped"]))
def test_layers_traced_once_give_the_program_of_layers_traced_one_by_one(tiny_config, monkeypatch, execution):
    """Operations, floating-point work, memory and bits, and the layer and operation that a profile reads."""
    config = tiny_config.replace(num_layers=3, sliding_windows=(None,) * 3, moe_layers=(True,) * 3)

    def program():
        compiled = compile_model(config, MoeConfig(execution), return_routing=True)
        read = read_program("", True, compiled.as_text())
        # XLA shares a few broadcasts among layers, which are then one's or the other's.
        places = Counter(
            (line.opcode, place.operation, None if line.opcode == "fusion" else place.layer)
            for name, line in read.instructions.items()
            if line.opcode in ("dot", "fusion", "while", "custom-call") and (place := read.places[name])
        )
        memory = compiled.memory_analysis()
        sizes = memory.temp_size_in_bytes, memory.output_size_in_bytes, compiled.cost_analysis()["flops"]
        return operations(compiled), places, sizes, compiled

    once = program()
    monkeypatch.setattr(decoder, "_traced_once", lambda: decoder.DecoderLayer.run)
    apart = program()
    kept = [{name: n for name, n in side[0].items() if name != "constant"} for side in (once, apart)]
    assert kept[0] == kept[1] and once[1:3] == apart[1:3]
    assert {layer for *_, layer in once[1]} >= set(range(config.num_layers))
    state = nnx.split(random_model(config, MoeConfig(execution), seed=0))[1]
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    results = [jax.tree.leaves(side[3](state, tokens)) for side in (once, apart)]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
