"""The formulas of communication: by hand, against the exchange's own count, and against small programs."""

import itertools
from collections import Counter
from typing import Any

import pytest

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.moe.exchange_size import (
    HopSize,
    capacity_buckets,
    exchanged_bytes,
)
from moejax.perf.comm import CommTerm, Exchange, role_sizes, step_comm, wire_bytes
from moejax.sharding.axes import Axes
from moejax.sharding.hlo import Collective, Difference, Shape, compare
from tests.perf.models import LAYOUTS, small_model
from tests.plain.step_extras import extra_terms

N, S, D = 12, 8, 40


def by_operation(terms: list[CommTerm]) -> dict[tuple[str, str, str], tuple[int, float]]:
    """(operation, kind, role) → (count, operand bytes of one)."""
    found: dict[tuple[str, str, str], tuple[int, float]] = {}
    for term in terms:
        key = (term.operation, term.kind, term.role)
        assert key not in found
        found[key] = (term.count, term.operand_bytes)
    return found


def simulated_ring(kind: str, operand: int, group: int) -> int:
    """Bytes that a device sends, step by step: around a ring, or straight to each peer."""
    if kind == "all-gather":
        return sum(operand for _ in range(group - 1))
    if kind == "reduce-scatter":
        return sum(operand // group for _ in range(group - 1))
    if kind == "all-reduce":
        scattered = simulated_ring("reduce-scatter", operand, group)
        return scattered + simulated_ring("all-gather", operand // group, group)
    if kind == "all-to-all":
        return sum(operand // group for peer in range(group) if peer != 0)
    return operand


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
)
def test_bytes_on_the_wire(kind: str, group: int) -> None:
    operand = 8 * 120
    assert wire_bytes(kind, operand, group) == (simulated_ring(kind, operand, group) if group > 1 else 0)


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown collective 'gather'.*all-gather"):
        wire_bytes("gather", 8, 2)


def test_one_device_sends_nothing() -> None:
    assert step_comm(small_model(qk_norm="projection"), ParallelConfig(), tokens=N, rows=S) == []


@pytest.mark.parametrize("layout", ["tp8", "ep8", "ep4_tp2"])
def test_attention_over_tensor(layout: str) -> None:
    """All eight devices see all tokens: sums after embedding, attention, experts and MLP, gathered logits."""
    terms = step_comm(small_model(), LAYOUTS[layout], tokens=N, rows=S)
    assert by_operation(terms) == {
        ("embedding", "all-reduce", "tensor"): (1, N * D * 4),
        ("attention", "all-reduce", "tensor"): (3, N * D * 4),
        ("experts", "all-reduce", "tensor"): (2, N * D * 4),
        ("mlp", "all-reduce", "tensor"): (1, N * D * 4),
        ("logits", "all-gather", "tensor"): (1, S * 96 // 8 * 4),
    }
    assert {term.group for term in terms} == {8}
    assert terms[0].total_bytes == terms[0].wire_bytes == 2 * 7 / 8 * N * D * 4


def test_attention_over_data() -> None:
    """Four groups of two: sums over pairs, tokens exchanged among four, sampled tokens gathered."""
    parallel = LAYOUTS["dp_attention_ep4_tp2"]
    model = small_model(dtype="bfloat16")
    terms = step_comm(model, parallel, tokens=N, rows=S, exchange=Exchange("allgather"))
    assert by_operation(terms) == {
        ("embedding", "all-reduce", "tensor"): (1, N * D * 2),
        ("attention", "all-reduce", "tensor"): (3, N * D * 2),
        ("dispatch", "all-gather", "exchange"): (2, N * (D * 2 + 2 * 8)),
        ("combine", "reduce-scatter", "exchange"): (2, 4 * N * D * 2),
        ("experts", "all-reduce", "tensor"): (2, N * D * 2),
        ("mlp", "all-reduce", "tensor"): (1, N * D * 2),
        ("logits", "all-gather", "tensor"): (1, S * 96 // 2 * 2),
        ("sampling", "all-gather", "data"): (1, S * 4),
    }
    assert Counter(term.group for term in terms) == {2: 5, 4: 3}


def test_norm_over_the_projection() -> None:
    """OLMoE's mean square: over all query heads, and over as many devices as have different key heads."""
    terms = step_comm(small_model(qk_norm="projection"), LAYOUTS["ep4_tp2"], tokens=N, rows=S)
    norms = [term for term in terms if term.operation == "qk_norm"]
    assert [(term.role, term.group, term.count, term.operand_bytes) for term in norms] == [
        ("tensor", 8, 3, N * 4),
        ("kv", 4, 3, N * 4),
    ]


def test_what_the_host_reads() -> None:
    """What `tests.plain.step_extras` adds; the programs agree with it in tests/sharding/test_accounting."""
    parallel, model = LAYOUTS["dp2_ep2_tp2"], small_model()
    options: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 4, "scored": (2, 5), "record": True}
    more = extra_terms(model, parallel, Exchange(), range(3), tokens=N, rows=S, **options)
    assert [(term.operation, term.kind, term.group, term.count, term.operand_bytes) for term in more] == [
        ("scores", "all-gather", 4, 2, 5 * 96 // 4 * 4),
        ("sampling", "all-gather", 2, 2, S * 4),
        ("sampling", "all-gather", 2, 2, S * 3 * 4),
        ("scores", "all-gather", 2, 3, (N - S) * 4),
        ("scores", "all-gather", 2, 2, (N - S) * 4 * 4),
        ("routing", "all-reduce", 2, 1, 3 * 16 * 4),
    ]


def test_pipeline_stages_add_up() -> None:
    """What the stages do together is what one stage would, and the hand-over."""
    model, parallel = small_model(), LAYOUTS["pp2_ep4"]
    stages = [step_comm(model, parallel, tokens=N, rows=S, layers=layers) for layers in ([0], [1, 2])]
    whole = step_comm(model, ParallelConfig(ep=4), tokens=N, rows=S)
    together: Counter[tuple[Any, ...]] = Counter()
    for term in itertools.chain(*stages):
        together[term.operation, term.kind, term.group, term.operand_bytes] += term.count
    handed = {key: together.pop(key) for key in list(together) if key[0] == "pipeline"}
    assert together == {
        (term.operation, term.kind, term.group, term.operand_bytes): term.count for term in whole
    }
    assert handed == {("pipeline", "collective-permute", 2, N * D * 4): 1}
    assert [term.operation for term in stages[0]] == ["embedding", "attention", "experts", "pipeline"]


def sent(model: ModelConfig, parallel: ParallelConfig, exchange: Exchange, *roles: str) -> float:
    """Bytes that a device sends in one layer's exchange over these roles, without agreeing on its size."""
    terms = step_comm(model, parallel, tokens=N, rows=S, exchange=exchange)
    moved = [term for term in terms if term.operation in ("dispatch", "combine") and term.role in roles]
    return sum(term.total_bytes for term in moved if term.kind != "all-reduce") / sum(model.moe_layers)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_exchanges_agree_with_their_own_count(microbatches: int) -> None:
    """`exchange_size` counts what is sent to others: the same bytes from another side."""
    model, row = small_model(), (D, 4, 2)
    flat, nodes = LAYOUTS["dp_attention_ep8"], LAYOUTS["two_nodes"]
    gathered = Exchange("allgather", microbatches=microbatches)
    assert sent(model, flat, gathered, "exchange") == exchanged_bytes(N, 8, *row)
    buckets = capacity_buckets(N, 2, [HopSize(8, 2)])
    for capacities in buckets:
        bucketed = Exchange("all_to_all", capacities, len(buckets), microbatches)
        expected = microbatches * exchanged_bytes(capacities[0], 8, *row)
        assert sent(model, flat, bucketed, "exchange") == expected
    buckets = capacity_buckets(N, 2, [HopSize(2, 8), HopSize(4, 2)])
    for capacities in buckets:
        hops = Exchange("hierarchical", capacities, len(buckets), microbatches)
        between, within = (exchanged_bytes(rows, n, *row) for rows, n in zip(capacities, (2, 4), strict=True))
        assert sent(model, nodes, hops, "node") == microbatches * between
        assert sent(model, nodes, hops, "local") == microbatches * within
    exact = Exchange("ragged", (2.5,), microbatches=microbatches)
    # Rows in the mean, and eight counts.
    expected = 7 * (2.5 * (2 * D * 4 + 8 * 2) + 4 * 8)
    assert sent(model, flat, exact, "exchange") == microbatches * expected


def test_agreeing_on_a_size() -> None:
    model = small_model()

    def agreed(layout: str, exchange: Exchange) -> list[tuple[str, int, float]]:
        terms = step_comm(model, LAYOUTS[layout], tokens=N, rows=S, exchange=exchange)
        return [
            (term.role, term.count, term.operand_bytes)
            for term in terms
            if (term.operation, term.kind) == ("dispatch", "all-reduce")
        ]

    assert agreed("two_nodes", Exchange("all_to_all", (8,), choices=3)) == [("exchange", 2, 4)]
    assert agreed("two_nodes", Exchange("hierarchical", (8, 8), choices=3, microbatches=2)) == [
        ("node", 2, 2 * 8 * 4),
        ("exchange", 2, 4),
    ]
    for fixed in (Exchange("all_to_all", (8,)), Exchange("all_to_all", (8,), choices=1, lossy=True)):
        assert agreed("two_nodes", fixed) == []


@pytest.mark.parametrize(
    ("layout", "exchange", "message"),
    [
        ("ep8", Exchange("allgather"), "parallel.exchange=allgather: 1 groups of tokens"),
        ("dp_attention_ep8", None, "parallel.exchange=none: 8 groups of tokens are exchanged"),
        ("dp_attention_ep8", Exchange("all_to_all"), r"1 capacities are needed, got \(\)"),
        ("two_nodes", Exchange("hierarchical", (8,)), r"2 capacities are needed, got \(8,\)"),
    ],
)
def test_misfits_are_errors(layout: str, exchange: Exchange | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step_comm(small_model(), LAYOUTS[layout], tokens=N, rows=S, exchange=exchange)
    with pytest.raises(ConfigError, match="unknown exchange 'pairs'"):
        Exchange("pairs")


def test_role_sizes() -> None:
    assert role_sizes(small_model(), LAYOUTS["four_nodes"]) == {
        "tensor": 2, "kv": 2, "data": 4, "exchange": 4, "node": 4, "local": 1, "pipeline": 1,
    }  # fmt: skip


AXES = Axes(sizes=(("dp", 2), ("node", 1), ("ep", 4), ("tp", 1)), data=("dp",), local=("ep",), tensor=("ep",))


def collective(
    kind: str, axes: tuple[str, ...] | None, *floats: int, executions: int | None = 1
) -> Collective:
    shapes = tuple(Shape("f32", (count,)) for count in floats)
    return Collective("c", kind, shapes, 4, axes, "", executions, ())


TERMS = [
    CommTerm("embedding", "all-reduce", "tensor", 4, 1, 80),
    CommTerm("attention", "all-reduce", "tensor", 4, 3, 80),
    CommTerm("logits", "all-gather", "tensor", 4, 1, 24),
    CommTerm("sampling", "all-gather", "data", 2, 1, 8),
]
PROGRAM = [
    collective("all-reduce", ("ep",), 20, 20),  # two that XLA combined
    collective("all-reduce", ("ep",), 20, executions=2),
    collective("all-gather", ("ep",), 6),
    collective("all-gather", ("dp",), 2),
    collective("all-reduce", (), 99),  # of one device
]


def test_formulas_and_program_that_agree() -> None:
    assert compare(TERMS, PROGRAM, AXES) == []


def test_formulas_and_program_that_differ() -> None:
    extra = [collective("all-to-all", None, 5), collective("all-gather", ("ep",), 1)]
    assert compare(TERMS[1:], PROGRAM + extra, AXES) == [
        Difference(("ep",), "all-gather", 24, 28),
        Difference(("ep",), "all-reduce", 240, 320),
        Difference(None, "all-to-all", 0, 20),
    ]


def test_loops_of_unknown_length_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="runs an unknown number of times"):
        compare(TERMS, [collective("all-reduce", ("ep",), 20, executions=None)], AXES)
    with pytest.raises(ValueError, match="tensor has 8 devices, its axes"):
        compare([CommTerm("mlp", "all-reduce", "tensor", 8, 1, 80)], PROGRAM, AXES)
