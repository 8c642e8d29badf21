"""Collects the inputs of runs and says in which of them the runs differ, by kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moejax.results.compare.runs import Run
from moejax.results.machine import busy_line, pace_line

MISSING = "(none)"
"""The value of a key that a run does not have: a variable not set, a package not installed."""

UNKNOWN = "(not recorded)"
"""The value where a run's record does not say; no difference by itself."""

KINDS: tuple[str, ...] = (
    "model", "workload", "device", "CPU", "quantization", "backend", "configuration", "kernel choices",
    "compiled programs", "code", "versions", "environment variables", "JAX settings", "seeds", "tracking",
)  # fmt: skip
"""All kinds, the ones that make runs incomparable first."""

# The sections of a configuration that are kinds of their own. What only follows a run does not change it.
_SECTIONS = {
    "model": "model",
    "workload": "workload",
    "quant": "quantization",
    "quantization": "quantization",
    "backend": "backend",
    "backends": "backend",
    "seed": "seeds",
    "tracker": "tracking",
    "telemetry": "tracking",
    "verbose": "tracking",
    "overwrite": "tracking",
    "hardware": "tracking",
    "goals": "tracking",
}
# How often and against which objectives a workload is measured is not part of it.
_MEASURING = ("iterations", "warmup", "slo", "compare")


# What a peer says of itself that its speed depends on.
_PEER_INPUTS = (
    "versions", "dtype", "kv_cache_dtype", "device", "threads", "attention", "experts", "weights_sha256"
)  # fmt: skip

_STOLEN = 15.0  # per cent of the time, by other virtual machines, from which a timing is suspect


@dataclass(frozen=True)
class Difference:
    """One key whose values are not all equal; `values[i]` is run i's."""

    kind: str
    key: str
    values: tuple[Any, ...]


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay values, and so do empty mappings."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def input_differences(runs: Sequence[Run]) -> list[Difference]:
    """Every input in which runs differ, ordered by kind. The time, the command line and the folder always
    differ and do not count; nor do a machine's passing states, for which see `conditions`."""
    differences = [
        *_compare("", [flatten(run.result["config"]) for run in runs], MISSING, _config_kind),
        *_provenance(runs),
        *_compare("", [_resolved(run) for run in runs], UNKNOWN, "kernel choices"),
        *_compare("", _programs(runs), UNKNOWN, "compiled programs"),
        *_compare("", [_case_backends(run) for run in runs], UNKNOWN, "backend"),
        *_compare("backends.", [_peers(run) for run in runs], UNKNOWN, "backend"),
    ]
    return sorted(differences, key=lambda difference: KINDS.index(difference.kind))


def between(differences: Sequence[Difference], one: int, other: int) -> list[Difference]:
    """Returns the differences between two of the runs."""
    pairs = [(difference, difference.values[one], difference.values[other]) for difference in differences]
    return [d for d, a, b in pairs if UNKNOWN not in (a, b) and a != b]


def same_inputs(differences: Sequence[Difference], index: int) -> bool:
    """Whether a run had the first one's inputs, as far as is recorded. Where the results go is none."""
    return all(difference.kind == "tracking" for difference in between(differences, 0, index))


def _compare(
    prefix: str, flats: Sequence[Mapping[str, Any]], absent: Any, kind: str | Callable[[str], str]
) -> list[Difference]:
    """Returns the keys whose known values differ; `kind` is that of all of them, or tells each one's."""
    keys = dict.fromkeys(key for flat in flats for key in flat)
    differences = []
    for key in keys:
        values = tuple(flat.get(key, absent) for flat in flats)
        known = [value for value in values if value != UNKNOWN]
        if any(value != known[0] for value in known):
            name = f"{prefix}{key}"
            differences.append(Difference(kind if isinstance(kind, str) else kind(name), name, values))
    return differences


def _config_kind(key: str) -> str:
    section, _, rest = key.partition(".")
    if section == "workload" and rest.partition(".")[0] in _MEASURING:
        return "configuration"
    return _SECTIONS.get(section, "configuration")


def _provenance(runs: Sequence[Run]) -> list[Difference]:
    parts = [run.result["provenance"] for run in runs]
    differences: list[Difference] = []
    for key, kind in (
        ("checkpoint_hash", "model"), ("workload_hash", "workload"), ("git", "code"), ("device", "device")
    ):  # fmt: skip
        sections = [{} if part.get(key) is None else flatten({key: part[key]}) for part in parts]
        differences += _compare("", sections, UNKNOWN, kind)
    for key, kind in (("cpu", "CPU"), ("jax", "JAX settings")):
        differences += _compare(f"{key}.", [flatten(part.get(key) or {}) for part in parts], UNKNOWN, kind)
    for key, kind in (("versions", "versions"), ("env", "environment variables"), ("seeds", "seeds")):
        absent = MISSING if all(key in part for part in parts) else UNKNOWN
        prefix = "seeds." if key == "seeds" else ""
        differences += _compare(prefix, [flatten(part.get(key) or {}) for part in parts], absent, kind)
    return differences


def _resolved(run: Run) -> dict[str, Any]:
    """Returns the value that each `auto` became; the reasons are not compared."""
    choices = run.result.get("resolved") or {}
    return {key: item.get("value") if isinstance(item, Mapping) else item for key, item in choices.items()}


def _programs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Counts programs compiled, those of them compiled while measuring, and those that are not the
    baseline's."""
    ledgers = [run.result.get("compile_ledger") for run in runs]
    programs = [{(row.get("function"), row.get("key")) for row in rows or ()} for rows in ledgers]
    flats: list[dict[str, Any]] = []
    for rows, keys in zip(ledgers, programs, strict=True):
        flats.append({})
        if rows is not None:
            flats[-1]["programs"] = len(keys)
            flats[-1]["recompiled while measuring"] = sum(bool(row.get("after_warmup")) for row in rows)
        if rows is not None and ledgers[0] is not None:
            flats[-1]["programs that the first run lacks"] = len(keys - programs[0])
    return flats


def _case_backends(run: Run) -> dict[str, Any]:
    names = [str(case["backend"]) for case in run.result.get("cases") or () if case.get("backend")]
    return {"backend of cases": ", ".join(dict.fromkeys(names))} if names else {}


def _peers(run: Run) -> dict[str, Any]:
    """Returns what peers say of themselves: they live in environments of which `versions` says nothing."""
    return {
        f"{backend.get('name')}.{key}": value
        for backend in run.result["provenance"].get("backends") or ()
        if backend.get("kind") != "moejax"
        for key, value in flatten(backend).items()
        if key.partition(".")[0] in _PEER_INPUTS
    }


def conditions(run: Run) -> list[str]:
    """Says, a line each, what else the machine was doing where that bears on a run's numbers."""
    provenance = run.result["provenance"]
    state, cpu = provenance.get("state") or {}, provenance.get("cpu") or {}
    lines = [f"{run.label}: {line}" for line in (busy_line(run.result), pace_line(run.result)) if line]
    if (state.get("steal_percent") or 0) > _STOLEN:
        lines.append(f"{run.label}: other virtual machines took {state['steal_percent']:.0f} % of the time")
    governor = cpu.get("governor")
    if governor and governor not in ("performance", "schedutil"):
        lines.append(f"{run.label}: CPU governor {governor!r} lets the clock sag between steps")
    recompiled = sum(bool(row.get("after_warmup")) for row in run.result.get("compile_ledger") or ())
    if recompiled:
        lines.append(f"{run.label} compiled {recompiled} programs while measuring")
    return lines


def incomparable(
    runs: Sequence[Run], one: int, other: int, differences: Sequence[Difference]
) -> dict[str, str]:
    """Kind → why two runs cannot be compared: another model, workload or device, or a simulation beside what
    was measured. Empty where they can."""
    apart = between(differences, one, other)
    simulated = [bool((runs[i].result.get("hardware") or {}).get("simulated")) for i in (one, other)]
    reasons = {
        "model": _other_model([d for d in apart if d.kind == "model"], one, other),
        "workload": _other_workload(runs, apart, one, other),
        "device": _other_device(runs, apart, one, other),
        "simulation": "one of them is simulated, the other measured"
        if simulated[0] != simulated[1]
        else None,
    }
    return {kind: reason for kind, reason in reasons.items() if reason}


def _told(difference: Difference, one: int, other: int) -> str:
    def short(value: Any) -> str:
        text, most = str(value), 8 if difference.key.endswith("_hash") else 39
        return text if len(text) <= most + 1 else f"{text[:most]}…"

    return f"{difference.key}: {short(difference.values[one])} and {short(difference.values[other])}"


def _other_model(apart: Sequence[Difference], one: int, other: int) -> str | None:
    """Weights of the same content are the same model, wherever they lie and in whatever type they compute."""
    by_key = {difference.key: difference for difference in apart}
    if "checkpoint_hash" in by_key:
        return f"the model differs ({_told(by_key['checkpoint_hash'], one, other)})"
    shapes = [d for d in apart if d.key.startswith(("model.hf_config", "model.load_format"))]
    return f"the model differs ({_told(shapes[0], one, other)})" if shapes else None


# Lists of cases: those that both runs have are the same in both, whatever else is measured.
_CASE_LISTS = ("workload.batch_size", "workload.prompt_len", "workload.output_len", "workload.pairing")


def _other_workload(runs: Sequence[Run], apart: Sequence[Difference], one: int, other: int) -> str | None:
    results = [runs[i].result for i in (one, other)]
    keys = [d for d in apart if d.kind == "workload" and d.key != "workload_hash"]
    hashes = [d for d in apart if d.key == "workload_hash"]
    if not hashes and all(result["provenance"].get("workload_hash") for result in results):
        return None
    lists = [d for d in keys if d.key in _CASE_LISTS]
    reasons = [d for d in keys if d not in lists or runs[one].experiment != "latency"]
    from_file = any((result["config"].get("workload") or {}).get("prompts_file") for result in results)
    if not lists or from_file:
        reasons += hashes
    return f"the workload differs ({_told(reasons[0], one, other)})" if reasons else None


def _other_device(runs: Sequence[Run], apart: Sequence[Difference], one: int, other: int) -> str | None:
    """The CPU is the device only where JAX ran on it."""
    keys = ["device.platform", "device.kind", "device.count", "device.process_count"]
    devices = [runs[i].result["provenance"].get("device") or {} for i in (one, other)]
    if all(device.get("platform") == "cpu" for device in devices):
        keys += ["cpu.model", "cpu.family", "cpu.usable_cores", "cpu.quota_cores"]
    differences = [difference for key in keys for difference in apart if difference.key == key]
    differences = [d for d in differences if d.key != "cpu.family" or {None, UNKNOWN}.isdisjoint(d.values)]
    return f"other devices ({_told(differences[0], one, other)})" if differences else None
