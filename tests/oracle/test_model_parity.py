"""Whole models against Hugging Face transformers: logits, routing and greedy tokens (invariant 1)."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from moejax.checkpoint.hf import load_pretrained
from moejax.core.config import RouterConfig
from moejax.core.moe import MoeConfig
from moejax.nn.param import num_params
from tests.decoding import cached_logits, forward, prefill_and_greedy
from tests.examples import in_turns, slow_but
from tests.numerics import assert_close, relative_l2
from tests.oracle import hf
from tests.oracle.cases import CASES, DENSE

pytestmark = pytest.mark.oracle

NAMES = [case.name for case in CASES]
ROUTED = [case.name for case in CASES if case.family not in DENSE]
ONE_BY_ONE = [name for name in NAMES if "dynamic" not in name and "past-its" not in name]
# The limit on each logit, and a stricter bound on the whole: two layers in float32 measure at most 2e-6.
LOGITS_LIMIT, L2_LIMIT = 1e-4, 1e-5
STEPS = 32

# Capacity 64: room for every assignment (the layer caps it at one row a token), so nothing may overflow.
EXECUTIONS = {
    "grouped": MoeConfig(execution="grouped"),
    "grouped-blocks-of-3": MoeConfig(execution="grouped", block_rows=3),
    "grouped-transposed": MoeConfig(execution="grouped", expert_layout="efd"),
    "ragged_dot": MoeConfig(execution="grouped", grouped_matmul="ragged_dot"),
    "dense": MoeConfig(execution="dense"),
    "capacity": MoeConfig(execution="capacity", capacity_factor=64.0),
    "capacity-reroute": MoeConfig(execution="capacity", capacity_factor=64.0, overflow="reroute"),
}


def check_logits(ours, theirs):
    # A flat reference would make any answer close.
    assert theirs.std() > 0.5
    assert_close(ours, theirs, LOGITS_LIMIT)
    assert relative_l2(ours, theirs) <= L2_LIMIT


@pytest.mark.parametrize(("name", "execution"), in_turns([(name,) for name in NAMES], [*EXECUTIONS]))
def test_logits(pair, name, execution):
    if name not in ROUTED and execution != "grouped":
        pytest.skip("no experts to execute")
    both = pair(name)
    # Past every case's max_position_embeddings of 16, window and original length.
    tokens = hf.random_tokens(96, 2, 40)
    model, _ = load_pretrained(both.directory, dtype="float32", moe=EXECUTIONS[execution])
    logits, traces = forward(model, tokens)
    check_logits(logits, hf.logits(both.theirs, tokens))
    for trace in traces:
        if trace is not None:
            assert int(trace.dropped) == int(trace.rerouted) == 0
            assert int(trace.counts.sum()) == tokens.size * model.config.num_experts_per_tok


@pytest.mark.parametrize("name", slow_but(NAMES[::6], NAMES))
def test_greedy_tokens(pair, name):
    both = pair(name)
    prompts = hf.random_tokens(96, 3, 20, seed=11)
    expected = hf.greedy(both.theirs, prompts, STEPS)
    logits, chosen = prefill_and_greedy(both.ours, prompts, STEPS)
    check_logits(logits, hf.logits(both.theirs, prompts))
    np.testing.assert_array_equal(chosen, expected)
    # A model that repeats one token would be matched by a broken one.
    assert len(np.unique(expected)) > 8


@pytest.mark.parametrize(
    "name", ["mixtral-dynamic", "qwen3_moe-dynamic-gelu", "qwen3_moe-longrope-past-its-original-length"]
)
def test_greedy_tokens_while_dynamic_rope_grows(pair, name):
    """The prompt is shorter than the length from which angles change (16 or 12), and generation passes it."""
    both = pair(name)
    prompts = hf.random_tokens(96, 2, 8, seed=5)
    _, chosen = prefill_and_greedy(both.ours, prompts, STEPS)
    np.testing.assert_array_equal(chosen, hf.greedy(both.theirs, prompts, STEPS))


@pytest.mark.parametrize("name", slow_but(ONE_BY_ONE[1::6], ONE_BY_ONE))
def test_decode_one_by_one(pair, name):
    """Prefill of 7, then single tokens, gives the logits of transformers' whole forward pass.

    Not for `dynamic`, nor past LongRoPE's length: there keys keep the angles of the length at which they were
    written.
    """
    both = pair(name)
    tokens = hf.random_tokens(96, 2, 24, seed=3)
    check_logits(cached_logits(both.ours, tokens, 7), hf.logits(both.theirs, tokens))


@pytest.mark.parametrize("name", [n for n in NAMES if "window" in n or "layer-types" in n])
def test_windows_against_both_attention_implementations(pair, name):
    """transformers' `sdpa` masks a window by other code than its `eager`; both must agree with ours."""
    both = pair(name)
    assert any(both.ours.config.sliding_windows)
    tokens = hf.random_tokens(96, 2, 40, seed=9)
    ours, _ = forward(both.ours, tokens)
    for implementation in ("eager", "sdpa") if both.theirs._supports_sdpa else ("eager",):
        check_logits(ours, hf.logits(hf.load(both.directory, implementation), tokens))


@pytest.mark.parametrize("name", ROUTED)
def test_routing(pair, name):
    """The same experts in the same order with the same weights in every layer."""
    both = pair(name)
    tokens = hf.random_tokens(96, 2, 40, seed=23)
    seen = []
    gates = [gate for layer in both.theirs.model.layers if (gate := hf.router(layer)) is not None]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: seen.append(out)) for gate in gates]
    try:
        hf.forget_length(both.theirs)
        seen.clear()
        with torch.no_grad():
            output = both.theirs(
                torch.tensor(tokens, dtype=torch.long), use_cache=False, output_router_logits=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    _, traces = forward(both.ours, tokens)
    routed = [trace for trace in traces if trace is not None]
    assert len(routed) == len(seen) == len(output.router_logits) == sum(both.ours.config.moe_layers)
    for trace, (_, weights, ids), router_logits in zip(routed, seen, output.router_logits, strict=True):
        logits, weights, ids = router_logits.numpy(), weights.detach().numpy(), ids.numpy()
        made = np.asarray(trace.ids).reshape(ids.shape), np.asarray(trace.weights).reshape(weights.shape)
        if both.ours.config.router != RouterConfig():
            # transformers leaves the order of these to torch's `topk(sorted=False)`.
            order, mine = np.argsort(ids, axis=-1), np.argsort(made[0], axis=-1)
            ids, weights = (np.take_along_axis(array, order, -1) for array in (ids, weights))
            made = tuple(np.take_along_axis(array, mine, -1) for array in made)
        np.testing.assert_array_equal(made[0], ids)
        # Half of the logits' own contract: the router sees the residual stream of a prefix of the layers.
        assert_close(np.asarray(trace.logits).reshape(logits.shape), logits, L2_LIMIT)
        assert_close(made[1], weights, L2_LIMIT)
        counted = np.bincount(ids.reshape(-1), minlength=both.ours.config.num_experts)
        np.testing.assert_array_equal(trace.counts, counted)


@pytest.mark.parametrize("name", NAMES)
def test_number_of_parameters(pair, name):
    both = pair(name)
    # A router's correction bias is no parameter there, but saved with them.
    theirs = sum(p.numel() for p in both.theirs.parameters())
    theirs += sum(b.numel() for name, b in both.theirs.named_buffers() if name.endswith("correction_bias"))
    assert num_params(both.ours) == theirs
