"""mode=bench: the kernels' device times beside their bound and beside other implementations.

select → per spec: inputs on the device, every variant checked against the reference, then timed in turn →
table, result.json and `<results_dir>/<device>/kernels-DATE.json`. The device's copy bandwidth and matrix
rates are measured in the same run; bounds and shares are of these.
"""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.kernels.baselines import BFLOAT16, Variant, restriction, variants
from moejax.bench.kernels.check import check, reference_result
from moejax.bench.kernels.config import KernelSelection
from moejax.bench.kernels.device_timing import (
    MEMORY_BUDGET,
    Chain,
    Timed,
    chain_length,
    measure,
    one_line,
    tree_bytes,
)
from moejax.bench.kernels.routed import select_routed
from moejax.bench.kernels.select import Selected, select
from moejax.core.errors import DeviceError
from moejax.core.files import atomic_write_text, dump_json, ensure_writable
from moejax.core.hardware import get_hardware
from moejax.report.progress import progress
from moejax.results.result import Result
from pallas_kernels.op import Cost, Op, Spec
from pallas_kernels.qformats import GROUPS
from pallas_kernels.tuned import device_key

# Bytes of last-level cache: NVIDIA's data sheets.
_CACHE = {"a100": 40 << 20, "h100": 50 << 20, "h200": 50 << 20}


def run_bench(config: KernelSelection, run: ExperimentRun) -> Result:
    """Runs mode=bench and finishes `run`.

    Raises:
        DeviceError: JAX has no CUDA device.
        ConfigError: an unknown name, or a trace that no grouped product's experts fit.
    """
    routed = config.bench.routing is not None
    selected = select_routed(config) if routed else select(config.ops, config.implementations, config.specs)
    require_gpu("bench")
    folder = ensure_writable(Path(config.bench.results_dir) / device_key())
    run.start(variant="bench")
    ceilings = measure_ceilings()
    rows: list[dict[str, Any]] = []
    with progress("timing kernels", total=sum(len(item.specs) for item in selected)) as task:
        for item in selected:
            for spec in item.specs:
                task.describe(f"{item.op.name} {spec.name}")
                rows += bench_spec(item, spec, config, ceilings)
                task.advance()
    result = run.result(
        metrics={**ceilings, "kernels": len(rows), **_best(rows)},
        cases=rows,
        hardware=get_hardware("auto", jax.devices()[0].device_kind),
    )
    name = f"kernels-{'routing-' if routed else ''}{datetime.date.today().isoformat()}.json"
    files = []
    with run.parts.part(name):
        files.append(atomic_write_text(folder / name, dump_json(result, indent=1) + "\n"))
    return run.finish(result, files=files, tables={"kernel_table": result["cases"]})


def require_gpu(mode: str) -> None:
    """Raises DeviceError where there is nothing to time on."""
    platform = jax.default_backend()
    if platform != "gpu":
        raise DeviceError(
            f"mode={mode} times kernels on a CUDA device, and JAX has only {platform!r} here; "
            "mode=static reports on them without one"
        )


def bench_spec(
    item: Selected, spec: Spec, config: KernelSelection, ceilings: Mapping[str, float]
) -> list[dict[str, Any]]:
    """A row per implementation of one spec."""
    op, cost = item.op, spec.cost
    bound = 1e6 * max(cost.bytes / ceilings["copy_bandwidth"], cost.flops / _rate(ceilings, cost))
    chosen = variants(op, spec, item.implementations, baselines=config.bench.baselines)
    rows = {}
    for variant, (timed, facts) in zip(
        chosen, try_variants(op, spec, chosen, config.bench.repeats), strict=True
    ):
        figures = _figures(timed, cost, bound, ceilings) if timed is not None else {}
        rows[variant.name] = _row(op, spec, variant, bound) | facts | figures
    plain = rows.get(BFLOAT16, {}).get("median_us")
    for row in rows.values():
        if plain and row["ours"] and row.get("median_us"):
            row["speedup_over_bf16"] = plain / row["median_us"]
    return list(rows.values())


def try_variants(
    op: Op, spec: Spec, chosen: Sequence[Variant], repeats: int
) -> list[tuple[Timed | None, dict[str, Any]]]:
    """Compares variants of one spec with the reference, and times in turn those that are right.

    Returns:
        For each variant its times, None where it has none, and facts for its row: `error`; of one that ran
        also `sets`, `cold` and `relative_error`.
    """
    want, unchecked = None, None
    try:
        want = reference_result(op, spec, restriction(op.name))
    except Exception as error:
        unchecked = f"not timed, since the reference, to compare with, failed: {one_line(error)}"
    sets = bench_inputs(op, spec)
    facts: dict[str, dict[str, Any]] = {}
    chains = {}
    for variant in chosen:
        fact = facts[variant.name] = {"error": variant.unavailable or unchecked}
        if fact["error"]:
            continue
        try:
            # What is prepared must fit beside the inputs.
            count = min(len(sets), max(2, MEMORY_BUDGET // max(variant.prepared_bytes, 1)))
            prepared = [variant.prepare(arrays) for arrays in sets[:count]]
            # Cold: what the calls read is too large together for the cache to hold it until it is read again.
            read = count * min(spec.cost.bytes, tree_bytes(prepared[0]))
            fact |= {"sets": count, "cold": read >= 3 * _CACHE.get(device_key(), 50 << 20)}
            if variant.comparable:
                defined = jax.jit(lambda kw, ready, v=variant: v.restrict(v.run(ready), kw))
                got = defined(sets[0], prepared[0])
                fact["relative_error"], fact["error"] = check(got, want, spec, op.name)
            if fact["error"] is None:  # a wrong result has no time, so that it cannot be the fastest
                chains[variant.name] = Chain(variant.run, prepared, variant.carries)
        except Exception as error:  # another library's refusal, or ours: a row of the table, not its end
            fact["error"] = one_line(error)
    timed, failed = measure(chains, repeats)
    for name, reason in failed.items():
        facts[name]["error"] = reason
    return [(timed.get(variant.name), facts[variant.name]) for variant in chosen]


def bench_inputs(op: Op, spec: Spec) -> list[dict[str, Any]]:
    """Inputs of a chain's calls, `check.first_inputs` first."""
    hardware = get_hardware("auto", jax.devices()[0].device_kind)
    bound = 1.0
    if hardware is not None and hardware.bandwidth is not None:
        peak = hardware.flops.get(spec.cost.unit)
        compute = spec.cost.flops / peak if peak else 0.0
        bound = 1e6 * max(spec.cost.bytes / hardware.bandwidth, compute)
    out = jax.eval_shape(lambda kw: op.reference(**kw, **spec.static), spec.abstract)
    count = chain_length(3 * bound, tree_bytes(spec.abstract) + tree_bytes(out))
    make = jax.jit(spec.make)
    return [make(jax.random.PRNGKey(i)) for i in range(count)]


def _row(op: Op, spec: Spec, variant: Variant, bound: float) -> dict[str, Any]:
    return {
        "op": op.name,
        "spec": spec.name,
        "implementation": variant.name,
        "ours": variant.ours,
        "config": variant.config,
        "config_reason": variant.reason,
        "bound_us": bound,
        "flops": spec.cost.flops,
        "bytes": spec.cost.bytes,
        "unit": spec.cost.unit,
        "tags": " ".join(sorted(spec.tags)),
        "note": variant.note,
        "error": None,
    }


def _figures(timed: Timed, cost: Cost, bound: float, ceilings: Mapping[str, float]) -> dict[str, Any]:
    seconds = timed.median_us / 1e6
    return {
        "median_us": timed.median_us,
        "spread": timed.spread,
        "bound_share": bound / timed.median_us if seconds else None,
        "bandwidth_share": cost.bytes / seconds / ceilings["copy_bandwidth"] if seconds else None,
        "rate_share": cost.flops / seconds / _rate(ceilings, cost) if seconds else None,
        "calls": timed.calls,
    }


def measure_ceilings() -> dict[str, float]:
    """Measures what this device reaches: copied bytes/s, reads and writes counted; matrix rates in FLOP/s."""
    x = jax.random.normal(jax.random.key(0), (1 << 29,), jnp.bfloat16)
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in (1, 2))
    small = [(jax.random.normal(jax.random.key(i), (8192, 8192)) * 30).astype(jnp.int8) for i in (3, 4)]
    y = x + jnp.bfloat16(1)
    chains = {
        "copy": Chain(lambda kw: kw["x"] + jnp.bfloat16(1), [{"x": x}, {"x": y}, {"x": x - y}]),
        "matmul": Chain(lambda kw: kw["a"] @ kw["b"], [{"a": a, "b": b}, {"a": b, "b": a}, {"a": a, "b": a}]),
        "int8": Chain(
            lambda kw: jax.lax.dot(kw["a"], kw["b"], preferred_element_type=jnp.int32),
            [{"a": small[i], "b": small[j]} for i, j in ((0, 1), (1, 0), (0, 0))],
        ),
    }
    timed, failed = measure(chains, 9)
    for name, reason in failed.items():
        raise DeviceError(f"this device's {name} rate, which bounds are of, cannot be measured: {reason}")
    return {
        "copy_bandwidth": 2 * x.nbytes / (timed["copy"].median_us / 1e6),
        "matmul_bfloat16": 2 * 8192**3 / (timed["matmul"].median_us / 1e6),
        "matmul_int8": 2 * 8192**3 / (timed["int8"].median_us / 1e6),
    }


def _rate(ceilings: Mapping[str, float], cost: Cost) -> float:
    """Matrix rate for a cost's unit. float32 work here is elementwise and bound by bandwidth."""
    if cost.unit == "int8":
        return max(ceilings["matmul_int8"], ceilings["matmul_bfloat16"])
    return ceilings["matmul_bfloat16"]


def _best(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median over specs of our best share of the bound, by operation; and least gains over bfloat16.

    `<op>_<format kind>_<decode or prefill>_speedup_over_bf16` is that of the spec where our best
    implementation gains least: a goal "at least" holds if this figure does.
    """
    metrics: dict[str, float] = {}
    ops = dict.fromkeys(row["op"] for row in rows)
    for op in ops:
        shares = _ours_by_spec(rows, op, "bound_share")
        if shares:
            metrics[f"{op}_bound_share"] = float(np.median([share for _, share in shares.values()]))
        for tags, gain in _ours_by_spec(rows, op, "speedup_over_bf16").values():
            for kind in GROUPS.keys() & tags:
                for phase in {"decode", "prefill"} & tags:
                    key = f"{op}_{kind}_{phase}_speedup_over_bf16"
                    metrics[key] = min(gain, metrics.get(key, gain))
    return metrics


def _ours_by_spec(rows: list[dict[str, Any]], op: str, figure: str) -> dict[str, tuple[set[str], float]]:
    """Returns by spec its tags and the highest figure that a right one of our implementations has."""
    best: dict[str, tuple[set[str], float]] = {}
    for row in rows:
        if row["op"] == op and row["ours"] and row["error"] is None and row.get(figure):
            least = best.get(row["spec"], (set(), 0.0))[1]
            best[row["spec"]] = set(row["tags"].split()), max(least, row[figure])
    return best
