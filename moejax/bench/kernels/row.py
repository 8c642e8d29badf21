"""Rows of the static report: what compilers say of a kernel, and which of it is a fault."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moejax.bench.kernels.occupancy import TARGETS


@dataclass(frozen=True)
class Row:
    """One kernel of one spec on one target.

    Attributes:
        config, config_reason: the configuration and where it came from.
        compiler: who compiled it, XLA by jaxlib's version or the Triton wheel, as a GPU machine would.
        grid, num_warps: of the launch.
        flops, bytes, unit: the spec's least work (all of its kernels together).
        registers: per thread; None: there was no ptxas. spill_stores, spill_loads, stack, shared: bytes.
        blocks_per_sm, occupancy, limiter: theoretical occupancy, as a share of the warps, and what limits it.
        products: matrix products in the kernel's IR.
        mma_sync, wgmma, cp_async, loads, stores: instructions in the PTX; `vector_` those of 8 bytes a thread
            and more, `cp_async_16` those of 16.
        error: why there are no figures.
    """

    op: str
    implementation: str
    spec: str
    target: str
    kernel: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    config_reason: str = ""
    compiler: str = ""
    grid: tuple[int, ...] = ()
    num_warps: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    unit: str = "bfloat16"
    registers: int | None = None
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0
    blocks_per_sm: int = 0
    occupancy: float = 0.0
    limiter: str = ""
    products: int = 0
    mma_sync: int = 0
    wgmma: int = 0
    cp_async: int = 0
    cp_async_16: int = 0
    loads: int = 0
    vector_loads: int = 0
    stores: int = 0
    vector_stores: int = 0
    error: str = ""

    @property
    def where(self) -> str:
        """The row in words."""
        return f"{self.op} {self.implementation} {self.spec} {self.target} {self.kernel}".rstrip()


def failures(rows: Iterable[Row]) -> list[str]:
    """Returns the faults of default configurations, a line each: the static gate.

    No kernel may fail to compile, spill, take more shared memory than a block may have, or do its matrix
    products outside the tensor cores (float32 products excepted: they are exact on purpose).
    """
    wrong = []
    for row in rows:
        if row.error:
            wrong.append(f"{row.where}: {row.error}")
            continue
        if row.registers is None:
            wrong.append(f"{row.where}: no ptxas was found, which tells what spills")
        if row.spill_stores or row.spill_loads:
            wrong.append(f"{row.where}: spills {row.spill_stores} B stores, {row.spill_loads} B loads")
        limit = TARGETS[row.target].shared_per_block
        if row.shared > limit:
            wrong.append(f"{row.where}: {row.shared} B of shared memory, of {limit}")
        if row.products and not (row.mma_sync or row.wgmma) and row.unit != "float32":
            wrong.append(f"{row.where}: its {row.products} products miss the tensor cores")
    return wrong
