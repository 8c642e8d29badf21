"""Reads what XLA:GPU says of a program that it has compiled: launches, kernels, buffers, collectives.

Texts in, dataclasses out; the formats are those of XLA's dumps of jaxlib 0.10.2 (`--xla_dump_to`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moejax.bench.profile.program import NOWHERE, Place, read_program
from moejax.core.errors import CompileError
from moejax.sharding.hlo import arrays
from moejax.sharding.hlo_syntax import CALLED, Line, closing, read_lines

LARGE = 1 << 16
"""Elements from which on an array is a weight's or a pool's, and no table of a few numbers."""

_FILES = {
    "hlo": "gpu_after_optimizations.txt", "live": "after_optimizations-live-range.txt",
    "buffers": "after_optimizations-buffer-assignment.txt",
    "thunks": "thunk_sequence_after_thunk_passes.txt", "metadata": "thunk_metadata.txt",
}  # fmt: skip
_THUNK = re.compile(r"^( *)\d+: (k\w+) *(?:\[[^\]\n]*\] *)?(.*)$", re.MULTILINE)
_KERNEL = re.compile(r"(\w+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)")
_METADATA = re.compile(r"^thunk_metadata \{(.*?)^\}", re.MULTILINE | re.DOTALL)
_GROUPS = ("kCommandBuffer", "kSequential")
_SYNCHRONISING = ("kConditional", "kWhile", "kInfeed", "kOutfeed", "kHostExecuteStart", "kHostSendDone")
_ASSEMBLED = re.compile(
    r"entry function '(\w+)' for '\w+'\n.*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\n.*Used (\d+) registers"
)
_PRODUCT = re.compile(r"^\s*(?:@%?\w+ )?(?:mma\.sync|wgmma\.mma_async)\b", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*):$")
_VALUE = re.compile(r"^ value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_RANGE = re.compile(r"^    (\S+):(\d+)-(\d+)$", re.MULTILINE)
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


@dataclass(frozen=True)
class Launch:
    """Work that the GPU is given: a kernel, a copy, a library's call or a collective.

    Attributes:
        kind: XLA's name of it, such as "kCustomKernel".
        kernel: the kernel's name; that of the instruction where it is none.
        instruction: of the optimised HLO.
        operation, layer: where it belongs, see `moejax.bench.profile.program.Place`.
        captured: whether it is within a command buffer, a CUDA graph.
        blocks, threads, shared: of a kernel: the grid, the threads and the dynamic shared memory of a block.
        read_bytes, written_bytes: its operands and results. Of arguments of the program (weights, pools) a
            fusion's are what it gathers or slices; another kernel's are not known and left out.
        passed_bytes: those of values that the program has made itself, read or written.
    """

    kind: str
    kernel: str
    instruction: str
    operation: str | None
    layer: int | None
    captured: bool
    blocks: int = 0
    threads: int = 0
    shared: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    passed_bytes: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel as assembled: registers a thread, bytes of spills and stack, matrix instructions in its PTX.
    None: the assembler did not say."""

    name: str
    registers: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    stack: int | None = None
    products: int = 0


@dataclass(frozen=True)
class Buffer:
    """A temporary value: where in the temporary memory, and first and last place in the schedule."""

    name: str
    shape: str
    size: int
    offset: int
    start: int
    end: int
    operation: str | None
    layer: int | None


@dataclass(frozen=True)
class Collective:
    """A collective over devices, and what runs between its start and its end.

    Attributes:
        bytes: of a device's operands.
        between: launches while it is under way; 0: nothing hides it.
    """

    name: str
    kind: str
    operation: str | None
    layer: int | None
    bytes: int
    between: int


@dataclass(frozen=True)
class Dump:
    """What is known of a compiled program.

    Attributes:
        launches: in the order of the program.
        kernels: those of `launches`, each once.
        buffers: temporary values.
        command_buffers, host_syncs: how many; a sync is a branch or transfer that the host waits for.
        pool_copies: bytes of values in a donated array's shape that are not in its memory.
        f32_copies: bytes of float32 values as large as a weight of fewer bits that they are made from.
        donated: bytes of arguments whose memory the results take.
    """

    launches: Sequence[Launch]
    kernels: Sequence[Kernel]
    buffers: Sequence[Buffer]
    collectives: Sequence[Collective]
    command_buffers: int
    host_syncs: int
    pool_copies: int
    f32_copies: int
    donated: int


def read_folder(folder: Path, assembler_log: str) -> Dump:
    """Reads the dump of the one program in a folder, and what ptxas said meanwhile.

    Raises:
        CompileError: files are missing: this version of XLA writes others.
    """
    texts = {}
    for name, ending in _FILES.items():
        files = sorted(folder.glob(f"*{ending}"))
        if len(files) != 1:
            raise CompileError(f"XLA dumped {len(files)} files *{ending} in place of one; jaxlib 0.10.2 does")
        texts[name] = files[0].read_text()
    ptx = "".join(path.read_text() for path in folder.glob("*.ptx"))
    return read_dump(texts, ptx, assembler_log)


def read_dump(texts: Mapping[str, str], ptx: str = "", assembler_log: str = "") -> Dump:
    """Reads a program from XLA's texts: "hlo", "live", "buffers", "thunks" and "metadata"."""
    module = _Module(texts["hlo"])
    launches = [module.counted(launch) for launch in _launches(texts["thunks"], texts["metadata"], module)]
    kinds = [kind for _, kind, _ in _THUNK.findall(texts["thunks"])]
    values = list(_values(texts["buffers"]))
    pools = {shape for shape in module.donated if shape.elements >= LARGE}
    elsewhere = [v for v in values if not v["parameter"] and v["shape"][0] != "("]
    copies = [v for v in elsewhere if pools & set(arrays(v["shape"]))]
    return Dump(
        launches,
        _kernels({launch.kernel for launch in launches if launch.blocks}, ptx, assembler_log),
        _buffers(values, texts["live"], module),
        list(module.collectives(launches)),
        command_buffers=kinds.count("kCommandBuffer"),
        host_syncs=sum(kind in _SYNCHRONISING for kind in kinds),
        pool_copies=sum(v["size"] for v in copies),
        f32_copies=module.f32_copies(),
        donated=sum(shape.nbytes for shape in module.donated),
    )


class _Module:
    """The optimised HLO: the scheduled lines of its entry computation and what they read."""

    def __init__(self, text: str) -> None:
        every = list(read_lines(text))
        self.lines = {line.name: line for line in every if line.entry}
        self.inner: dict[str, list[Line]] = {}
        for line in every:
            self.inner.setdefault(line.computation, []).append(line)
        self.position = {name: i for i, name in enumerate(self.lines)}
        self.places = read_program("", False, text).places
        parameters = [line for line in self.lines.values() if line.opcode == "parameter"]
        shapes = {int(line.rest[1 : closing(line.rest)]): line.shape for line in parameters}
        header = text[: text.find("entry_computation_layout")]
        donated = [shapes[int(number)] for _, number in _ALIASED.findall(header)]
        self.donated = [shape for text in donated for shape in arrays(text)]

    def operands(self, line: Line) -> list[str]:
        return re.findall(r"%([\w.\-]+)", line.rest[: closing(line.rest)])

    def aliases(self, line: Line) -> dict[int, str]:
        """Returns result number → the operand whose memory it is."""
        _, found, rest = line.rest.partition("output_to_operand_aliasing={")
        operands = self.operands(line) if found else []
        pairs = _ALIASED.findall(rest[: rest.find("}}")]) if found else []
        return {int(result or 0): operands[int(operand)] for result, operand in pairs}

    def origin(self, name: str) -> Line:
        """Returns the line that a value's memory is of: through bitcasts, tuples' parts, in-place results."""
        line = self.lines[name]
        if line.opcode == "bitcast":
            return self.origin(self.operands(line)[0])
        if line.opcode == "get-tuple-element":
            index = int(re.findall(r"index=(\d+)", line.rest)[0])
            maker = self.lines[self.operands(line)[0]]
            aliased = self.aliases(maker).get(index)
            return self.origin(aliased) if aliased else line
        aliased = self.aliases(line).get(0)
        return self.origin(aliased) if aliased else line

    def counted(self, launch: Launch) -> Launch:
        """Returns a launch with its bytes."""
        line = self.lines.get(launch.instruction)
        if line is None:
            return launch
        aliases, results = self.aliases(line), arrays(line.shape)
        written = sum(shape.nbytes for i, shape in enumerate(results) if i not in aliases)
        read = passed = 0
        for place, operand in enumerate(self.operands(line)):
            if operand in aliases.values() or operand not in self.lines:
                continue
            size = sum(shape.nbytes for shape in arrays(self.lines[operand].shape))
            size = min(size, self._reached(line, place)) if line.opcode == "fusion" else size
            made_here = self.origin(operand).opcode != "parameter"
            passed += size if made_here else 0
            read += size if made_here or line.opcode == "fusion" else 0
        return replace(launch, read_bytes=read, written_bytes=written, passed_bytes=passed + written)

    def _reached(self, line: Line, place: int) -> int:
        """Returns the bytes that a fusion reads of an operand: what it gathers or slices, or all."""
        body = self.inner[dict(CALLED.findall(line.rest))["calls"]]
        names = [x.name for x in body if x.opcode == "parameter" and x.rest.startswith(f"({place})")]
        users = [inner for inner in body if set(names) & set(self.operands(inner))]
        if not users or any(user.opcode not in ("gather", "dynamic-slice", "slice") for user in users):
            return 1 << 62
        return sum(shape.nbytes for user in users for shape in arrays(user.shape))

    def f32_copies(self) -> int:
        total = 0
        for line in self.lines.values():
            if line.opcode in ("parameter", "bitcast", "get-tuple-element"):
                continue
            sources = [self.origin(name) for name in self.operands(line) if name in self.lines]
            weights = {
                shape.elements
                for source in sources if source.opcode == "parameter"
                for shape in arrays(source.shape) if shape.dtype != "f32" and shape.elements >= LARGE
            }  # fmt: skip
            copies = [s for s in arrays(line.shape) if s.dtype == "f32" and s.elements in weights]
            total += sum(shape.nbytes for shape in copies)
        return total

    def place(self, name: str) -> Place:
        return self.places.get(name, NOWHERE)

    def collectives(self, launches: Iterable[Launch]) -> Iterator[Collective]:
        """Yields the collectives: pairs of start and done, and those that are one instruction."""
        at = [self.position[x.instruction] for x in launches if x.instruction in self.position]
        for line in self.lines.values():
            inside = [x.opcode for name in CALLED.findall(line.rest) for x in self.inner.get(name[1], [])]
            kinds = [line.opcode.removesuffix("-start"), *(inside if line.opcode == "async-start" else [])]
            kind = next((kind for kind in kinds if kind in _COLLECTIVES), None)
            if kind is None:
                continue
            start = end = self.position[line.name]
            for other in self.lines.values():
                if other.opcode.endswith("-done") and line.name in self.operands(other):
                    end = self.position[other.name]
            sent = [s for name in self.operands(line) for s in arrays(self.lines[name].shape)]
            place = self.place(line.name)
            yield Collective(
                line.name, kind, place.operation, place.layer, sum(shape.nbytes for shape in sent),
                between=sum(start < i < end for i in at),
            )  # fmt: skip


_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
)  # fmt: skip


def _launches(thunks: str, metadata: str, module: _Module) -> Iterator[Launch]:
    """Yields the thunks that give the GPU work.

    Raises:
        CompileError: thunks and their metadata do not agree.
    """
    named = []
    for block in _METADATA.findall(metadata):
        annotation = re.search(r'profile_annotation: "([^"]*)"', block)
        found = re.search(r'thunk_kind: "(\w+)"', block)
        if found and found[1] not in _GROUPS:
            named.append((found[1], annotation[1] if annotation else ""))
    listed = [item for item in _THUNK.findall(thunks) if item[1] not in _GROUPS]
    if [kind for kind, _ in named] != [kind for _, kind, _ in listed]:
        raise CompileError("XLA's thunks and their metadata do not agree; jaxlib 0.10.2's do")
    captures = _captured(_THUNK.findall(thunks))
    for (kind, instruction), (_, _, rest), captured in zip(named, listed, captures, strict=True):
        if kind in ("kConditional", "kWhile") or kind.endswith("Done") or kind.startswith("kWait"):
            continue
        place, kernel = module.place(instruction), _KERNEL.search(rest)
        launch = Launch(kind, instruction, instruction, place.operation, place.layer, captured)
        if kernel:
            blocks, threads = (_product(text) for text in (kernel[2], kernel[3]))
            launch = replace(launch, kernel=kernel[1], blocks=blocks, threads=threads, shared=int(kernel[4]))
        yield launch


def _captured(thunks: Sequence[tuple[str, str, str]]) -> Iterator[bool]:
    """Yields for each thunk that is no group whether it lies in a command buffer, by the indentation."""
    buffer: int | None = None
    for indent, kind, _ in thunks:
        if buffer is not None and len(indent) <= buffer:
            buffer = None
        if kind == "kCommandBuffer":
            buffer = len(indent)
        elif kind not in _GROUPS:
            yield buffer is not None


def _product(text: str) -> int:
    sizes = [int(part) for part in text.split(",")]
    return sizes[0] * sizes[1] * sizes[2]


def _kernels(names: Iterable[str], ptx: str, assembler_log: str) -> list[Kernel]:
    assembled = {found[0]: [int(n) for n in found[1:]] for found in _ASSEMBLED.findall(assembler_log)}
    parts = re.split(r"^\.visible \.entry (\w+)\(", ptx, flags=re.MULTILINE)
    bodies = zip(parts[1::2], parts[2::2], strict=True)
    products = {name: len(_PRODUCT.findall(body)) for name, body in bodies}
    kernels = []
    for name in sorted(names):
        stack, stores, loads, registers = assembled.get(name, [None] * 4)
        kernels.append(Kernel(name, registers, stores, loads, stack, products.get(name, 0)))
    return kernels


def _values(text: str) -> Iterator[dict[str, Any]]:
    """Yields the values of a buffer assignment, and what kind of memory they are in."""
    about = ""
    for line in text.splitlines():
        if found := _ALLOCATION.match(line):
            about = found[3]
        elif found := _VALUE.match(line):
            yield {
                "name": found[1], "size": int(found[2]), "offset": int(found[3]), "shape": found[4],
                "parameter": ", parameter " in about, "temporary": "preallocated-temp" in about,
            }  # fmt: skip


def _buffers(values: Iterable[Mapping[str, Any]], live: str, module: _Module) -> list[Buffer]:
    spans = {name: (int(start), int(end)) for name, start, end in _RANGE.findall(live)}
    buffers = []
    for value in values:
        name = value["name"]
        span = spans.get(name) or spans.get(f"{name}{{}}")
        if value["temporary"] and span:
            place = module.place(re.sub(r"\{.*", "", name))
            buffers.append(Buffer(name, value["shape"], value["size"], value["offset"], *span, *place[:2]))
    return buffers


def occupancy(buffers: Sequence[Buffer]) -> list[int]:
    """Returns the bytes of temporary memory in use at each place of the schedule; values that share their
    memory count once."""
    last = max((buffer.end for buffer in buffers), default=-1)
    return [_union(alive(buffers, place)) for place in range(last + 1)]


def alive(buffers: Iterable[Buffer], place: int) -> list[Buffer]:
    """Returns the values that are needed at a place of the schedule, the largest first."""
    needed = [buffer for buffer in buffers if buffer.start <= place <= buffer.end]
    return sorted(needed, key=lambda buffer: -buffer.size)


def _union(buffers: Iterable[Buffer]) -> int:
    total = reached = 0
    for start, end in sorted((b.offset, b.offset + b.size) for b in buffers):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
