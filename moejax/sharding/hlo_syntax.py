"""Syntax of a line of XLA's HLO text, shared by the readers of collectives and of profiles."""

import re

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
"""A computation's first line: group 1 where it is the entry, group 2 its name."""

INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
"""An instruction's beginning: its name."""

OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
CALLED = re.compile(r"\b(to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
"""A computation that an instruction runs: as what, and its name."""

BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
OP_NAME = re.compile(r'\bop_name="([^"]*)"')
