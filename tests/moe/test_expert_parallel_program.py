"""What the compiled exchanges are made of: collectives, their operands, and what waits for what."""

import jax
import jax.numpy as jnp
import pytest

from moejax.moe.exchange_size import HopSize, capacity_buckets
from moejax.sharding.hlo import collectives
from tests.moe.expert_parallel import HIDDEN, PER_RANK, compiled, lowered, mesh_of, shapes, sharded

pytestmark = pytest.mark.multidevice

TOP_K = 2
WORDS = HIDDEN + 2 * TOP_K  # of a row there, 4 bytes each
TAKES = ("node", "ep")


def found(layout, method, tokens, **options):
    """(kind, axes, dtype, elements of the operand), one for each collective and branch."""
    (mesh,), _ = mesh_of(layout)
    read = collectives(compiled(layout, method, tokens, TOP_K, **options), mesh)
    rows = []
    for one in read:
        each = {"f32": 4, "s32": 4, "u32": 4, "u16": 2}[one.dtype]
        rows.append((one.kind, one.axes, one.dtype, one.operand_bytes // each))
    return sorted(rows)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_allgather(microbatches):
    """Of all tokens at once: XLA would join the parts of several."""
    each = [("all-gather", ("ep",), "u32", 6 * WORDS), ("reduce-scatter", ("ep",), "f32", 8 * 6 * HIDDEN)]
    assert found("ep8", "allgather", 6, microbatches=microbatches) == sorted(each)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_all_to_all_of_few_tokens(microbatches):
    """No choice of sizes: nothing to agree on."""
    part = 6 // microbatches
    each = [
        ("all-to-all", ("ep",), "u32", 8 * part * WORDS),
        ("all-to-all", ("ep",), "u32", 8 * part * HIDDEN),
    ]
    assert found("ep8", "all_to_all", 6, microbatches=microbatches) == sorted(each * microbatches)


def test_all_to_all_of_many_tokens():
    buckets = capacity_buckets(72, TOP_K, [HopSize(8, PER_RANK)])
    assert len(buckets) > 1
    expected = [("all-reduce", ("ep",), "s32", 1)]
    for (room,) in buckets:
        expected += [("all-to-all", ("ep",), "u32", 8 * room * n) for n in (WORDS, HIDDEN)]
    assert found("ep8", "all_to_all", 72) == sorted(expected)


def test_hierarchical():
    buckets = capacity_buckets(72, TOP_K, [HopSize(2, 4 * PER_RANK), HopSize(4, PER_RANK)])
    assert len(buckets) > 1
    expected = [("all-reduce", ("node",), "s32", 8), ("all-reduce", TAKES, "s32", 1)]
    for between, within in buckets:
        expected += [("all-to-all", ("node",), "u32", 2 * between * n) for n in (WORDS, HIDDEN)]
        expected += [("all-to-all", ("ep",), "u32", 4 * within * n) for n in (WORDS, HIDDEN)]
    assert found("nodes2", "hierarchical", 72) == sorted(expected)


def test_capacity_of_two_hops():
    """No agreement; the way home has one word more a row, for what the second hop dropped."""
    expected = [("all-to-all", ("node",), "u32", 2 * 10 * n) for n in (WORDS, HIDDEN + 1)]
    expected += [("all-to-all", ("ep",), "u32", 4 * 6 * n) for n in (WORDS, HIDDEN)]
    assert found("nodes2", "hierarchical", 12, capacity=1.0) == sorted(expected)


@pytest.mark.parametrize("layout", ["ep8", "nodes2"])
def test_ragged_lowers_for_cuda(layout):
    """Counts first, then the ragged exchange there and back, of as many rows as can be."""
    N, R = 6, 8
    text = lowered(layout, "ragged", N, TOP_K, platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") == 2
    assert text.count("stablehlo.all_gather") == 1
    assert 'all_to_all"(' not in text.replace("ragged_all_to_all", "")
    there = f"(tensor<{TOP_K * N}x{WORDS}xui32>, tensor<{R * N}x{WORDS}xui32>"
    back = f"(tensor<{R * N}x{HIDDEN}xui32>, tensor<{TOP_K * N}x{HIDDEN}xui32>"
    assert there in text and back in text


def test_no_collectives_where_all_see_all():
    (mesh,), axes = mesh_of("tensor")
    read = collectives(compiled("tensor", "none", 5, TOP_K), mesh)
    assert [(one.kind, one.axes) for one in read] == [("all-reduce", axes.expert + axes.tp)]  # the caller's


@pytest.mark.parametrize(("layout", "method"), [("ep8", "all_to_all"), ("nodes2", "hierarchical")])
def test_bfloat16_travels_as_it_is(layout, method):
    """XLA:CPU would send bfloat16 as float32."""
    (mesh,), _ = mesh_of(layout)
    program = sharded(layout, method).lower(*shapes(layout, 6, TOP_K, jnp.bfloat16)).compile()
    assert {one.dtype for one in collectives(program, mesh)} == {"u16"}


def inner(jaxpr):
    """The function's body inside `jit` and `shard_map`."""
    while len(jaxpr.eqns) == 1 and any(key in jaxpr.eqns[0].params for key in ("jaxpr", "call_jaxpr")):
        params = jaxpr.eqns[0].params
        jaxpr = params.get("jaxpr", params.get("call_jaxpr"))
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return jaxpr


def ancestors(jaxpr):
    """For each exchange and `sin`, in program order: (name, numbers of those that it waits for)."""
    waits, nodes = {}, []
    for eqn in jaxpr.eqns:
        needs = set().union(*(waits.get(v, set()) for v in eqn.invars if not hasattr(v, "val")))
        if eqn.primitive.name in ("all_to_all", "all_gather", "reduce_scatter", "sin"):
            nodes.append((eqn.primitive.name, needs))
            needs = needs | {len(nodes) - 1}
        for v in eqn.outvars:
            waits[v] = needs
    return nodes


@pytest.mark.parametrize(
    ("method", "there", "back", "parts"),
    [("allgather", "all_gather", "reduce_scatter", 1), ("all_to_all", "all_to_all", "all_to_all", 2)],
)
def test_what_waits_for_what(method, there, back, parts):
    """A microbatch's exchange waits for its own only; the shared expert and the exchange for neither."""
    program = sharded("ep8", method, microbatches=2, shared=jnp.sin)
    nodes = ancestors(inner(jax.make_jaxpr(program)(*shapes("ep8", 6, TOP_K)).jaxpr))
    assert [name for name, _ in nodes] == [there, back, "sin"] * parts
    assert [needs for _, needs in nodes] == [set(), {0}, set(), set(), {3}, set()][: 3 * parts]


def test_shared_expert_stands_in_the_branches():
    """Beside a conditional it could not overlap with the collectives within."""
    program = sharded("ep8", "all_to_all", shared=jnp.sin)
    body = inner(jax.make_jaxpr(program)(*shapes("ep8", 72, TOP_K)).jaxpr)
    assert ancestors(body) == []
    (switch,) = [eqn for eqn in body.eqns if eqn.primitive.name == "cond"]
    assert len(switch.params["branches"]) == len(capacity_buckets(72, TOP_K, [HopSize(8, PER_RANK)]))
    for branch in switch.params["branches"]:
        assert sorted(name for name, _ in ancestors(branch.jaxpr)) == ["all_to_all", "all_to_all", "sin"]
