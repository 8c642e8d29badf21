"""Writes docs/metrics.md from the glossary: python docs/make_metrics.py"""

from itertools import groupby
from pathlib import Path

from moejax.results.metric_names import GLOSSARY, Metric, short_name

PAGE = Path(__file__).with_name("metrics.md")
_HEAD = """\
<!-- Made of moejax/assets/metrics.toml by `python docs/make_metrics.py`: change that file. -->
# Metrics

Every name that `result.json` gives to a figure: one name, one quantity. `metrics` is flat, `cases` has a
row each.

- *of* is the scope. What is of a **case** is in its row, and flat only where the run (of its first engine)
  has one case: no latency is pooled over several. What is of a **case or run** is flat over all cases as
  well. **process** is the one that writes the result, **device** each one, **operation** a row of `roofline`.
- `NAME_low` and `NAME_high` are the ends of NAME's 95 % interval; a flat `NAME_LABEL` is NAME of the method
  or trace LABEL. `STATISTIC` is mean, median, std or a percentile. A share is a number from 0 to 1.
- *better* is what a comparison calls better, where either is.
"""


def page() -> str:
    """Returns the page's text."""
    parts = [_HEAD]
    for section, metrics in groupby(GLOSSARY, key=lambda metric: metric.section):
        lines = ["| name | unit | of | better | definition |", "|---|---|---|---|---|"]
        parts.append("\n".join([f"## {section}\n", *lines, *map(_line, metrics)]) + "\n")
    return "\n".join(parts)


def _line(metric: Metric) -> str:
    name = metric.name.replace("{statistic}", "STATISTIC").replace(r"\w+", "…").replace(r"\d+", "N")
    called = "" if metric.label is None or "{" in metric.label else f" ({short_name(metric.name)})"
    name = name.replace("|", "\\|")
    cells = (f"`{name}`{called}", metric.unit, metric.of, metric.better or "", metric.means)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
