"""Runs whose truth is known: requests with a chosen factor, noise between iterations and within them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moejax.results.metrics import flat_metrics
from moejax.results.result import build_result, write_request_rows, write_result

PROVENANCE: dict[str, Any] = {
    "time_utc": "2026-01-01T00:00:00+00:00",
    "git": {"commit": "0" * 40, "dirty": False, "diff_hash": None},
    "device": {"platform": "gpu", "kind": "NVIDIA A100-SXM4-80GB", "count": 1, "process_count": 1},
    "cpu": {"model": "EPYC", "usable_cores": 8},
    "versions": {"jax": "0.10.2", "numpy": "2.0"},
    "env": {"XLA_FLAGS": "--a"},
    "seeds": {"engine": 0, "workload": 0},
    "jax": {"jax_enable_x64": False},
    "checkpoint_hash": "c" * 64,
    "workload_hash": "w" * 64,
}
CONFIG: dict[str, Any] = {
    "model": {"path": "tiny", "dtype": "auto", "hf_config": None, "load_format": "auto"},
    "engine": {"overlap": True, "block_size": 32},
    "quant": {"method": "none"},
    "workload": {"batch_size": [1, 4], "prompt_len": 8, "output_len": 5, "seed": 0, "prompts_file": None},
    "tracker": {"kind": "none"},
    "seed": 0,
}
NAMES = ("ttft", "tpot", "e2el")
CASES = ((1, 8, 5), (4, 8, 5))


def changed(value: dict[str, Any], **paths: Any) -> dict[str, Any]:
    """A copy with some dotted keys (a__b for a.b) set."""
    copy = json.loads(json.dumps(value))
    for path, item in paths.items():
        *parents, leaf = path.split("__")
        place = copy
        for name in parents:
            place = place.setdefault(name, {})
        place[leaf] = item
    return copy


def latency_run(
    folder: Path,
    *,
    factor: float = 1.0,
    iterations: int = 10,
    between: float = 0.01,
    within: float = 0.005,
    seed: int = 0,
    cases: tuple[tuple[int, int, int], ...] = CASES,
    config: dict[str, Any] = CONFIG,
    provenance: dict[str, Any] = PROVENANCE,
    requests: bool = True,
    iterations_rows: list[dict[str, Any]] | None = None,
    **extra: Any,
) -> Path:
    """Writes a latency run whose times are `factor` times a common truth; `between` and `within` are the
    relative noise of whole iterations and of single requests."""
    rng = np.random.default_rng(seed)
    rows, case_rows = [], []
    moments = np.exp(rng.normal(0.0, between, iterations))
    for index, (batch, prompt, output) in enumerate(cases):
        ttft, step = 5.0 * batch**0.5, 1.0 + 0.2 * batch
        for iteration in range(iterations):
            for _ in range(batch):
                noise = factor * moments[iteration] * np.exp(rng.normal(0.0, within))
                gaps = [step * noise] * (output - 1)
                row = {
                    "request_id": str(len(rows)), "case": index, "prompt_len": prompt, "output_len": output,
                    "finish_reason": "length", "arrival_s": 0.0, "ttft_ms": ttft * noise,
                    "tpot_ms": step * noise, "e2el_ms": ttft * noise + sum(gaps), "itl_ms": gaps,
                }  # fmt: skip
                rows.append(row)
        mine = [row for row in rows if row["case"] == index]
        case_rows.append(
            {
                "case": index,
                "backend": "moejax",
                "batch_size": batch,
                "prompt_len": prompt,
                "output_len": output,
                **{f"median_{n}_ms": float(np.median([row[f"{n}_ms"] for row in mine])) for n in NAMES},
            }
        )
    metrics = {"model_bytes": 1000, "compile_seconds": 2.5}
    metrics |= flat_metrics(case_rows[0]) if len(case_rows) == 1 else {}
    metrics |= extra.pop("metrics", {})
    extra |= {"iterations": iterations_rows} if iterations_rows else {}
    result = build_result(
        "latency", metrics=metrics, cases=case_rows, config=config, provenance=provenance, **extra
    )
    write_result(result, folder)
    if requests:
        write_request_rows(rows, folder)
    return folder
