"""The collectives of a compiled program, read from its HLO text: what really runs, over which mesh axes.

XLA is free to change what a program asked for: it combines small all-reduces, may turn a reduce-scatter into
an all-reduce and a slice, and on CPU moves and adds bfloat16 (not float16) as float32. Nothing of that is
undone here: it is what runs.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from moejax.perf.comm import COLLECTIVES, CommTerm, wire_bytes
from moejax.sharding.axes import Axes
from moejax.sharding.hlo_groups import Grid, numbers
from moejax.sharding.hlo_syntax import CALLED, HloError, Line, closing, read_lines

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Shape(NamedTuple):
    """An array's dtype in HLO's words ("f32", "bf16") and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = _BITS.get(self.dtype)
        if bits is None:
            number = re.match(r"[a-z]+(\d+)", self.dtype)
            if number is None:
                raise HloError(f"HLO dtype {self.dtype!r} is not known")
            bits = int(number[1])
        return -(-self.elements * bits // 8)


class Branch(NamedTuple):
    """A branch of a conditional: its HLO name, its op_name, and the branch's number in the order of
    `jax.lax.switch` (for `jax.lax.cond` 0 is false and 1 is true)."""

    conditional: str
    op_name: str
    number: int


@dataclass(frozen=True)
class Collective:
    """One collective instruction, as one device runs it.

    Attributes:
        name: of the HLO instruction.
        kind: one of `moejax.perf.comm.COLLECTIVES`.
        operands: what each device puts in; several where XLA combined collectives, or where an all-to-all
            takes a part for each device. A ragged-all-to-all's operand is its data alone.
        group_size: devices that take part with each other.
        axes: mesh axes of size above 1 that the groups run along, in mesh order; None where the groups are no
            product of whole axes. A permutation runs along every axis that one of its pairs moves on.
        op_name: the source operation, by JAX's name stack. Of a combined collective it is one of several.
        executions: runs in one call of the program (of the branch taken); None in a loop of unknown count.
        branches: the branches of conditionals that it lies in, outermost first.
    """

    name: str
    kind: str
    operands: tuple[Shape, ...]
    group_size: int
    axes: tuple[str, ...] | None
    op_name: str
    executions: int | None
    branches: tuple[Branch, ...]

    @property
    def operand_bytes(self) -> int:
        return sum(shape.nbytes for shape in self.operands)

    @property
    def dtype(self) -> str:
        """ "f32"; "f32+s32" for a combined collective of both."""
        return "+".join(dict.fromkeys(shape.dtype for shape in self.operands))


def bytes_on_wire(collective: Collective) -> float:
    """Returns the bytes a device sends in one execution, by `moejax.perf.comm.wire_bytes`'s convention."""
    return wire_bytes(collective.kind, collective.operand_bytes, collective.group_size)


def collectives(compiled: Any, mesh: Any) -> list[Collective]:
    """Returns a program's collectives in the order of its text, once for each call of their computation.

    Args:
        compiled: a `jax.stages.Compiled`, or HLO text.
        mesh: the `jax.sharding.Mesh` that it was compiled for.

    Raises:
        HloError: a collective cannot be read, or no way from the entry computation leads to it.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    program = _Program(text, mesh)
    instructions = list(program.visit(program.entry, 1, ()))
    lines = itertools.chain.from_iterable(scope.values() for scope in program.computations.values())
    missed = {line.name for line in lines if _kind(line.opcode)} - {c.name for c in instructions}
    if missed:
        raise HloError(f"the entry computation does not lead to the collectives {', '.join(sorted(missed))}")
    return instructions


def taken(instructions: Iterable[Collective], choose: Callable[[Branch], int]) -> list[Collective]:
    """Returns the collectives that run if `choose` names the branch taken at each conditional."""
    return [c for c in instructions if all(branch.number == choose(branch) for branch in c.branches)]


class Difference(NamedTuple):
    """Operand bytes of a device and step in which formulas and program disagree."""

    axes: tuple[str, ...] | None
    kind: str
    expected_bytes: float
    program_bytes: float


def compare(terms: Iterable[CommTerm], instructions: Iterable[Collective], axes: Axes) -> list[Difference]:
    """Returns the differences in bytes, by mesh axes and kind; empty where formulas and program agree.

    Executions do not count by themselves: XLA may combine collectives. What runs within a single
    device is left out. XLA:CPU moves bfloat16 as float32, so compare programs of other dtypes there.

    Args:
        instructions: of the branches that are taken, see `taken`.

    Raises:
        ValueError: a collective is in a loop of unknown count.
    """
    order = [name for name, _ in axes.sizes]
    expected: dict[tuple[Any, str], float] = defaultdict(float)
    sent: dict[tuple[Any, str], float] = defaultdict(float)
    for term in terms:
        names = tuple(sorted(getattr(axes, term.role), key=order.index))
        if math.prod(dict(axes.sizes)[name] for name in names) != term.group:
            raise ValueError(
                f"{term.operation}: role {term.role} has {term.group} devices, its axes {names} do not"
            )
        expected[names, term.kind] += term.count * term.operand_bytes
    for collective in instructions:
        if collective.executions is None:
            raise ValueError(f"{collective.kind} over {collective.axes} runs an unknown number of times")
        if collective.axes != ():
            sent[collective.axes, collective.kind] += collective.executions * collective.operand_bytes
    keys = sorted(expected.keys() | sent.keys(), key=lambda key: (str(key[0]), key[1]))
    return [Difference(*key, expected[key], sent[key]) for key in keys if expected[key] != sent[key]]


class _Program:
    """A module's computations, and the walk through them."""

    def __init__(self, text: str, mesh: Any) -> None:
        self.grid = Grid(mesh)
        self.computations: dict[str, dict[str, Line]] = {}
        self.entry = ""
        replicas = re.search(r"\breplica_count=(\d+)", text[: text.find("\n")])
        if replicas and int(replicas[1]) > 1:
            raise HloError(f"the program has {replicas[1]} replicas (pmap); only partitioned ones are read")
        for line in read_lines(text):
            self.computations.setdefault(line.computation, {})[line.name] = line
            self.entry = line.computation if line.entry else self.entry
        if not self.entry:
            raise HloError("the text has no ENTRY computation")

    def visit(self, name: str, executions: int | None, branches: tuple[Branch, ...]) -> Iterator[Collective]:
        """Yields the collectives of a computation that runs so often, in the given branches."""
        if name not in self.computations:
            raise HloError(f"the computation {name} is called, but is not in the text")
        scope = self.computations[name]
        for line in scope.values():
            if _kind(line.opcode):
                yield self._collective(line, scope, executions, branches)
                continue
            called = dict(CALLED.findall(line.rest))
            if line.opcode == "while":
                trips = _TRIPS.search(line.rest)
                times = int(trips[1]) if trips and executions is not None else None
                body = None if times is None or executions is None else executions * times
                test = None if times is None or executions is None else executions * (times + 1)
                yield from self.visit(called["body"], body, branches)
                yield from self.visit(called["condition"], test, branches)
            elif line.opcode == "conditional":
                in_order = line.called if "branch_computations=" in line.rest else line.called[::-1]
                for number, branch in enumerate(in_order):
                    inside = Branch(line.name, line.op_name, number)
                    yield from self.visit(branch, executions, (*branches, inside))
            elif line.opcode in ("call", "fusion", "async-start", "custom-call"):
                for target in line.called:
                    yield from self.visit(target, executions, branches)

    def _collective(
        self,
        line: Line,
        scope: dict[str, Line],
        executions: int | None,
        branches: tuple[Branch, ...],
    ) -> Collective:
        kind = _kind(line.opcode)
        assert kind is not None
        close = closing(line.rest)
        operands = [_operand(part, scope) for part in _split(line.rest[1:close])]
        if kind == "ragged-all-to-all":
            operands = operands[:1]
        attributes = line.rest[close + 1 :]
        size, axes = self.grid.participants(kind, attributes, line.name)
        return Collective(
            name=line.name,
            kind=kind,
            operands=tuple(itertools.chain.from_iterable(map(arrays, operands))),
            group_size=size,
            axes=axes,
            op_name=line.op_name,
            executions=executions,
            branches=branches,
        )


def _kind(opcode: str) -> str | None:
    """Returns the kind of a collective that starts here; its -done and -update are parts of it."""
    base = opcode.removesuffix("-start")
    return base if base in COLLECTIVES else None


def _split(text: str) -> list[str]:
    """Parts between commas that lie in no bracket."""
    parts, depth, begin = [], 0, 0
    for mark in re.finditer(r"[(\[{}\]),]", text):
        if mark[0] == ",":
            if depth == 0:
                parts.append(text[begin : mark.start()].strip())
                begin = mark.end()
        else:
            depth += 1 if mark[0] in "([{" else -1
    parts.append(text[begin:].strip())
    return [part for part in parts if part]


def _operand(text: str, scope: dict[str, Line]) -> str:
    """Returns the shape of an operand: as written before its name, or as its own line says."""
    shape, _, name = text.rpartition(" ")
    if shape:
        return shape
    try:
        return scope[name.removeprefix("%")].shape
    except KeyError:
        raise HloError(f"the operand {name} is not defined in its computation") from None


def arrays(text: str) -> list[Shape]:
    """Returns all arrays in a shape; a token or opaque value is none."""
    shapes = []
    for dtype, dims in _ARRAY.findall(text):
        if dtype not in ("token", "opaque"):
            shapes.append(Shape(dtype, tuple(numbers(dims.replace("<=", "")))))
    return shapes
