"""The static report that is committed with the kernels, read back: nothing is compiled."""

import json
from collections.abc import Sequence
from pathlib import Path

from moejax.bench.kernels.config import TARGETS
from moejax.bench.kernels.static import case, static_metrics
from moejax.core.config import check_choice
from moejax.core.errors import ConfigError, unknown
from moejax.results.result import SCHEMA, Result
from pallas_kernels.static import Row, failures


def committed_report(
    ops: str | Sequence[str] = (),
    specs: str | Sequence[str] = (),
    targets: str | Sequence[str] = TARGETS,
    folder: str | Path | None = None,
) -> Result:
    """What `python -m experiments.kernels mode=static` has found, as its result.

    Args:
        ops: operations by name; none takes all.
        specs: parts of specs' names, of which one must occur; none takes all.
        targets: "sm_80" is the A100, "sm_90" the H100.
        folder: of the reports; None: `results/static` of this checkout.

    Raises:
        ConfigError: there are no reports, a file is none, or a name occurs in none of them.
    """
    ops, specs, targets = ([part] if isinstance(part, str) else part for part in (ops, specs, targets))
    where = Path(folder) if folder else Path(__file__).resolve().parents[3] / "results" / "static"
    files = {file.stem: file for file in sorted(where.glob("*.json"))}
    if not files:
        raise ConfigError(
            f"no static report in {where}; make static writes them in a checkout of the repository"
        )
    for op in ops:
        if op not in files:
            raise ConfigError(unknown("operation", op, files))
    rows, about = [], {}
    for file in [files[op] for op in ops or files]:
        try:
            content = json.loads(file.read_text())
            about = {name: content[name] for name in ("jax", "triton")}
            rows += [Row(**row) for row in content["rows"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} is no static report of kernels: {error}") from error
    for target in targets:
        check_choice("targets", target, TARGETS)
    rows = [row for row in rows if row.target in targets]
    rows = [row for row in rows if not specs or any(part in row.spec for part in specs)]
    if not rows:
        raise ConfigError(f"no spec of {', '.join(ops or files)} has a name with {' or '.join(specs)}")
    wrong = failures(rows)
    return Result(
        schema=SCHEMA,
        experiment="kernels",
        metrics=static_metrics(rows, wrong, []),
        cases=[case(row) for row in rows],
        config={"mode": "static"},
        provenance={},
        compiler=about,
        failures=wrong,
        grown=[],
    )
