"""What went into runs, and in what of it they differ, by kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moejax.results.compare.runs import Run

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
    "hardware": "tracking",
}
# How often and against which objectives a workload is measured is not part of it.
_MEASURING = ("iterations", "warmup", "slo", "compare")


# What a peer says of itself that its speed depends on.
_PEER_INPUTS = (
    "versions", "dtype", "kv_cache_dtype", "device", "threads", "attention", "experts", "weights_sha256"
)  # fmt: skip

_BUSY = 15.0  # per cent of the cores, by others, from which a timing is suspect


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
    found = [
        *_compare("", [flatten(run.result["config"]) for run in runs], MISSING, _config_kind),
        *_provenance(runs),
        *_resolved(runs),
        *_programs(runs),
        *_backends(runs),
    ]
    return sorted(found, key=lambda difference: KINDS.index(difference.kind))


def between(differences: Sequence[Difference], one: int, other: int) -> list[Difference]:
    """Those in which two of the runs differ."""
    pairs = [(difference, difference.values[one], difference.values[other]) for difference in differences]
    return [d for d, a, b in pairs if UNKNOWN not in (a, b) and a != b]


def _compare(
    prefix: str, flats: Sequence[Mapping[str, Any]], absent: Any, kind: Callable[[str], str]
) -> list[Difference]:
    keys = dict.fromkeys(key for flat in flats for key in flat)
    found = []
    for key in keys:
        values = tuple(flat.get(key, absent) for flat in flats)
        known = [value for value in values if value != UNKNOWN]
        if any(value != known[0] for value in known):
            name = f"{prefix}{key}"
            found.append(Difference(kind(name), name, values))
    return found


def _config_kind(key: str) -> str:
    section, _, rest = key.partition(".")
    if section == "workload" and rest.partition(".")[0] in _MEASURING:
        return "configuration"
    return _SECTIONS.get(section, "configuration")


def _provenance(runs: Sequence[Run]) -> list[Difference]:
    parts = [run.result["provenance"] for run in runs]
    found: list[Difference] = []
    for key, kind in (
        ("checkpoint_hash", "model"), ("workload_hash", "workload"), ("git", "code"), ("device", "device")
    ):  # fmt: skip
        found += _compare("", [_section(part, key) for part in parts], UNKNOWN, _always(kind))
    for key, kind in (("cpu", "CPU"), ("jax", "JAX settings")):
        found += _compare(f"{key}.", [_inside(part, key) for part in parts], UNKNOWN, _always(kind))
    for key, kind in (("versions", "versions"), ("env", "environment variables"), ("seeds", "seeds")):
        absent = MISSING if all(key in part for part in parts) else UNKNOWN
        prefix = "seeds." if key == "seeds" else ""
        found += _compare(prefix, [_inside(part, key) for part in parts], absent, _always(kind))
    return found


def _always(kind: str) -> Callable[[str], str]:
    """Every key is of one kind."""
    return lambda key: kind


def _section(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A key of provenance with all below it, dotted; nothing where it is not recorded."""
    value = part.get(key)
    if value is None:
        return {}
    return flatten({key: value}) if isinstance(value, Mapping) else {key: value}


def _inside(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    return flatten(part.get(key) or {})


def _resolved(runs: Sequence[Run]) -> list[Difference]:
    """What each `auto` became; the reasons are not compared."""
    flats = []
    for run in runs:
        choices = run.result.get("resolved") or {}
        flats.append({k: v.get("value") if isinstance(v, Mapping) else v for k, v in choices.items()})
    if not any(flats):
        return []
    return _compare("", flats, UNKNOWN, _always("kernel choices"))


def _programs(runs: Sequence[Run]) -> list[Difference]:
    """Programs compiled, those of them compiled while measuring, and those that are not the baseline's."""
    ledgers = [run.result.get("compile_ledger") for run in runs]
    keys = [None if rows is None else {(r.get("function"), r.get("key")) for r in rows} for rows in ledgers]
    flats: list[dict[str, Any]] = []
    for rows, own in zip(ledgers, keys, strict=True):
        if rows is None or own is None:
            flats.append({})
            continue
        flat: dict[str, Any] = {"programs": len(own)}
        flat["recompiled while measuring"] = sum(bool(row.get("after_warmup")) for row in rows)
        if keys[0] is not None:
            flat["programs that the first run lacks"] = len(own - keys[0])
        flats.append(flat)
    return _compare("", flats, UNKNOWN, _always("compiled programs"))


def _backends(runs: Sequence[Run]) -> list[Difference]:
    names = [list(dict.fromkeys(str(c["backend"]) for c in _cases(run) if c.get("backend"))) for run in runs]
    flats = [{"backend of cases": ", ".join(found)} if found else {} for found in names]
    found = _compare("", flats, UNKNOWN, _always("backend"))
    # Peers live in environments of their own, of which `versions` says nothing.
    peers = [_peers(run.result["provenance"].get("backends") or ()) for run in runs]
    return found + _compare("backends.", peers, UNKNOWN, _always("backend"))


def _peers(described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{backend.get('name')}.{key}": value
        for backend in described
        if backend.get("kind") != "moejax"
        for key, value in flatten(backend).items()
        if key.partition(".")[0] in _PEER_INPUTS
    }


def _cases(run: Run) -> Sequence[Mapping[str, Any]]:
    return run.result.get("cases") or ()


def conditions(run: Run) -> list[str]:
    """What a machine was doing when a run began, where that bears on its numbers; a line each."""
    provenance = run.result["provenance"]
    state, cpu = provenance.get("state") or {}, provenance.get("cpu") or {}
    lines = []
    # While it was measured, where telemetry was on; else when it began.
    others, busy = run.result["metrics"].get("mean_other_cpu_percent"), state.get("busy_percent")
    cores = cpu.get("usable_cores") or 1
    if others is not None:
        if others > _BUSY * cores:
            lines.append(f"{run.label}: other processes took {others:.0f} % of a core while it was measured")
    elif busy is not None and busy > _BUSY:
        lines.append(f"{run.label} began while other processes took {busy:.0f} % of the machine")
    if (state.get("steal_percent") or 0) > _BUSY:
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
    """Kind → why two runs cannot be compared: another model, workload or device. Empty where they can."""
    apart = between(differences, one, other)
    found: dict[str, str] = {}
    if reason := _other_model([d for d in apart if d.kind == "model"], one, other):
        found["model"] = reason
    if reason := _other_workload(runs, apart, one, other):
        found["workload"] = reason
    if reason := _other_device(runs, apart, one, other):
        found["device"] = reason
    return found


def _told(difference: Difference, one: int, other: int) -> str:
    def short(value: Any) -> str:
        text = str(value)
        return (
            f"{text[:8]}…"
            if difference.key.endswith("_hash")
            else text
            if len(text) <= 40
            else f"{text[:39]}…"
        )

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
    mine = [d for d in apart if d.kind == "workload"]
    hashes = [d for d in mine if d.key == "workload_hash"]
    if not hashes and all(run.result["provenance"].get("workload_hash") for run in (runs[one], runs[other])):
        return None
    keys = [d for d in mine if d.key != "workload_hash"]
    fixed_batches = runs[one].experiment == "latency"
    lists = [d for d in keys if d.key in _CASE_LISTS]
    rest = [d for d in keys if d not in lists] if fixed_batches else keys
    if rest:
        return f"the workload differs ({_told(rest[0], one, other)})"
    from_file = any(
        (run.result["config"].get("workload") or {}).get("prompts_file") for run in (runs[one], runs[other])
    )
    if hashes and (not lists or from_file):
        return f"the workload differs ({_told(hashes[0], one, other)})"
    return None


def _other_device(runs: Sequence[Run], apart: Sequence[Difference], one: int, other: int) -> str | None:
    """The CPU is the device only where JAX ran on it."""
    keys = ["device.platform", "device.kind", "device.count", "device.process_count"]
    if all(_platform(run) == "cpu" for run in (runs[one], runs[other])):
        keys += ["cpu.model", "cpu.usable_cores", "cpu.quota_cores"]
    found = [difference for key in keys for difference in apart if difference.key == key]
    return f"other devices ({_told(found[0], one, other)})" if found else None


def _platform(run: Run) -> str | None:
    return (run.result["provenance"].get("device") or {}).get("platform")
