"""Which operation of the model each HLO instruction belongs to, by the named scopes in its metadata."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moejax.perf.operation_costs import OPERATIONS
from moejax.sharding.hlo_syntax import Line, read_lines

_LAYER = re.compile(r"layer_(\d+)$")

# GPU kernels do several things at once, or are called below one scope for all: theirs is the kernel's name.
_KERNELS = {
    "rms_norm": "norm",
    "rope_kv_write": "kv_write",
    "ragged_paged_attention": "attention",
    "flash_attention": "attention",
    "topk_router": "router",
    "moe_permute": "experts_dispatch",
    "moe_combine": "experts_dispatch",
    "grouped_swiglu": "experts_gate_up",
    "grouped_matmul": "experts_down",
}


class Place(NamedTuple):
    """Where an instruction belongs.

    Attributes:
        operation: of `moejax.perf.operation_costs.OPERATIONS`; None: not known.
        layer: None outside of the layers, or not known.
        inferred: it has no scope of its own: it is its caller's, or that of what uses it.
    """

    operation: str | None
    layer: int | None
    inferred: bool = False


NOWHERE = Place(None, None)


@dataclass
class Program:
    """A compiled program's instructions.

    Attributes:
        key: what it was compiled for.
        prefill: it computes parts of prompts.
        instructions: by name, all computations'.
        places: by name.
        callers: by name, the instructions (a loop, a conditional) that it runs within, inner ones included.
    """

    key: str
    prefill: bool
    instructions: Mapping[str, Line] = field(repr=False)
    places: Mapping[str, Place] = field(repr=False)
    callers: Mapping[str, frozenset[str]] = field(repr=False)


def read_program(key: str, prefill: bool, text: str) -> Program:
    """A program from its optimised HLO, as `jax.stages.Compiled.as_text` gives it."""
    instructions = {line.name: line for line in read_lines(text)}
    by_computation: dict[str, list[Line]] = {}
    calls: dict[str, list[str]] = {}
    for line in instructions.values():
        by_computation.setdefault(line.computation, []).append(line)
        for target in line.called:
            calls.setdefault(target, []).append(line.name)
    callers = _callers(instructions, calls)
    places = _places(instructions, by_computation, calls)
    return Program(key, prefill, instructions, places, callers)


def match(names: Iterable[str], programs: Sequence[Program]) -> Program | None:
    """The program that has these instructions: the most of them, of several the smallest. None: none has nine
    in ten, which allows for a few that the runtime names otherwise."""
    instructions = set(names)

    def missing(program: Program) -> int:
        return len(instructions - program.instructions.keys())

    best = min(programs, key=lambda program: (missing(program), len(program.instructions)), default=None)
    return best if best is not None and 10 * missing(best) <= len(instructions) else None


def place_of(op_name: str) -> Place:
    """Reads a name stack: `jit(step)/layer_3/attention/kv_write/while` is layer 3's "kv_write"."""
    operation = layer = None
    for part in op_name.split("/"):
        layer_scope = _LAYER.match(part)
        if layer_scope:
            layer = int(layer_scope[1])
        elif part in OPERATIONS:
            operation = part
        else:
            operation = next(
                (name for kernel, name in _KERNELS.items() if part.startswith(kernel)), operation
            )
    return Place(operation, layer)


def _callers(
    instructions: Mapping[str, Line], calls: Mapping[str, Sequence[str]]
) -> dict[str, frozenset[str]]:
    known: dict[str, frozenset[str]] = {}

    def of(computation: str) -> frozenset[str]:
        if computation not in known:
            known[computation] = frozenset()  # HLO has no recursion
            direct = calls.get(computation, ())
            known[computation] = frozenset(direct).union(*(of(instructions[n].computation) for n in direct))
        return known[computation]

    return {name: of(line.computation) for name, line in instructions.items()}


def _places(
    instructions: Mapping[str, Line],
    by_computation: Mapping[str, Sequence[Line]],
    calls: Mapping[str, Sequence[str]],
) -> dict[str, Place]:
    """Scopes where there are some, then what lies near."""
    places = {name: _own_place(line, by_computation) for name, line in instructions.items()}
    users: dict[str, list[str]] = {}
    operands = {name: [x.partition("#")[0] for x in line.operands] for name, line in instructions.items()}
    for name, given in operands.items():
        for operand in given:
            users.setdefault(operand, []).append(name)
    # Copies, broadcasts and the like that XLA has added: those who use them first, then what they are made
    # of. In rounds, since these may have no scope either.
    for near in (users, operands):
        for _ in range(4):
            for name, place in list(places.items()):
                if place.operation is None and instructions[name].opcode != "parameter":
                    nearby = [places[n] for n in near.get(name, ()) if n in places and places[n].operation]
                    if nearby:
                        places[name] = nearby[0]._replace(inferred=True)
    # What is still without a place in a loop's body or condition is the loop's.
    for name, line in instructions.items():
        computation = line.computation
        while places[name].operation is None and computation in calls:
            caller = instructions[calls[computation][0]]
            if places[caller.name].operation is not None:
                places[name] = places[caller.name]._replace(inferred=True)
            computation = caller.computation
    return places


def _own_place(line: Line, by_computation: Mapping[str, Sequence[Line]]) -> Place:
    """By its own metadata. A fusion is its product's, since that takes the time; else its root's, whose
    metadata it has; else that of most of its parts."""
    if line.opcode not in ("fusion", "call", "custom-call"):
        return place_of(line.op_name)
    inside = [part for name in line.called for part in by_computation.get(name, ())]
    products = [part for part in inside if part.opcode in ("dot", "convolution")]
    named = place_of((products[-1] if products else line).op_name)
    if named.operation is not None or not inside:
        return named
    votes = Counter(place for part in inside if (place := place_of(part.op_name)).operation is not None)
    return votes.most_common(1)[0][0] if votes else NOWHERE
