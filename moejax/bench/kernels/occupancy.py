"""Resources of a streaming multiprocessor, and how many blocks of a kernel fit on one.

Source: CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications).
"""

from typing import NamedTuple


class Target(NamedTuple):
    """Limits of one multiprocessor; shared memory in bytes. `device` is its name in `pallas_kernels/data` and
    in `moejax.bench.program.compiler`, `hardware` the one whose peaks bound its kernels."""

    device: str
    hardware: str
    capability: int
    registers: int
    warps: int
    blocks: int
    shared: int
    shared_per_block: int


TARGETS = {
    "sm_80": Target("a100", "a100_80gb", 80, 65536, 64, 32, 164 * 1024, 163 * 1024),
    "sm_90": Target("h100", "h100", 90, 65536, 64, 32, 228 * 1024, 227 * 1024),
}

_WARP, _REGISTER_UNIT, _SHARED_RESERVED = 32, 256, 1024


class Occupancy(NamedTuple):
    """Blocks that fit on a multiprocessor, the share of its warps they fill, and what ran out first."""

    blocks: int
    share: float
    limiter: str


def occupancy(target: Target, registers: int, shared: int, num_warps: int) -> Occupancy:
    """Returns the theoretical occupancy of a kernel.

    Args:
        registers: per thread; allocated in units of 256 a warp.
        shared: bytes per block; the system reserves 1 KB more.
    """
    per_warp = -(-max(registers, 1) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    room = {
        "registers": target.registers // per_warp // num_warps,
        "shared memory": target.shared // (shared + _SHARED_RESERVED),
        "warps": target.warps // num_warps,
        "blocks": target.blocks,
    }
    if shared > target.shared_per_block:
        room["shared memory"] = 0
    limiter = min(room, key=lambda name: room[name])
    return Occupancy(room[limiter], room[limiter] * num_warps / target.warps, limiter)
