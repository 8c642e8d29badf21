"""Where FLOPs and bytes go, `result["roofline"]`, and utilisation in a result's rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moejax.core.hardware import KNOWN, Hardware
from moejax.perf.operation_costs import SUMS, Bound, OpCost, bounds, by_operation, total, utilisation


def cost_breakdown(
    ops: Sequence[OpCost],
    hardware: Hardware | None,
    dtype: str,
    *,
    seconds: float | None = None,
    kinds: Iterable[str] = (),
    measured_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Returns one phase's cost breakdown: sums by operation, their bounds on the device, and on others by
    their data sheets.

    Args:
        ops: of one phase, layer by layer.
        hardware: the device that ran them; None, or one without known peaks: no bounds.
        dtype: what products are computed in.
        seconds: what they took, without a profiler.
        kinds: further devices, of `moejax.core.hardware.KNOWN`; those without known peaks are left out.
        measured_ms: what each operation took under the profiler.

    Returns:
        `phase`, `flops`, `weight_bytes`, `cache_bytes`, `activation_bytes`, `seconds`, `mfu`, `mbu`,
        `roofline_doubt` (why one of the two is None), `bound_ms`, `limit`, `in_turn_ms` (None without peaks),
        `devices` (kind → the three) and `operations`, rows of the same with `operation` and, where given,
        `measured_ms` and `excess_ms`.
    """
    done = total(ops)
    rows = by_operation(ops)
    used = utilisation(ops, seconds, hardware, dtype) if seconds else None
    known = hardware is not None and has_peaks(hardware, dtype)
    limits = bounds(rows, hardware, dtype) if known and hardware is not None else None
    devices = {
        kind: _bounds(bounds(rows, KNOWN[kind], dtype)) for kind in kinds if has_peaks(KNOWN[kind], dtype)
    }
    operations = []
    for i, op in enumerate(rows):
        each = limits.each[i] if limits else None
        row: dict[str, Any] = {"operation": op.operation, **_sums(op), "intensity": op.intensity}
        least = each.seconds * 1e3 if each else None
        row |= {"bound_ms": least, "limit": each.limit if each else None}
        if measured_ms is not None:
            spent = measured_ms.get(op.operation, 0.0)
            row |= {"measured_ms": spent, "excess_ms": None if least is None else spent - least}
        operations.append(row)
    return {
        "phase": rows[0].phase if rows else None,
        "dtype": dtype,
        **_sums(done),
        "seconds": seconds,
        "mfu": used.mfu if used else None,
        "mbu": used.mbu if used else None,
        "roofline_doubt": used.doubt if used else None,
        **(_bounds(limits) if limits else {"bound_ms": None, "limit": None, "in_turn_ms": None}),
        "devices": devices,
        "operations": operations,
    }


def utilisation_percent(
    ops: Iterable[OpCost], seconds: float | None, hardware: Hardware | None, dtype: str, prefix: str = ""
) -> dict[str, float | None]:
    """`mfu_percent` and `mbu_percent` for a row, their names after `prefix`; None where not known."""
    used = utilisation(ops, seconds, hardware, dtype) if seconds else None
    percent = {"mfu_percent": used.mfu if used else None, "mbu_percent": used.mbu if used else None}
    return {prefix + name: None if part is None else 100 * part for name, part in percent.items()}


def percent_of_roof(
    name: str, bound: Bound, seconds: float, hardware: Hardware | None, dtype: str
) -> dict[str, float | str | None]:
    """Returns for a row, as `name`, the least time in per cent of the measured; where that cannot be true
    None, and the reason as `roofline_doubt`."""
    assert hardware is not None, "there was a bound"
    share, doubt = hardware.believed(bound.limit, dtype, bound.seconds / seconds)
    return {name: None if share is None else 100 * share, **({"roofline_doubt": doubt} if doubt else {})}


def has_peaks(hardware: Hardware, dtype: str) -> bool:
    """Whether bandwidth and FLOP/s for that dtype are known."""
    return bool(hardware.bandwidth and hardware.flops.get(dtype))


def _sums(op: OpCost) -> dict[str, float]:
    return {name: getattr(op, name) for name in SUMS}


def _bounds(limits: Any) -> dict[str, Any]:
    return {
        "bound_ms": limits.whole.seconds * 1e3,
        "limit": limits.whole.limit,
        "in_turn_ms": limits.in_turn * 1e3,
    }
