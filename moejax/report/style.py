"""Names and colours that the tables and plots of a result share. No JAX here."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Okabe and Ito's colours: told apart by every kind of colour vision, and in this order also in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def nth_color(index: int) -> str:
    """Returns the colour of the curve or run of this number; after eight they come again."""
    return COLORS[index % len(COLORS)]


def model_name(result: Mapping[str, Any]) -> str | None:
    """The model's name in a result's config: `model` itself, or its `name` or `path`."""
    model = result.get("config", {}).get("model")
    if isinstance(model, Mapping):
        described = model.get("hf_config") or {}
        layers = model.get("num_hidden_layers")
        model = model.get("name") or model.get("path") or described.get("_name_or_path")
        model = f"{model}-{layers}layers" if model and layers else model
    return str(model) if model else None


def device_name(result: Mapping[str, Any]) -> str | None:
    """Such as "4x NVIDIA A100-SXM4-80GB", or the processor's name where JAX ran on the CPU."""
    provenance = result.get("provenance", {})
    device, cpu = provenance.get("device") or {}, provenance.get("cpu") or {}
    kind, count = device.get("kind"), device.get("count") or 1
    if device.get("platform") == "cpu":
        cores = cpu.get("usable_cores")
        return f"{cpu.get('model') or 'CPU'}{f', {cores} cores' if cores else ''}"
    return f"{count}x {kind}" if kind and count > 1 else kind


def commit_name(result: Mapping[str, Any]) -> str | None:
    """The commit's first seven digits, with a + where the tree differed from it."""
    git = result.get("provenance", {}).get("git") or {}
    return f"{git['commit'][:7]}{'+' if git.get('dirty') else ''}" if git.get("commit") else None


def preset(provenance: Mapping[str, Any]) -> str | None:
    """The `experiment=` preset of the command line or its `scenario=`, or None."""
    for word in provenance.get("argv") or ():
        match = re.fullmatch(r"\+?(?:experiment|scenario)=([\w./-]+)", str(word))
        if match and match.group(1) != "null":
            return match.group(1)
    return None


def run_title(result: Mapping[str, Any]) -> str:
    """Model, device and commit on one line; what is not known is left out. What was modelled for a device or
    had its routing forced says so."""
    device = device_name(result)
    if result.get("experiment") == "scaling":
        measured = any(row.get("cpu_decode_ms") for row in result.get("cases") or ())
        device = f"modelled {result['hardware']['kind']}{f', CPU: {device}' if measured else ''}"
    elif result.get("experiment") == "program":
        device = f"compiled for {result['target']['devices']}x {result['target']['device']}"
    engine = (result.get("config") or {}).get("engine") or {}
    parts = [model_name(result), device, "replayed routing" if engine.get("replay_routing") else None]
    commit = commit_name(result)
    return " · ".join([part for part in parts if part] + ([f"commit {commit}"] if commit else []))


def case_label(case: Mapping[str, Any], separator: str = "\n", *, named: bool = False) -> str:
    """Batch, prompt and output length of a case, behind its backend's name if `named`."""
    names = (("bs", "batch_size"), ("in", "prompt_len"), ("out", "output_len"))
    parts = [f"{short}={case[name]}" for short, name in names if case.get(name) is not None]
    return separator.join([str(case.get("backend", "moejax")), *parts] if named else parts)


def tail_key(key: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns a 99th percentile's key, or the maximum's where a row has too few values for the percentile."""
    most = key.replace("p99_", "max_")
    short = any(row.get(key) is None and row.get(most) is not None for row in rows)
    return most if short else key


def has_peers(result: Mapping[str, Any]) -> bool:
    """Whether any case was measured on another engine than ours."""
    return any(case.get("backend", "moejax") != "moejax" for case in result.get("cases", []))


def mode_label(result: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Names a row of a throughput result for a plot: its batching mode, and beside peers its backend, ours
    with the mode where there are several; and how many users there are."""
    batching, backend = str(row.get("batching", "")), row.get("backend", "moejax")
    users = f", {row['concurrency']} users" if row.get("concurrency") else ""
    if not has_peers(result):
        return batching + users
    ours = [case for case in result.get("cases", []) if case.get("backend", "moejax") == "moejax"]
    return (f"moejax {batching}" if backend == "moejax" and len(ours) > 1 else str(backend)) + users


def rows_by_case(
    result: Mapping[str, Any], requests: Iterable[Mapping[str, Any]]
) -> list[tuple[str, Sequence[Any]]]:
    """(label, rows) of each case that has rows, in the cases' order."""
    cases, named = result.get("cases", []), has_peers(result)
    groups: dict[int, list[Any]] = {}
    for row in requests:
        groups.setdefault(row["case"], []).append(row)
    return [
        (case_label(cases[index], " ", named=named) if index < len(cases) else f"case {index}", groups[index])
        for index in sorted(groups)
    ]
