"""Requests split by weight between versions of a model, and whether one of them answers faster."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.core.errors import RequestError, unknown
from moejax.engine.llm import LLM
from moejax.results.verdict import Trial, Verdict, decide
from moejax.serving.config import bad_weights

WINDOW_S = 10.0


class Split:
    """Says which version gets a request: shares are exact to one request, without bursts (nginx's smooth
    weighted round robin). `given` counts who has got how many."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights, self.given = dict(weights), Counter[str]()
        self._credit = dict.fromkeys(weights, 0.0)

    def next(self) -> str:
        """Returns who gets the next one."""
        for name, weight in self.weights.items():
            self._credit[name] += weight
        chosen = max(self._credit, key=self._credit.__getitem__)
        self._credit[chosen] -= sum(self.weights.values())
        self.given[chosen] += 1
        return chosen

    def act(self, given: Mapping[str, Any], llms: Mapping[str, LLM]) -> dict[str, Any]:
        """Takes new weights, if there are any, and tells how the versions do (see `judge`).

        Raises:
            RequestError: weights that are none.
        """
        for name in given.keys() - {"weights"}:
            raise RequestError(unknown("argument", name[:100], ["weights"]))
        if "weights" in given:
            if reason := bad_weights(given["weights"], self.weights):
                raise RequestError(f"split: weights {reason}")
            self.weights = {name: float(given["weights"].get(name, 0.0)) for name in self.weights}
            self._credit = dict.fromkeys(self.weights, 0.0)
        verdicts = judge({name: llms[name] for name in self.weights})
        errors = {name: llms[name].engine.recent.ended["error"] for name in self.weights}
        rows = [verdict.row() for verdict in verdicts]
        return {"done": "split", "weights": self.weights, "requests": dict(self.given), "errors": errors,
                "verdicts": rows, "words": [verdict.sentence() for verdict in verdicts]}  # fmt: skip


def judge(llms: Mapping[str, LLM], window_s: float = WINDOW_S) -> list[Verdict]:
    """Judges each other version against the first one by the rule of A/B runs (`moejax.results.verdict`):
    both ones' medians of TTFT and TPOT in each window of the clock in which both have answered make a pair,
    for they met the same moment of the machine."""
    base, *others = llms
    trials = []
    for other in others:
        for kind in ("ttft", "tpot"):
            mine, theirs = (_medians(llms[name], kind, window_s) for name in (other, base))
            both = sorted(mine.keys() & theirs.keys())
            values, against = (np.array([side[at] for at in both]) for side in (mine, theirs))
            if both:
                trial = Trial.of(f"median_{kind}_ms", None, other, base, values, against, paired=True)
            else:
                trial = Trial(f"median_{kind}_ms", None, other, base, None, None)
            trials.append(trial)
    return decide(trials, unit="windows")


def _medians(llm: LLM, kind: str, window_s: float) -> dict[int, float]:
    """Returns milliseconds by the window in which they were told."""
    windows = defaultdict[int, list[float]](list)
    for time, seconds in llm.engine.recent.samples(kind):
        windows[int(time // window_s)].append(1e3 * seconds)
    return {at: float(np.median(values)) for at, values in windows.items()}
