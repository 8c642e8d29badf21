"""Reads what XLA:GPU says of a program that it has compiled: launches, kernels, memory.

Texts in, dataclasses out. The formats are those of XLA's dumps in jaxlib 0.10.2 to 0.12.0 (`xla_dump_to`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moejax.bench.profile.program import NOWHERE, read_program
from moejax.core.errors import CompileError
from moejax.perf.comm import COLLECTIVES
from moejax.sharding.hlo import Shape, arrays
from moejax.sharding.hlo_syntax import Line, closing, read_lines

TRIED = "the dumps of jaxlib 0.10.2 to 0.12.0 are read"
LARGE = 1 << 16
"""Elements from which on an array is a weight's or a pool's, and no table of a few numbers."""

_FILES = {
    "hlo": "gpu_after_optimizations.txt", "live": "-live-range.txt", "buffers": "-buffer-assignment.txt",
    "thunks": "thunk_sequence_after_thunk_passes.txt", "metadata": "thunk_metadata.txt",
}  # fmt: skip
_THUNK = re.compile(r"^( *)(?:\d+: (k\w+) *(?:\[[^\]\n]*\] *)?(.*)|branch_(\d+):)$", re.MULTILINE)
KERNEL = re.compile(r"(\w+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+).*shared_memory: (\d+)")
_METADATA = re.compile(r"^thunk_metadata \{.*?thunk_kind: \"(\w+)\"\n\}", re.MULTILINE | re.DOTALL)
_GROUPS = ("kCommandBuffer", "kSequential", "kAsyncStart")
_WAITS = ("kConditional", "kWhile", "kInfeed", "kOutfeed", "kHostExecuteStart", "kHostSendDone")
_ASSEMBLED = re.compile(
    r"entry function '(\w+)' for '\w+'\n.*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\n.*Used (\d+) registers"
)
_FIGURES = ("stack", "spill_stores", "spill_loads", "registers")
_PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)\b")
_VALUE = re.compile(
    r"^(?:allocation \d+: size \d+(.*):| value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (.+))$",
    re.MULTILINE,
)
_RANGE = re.compile(r"^    ([^{\s]+)(\{\d*\}):(\d+)-(\d+)$", re.MULTILINE)
_DONATED = re.compile(r"\{\d*\}: \((\d+), \{\}")


@dataclass(frozen=True)
class Launch:
    """Work that the GPU is given: a kernel, a copy, a library's call or a collective.

    Attributes:
        kind: XLA's name, such as "kCustomKernel"; of a collective one of `moejax.perf.comm.COLLECTIVES`.
        kernel: the kernel's name; that of the instruction where it is none.
        instruction: of the optimised HLO.
        operation, layer: where it belongs, see `moejax.bench.profile.program.Place`.
        captured: whether it is within a command buffer, a CUDA graph.
        read_bytes, written_bytes: its operands and results. Of arguments of the program (weights, pools) a
            fusion's are what it gathers or slices; another kernel's are not known and left out.
        passed_bytes: those of values that the program has made itself, read or written.
        beside: launches between a collective's start and its end; None: no collective.
        overlapped: whether there are any.
        independent: launches that could be there: they neither feed the collective nor need it.
        blocks, threads, shared: of a kernel: grid, threads and bytes of dynamic shared memory of a block.
        stack, spill_stores, spill_loads, registers: bytes and registers of a thread, as assembled; None: not
            said.
        products: matrix instructions in the kernel's PTX.
    """

    kind: str
    kernel: str
    instruction: str
    operation: str | None
    layer: int | None
    captured: bool
    read_bytes: int = 0
    written_bytes: int = 0
    passed_bytes: int = 0
    beside: int | None = None
    overlapped: bool | None = None
    independent: int | None = None
    blocks: int = 0
    threads: int = 0
    shared: int = 0
    stack: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    registers: int | None = None
    products: int = 0
    launches: ClassVar = 1


@dataclass(frozen=True)
class Flow:
    """How an instruction's values come about.

    Attributes:
        reads: instructions whose values it reads; arguments of the program are left out.
        in_place: what its results take the memory of: "argument", or instructions that it reads.
        fused: operations of the HLO within it, where XLA fused it.
    """

    reads: Sequence[str]
    in_place: Sequence[str]
    fused: Sequence[str]


@dataclass(frozen=True)
class Buffer:
    """A value: the memory that it is in ("argument", "temporary" or "output"), its place there, and the first
    and last place in the schedule where it is needed."""

    name: str
    memory: str
    shape: str
    size: int
    offset: int
    start: int
    end: int
    operation: str | None
    layer: int | None


@dataclass(frozen=True)
class Dump:
    """What is known of a compiled program.

    Attributes:
        launches: in the order of the program. Of a conditional's branches the first one's: of an exchange's
            that for an even routing.
        buffers: its values.
        flows: of the launches, by instruction.
        command_buffers, host_syncs: how many; a sync is a branch or a transfer that the host waits for.
            In a command buffer it does not.
        donated_bytes: arguments whose memory the results take.
        pool_copies: bytes of values in a large donated array's shape that are not in an argument's memory.
        f32_copies: bytes of float32 values in the shape of a weight of fewer bits that they are made from.
    """

    launches: Sequence[Launch]
    buffers: Sequence[Buffer]
    flows: Mapping[str, Flow]
    command_buffers: int
    host_syncs: int
    donated_bytes: int
    pool_copies: int
    f32_copies: int


def read_folder(folder: Path, assembler_log: str) -> Dump:
    """Reads the dump of the one program in a folder, and what ptxas said meanwhile.

    Raises:
        CompileError: files are missing, or do not agree: this version of XLA writes others.
    """
    texts = {}
    for name, ending in _FILES.items():
        files = sorted(folder.glob(f"*{ending}"))
        if len(files) != 1:
            raise CompileError(f"XLA dumped {len(files)} files *{ending} in place of one; {TRIED}")
        texts[name] = files[0].read_text()
    return read_dump(texts, "".join(path.read_text() for path in folder.glob("*.ptx")), assembler_log)


def read_dump(texts: Mapping[str, str], ptx: str = "", assembler_log: str = "") -> Dump:
    """Reads a program from XLA's texts "hlo", "live", "buffers", "thunks" and "metadata"."""
    module = _Module(texts)
    kinds = Counter((kind, captured) for kind, _, captured, taken in _thunks(texts["thunks"]) if taken)
    pools = {shape for shape in module.donated if shape.elements >= LARGE}
    outside = [b for b in module.buffers if b.memory != "argument" and not b.shape.startswith("(")]
    launches = list(_launches(texts, module, ptx, assembler_log))
    return Dump(
        launches,
        module.buffers,
        {x.instruction: module.flow(x.instruction) for x in launches if x.instruction in module.lines},
        command_buffers=kinds["kCommandBuffer", False],
        host_syncs=sum(kinds[kind, False] for kind in _WAITS),
        donated_bytes=sum(shape.nbytes for shape in module.donated),
        pool_copies=sum(b.size for b in outside if pools & set(arrays(b.shape))),
        f32_copies=sum(map(module.f32_copies, module.lines.values())),
    )


def sorted_dims(shape: Shape) -> tuple[int, ...]:
    """Returns an array's dimensions in ascending order, without those of 1."""
    return tuple(sorted(size for size in shape.dims if size > 1))


class _Module:
    """The optimised HLO's scheduled lines and the memory of their values."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        text, self.inner = texts["hlo"], dict[str, list[Line]]()
        self.every = {line.name: line for line in read_lines(text)}
        self.lines = {name: line for name, line in self.every.items() if line.entry}
        for line in self.every.values():
            self.inner.setdefault(line.computation, []).append(line)
        self.position = {name: place for place, name in enumerate(self.every)}
        # Some collectives are the one instruction of a computation that is started.
        starts = {name: line for name, line in self.every.items() if line.opcode == "async-start"}
        self.started = {x.name: name for name, line in starts.items() for x in self.called(line)}
        self.places = read_program("", False, text).places
        self.buffers = list(self._values(texts["buffers"], texts["live"]))
        self.memory = {buffer.name: buffer.memory for buffer in self.buffers}
        parameters = [line for line in self.lines.values() if line.opcode == "parameter"]
        shapes = {int(line.rest[1 : closing(line.rest)]): line.shape for line in parameters}
        numbers = _DONATED.findall(text[: text.find("entry_computation_layout")])
        self.donated = [shape for number in numbers for shape in arrays(shapes[int(number)])]

    def _values(self, buffers: str, live: str) -> Iterator[Buffer]:
        spans = {name + index.replace("{}", ""): span for name, index, *span in _RANGE.findall(live)}
        memory = ""
        for about, name, size, offset, shape in _VALUE.findall(buffers):
            if not name:
                temporary = "temporary" if "preallocated-temp" in about else "output"
                memory = "argument" if ", parameter " in about else temporary
            elif name in spans:
                start, end = map(int, spans[name])
                place = self.places.get(name.partition("{")[0], NOWHERE)
                yield Buffer(name, memory, shape, int(size), int(offset), start, end, *place[:2])

    def value(self, name: str) -> str:
        """Returns the value whose memory a name is of, through bitcasts and tuples' parts."""
        whole, _, part = name.partition("#")  # jaxlib 0.11 and later write parts so
        if part:
            return f"{whole}{{{part}}}"
        line = self.lines[name]
        if line.opcode == "bitcast":
            return self.value(line.operands[0])
        if line.opcode == "get-tuple-element":
            return f"{line.operands[0]}{{{re.findall('index=([0-9]+)', line.rest)[0]}}}"
        return name

    def shapes(self, name: str) -> list[Shape]:
        """Returns the arrays that a name is of."""
        whole, _, part = name.partition("#")
        every = list(arrays(self.every[whole].shape))
        return [every[int(part)]] if part else every

    def called(self, line: Line) -> list[Line]:
        """Returns the instructions of the computations that an instruction runs."""
        return [x for name in line.called for x in self.inner.get(name, [])]

    def is_argument(self, name: str) -> bool:
        return self.memory.get(self.value(name)) == "argument"

    def moved(self, name: str) -> dict[str, int]:
        """Returns the bytes of an instruction's launch by their names there."""
        line, read, passed = self.lines[name], 0, 0
        shapes, tuple_ = arrays(line.shape), line.shape.startswith("(")
        written = sum(
            shape.nbytes for i, shape in enumerate(shapes)
            if self.memory.get(f"{name}{{{i}}}" if tuple_ else name) != "argument"
        )  # fmt: skip
        for number, operand in enumerate(line.operands):
            size = sum(shape.nbytes for shape in self.shapes(operand))
            size = min(size, self._reached(line, number)) if line.opcode == "fusion" else size
            made_here = not self.is_argument(operand)
            passed += size if made_here else 0
            read += size if made_here or line.opcode == "fusion" else 0
        return {"read_bytes": read, "written_bytes": written, "passed_bytes": passed + written}

    def flow(self, name: str) -> Flow:
        """Returns what an instruction reads, overwrites and is made of."""
        line, buffers = self.lines[name], {buffer.name: buffer for buffer in self.buffers}
        values = dict.fromkeys(self.value(operand) for operand in line.operands)
        made = [buffer for buffer in self.buffers if buffer.name.partition("{")[0] == name and buffer.size]
        memory = {(buffer.memory, buffer.offset) for buffer in made if buffer.memory != "argument"}
        donated = {"argument" for buffer in made if buffer.memory == "argument"}
        reads, over = set[str](), set[str]()
        for value in values:
            if self.lines[maker := value.partition("{")[0]].opcode != "parameter":
                reads.add(maker)
                buffer = buffers.get(value)
                over |= {maker} if buffer and (buffer.memory, buffer.offset) in memory else set()
        body = self.called(line) if line.opcode == "fusion" else []
        plain = ("parameter", "constant", "bitcast", "tuple")
        return Flow(sorted(reads), sorted(donated | over), [x.opcode for x in body if x.opcode not in plain])

    def _reached(self, line: Line, number: int) -> int:
        """Returns the most bytes that a fusion reads of an operand: all that it gathers or slices."""
        body = self.called(line)
        names = {x.name for x in body if x.opcode == "parameter" and x.rest.startswith(f"({number})")}
        users = [x for x in body if names & set(x.operands)]
        if any(user.opcode not in ("gather", "dynamic-slice", "slice") for user in users):
            return 1 << 62
        return sum(shape.nbytes for user in users for shape in arrays(user.shape))

    def f32_copies(self, line: Line) -> int:
        if line.opcode in ("parameter", "bitcast", "get-tuple-element"):
            return 0
        values = {self.value(name) for name in line.operands if self.is_argument(name)}
        shapes = [shape for name in values & self.lines.keys() for shape in arrays(self.lines[name].shape)]
        # By all dimensions: partial sums of a product may have as many elements as its weight.
        weights = {sorted_dims(s) for s in shapes if s.dtype != "f32" and s.elements >= LARGE}
        return sum(s.nbytes for s in arrays(line.shape) if s.dtype == "f32" and sorted_dims(s) in weights)

    def collective(self, name: str) -> tuple[str, range] | None:
        """Returns a collective's kind and the places in the schedule while it is under way."""
        if name not in self.every:
            return None
        line = self.every[name]
        inside = [x.opcode for x in self.called(line)] if line.opcode == "async-start" else []
        for kind in (x for x in (line.opcode.removesuffix("-start"), *inside) if x in COLLECTIVES):
            users = [x for x in self.inner[line.computation] if name in x.operands]
            done = [x.name for x in users if x.opcode.endswith("-done")]
            return kind, range(self.position[name] + 1, self.position[done[0] if done else name])
        return None

    def independent(self, name: str) -> set[int]:
        """Returns the places of instructions beside this one that neither feed it nor need it."""
        body = self.inner[self.every[name].computation]
        operands = {line.name: {x.partition("#")[0] for x in line.operands} for line in body}
        feeding, needing = {name}, {name}
        for line in reversed(body):
            feeding |= operands[line.name] if line.name in feeding else set()
        for line in body:
            needing |= {line.name} if operands[line.name] & needing else set()
        return {self.position[name] for name in operands.keys() - feeding - needing}


def _launches(texts: Mapping[str, str], module: _Module, ptx: str, log: str) -> Iterator[Launch]:
    """Yields the thunks that give the GPU work.

    Raises:
        CompileError: thunks and their metadata do not agree.
    """
    thunks = [thunk for thunk in _thunks(texts["thunks"]) if thunk[0] not in _GROUPS]
    named = [block for block in _METADATA.finditer(texts["metadata"]) if block[1] not in _GROUPS]
    if [block[1] for block in named] != [kind for kind, *_ in thunks]:
        raise CompileError(f"XLA's thunks and their metadata do not agree; {TRIED}")
    figures = assembled(log)
    bodies = kernel_bodies(ptx)
    names = ["".join(re.findall('profile_annotation: "([^"]*)"', block[0])) for block in named]
    work = [
        (thunk, module.started.get(name, name))
        for thunk, name in zip(thunks, names, strict=True)
        if thunk[3] and not re.match("kConditional|kWhile|kWait|.*Done$", thunk[0])
    ]
    found = {name: collective for _, name in work if (collective := module.collective(name))}
    at = [module.position.get(name, -1) for _, name in work if name not in found]
    for (kind, rest, captured, _), instruction in work:
        more: dict[str, Any] = dict(module.moved(instruction)) if instruction in module.lines else {}
        if instruction in found:
            kind, during = found[instruction]
            operands, free = module.every[instruction].operands, module.independent(instruction)
            more["read_bytes"] = sum(shape.nbytes for x in operands for shape in module.shapes(x))
            more["beside"] = sum(place in during for place in at)
            more["overlapped"] = more["beside"] > 0
            more["independent"] = sum(place in free for place in at)
        name, place = instruction, module.places.get(instruction, NOWHERE)
        if kernel := KERNEL.search(rest):
            name, (x, y, z, threads, shared) = kernel[1], map(int, kernel.groups()[1:])
            more |= {"blocks": x * y * z, "threads": threads, "shared": shared, **figures.get(name, {})}
            more["products"] = len(_PRODUCT.findall(bodies.get(name, "")))
        yield Launch(kind, name, instruction, *place[:2], captured, **more)


def assembled(log: str) -> dict[str, dict[str, int]]:
    """Returns what ptxas says of each kernel in a log: "stack", "spill_stores", "spill_loads",
    "registers"."""
    return {name: dict(zip(_FIGURES, map(int, said), strict=True)) for name, *said in _ASSEMBLED.findall(log)}


def kernel_bodies(ptx: str) -> dict[str, str]:
    """Returns the text of each kernel."""
    entries = re.split(r"^\.visible \.entry (\w+)\(", ptx, flags=re.MULTILINE)[1:]
    return dict(zip(entries[::2], entries[1::2], strict=True))


def _thunks(text: str) -> Iterator[tuple[str, str, bool, bool]]:
    """Yields thunks: kind, description, whether they are in a command buffer, and whether in no branch of a
    conditional but the first. What a thunk has is indented further than it."""
    buffers, others = list[int](), list[int]()
    for spaces, kind, rest, branch in _THUNK.findall(text):
        indent = len(spaces)
        buffers, others = [x for x in buffers if x < indent], [x for x in others if x < indent]
        if kind:
            yield kind, rest, bool(buffers), not others
        buffers += [indent] if kind == "kCommandBuffer" else []
        others += [indent] if branch not in ("", "0") else []


def occupancy(buffers: Iterable[Buffer]) -> list[int]:
    """Returns the bytes of temporary memory in use at each place of the schedule; values that share their
    memory count once."""
    temporary = [buffer for buffer in buffers if buffer.memory == "temporary"]
    last = max((buffer.end for buffer in temporary), default=-1)
    use = []
    for place in range(last + 1):
        total = reached = 0
        for start, size in sorted((b.offset, b.size) for b in alive(temporary, place)):
            total += max(0, start + size - max(start, reached))
            reached = max(reached, start + size)
        use.append(total)
    return use


def alive(buffers: Iterable[Buffer], place: int) -> list[Buffer]:
    """Returns the temporary values that are needed at a place of the schedule, the largest first."""
    needed = [b for b in buffers if b.memory == "temporary" and b.start <= place <= b.end]
    return sorted(needed, key=lambda buffer: -buffer.size)
