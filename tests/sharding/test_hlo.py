"""The collectives read from compiled programs, against what the programs ask for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moejax.sharding.hlo import Branch, Collective, Shape, bytes_on_wire, collectives
from moejax.sharding.hlo_groups import HloError

pytestmark = pytest.mark.multidevice

NAMES = ("dp", "ep", "tp")


def make_mesh(
    shape: tuple[int, ...] = (2, 2, 2), names: tuple[str, ...] = NAMES, devices: Any = None
) -> Mesh:
    devices = np.array(jax.devices() if devices is None else devices, dtype=object)
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def read(function: Callable[..., Any], *args: Any, mesh: Mesh | None = None) -> list[Collective]:
    """The collectives of a function of one device's `[1, …]` part of each argument."""
    mesh = mesh or make_mesh()
    split = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return collectives(jax.jit(mapped).lower(*args).compile(), mesh)


def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """One row for each of eight devices."""
    return jnp.ones((8, *shape), dtype)


ROW = 16 * 4  # bytes of float32 [1, 16]


@pytest.mark.optimized
@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("ep", "tp"), ("dp", "tp"), NAMES])
def test_all_reduce(axes: tuple[str, ...]) -> None:
    (found,) = read(lambda x: jax.lax.psum(x, axes), ones(16))
    group = 2 ** len(axes)
    assert (found.kind, found.axes, found.group_size) == ("all-reduce", axes, group)
    assert found.operands == (Shape("f32", (1, 16)),)
    assert (found.executions, found.branches) == (1, ())
    assert "psum" in found.op_name
    assert bytes_on_wire(found) == 2 * (group - 1) / group * ROW


def test_axis_order_does_not_matter() -> None:
    (found,) = read(lambda x: jax.lax.all_gather(x, ("tp", "dp")), ones(16))
    assert found.axes == ("dp", "tp")


@pytest.mark.optimized
def test_all_gather() -> None:
    (found,) = read(lambda x: jax.lax.all_gather(x, ("dp", "tp"), tiled=True).sum(0)[None], ones(16))
    assert (found.kind, found.axes) == ("all-gather", ("dp", "tp"))
    assert found.operand_bytes == ROW
    assert bytes_on_wire(found) == 3 * ROW


@pytest.mark.optimized
def test_reduce_scatter() -> None:
    """XLA may split it into an all-reduce and a slice; whichever it is must be reported as it is."""
    (found,) = read(
        lambda x: jax.lax.psum_scatter(x, ("ep", "tp"), scatter_dimension=1, tiled=True), ones(16)
    )
    assert (found.axes, found.operand_bytes, found.dtype) == (("ep", "tp"), ROW, "f32")
    assert (found.kind, bytes_on_wire(found)) in [
        ("reduce-scatter", 3 / 4 * ROW),
        ("all-reduce", 6 / 4 * ROW),
    ]


@pytest.mark.optimized
def test_all_to_all() -> None:
    """On CPU a tuple of eight parts, elsewhere one array: the same bytes."""
    (found,) = read(lambda x: jax.lax.all_to_all(x[0], NAMES, 0, 0, tiled=True), ones(8, 4))
    assert (found.kind, found.axes, found.group_size) == ("all-to-all", NAMES, 8)
    assert found.operand_bytes == 8 * 16
    assert bytes_on_wire(found) == 7 * 16


@pytest.mark.optimized
@pytest.mark.parametrize("axis", NAMES)
def test_collective_permute(axis: str) -> None:
    (found,) = read(lambda x: jax.lax.ppermute(x, axis, [(0, 1)]), ones(16))
    assert (found.kind, found.axes, found.group_size) == ("collective-permute", (axis,), 2)
    assert bytes_on_wire(found) == found.operand_bytes == ROW


@pytest.mark.optimized
def test_several_operands_at_once() -> None:
    """XLA combines equal groups and reducers into one all-reduce; the bytes add up the same."""
    found = read(lambda x, y: jax.lax.psum((x, 2 * x, y), ("tp",)), ones(16), ones(4, dtype=jnp.int32))
    assert {c.kind for c in found} == {"all-reduce"} and {c.axes for c in found} == {("tp",)}
    assert sum(c.operand_bytes for c in found) == 2 * ROW + 4 * 4
    assert sum(len(c.operands) for c in found) == 3
    assert {shape.dtype for c in found for shape in c.operands} == {"f32", "s32"}


@pytest.mark.optimized
def test_sixteen_bits_are_reported_as_they_run() -> None:
    """XLA:CPU moves bfloat16 as float32, and float16 as it is; others move both as they are."""

    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        return jax.lax.psum(x, "tp"), jax.lax.all_gather(x, "dp"), jax.lax.ppermute(x, "ep", [(0, 1)])

    half = read(function, ones(16, dtype=jnp.float16))
    assert [(c.dtype, c.operand_bytes) for c in half] == [("f16", ROW // 2)] * 3
    widened = ("f32", ROW) if jax.default_backend() == "cpu" else ("bf16", ROW // 2)
    brain = read(function, ones(16, dtype=jnp.bfloat16))
    assert [(c.dtype, c.operand_bytes) for c in brain] == [widened] * 3


def test_axes_of_size_one_are_left_out() -> None:
    mesh = make_mesh((1, 1, 4, 2, 1), ("dp", "node", "ep", "ep_copy", "tp"))
    sums = [("node", "ep"), ("ep_copy", "tp"), ("dp", "node", "ep", "ep_copy", "tp"), ("dp",)]
    found = read(lambda x: [jax.lax.psum(x, axes) for axes in sums], ones(16), mesh=mesh)
    along = {c.axes for c in found if c.group_size > 1}
    assert along == {("ep",), ("ep_copy",), ("ep", "ep_copy")}
    assert all(c.axes == () and bytes_on_wire(c) == 0 for c in found if c.group_size == 1)


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 0, 2, 7, 5, 4, 6]])
def test_order_of_devices_does_not_matter(order: list[int]) -> None:
    """The text counts places in the mesh, not device ids."""
    mesh = make_mesh(devices=[jax.devices()[i] for i in order])

    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        x = jax.lax.ppermute(x, "ep", [(0, 1), (1, 0)])
        return jax.lax.psum(x, ("dp", "tp")), jax.lax.all_gather(x, ("ep",))

    found = {c.kind: c.axes for c in read(function, ones(16), mesh=mesh)}
    assert found == {"collective-permute": ("ep",), "all-reduce": ("dp", "tp"), "all-gather": ("ep",)}


def test_part_of_the_devices() -> None:
    """A pipeline stage's mesh is the last four devices; places count from 0 in it."""
    mesh = make_mesh((2, 2), ("dp", "tp"), jax.devices()[4:])
    (found,) = read(lambda x: jax.lax.psum(x, "dp"), jnp.ones((4, 16)), mesh=mesh)
    assert (found.axes, found.group_size) == (("dp",), 2)


@pytest.mark.optimized
def test_a_partitioned_product() -> None:
    """Collectives that XLA's partitioner adds, where no program names an axis, spelled in its own way."""
    mesh = make_mesh()

    def place(*parts: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*parts))

    product = jax.jit(
        jnp.matmul, in_shardings=(place(None, ("dp", "tp")), place(("dp", "tp"))), out_shardings=place()
    )
    (found,) = collectives(product.lower(jnp.ones((8, 16)), jnp.ones((16, 32))).compile(), mesh)
    assert (found.kind, found.axes, found.operand_bytes) == ("all-reduce", ("dp", "tp"), 8 * 32 * 4)


@pytest.mark.optimized
def test_loop_of_known_length() -> None:
    def function(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.psum(jnp.tanh(carry), "tp"), None

        def outer(_: Any, carry: jax.Array) -> jax.Array:
            return jax.lax.scan(step, carry, None, length=5)[0]

        return jax.lax.psum(jax.lax.fori_loop(0, 3, outer, x), "dp")

    found = read(function, ones(16))
    assert sorted((c.axes, c.executions) for c in found) == [(("dp",), 1), (("tp",), 15)]


@pytest.mark.optimized
def test_loop_of_unknown_length() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: jax.lax.psum(x, "tp"), x)

    (found,) = read(function, ones(16))
    assert (found.axes, found.executions) == (("tp",), None)


@pytest.mark.optimized
def test_branches_of_a_conditional() -> None:
    def function(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            same = jax.lax.psum(x[0, 0], "dp") > 4
            return jax.lax.cond(same, lambda x: jax.lax.psum(x, "dp"), lambda x: x, x)

        index = jax.lax.pmax(jnp.sum(x).astype(jnp.int32), "tp")
        gathered = [lambda x: x, lambda x: jax.lax.all_gather(x, "ep").sum(0), inner]
        return jax.lax.switch(index, gathered, x)

    found = read(function, ones(16))
    where = {(c.kind, c.axes, c.operand_bytes): tuple(b.number for b in c.branches) for c in found}
    assert where == {
        ("all-reduce", ("tp",), 4): (),
        ("all-gather", ("ep",), ROW): (1,),
        ("all-reduce", ("dp",), 4): (2,),
        ("all-reduce", ("dp",), ROW): (2, 1),
    }
    assert all("cond" in branch.op_name for c in found for branch in c.branches)


# Programs that XLA:CPU does not make: asynchronous forms as XLA:GPU writes them, and spellings of groups.
HEAD = """HloModule test, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

"""
ALL = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"


def read_text(body: str, mesh: Mesh | None = None) -> list[Collective]:
    entry = (
        "ENTRY %main (x: f32[16,4], y: bf16[8]) -> f32[16,4] {\n  %x = f32[16,4]{1,0:T(8,128)} parameter(0)\n"
    )
    return collectives(f"{HEAD}{entry}  %y = bf16[8]{{0}} parameter(1)\n{body}\n}}\n", mesh or make_mesh())


@pytest.mark.parametrize(
    ("line", "operands"),
    [
        (
            "%s = f32[16,4]{1,0} all-reduce-start(%x), " + ALL + ", to_apply=%add",
            [("f32", (16, 4))],
        ),
        (
            "%s = (f32[16,4]{1,0}, bf16[8]{0}) all-reduce-start(%x, /*index=1*/%y), "
            + ALL
            + ", to_apply=%add",
            [("f32", (16, 4)), ("bf16", (8,))],
        ),
        (
            "%s = (f32[16,4]{1,0:T(8,128)}, f32[128,4]{1,0}) all-gather-start(%x), "
            + ALL
            + ", dimensions={0}",
            [("f32", (16, 4))],
        ),
        (
            "%s = ((f32[16,4], bf16[8]), (f32[128,4], bf16[64])) all-gather-start(f32[16,4] %x, bf16[8] %y), "
            + ALL,
            [("f32", (16, 4)), ("bf16", (8,))],
        ),
        (
            "%s = ((f32[16,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%x), " + ALL + ", to_apply=%add",
            [("f32", (16, 4))],
        ),
        (
            "%s = ((f32[16,4]{1,0}), f32[16,4]{1,0}, u32[]) all-to-all-start(%x), channel_id=1, "
            "replica_groups=[1,8]<=[8], dimensions={0}",
            [("f32", (16, 4))],
        ),
        (
            "%s = (bf16[8]{0}, bf16[8]{0}, u32[], u32[]) collective-permute-start(%y), channel_id=1, "
            "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}",
            [("bf16", (8,))],
        ),
    ],
)
def test_asynchronous_forms(line: str, operands: list[Any]) -> None:
    opcode = line.split("-start(")[0].split()[-1]
    done = f"  ROOT %d = f32[16,4]{{1,0}} {opcode}-done(%s)"
    (found,) = read_text(f"  {line}\n  %u = f32[16,4] {opcode}-update(%s)\n{done}")
    assert (found.kind, found.group_size, found.axes) == (opcode, 8, NAMES)
    assert list(found.operands) == operands


def test_an_asynchronous_computation() -> None:
    body = """  %s = ((f32[16,4]), f32[16,4], u32[]) async-start(%x), calls=%inner
  ROOT %d = f32[16,4] async-done(%s)
}

%inner (p: f32[16,4]) -> f32[16,4] {
  %p = f32[16,4] parameter(0)
  ROOT %r = f32[16,4] all-to-all(%p), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}"""
    (found,) = read_text(body)
    assert (found.kind, found.axes, found.executions) == ("all-to-all", ("dp",), 1)


def test_ragged_all_to_all_counts_its_data() -> None:
    """JAX's own lowering, before XLA: no CPU implementation exists."""
    mesh = make_mesh()
    axes = PartitionSpec(NAMES)

    def function(x: jax.Array, out: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(x, out, n, n, n, n, axis_name=("ep", "tp"))

    mapped = jax.shard_map(function, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)
    counts = jnp.ones((32,), jnp.int32)
    text = jax.jit(mapped).lower(jnp.ones((64, 16)), jnp.ones((128, 16)), counts).as_text(dialect="hlo")
    (found,) = collectives(text, mesh)
    assert (found.kind, found.axes) == ("ragged-all-to-all", ("ep", "tp"))
    assert found.operands == (Shape("f32", (8, 16)),)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{}", NAMES, 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tp",), 2),
        ("{{5,1},{4,0},{2,6},{7,3}}", ("dp",), 2),
        ("{{0,2,5,7},{1,3,4,6}}", None, 4),
        ("{{0,3},{1,2},{4,7},{5,6}}", None, 2),
        ("{{0,1,2,3,4},{5,6,7}}", None, 5),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
        ("[1,8]<=[8]", NAMES, 8),
        ("[2,4]<=[8]", ("ep", "tp"), 4),
        ("[2,4]<=[4,2]T(1,0)", ("dp", "ep"), 4),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("ep",), 2),
        ("mesh['dp'=2,'ep'=2,'tp'=2] {'ep','tp'}", ("ep", "tp"), 4),
        ("mesh[axis_0=2,axis_1=4] {axis_1:(2)2}", ("tp",), 2),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("dp", "tp"), 4),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,2,2]T(0,2,1)) {'b'}", ("dp", "tp"), 4),
        ("mesh['a'=8], device_ids=([8]) {'a':(2)4}", ("ep", "tp"), 4),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ("dp", "ep"), 4),
        ("mesh['a'=2,'b'=4] {}", (), 1),
    ],
)
def test_spellings_of_groups(groups: str, axes: tuple[str, ...] | None, size: int) -> None:
    line = f"  ROOT %r = f32[16,4] all-reduce(%x), channel_id=1, replica_groups={groups}, "
    (found,) = read_text(line + 'use_global_device_ids=true, to_apply=%add, metadata={op_name="a/b"}')
    assert (found.axes, found.group_size, found.op_name) == (axes, size, "a/b")


def test_predicate_conditional_counts_as_cond_does() -> None:
    body = """  %p = pred[] constant(true)
  ROOT %c = f32[16,4] conditional(%p, %x, %x), true_computation=%yes, false_computation=%no
}

%yes (a: f32[16,4]) -> f32[16,4] {
  %a = f32[16,4] parameter(0)
  ROOT %r = f32[16,4] all-reduce(%a), GROUPS, to_apply=%add
}

%no (a: f32[16,4]) -> f32[16,4] {
  ROOT %a = f32[16,4] parameter(0)""".replace("GROUPS", ALL)
    (found,) = read_text(body)
    assert found.branches == (Branch("c", "", 1),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  ROOT %r = f32[16,4] all-reduce(%x), channel_id=1, to_apply=%add", "no replica_groups"),
        ("  ROOT %r = f32[16,4] all-reduce(%z), " + ALL, "the operand %z is not defined"),
        ("  ROOT %r = f32[16,4] all-to-all(%x), replica_groups={{0,1}}", "are not the 8 devices"),
        ("  ROOT %r = q7[16,4] all-to-all(%x), replica_groups=mesh['a'=8] {'b'}", "is not one of mesh"),
        ("  ROOT %r = f32[16,4] collective-permute(%x)", "no source_target_pairs"),
        ("  ROOT %r = f32[16,4] call(%x), to_apply=%none", "none is called, but is not in the text"),
        (
            "  ROOT %x.1 = f32[16,4] negate(%x)\n}\n\n%lost (a: f32[16,4]) -> f32[16,4] {\n"
            "  %a = f32[16,4] parameter(0)\n  ROOT %r = f32[16,4] all-reduce(%a), " + ALL,
            "does not lead to the collectives r",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error(line: str, message: str) -> None:
    with pytest.raises(HloError, match=message):
        read_text(line)


def test_a_text_without_entry_is_an_error() -> None:
    with pytest.raises(HloError, match="no ENTRY"):
        collectives(HEAD, make_mesh())
    with pytest.raises(HloError, match="2 replicas"):
        collectives(HEAD.replace("num_partitions=8", "replica_count=2"), make_mesh())


def test_bytes_of_dtypes() -> None:
    sizes = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "s4": 4, "c64": 64, "u32": 32}
    assert {name: Shape(name, (8,)).nbytes for name in sizes} == sizes
    assert (Shape("s4", (3,)).nbytes, Shape("f32", ()).nbytes) == (2, 4)
    with pytest.raises(HloError, match="dtype 'odd' is not known"):
        _ = Shape("odd", (1,)).nbytes
