"""Names, groups and tags a run, so that a W&B workspace can be read at a glance: all experiments
ask here. No JAX here."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.report.style import commit_name, model_name, preset
from moejax.tracking.base import RunInfo

_MOST_NAME, _MOST_TAG = 120, 64  # W&B takes 128 and 64 characters
_UNQUANTIZED = ("", "none", "None")


def run_info(
    experiment: str,
    output_dir: Path,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    model: str | None = None,
    variant: str | None = None,
    group: str | None = None,
    job_type: str | None = None,
    tags: Iterable[str] = (),
) -> RunInfo:
    """The run of an experiment.

    Args:
        config: the whole resolved configuration; its sections `model`, `workload`, `quant`, `parallel`,
            `backend` and `engine` name the run, as far as there are any.
        provenance: from `moejax.tracking.provenance.collect`.
        model: its short name, where `config` has none.
        variant: what tells the run from the group's others, at the name's end: a method, a mode.
        group: None takes the sweep's folder, or for a run by itself none.
        tags: more of them.
    """
    return RunInfo(
        experiment,
        run_name(experiment, config, provenance, model=model, variant=variant),
        output_dir,
        group=group or sweep_group(experiment, output_dir),
        job_type=job_type or experiment,
        tags=(*run_tags(experiment, config, provenance), *(tag[:_MOST_TAG] for tag in tags if tag)),
        config=_tracked(config, provenance),
    )


def _tracked(config: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration for the tracker, what nothing reads left out (peers that do not run; the
    provenance's second copy of it all), and all that is no setting under `provenance`."""
    backend = config.get("backend") or {}
    used = {name: peer for name, peer in backend.get("peers", {}).items() if name in backend["compare_with"]}
    settings = {**config, "backend": {**backend, "peers": used}} if backend else dict(config)
    return {**settings, "provenance": {k: v for k, v in provenance.items() if k != "config"}}


def run_name(
    experiment: str,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    model: str | None = None,
    variant: str | None = None,
) -> str:
    """Such as "tiny · b1-8 p64 o32 · int8 · 8x a100": what was run, on what. A part that says nothing
    (unquantized, our own engine) is left out."""
    parts = [
        model_word(config) or model or experiment,
        workload_words(config),
        *quant_words(config),
        parallel_word(config),
        *(name for name in backend_words(config) if name != "moejax"),
        variant,
        device_word(provenance, config),
    ]
    name = " · ".join(dict.fromkeys(part for part in parts if part))
    return name if len(name) <= _MOST_NAME else name[: _MOST_NAME - 1] + "…"


def run_tags(experiment: str, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Model, device, dtype, quantization, backends, commit and the preset, each a tag."""
    commit = commit_name({"provenance": provenance})
    dtype = _section(config, "model").get("dtype")
    parts = [
        model_word(config), device_word(provenance, {}), None if dtype in (None, "auto") else dtype,
        *(quant_words(config) or ["full-precision"] * ("quant" in config)), *backend_words(config),
        f"commit-{commit.replace('+', '-dirty')}" if commit else None, preset(provenance),
    ]  # fmt: skip
    return tuple(dict.fromkeys(part[:_MOST_TAG] for part in parts if part and part != experiment))


def sweep_group(experiment: str, output_dir: Path) -> str | None:
    """A group for the jobs of one sweep: `EXPERIMENT/FOLDER` where the output folder is a sweep's numbered
    one, else None."""
    folder = output_dir.resolve()
    if re.fullmatch(r"\d+", folder.name) is None or not folder.parent.name:
        return None
    return f"{experiment}/{folder.parent.name}"


def model_word(config: Mapping[str, Any]) -> str | None:
    """The model's short name."""
    name = model_name({"config": config})
    return Path(name).name if name else "custom" if _section(config, "model").get("hf_config") else None


def workload_words(config: Mapping[str, Any]) -> str | None:
    """Such as "b1-8 p64 o32" of a latency workload, "rate 4 p64 o32" or "users 4 …" of a throughput one."""
    workload = _section(config, "workload")
    words = []
    if workload.get("trace_file"):
        words.append(f"trace {Path(str(workload['trace_file'])).stem}")
    elif (users := _span(workload.get("concurrency"))) is not None:
        words.append(f"users {users}")
    elif (rate := workload.get("request_rate")) is not None:
        words.append("all at once" if str(rate) in ("inf", "Infinity") else f"rate {_span(rate)}")
    for letter, key in (("b", "batch_size"), ("p", "prompt_len"), ("o", "output_len")):
        if (span := _span(workload.get(key))) is not None:
            words.append(f"{letter}{span}")
    return " ".join(words) or None


def quant_words(config: Mapping[str, Any]) -> list[str]:
    """Such as ["int4_g64-gptq", "kv-int8"]; empty in full precision. Round-to-nearest goes without saying."""
    quant = _section(config, "quant")
    method, form = str(quant.get("method") or ""), str(quant.get("format") or "")
    words = [word for word in (form, method) if word not in (*_UNQUANTIZED, "rtn")]
    kv = str(quant.get("kv_cache") or "")
    weights = ["-".join(words)] if method not in _UNQUANTIZED and words else []
    return weights + ([] if kv in (*_UNQUANTIZED, "auto") else [f"kv-{kv}"])


def parallel_word(config: Mapping[str, Any]) -> str | None:
    """Such as "ep8" or "pp2 ep4"; None on one device."""
    parallel = _section(config, "parallel")
    sizes = [
        f"{axis}{parallel[axis]}"
        for axis in ("dp", "pp", "ep", "tp")
        if isinstance(parallel.get(axis), int) and parallel[axis] > 1
    ]
    return " ".join(sizes) or None


def backend_words(config: Mapping[str, Any]) -> list[str]:
    """The engines that a run measures: the first one's kind, and the names of those beside it."""
    section = _section(config, "backend")
    return list(dict.fromkeys(filter(None, (section.get("kind"), *section.get("compare_with", ())))))


def device_word(provenance: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Such as "8x a100" or "cpu": how many devices of which kind were there."""
    device = provenance.get("device") or {}
    kind = str(device.get("kind") or device.get("platform") or "").lower()
    if not kind:
        return None
    if device.get("platform") == "cpu" or kind == "cpu":
        return "cpu"
    match = re.search(r"\b([abhlv]\d{2,3}s?|rtx \d{4}|t4|tpu[\w ]*)\b", kind)
    word = match.group(1) if match else kind.removeprefix("nvidia ").split("-")[0].strip()
    sizes = [_section(config, "parallel").get(axis) for axis in ("dp", "pp", "ep", "tp")]
    known = [size for size in sizes if isinstance(size, int)]
    count = math.prod(known) if known else device.get("count") or 1
    return f"{count}x {word}" if count > 1 else word


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _span(value: Any) -> str | None:
    """A number, or the least and the greatest of several."""
    if isinstance(value, Mapping):  # a distribution of lengths
        ends = [value.get(key) for key in ("low", "high")]
        if all(isinstance(end, (int, float)) for end in ends):
            return _span(ends)
        value = value.get("mean") or value.get("value")
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = sorted({item for item in value if isinstance(item, (int, float))})
        if not numbers:
            return None
        return f"{numbers[0]:g}" if len(numbers) == 1 else f"{numbers[0]:g}-{numbers[-1]:g}"
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else None
