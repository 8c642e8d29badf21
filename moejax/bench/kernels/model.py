"""The static model: a time for a configuration from what compilers say of it. It ranks; it does not measure.

It chooses where there is no device to time on, and only against a margin: a configuration takes the
heuristic's place if the model has it faster by `MARGIN`, because its terms leave out what caches, schedulers
and the order of instructions do.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.bench.kernels.occupancy import TARGETS
from moejax.bench.kernels.row import Row
from moejax.core.hardware import KNOWN

MARGIN = 1.15

# Seconds that a load takes from device memory under load; bytes in flight are bandwidth times this.
_LATENCY_S = 0.8e-6
# Bytes a second that one multiprocessor takes at most: 64 a cycle, at an A100's 1.41 GHz.
_MULTIPROCESSOR_BYTES = 64 * 1.41e9
# Products (mma.m16n8k16) that keep a multiprocessor's four tensor cores busy: each starts one in 8 cycles and
# finishes it after about 33 (Sun et al., arXiv 2206.02874, table 4, A100), so four must be under way in each.
_UNDER_WAY, _CHAIN = 16, 4
# Steps of 16 that one accumulator goes through in a turn where the configuration does not say: 128 numbers.
_STEPS = 8

# Fields of a configuration that say how much a program multiplies in a turn. Attention over pages has one
# configuration for two kernels.
_TILE = ("block_m", "block_n", "block_k", "block_q", "rows", "tile")
_TILE_OF = {"paged_decode": ("decode_tile",), "paged_chunk": ("rows", "tile")}

Repeats = Mapping[tuple[str, int], float]
"""Kernel's name and place among its spec's kernels → how often its products are made."""


def predict_us(rows: Sequence[Row], repeats: Repeats | None = None) -> float:
    """Microseconds of one configuration: the spec's bound, slowed by what the configuration leaves unused.

    Memory: bandwidth is reached when enough bytes are in flight (Little's law); a block keeps in flight what
    its pipeline buffers in shared memory, or four 16-byte loads a thread where it has none. Tensor cores:
    busy when enough independent products are under way, which warps and the accumulators of a warp give;
    products that several warps make of the same numbers (`repeated_products`) take their time, too. Other
    arithmetic: a quarter of a multiprocessor's warps keeps it busy. A last wave of blocks that is not full
    has less of all that, but also less to do: where memory is the limit, few blocks still use most of it.

    The kernels of a spec share one cost; it is that of the slowest kernel with products, if any has them:
    beside these, a reduction of partial results moves next to nothing.
    """
    heavy = [(at, row) for at, row in enumerate(rows) if row.products] or list(enumerate(rows))
    return 1e6 * max(_seconds(row, (repeats or {}).get((row.kernel, at), 1.0)) for at, row in heavy)


def _seconds(row: Row, repeat: float) -> float:
    """Whole waves of blocks, and a last one of the blocks that are left."""
    programs = math.prod(row.grid)
    slots = row.blocks_per_sm * TARGETS[row.target].multiprocessors
    whole, left = divmod(programs, slots)
    return whole * _wave(row, min(programs, slots), repeat) + (_wave(row, left, repeat) if left else 0.0)


def _wave(row: Row, active: int, repeat: float) -> float:
    """Seconds of `active` blocks that run together, each with its share of the work."""
    target, hardware = TARGETS[row.target], KNOWN[TARGETS[row.target].hardware]
    assert hardware.bandwidth is not None
    share, used = active / math.prod(row.grid), min(active, target.multiprocessors)
    each = row.shared if row.cp_async else 4 * 16 * 32 * row.num_warps
    bandwidth = min(hardware.bandwidth, used * _MULTIPROCESSOR_BYTES, active * each / _LATENCY_S)
    warps = active * row.num_warps / used
    if row.mma_sync:
        busy = warps * min(_CHAIN, max(1.0, row.mma_sync / _steps(row))) / _UNDER_WAY
    else:
        busy = 4 * warps / target.warps
    peak = hardware.flops.get(row.unit, hardware.flops["float32"])
    rate = peak * used / target.multiprocessors * min(1.0, busy)
    return share * max(row.bytes / bandwidth, repeat * row.flops / rate)


def repeated_products(reports: Sequence[Sequence[Row]]) -> list[Repeats]:
    """How often each configuration's warps make the same product, from the reports of all those of a spec.

    Where a tile is too small to be cut into as many parts as there are warps, several warps multiply the same
    numbers. It shows in the code: instructions a warp, times warps, over the tile should be the same number
    for all configurations of a kernel, since every warp runs the same code and a turn's loop is unrolled.
    The least among them counts as 1, so that what all of them repeat is not seen; nor is anything on
    sm_90, whose instructions differ in size.
    """
    density: list[dict[tuple[Any, ...], float]] = []
    for rows in reports:
        densities = {}
        for at, row in enumerate(rows):
            tile = math.prod(row.config[name] for name in _fields(row))
            if row.mma_sync and not row.wgmma and _fields(row):
                # Another mode is another kernel, perhaps with fewer matrices.
                densities[(row.kernel, at, row.config.get("mode"))] = row.mma_sync * row.num_warps / tile
        density.append(densities)
    least: dict[tuple[Any, ...], float] = {}
    for densities in density:
        for key, value in densities.items():
            least[key] = min(value, least.get(key, value))
    return [{key[:2]: value / least[key] for key, value in densities.items()} for densities in density]


def choose(predicted: Sequence[float], heuristic: int | None) -> tuple[int, str]:
    """Which configuration an untimed entry gets, and why.

    Args:
        predicted: microseconds by the model.
        heuristic: place of the heuristic's configuration among them; None if it is not sound.
    """
    best = min(range(len(predicted)), key=lambda i: predicted[i])
    if heuristic is None:
        return best, "the model's best: the heuristic's configuration is not sound"
    gain = predicted[heuristic] / predicted[best]
    if gain < MARGIN:
        return heuristic, f"the heuristic's: the model's best gains {gain:.2f}, less than {MARGIN}"
    return best, f"the model's best: gains {gain:.2f} over the heuristic's"


def _fields(row: Row) -> tuple[str, ...]:
    names = _TILE_OF.get(row.kernel.removesuffix("_kernel"), _TILE)
    return tuple(name for name in names if name in row.config)


def _steps(row: Row) -> float:
    """Products of a turn that follow one another in each accumulator."""
    depth = row.config["block_k"] / 16 if "block_n" in row.config else _STEPS
    return max(1.0, depth)
