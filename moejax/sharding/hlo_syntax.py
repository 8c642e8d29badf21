"""Lines of XLA's HLO text, for the readers of collectives and of profiles."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")

CALLED = re.compile(r"\b(to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
"""A computation that an instruction runs: as what, and its name."""

BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
OP_NAME = re.compile(r'\bop_name="([^"]*)"')


class HloError(ValueError):
    """A text that cannot be read so that nothing is missed."""


class Line(NamedTuple):
    """An instruction: its computation, and whether that is the entry; its name, the result's shape, the
    opcode, and the text from the operands' bracket on."""

    computation: str
    entry: bool
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def op_name(self) -> str:
        """Returns the source operation, by JAX's name stack; "" where there is none."""
        named = OP_NAME.search(self.rest)
        return named[1] if named else ""

    @property
    def called(self) -> list[str]:
        """Returns the computations that it runs."""
        branches = ",".join(BRANCHES.findall(self.rest)).split(",")
        return [name for _, name in CALLED.findall(self.rest)] + [x.strip(" %") for x in branches if x]

    @property
    def operands(self) -> list[str]:
        """Returns the names of its operands; jaxlib 0.11 and later write `name#part` for a tuple's part."""
        return re.findall(r"%([\w.\-]+(?:#\d+)?)", self.rest[: closing(self.rest)])


def read_lines(text: str) -> Iterator[Line]:
    """Yields the instructions of a module in the order of its text.

    Raises:
        HloError: a bracket that does not close.
    """
    opened = None
    for line in text.splitlines():
        if not line[:1].isspace():
            opened = _COMPUTATION.match(line)
        elif opened and (begin := _INSTRUCTION.match(line)):
            rest = line[begin.end() :]
            rest = re.sub(r"/\*.*?\*/", "", rest) if "/*" in rest else rest
            opcode = _OPCODE.search(rest, closing(rest) + 1 if rest.startswith("(") else 0)
            if opcode:
                shape, after = rest[: opcode.start()], rest[opcode.end() - 1 :]
                yield Line(opened[2], bool(opened[1]), begin[1], shape, opcode[1], after)


def closing(text: str) -> int:
    """Returns the index of the bracket that closes the text's first.

    Raises:
        HloError: it does not close.
    """
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.start()
    raise HloError(f"a bracket does not close in {text[:80]!r}")
