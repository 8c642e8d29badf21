"""Checks this machine, and what bounded a finished run, without changing either.

python -m experiments.doctor [run=outputs/latency/DATE_TIME] [json=true]    # exit code 1 where a check fails
"""

import sys
from pathlib import Path
from typing import Any

from experiments.launch.app import run_experiment
from experiments.launch.schema import DoctorConfig

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "dim"}


def main(config: DoctorConfig) -> None:
    from collections import Counter
    from dataclasses import asdict

    from moejax.core.files import cache_root, dump_json
    from moejax.report.tables import Column, column_table, stderr_console
    from moejax.results.diagnosis import diagnose
    from moejax.results.result import load_result
    from moejax.tracking.doctor import check_machine

    result = load_result(config.run) if config.run else None
    engine: Any = result["config"].get("engine") if result else None
    tiers = ((engine or {}).get("tiers") or {}).get("disk_dir")
    folders = {
        "runs": Path("outputs"),
        "cache": cache_root(),
        "tiers": Path(tiers or cache_root() / "experts"),
    }
    sections = {"machine": check_machine(folders, Path(__file__).parents[1] / "constraints.txt")}
    if result is not None:
        sections[f"run {config.run}"] = diagnose(result)
    tables = {title: [asdict(finding) for finding in findings] for title, findings in sections.items()}
    columns = [Column(name, name, fold=True) for name in ("check", "state", "reason", "remedy")]
    for title, rows in () if config.json else tables.items():
        stderr_console().print(column_table(title, columns, rows, style=lambda row: _COLORS[row["state"]]))
    rows = [row for each in tables.values() for row in each]
    counts = dict(Counter(row["state"] for row in rows))
    print(dump_json({"experiment": "doctor", **counts, **({"checks": rows} if config.json else {})}))
    if "fail" in counts:
        sys.exit(1)


if __name__ == "__main__":
    run_experiment(main, "doctor")
