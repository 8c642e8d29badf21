"""Rows of the static report: operation × implementation × spec × target, a row for every kernel of it."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pallas_kernels._compat import Lowered, lower_for_cuda
from pallas_kernels.op import Implementation, Op, Spec, TritonSource
from pallas_kernels.static.compiler import Compiler
from pallas_kernels.static.targets import TARGETS, occupancy
from pallas_kernels.tuned import configure

_DEVICE = {"sm_80": "a100", "sm_90": "h100"}


@dataclass(frozen=True)
class Row:
    """One kernel of one spec on one target.

    Attributes:
        config, config_reason: the default configuration and where it came from.
        registers: per thread. spill_stores, spill_loads, stack, shared: bytes.
        blocks_per_sm, occupancy, limiter: theoretical occupancy, as a share of the warps, and what limits it.
        products, products_missed: matrix products, and those of them that are not on the tensor cores.
        mma_sync, wgmma, cp_async, loads, stores: instructions in the PTX; `vector_` those of 8 bytes a thread
            and more, `cp_async_16` those of 16.
        flops, bytes, unit: the spec's least work (all of its kernels together).
        error: why there are no figures.
    """

    op: str
    implementation: str
    spec: str
    target: str
    kernel: str
    config: dict[str, Any]
    config_reason: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    flops: float
    bytes: float
    unit: str
    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0
    blocks_per_sm: int = 0
    occupancy: float = 0.0
    limiter: str = ""
    products: int = 0
    products_missed: int = 0
    mma_sync: int = 0
    wgmma: int = 0
    cp_async: int = 0
    cp_async_16: int = 0
    loads: int = 0
    vector_loads: int = 0
    stores: int = 0
    vector_stores: int = 0
    error: str = ""


def report_op(
    op: Op,
    compiler: Compiler,
    *,
    targets: Sequence[str] = tuple(TARGETS),
    select: Callable[[str, Spec], bool] = lambda implementation, spec: True,
    config: Any = None,
) -> list[Row]:
    """Compiles every spec that `select(implementation, spec)` keeps, with its default configuration.

    Args:
        config: an explicit configuration instead; then all specs kept must be of its implementation.
    """
    rows: list[tuple[Row, bool]] = []

    def jobs() -> Iterator[dict[str, Any]]:
        for name, kind in op.implementations.items():
            for spec in op.specs:
                if not select(name, spec) or kind.supports(spec.problem) is not None:
                    continue
                for target in targets:
                    chosen = configure(op, name, spec.problem, config=config, device=_DEVICE[target])
                    for row, job in _kernels(op, name, kind, spec, target, chosen.config, chosen.reason):
                        rows.append((row, job is not None))
                        if job is not None:
                            yield job

    results = iter(compiler.compile(jobs()))
    return [_filled(row, next(results)) if lowered else row for row, lowered in rows]


def failures(rows: Iterable[Row]) -> list[str]:
    """Returns the faults of default configurations, a line each: the static gate.

    No kernel may fail to compile, spill, take more shared memory than a block may have, or do a matrix
    product outside the tensor cores (float32 products excepted: they are exact on purpose).
    """
    wrong = []
    for row in rows:
        where = f"{row.op} {row.implementation} {row.spec} {row.target} {row.kernel}"
        if row.error:
            wrong.append(f"{where}: {row.error}")
            continue
        if row.spill_stores or row.spill_loads:
            wrong.append(f"{where}: spills {row.spill_stores} B stores, {row.spill_loads} B loads")
        limit = TARGETS[row.target].shared_per_block
        if row.shared > limit:
            wrong.append(f"{where}: {row.shared} B of shared memory, of {limit}")
        if row.products_missed and row.unit != "float32":
            wrong.append(f"{where}: {row.products_missed} of {row.products} products miss the tensor cores")
    return wrong


def _kernels(
    op: Op, name: str, kind: Implementation, spec: Spec, target: str, config: Any, reason: str
) -> list[tuple[Row, dict[str, Any] | None]]:
    def row(kernel: str, grid: Sequence[int], warps: int, stages: int, error: str = "") -> Row:
        return Row(
            op.name,
            name,
            spec.name,
            target,
            kernel,
            asdict(config),
            reason,
            tuple(grid),
            warps,
            stages,
            **asdict(spec.cost),
            error=error,
        )

    capability = TARGETS[target].capability
    try:
        run = functools.partial(kind.run, **spec.static, config=config, interpret=False)
        kernels: Sequence[Lowered | TritonSource] = (
            lower_for_cuda(run, spec.abstract, capability)
            if kind.sources is None
            else kind.sources(spec, config)
        )
        return [(row(k.name, k.grid, k.num_warps, k.num_stages), _job(k, capability)) for k in kernels]
    except Exception as error:  # JAX's own lowering refused: a finding like any other
        text = " ".join(str(error).split())
        return [(row("", (), 0, 0, f"does not lower: {type(error).__name__}: {text[:400]}"), None)]


def _job(kernel: Lowered | TritonSource, capability: int) -> dict[str, Any]:
    return {
        **({"ttir": kernel.ttir} if isinstance(kernel, Lowered) else {"source": _source(kernel)}),
        "capability": capability,
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
    }


def _source(source: TritonSource) -> dict[str, Any]:
    return {
        "module": source.module,
        "function": source.name,
        "signature": dict(source.signature),
        "constants": dict(source.constants),
        "divisible": [name for name in source.signature if source.signature[name].startswith("*")],
        # The module's text is part of the job, so that the cache sees it change, and what it calls beside it.
        "text": inspect.getsource(importlib.import_module(source.module)),
    }


def _filled(row: Row, result: dict[str, Any]) -> Row:
    values = {**asdict(row), **{k: v for k, v in result.items() if k != "died"}}
    if "error" not in result:
        occupied = occupancy(TARGETS[row.target], result["registers"], result["shared"], row.num_warps)
        values |= {"blocks_per_sm": occupied.blocks, "occupancy": occupied.share, "limiter": occupied.limiter}
    return Row(**values)
