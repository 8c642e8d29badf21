"""FLOPs and bytes by operation: against hand counts, counts token by token, and XLA's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import KNOWN, Hardware
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import specs
from moejax.perf.memory import held_weights
from moejax.perf.operation_costs import (
    OPERATIONS,
    OpCost,
    attribute,
    bounds,
    by_operation,
    query_key_pairs,
    total,
    utilisation,
)  # fmt: skip
from moejax.perf.sizes import expert_params
from tests.model_shapes import GEMMA, LATENT, LINEAR, LLAMA, SINKS
from tests.perf.models import small_model
from tests.perf.steps import decode_step_cost

# Two experts of sixteen, D 40, H 8 and K 4 heads of 6, F 24, shared 72, dense 56, V 96.
CONFIG = small_model()
HITS = np.array([5.0, 0.0, 3.0])


def find(ops: list[OpCost], layer: int | None, operation: str) -> OpCost:
    (op,) = [op for op in ops if (op.layer, op.operation) == (layer, operation)][-1:]
    return op


def decode(config: ModelConfig = CONFIG, context: float = 10, batch: int = 3, **how: object) -> list[OpCost]:
    rows = {"new_tokens": [1] * batch, "context": [context] * batch}
    return attribute(config, **rows, phase="decode", hits=HITS, **how)  # type: ignore[arg-type]


def test_decode_by_hand() -> None:
    ops = decode()
    qkv = 40 * (48 + 24 + 24)
    assert find(ops, 0, "qkv_projection").flops == 2 * 3 * qkv
    assert find(ops, 0, "qkv_projection").weight_bytes == 4 * qkv
    attention, written = find(ops, 1, "attention"), find(ops, 1, "kv_write")
    assert attention.flops == 3 * 10 * 48 * 4  # two products, two FLOPs each, for 8 heads of 6
    assert attention.cache_bytes == 3 * 9 * 2 * 24 * 4 and written.cache_bytes == 3 * 2 * 24 * 4
    assert attention.weight_bytes == written.flops == 0
    gate_up, down = find(ops, 2, "experts_gate_up"), find(ops, 2, "experts_down")
    assert gate_up.weight_bytes == 3 * 2 * 40 * 24 * 4 and down.weight_bytes == 3 * 24 * 40 * 4
    assert gate_up.flops == 2 * down.flops == 2 * (3 * 2) * 2 * 40 * 24
    assert find(ops, 1, "mlp").weight_bytes == 3 * 40 * 56 * 4
    assert find(ops, 0, "shared_expert").flops == 2 * 3 * 3 * 40 * 72
    assert find(ops, None, "lm_head").flops == 2 * 3 * 40 * 96
    assert (
        find(ops, 0, "norm").flops == find(ops, 0, "norm").bytes == 0 < find(ops, 0, "norm").activation_bytes
    )
    assert {op.operation for op in ops} <= OPERATIONS.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_windows": (4, None, 7), "num_kv_heads": 2},
        {"moe_layers": (True, True, True), "shared_expert_intermediate_size": 0, "dtype": "bfloat16"},
        {**LLAMA, "moe_layers": (False,) * 3},
        {**GEMMA, "moe_layers": (False,) * 3, "sliding_windows": (4, None, 4)},
    ],
)
def test_decode_agrees_with_the_formula_of_the_whole(changes: dict[str, object]) -> None:
    """The sums are those of the bound, written out here once more."""
    config, batch, context = small_model(**changes), 3, 6.5
    hits = np.where(config.moe_layers, 4.5, 0.0)
    D, Dh, size = config.hidden_size, config.head_dim, 2 if config.dtype == "bfloat16" else 4
    always = D * config.vocab_size + config.num_layers * 2 * D * Dh * (config.num_heads + config.num_kv_heads)
    for sparse in config.moe_layers:
        own = D * config.num_experts + 3 * D * config.shared_expert_intermediate_size
        always += own if sparse else 3 * D * config.intermediate_size
    routed = sum(config.moe_layers) * config.num_experts_per_tok * expert_params(config)
    seen = sum(min(context, window or context) for window in config.sliding_windows)
    cost = decode_step_cost(config, batch, context, hits)
    assert cost.weight_bytes == size * (always + hits.sum() * expert_params(config))
    assert cost.cache_bytes == pytest.approx(2 * size * batch * seen * config.num_kv_heads * Dh)
    assert cost.flops == pytest.approx(
        2 * batch * (always + routed) + 4 * batch * seen * config.num_heads * Dh
    )


def test_linear_attention_by_hand() -> None:
    """A state of 8 heads of 6 x 6 numbers, float32 whatever the model is in, is read and written once a row;
    a row that begins reads nothing."""
    config = small_model(**LINEAR | {"linear_layers": (True, False, True), "dtype": "bfloat16"})
    ops, state = decode(config), 8 * 6 * 6
    assert find(ops, 0, "qkv_projection").weight_bytes == 2 * 40 * 4 * 48
    assert find(ops, 2, "output_projection").weight_bytes == 2 * 48 * 40
    attention, written = find(ops, 0, "attention"), find(ops, 0, "kv_write")
    assert attention.flops == 3 * 2 * 2 * state
    assert attention.cache_bytes == written.cache_bytes == 3 * state * 4
    assert find(ops, 1, "attention").cache_bytes == 3 * 9 * 2 * 24 * 2
    held = held_weights(config, specs(Decoder(config)))
    for name in ("qkv_projection", "output_projection"):
        assert find(decode(config, weights=held), 0, name).weight_bytes == find(ops, 0, name).weight_bytes
    rows: Any = {"new_tokens": [7, 5], "context": [7, 9]}
    prefill = attribute(config, **rows, phase="prefill", hits=HITS)
    assert find(prefill, 2, "attention").flops == 12 * 4 * state
    assert find(prefill, 2, "attention").cache_bytes == state * 4
    assert find(prefill, 2, "kv_write").cache_bytes == 2 * state * 4


def test_latent_attention_by_hand() -> None:
    """The cache has 6 + 16 numbers a token; queries and values go by way of the latents, of 16."""
    config = small_model(**LATENT)
    ops = decode(config)
    projected = 40 * 20 + 20 * 8 * 14 + 40 * 22 + 16 * 8 * (8 + 12)
    assert find(ops, 0, "qkv_projection").weight_bytes == 4 * projected
    assert find(ops, 0, "qkv_projection").flops == 2 * 3 * projected
    attention, written = find(ops, 1, "attention"), find(ops, 1, "kv_write")
    assert attention.flops == 3 * 10 * 8 * 2 * (22 + 16)
    assert attention.cache_bytes == 3 * 9 * 22 * 4 and written.cache_bytes == 3 * 22 * 4
    assert find(ops, 2, "output_projection").weight_bytes == 4 * 8 * 12 * 40
    held = held_weights(config, specs(Decoder(config)))
    for name in ("qkv_projection", "output_projection", "router", "shared_expert"):
        assert find(decode(config, weights=held), 0, name).weight_bytes == find(ops, 0, name).weight_bytes


def test_biases_are_no_matrices() -> None:
    config = small_model(**SINKS, shared_expert_intermediate_size=0)
    ops, held = decode(config), held_weights(config, specs(Decoder(config)))
    for name in ("qkv_projection", "output_projection", "router", "experts_gate_up", "experts_down"):
        assert find(decode(config, weights=held), 0, name).weight_bytes == find(ops, 0, name).weight_bytes


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_pairs_are_those_of_each_query(window: int | None) -> None:
    rows = [(1, 1), (1, 9), (5, 5), (4, 9), (9, 9), (2, 3)]
    new, seen = np.array(rows, float).T
    counted = [
        sum(min(p + 1, window or p + 1) for p in range(context - count, context)) for count, context in rows
    ]
    assert query_key_pairs(new, seen, window).tolist() == counted


def test_a_prompt_in_two_parts_computes_the_same_and_reads_more() -> None:
    config = small_model(sliding_windows=(None, 4, None))

    def step(new: int, context: int, logits: int) -> OpCost:
        rows = {"new_tokens": [new], "context": [context]}
        return total(attribute(config, **rows, phase="prefill", hits=HITS, logits=logits))

    whole, first, second = step(12, 12, 1), step(7, 7, 0), step(5, 12, 1)
    assert first.flops + second.flops == pytest.approx(whole.flops)
    head = find(decode(config), None, "lm_head").weight_bytes
    assert first.weight_bytes + second.weight_bytes == 2 * whole.weight_bytes - head
    # The second part reads 7 earlier tokens of the full layers and 3 in sight of the window.
    assert first.cache_bytes + second.cache_bytes - whole.cache_bytes == (7 + 3 + 7) * 2 * 24 * 4


def test_sums() -> None:
    ops = decode()
    whole, names = total(ops), by_operation(ops)
    for field in ("flops", "weight_bytes", "cache_bytes", "activation_bytes"):
        expected = sum(getattr(op, field) for op in ops)
        assert getattr(whole, field) == expected
        assert sum(getattr(op, field) for op in names) == pytest.approx(expected)
    assert {op.layer for op in ops} == {None, 0, 1, 2}
    assert [op.operation for op in names] == [n for n in OPERATIONS if n in {op.operation for op in ops}]


def test_weights_as_they_are_held() -> None:
    """Bytes of each operation are those of its declared tensors; plain ones agree with the formula but for
    the shared experts' gates, which the formula leaves out."""
    declared = specs(Decoder(CONFIG))
    held = held_weights(CONFIG, declared)
    own, plain = decode(weights=held), decode()
    gates = 40 * 4
    for op, other in zip(own, plain, strict=True):
        extra = gates if op.operation == "shared_expert" else 0
        assert op.weight_bytes == other.weight_bytes + extra, op
    halved = {
        name: spec if ".experts." not in name else _Half(spec.shape, spec.axes)
        for name, spec in declared.items()
    }
    small = decode(weights=held_weights(CONFIG, halved))
    for op, other in zip(small, own, strict=True):
        ratio = 2 if op.operation.startswith("experts_") else 1
        assert ratio * op.weight_bytes == other.weight_bytes
    tied = CONFIG.replace(tie_word_embeddings=True)
    parts = held_weights(tied, specs(Decoder(tied)))
    assert parts[None, "lm_head"] == 96 * 40 * 4 and not any(name == "other" for _, name in parts)


class _Half:
    """A declaration in two bytes a number."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
        self.shape, self.axes, self.dtype = shape, axes, jnp.dtype(jnp.bfloat16)


def test_cache_dtype() -> None:
    floats, codes = (total(decode(kv_dtype=kv)).cache_bytes for kv in ("float32", "int8"))
    assert codes / floats == (6 + 4) / (6 * 4)  # six codes and a scale, where six floats were


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 256, "vocab_size": 512},
        {"hidden_size": 256, "moe_layers": (False,) * 3, "intermediate_size": 512, "num_kv_heads": 2},
        {"hidden_size": 256, "tie_word_embeddings": True, "shared_expert_intermediate_size": 0},
    ],
    ids=["experts", "dense", "tied"],
)
def test_flops_are_those_of_the_program(changes: dict[str, object]) -> None:
    """XLA's count of a program without loops: experts have room for all tokens, so that each runs on N rows.

    XLA counts element by element besides: at most four times for what goes between operations, for scores,
    and for the places that assignments are counted in. And it attends to all pairs, also the masked ones.
    """
    config = small_model(**changes)
    B, T, E, k = 2, 16, config.num_experts, config.num_experts_per_tok
    model = Decoder(config, moe=MoeConfig(execution="capacity", capacity_factor=E / k))
    graph, state = nnx.split(model)
    program = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    counted = program.lower(state, jnp.zeros((B, T), jnp.int32)).cost_analysis()["flops"]
    done = total(
        attribute(
            config, new_tokens=[T] * B, context=[T] * B, phase="prefill", hits=[0] * 3, logits=B * T,
            assignments=[B * T * E] * 3,
        )
    )  # fmt: skip
    masked = 3 * B * (T * (T - 1) / 2) * 4 * config.num_heads * config.head_dim
    scores, places = 3 * B * config.num_heads * T * T, sum(config.moe_layers) * B * T * k * E
    margin = 4 * (done.activation_bytes / 4 + scores + places)
    assert 0 <= counted - (done.flops + masked) <= margin < 0.2 * done.flops


def test_bounds() -> None:
    """Each operation's, all together, and all one after another; activations are in none."""
    device = Hardware("made_up", 100.0, {"float32": 10.0}, None, None, "data sheet")
    ops = [
        OpCost(0, "qkv_projection", "decode", flops=20, weight_bytes=100, activation_bytes=1e9),
        OpCost(0, "attention", "decode", flops=5, cache_bytes=400),
    ]
    found = bounds(ops, device, "float32")
    assert [(each.seconds, each.limit) for each in found.each] == [(2.0, "compute"), (4.0, "memory")]
    assert (found.whole.seconds, found.whole.limit, found.in_turn) == (5.0, "memory", 6.0)
    used = utilisation(ops, 10.0, device, "float32")
    assert (used.mfu, used.mbu) == (0.25, 0.5)
    for kind in ("a100_80gb", "h100", "h200"):
        each = bounds(decode(), KNOWN[kind], "bfloat16")
        assert 0 < each.whole.seconds <= each.in_turn * (1 + 1e-9)


def test_unknown_peaks() -> None:
    device = Hardware("made_up", None, {"float32": 10.0}, None, None, "data sheet")
    with pytest.raises(ConfigError, match=r"'made_up' has no known peak for int8 \(known: float32"):
        bounds(decode(), device, "int8")
    with pytest.raises(ConfigError, match="no known bandwidth"):
        bounds(decode(), device, "float32")
    assert utilisation(decode(), 1.0, device, "float32").mbu is None
    assert utilisation(decode(), 1.0, None, "float32").mfu is None
    with pytest.raises(ValueError, match="seconds"):
        utilisation(decode(), 0.0, device, "float32")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"new_tokens": [2], "context": [1]}, "a context that holds them"),
        ({"new_tokens": [], "context": []}, "new tokens above 0"),
        ({"hits": [1, 2]}, "for 3 layers"),
        ({"phase": "decoding"}, "phase: unknown"),
    ],
)
def test_bad_steps(change: dict[str, object], says: str) -> None:
    step = {"new_tokens": [1], "context": [4], "phase": "decode", "hits": HITS, **change}
    with pytest.raises(ConfigError, match=says):
        attribute(CONFIG, **step)  # type: ignore[arg-type]
