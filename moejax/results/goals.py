"""Goals that a configuration sets, and what a result says of them. No JAX here."""

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from moejax.core.checked import Checked, Must, Name
from moejax.core.errors import ConfigError, did_you_mean
from moejax.results.metric_names import GLOSSARY, STATISTICS, find_metric
from moejax.results.metrics import is_number

_OPS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Goal(Checked, section="goals"):
    """What a metric of the glossary is to be, in its unit, and in words where that comes from.

    `case` has the fields of the cases that it is of, such as batch_size=8, of which the worst decides; None:
    it is of the whole run where that has the metric, else of all cases of the first engine.
    """

    metric: Name
    op: Literal["<=", ">=", "<", ">"]
    value: Annotated[float | int, Must(math.isfinite, "a number")]
    source: Name
    case: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (self.metric, *(self.case or ())):
            if find_metric(name) is None:
                known = {m.name.replace("{statistic}", s) for m in GLOSSARY for s in STATISTICS}
                near = did_you_mean(name, known)
                raise ConfigError(f"goals.metric: unknown metric {name!r}{near} (docs/metrics.md has all)")

    def verdict(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the goal with the `actual` value in a result's content, the `low` and `high` ends of its
        interval where it has one, and the `verdict`: `met`, `missed` (with the `factor` by which, at least 1,
        of two positive numbers) or `not measurable here` (with the `reason`)."""
        flat, cases = result["metrics"], result["cases"]
        fields = self.case or {key: row[key] for row in cases[:1] for key in ("backend",) if key in row}
        rows = [row for row in cases if self.metric in row and fields.items() <= row.items()]
        if self.case is None and is_number(flat.get(self.metric)):
            rows = [flat]
        known = [row[self.metric] for row in rows if is_number(row[self.metric])]
        where = ", ".join(f"{key}={value}" for key, value in (self.case or {}).items())
        name = f"{self.metric} ({where})" if where else self.metric
        told: dict[str, Any] = {"name": name, "verdict": "not measurable here"}
        told |= dict.fromkeys(("actual", "low", "high", "factor", "reason"))
        if len(known) < len(rows):
            told["reason"] = f"no value in {len(rows) - len(known)} of {len(rows)} cases"
        elif not rows:
            near = did_you_mean(self.metric, {*flat, *(key for row in cases for key in row)} - {self.metric})
            told["reason"] = f"this {result['experiment']} run has no {name}{near}"
        else:
            worst = (max if self.op[0] == "<" else min)(rows, key=lambda row: row[self.metric])
            actual = told["actual"] = worst[self.metric]
            told |= {end: worst.get(f"{self.metric}_{end}") for end in ("low", "high")}
            told["verdict"] = "met" if _OPS[self.op](actual, self.value) else "missed"
            if told["verdict"] == "missed" and actual > 0 and self.value > 0:
                told["factor"] = max(actual / self.value, self.value / actual)
        return asdict(self) | told
