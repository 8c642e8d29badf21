"""A/B runs: turns are balanced, the truth is found, and where there is none no winner is called."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moejax.bench.ab import measure
from moejax.bench.ab.config import AbSection
from moejax.bench.ab.judge import judge, judged_metrics
from moejax.bench.ab.measure import TrafficLoad, orders
from moejax.bench.ab.run import run_ab
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.common.agreement import token_agreement
from moejax.bench.traffic import Lengths, RequestKind, ThroughputWorkload
from moejax.bench.workload import WorkloadConfig
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.engine.requests.api import CompletionOutput, RequestMetrics, RequestOutput
from moejax.report.ab import ab_lines
from moejax.results.compare import compare
from moejax.tracking.base import TrackerConfig
from tests.bench.fake_llm import FakeLLM, VirtualClock
from tests.bench.runs import run_into


class Clocked(Backend):
    """A backend whose passes take what they are told to, on a clock of its own: no time passes."""

    def __init__(self, factor=1.0, noise=0.0, seed=0, tokens=7, drift=None, shorter=0) -> None:
        self.name, self.vocab_size, self.max_model_len, self.max_num_seqs = "clocked", 64, 32, 8
        self.batching, self.encode, self.checkpoint, self.seed, self.on_step = "own", None, None, 0, None
        self.factor, self.noise, self.tokens, self.shorter = factor, noise, tokens, shorter
        self.rng = np.random.default_rng(seed)
        self.drift = drift or SimpleNamespace(value=1.0)
        self.passes: list[str] = []

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def generate(self, prompts, params):
        self.passes.append("pass")
        self.drift.value *= 1.01  # the machine slows down with every pass, whoever runs
        scale = self.drift.value * self.factor * float(np.exp(self.rng.normal(0, self.noise)))
        outputs = []
        for index, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            count = asked.max_tokens - self.shorter
            times = [0.1 * scale + 0.01 * scale * i for i in range(count)]
            outputs.append(
                RequestOutput(
                    request_id=str(index),
                    prompt=None,
                    prompt_token_ids=list(prompt),
                    outputs=[CompletionOutput(0, "", [self.tokens] * count, finish_reason="length")],
                    metrics=RequestMetrics(0.0, times),
                    finished=True,
                )
            )
        return outputs

    def submit(self, prompt, sampling_params=None, *, arrival_time=None, options=None): ...
    def step(self) -> bool:
        return False

    def abort(self, request_id: str) -> None: ...


@pytest.fixture(autouse=True)
def _only_what_is_tested(request, monkeypatch):
    """Collecting garbage and provenance and drawing take seconds a run; one test has them all."""
    if "drift_that_would_hide" in request.node.name:
        return
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)
    for plot in ("ratios_plot", "rounds_plot"):
        monkeypatch.setattr(f"moejax.report.ab.{plot}", lambda result: None)
    provenance = {"seeds": {}, "checkpoint_hash": "c", "workload_hash": "w", "device": {"platform": "gpu"}}
    monkeypatch.setattr("moejax.bench.experiment_run.collect", lambda *_, **__: copy.deepcopy(provenance))


WORKLOAD = WorkloadConfig(batch_size=[1, 2], prompt_len=4, output_len=5)
QUIET = TrackerConfig(kind="none")


def run(
    tmp_path: Path, backends: dict[str, Clocked], workload=WORKLOAD, config: Any = None, **section: Any
) -> dict[str, Any]:
    variants = [Arm(name, [f"x={name}"], backend) for name, backend in backends.items()]
    section.setdefault("rounds", 10)
    kind = "latency" if isinstance(workload, WorkloadConfig) else "throughput"
    with run_into(tmp_path, f"{kind}_ab", config) as this:
        return run_ab(variants, workload, AbSection(**section), this)


def by_metric(rows) -> dict[str, dict[str, Any]]:
    return {row["metric"]: row for row in rows}


def test_a_difference_is_found_through_a_drift_that_would_hide_it(tmp_path, capsys):
    drift = SimpleNamespace(value=1.0)
    backends = {n: Clocked(f, 0.002, i, drift=drift) for i, (n, f) in enumerate((("a", 1.0), ("b", 1.05)))}
    result = run(tmp_path, backends, rounds=12)
    found = by_metric(result["verdicts"])
    assert drift.value > 2
    for metric in ("median_ttft_ms", "median_tpot_ms", "median_e2el_ms"):
        row = found[metric]
        assert row["outcome"] == "worse" and row["ratio_low"] < 1.05 < row["ratio_high"] + 0.01
        assert row["effect"] == 1.0 and row["samples"] == [12, 12]
    assert [row["outcome"] for row in result["control"]] == ["no winner"] * 3
    assert result["experiment"] == "latency_ab" and len(result["cases"]) == 6
    assert {row["outcome"] for row in result["case_verdicts"]} == {"worse"}
    text = capsys.readouterr().err
    assert "values a round: TTFT 1 to 2, TPOT 1 to 2, ITL 4 to " in text
    assert "TPOT p50 (ms): b is slower than a by 1.0" in text and "control: a second engine of a" in text
    files = {path.name for path in tmp_path.iterdir()}
    assert {"result.json", "requests.jsonl", "ratios.png", "rounds.png"} <= files


def test_equal_variants_have_no_winner_more_often_than_alpha(tmp_path):
    """The whole rule on paired rounds, drawn and not run: many seeds."""
    cases = [{"batch_size": 1, "prompt_len": 4, "output_len": 5}]

    def arm(name, rng, common, factor=1.0):
        found = Arm(name, [], Clocked())
        for round_ in range(12):
            noise = factor * common[round_] * np.exp(0.02 * rng.standard_t(2))
            found.rounds[round_, 0] = {
                "median_ttft_ms": noise,
                "median_tpot_ms": noise * np.exp(rng.normal(0, 0.02)),
            }
        found.tokens[0] = [[1]]
        return found

    def share(factor, seeds):
        wins = 0
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            common = np.exp(np.cumsum(rng.normal(0, 0.05, 12)))
            arms = [arm(n, rng, common) for n in ("a", CONTROL)] + [arm("b", rng, common, factor)]
            metrics = judged_metrics(arms, cases, ())
            found = judge(arms[0], arms[1], arms[2:], metrics, ["B=1"])
            wins += any(verdict.decided for verdict in found.verdicts)
        return wins / seeds

    assert share(1.0, 60) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 60)
    assert share(1.2, 20) >= 0.9


def test_turns_are_balanced_and_drawn():
    order = orders(3, np.random.default_rng(0))
    rounds = [next(order) for _ in range(40)]
    assert all(sorted(turn) == [0, 1, 2] for turn in rounds)
    assert all(rounds[i + 1] == rounds[i][::-1] for i in range(0, 40, 2))
    assert len({tuple(turn) for turn in rounds}) == 6
    again = orders(3, np.random.default_rng(0))
    assert [next(again) for _ in range(40)] == rounds


def test_every_member_runs_every_case_of_every_round_and_says_when(tmp_path):
    backends = {"a": Clocked(), "b": Clocked()}
    run(tmp_path, backends, rounds=7)
    # Per case a warm-up and a pass for the tokens; the control is the baseline's backend here.
    assert len(backends["b"].passes) == 2 * (2 + 7) and len(backends["a"].passes) == 2 * 2 * (2 + 7)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 7 * (1 + 2)
    assert {(row["case"], row["variant"]) for row in rows} == {
        (0, "a"), (1, "a"), (2, CONTROL), (3, CONTROL), (4, "b"), (5, "b"),
    }  # fmt: skip
    firsts = [(r["iteration"], r["position"]) for r in rows if r["variant"] == "b" and r["case"] == 4]
    assert [i for i, _ in firsts] == list(range(7)) and {p for _, p in firsts} <= {0, 1, 2}


def test_tokens_that_differ_are_told_and_lengths_that_differ_are_not_compared(tmp_path):
    result = run(tmp_path, {"a": Clocked(), "b": Clocked(tokens=8), "c": Clocked(0.5, shorter=1)})
    rows = {(row["variant"], row["batch_size"]): row for row in result["cases"]}
    assert rows["control", 2]["equal_requests"] == 1.0 and rows["control", 2]["first_difference"] is None
    assert rows["b", 2]["equal_requests"] == 0.0 and rows["b", 2]["first_difference"] == 0
    assert rows["c", 1]["first_difference"] == 4 and rows["c", 1]["equal_lengths"] is False
    found = by_metric(row for row in result["verdicts"] if row["run"] == "c")
    assert found["median_e2el_ms"]["text"] == "not comparable: the outputs' lengths differ"
    assert found["median_tpot_ms"]["outcome"] == "better"


def test_a_server_that_only_counts_its_tokens_is_not_said_to_agree(tmp_path):
    class Counting(Clocked):
        itl_known = False

        def generate(self, prompts, params):
            outputs = super().generate(prompts, params)
            for output in outputs:
                output.outputs[0].token_ids = []
            return outputs

    result = run(tmp_path, {"a": Clocked(), "b": Counting(0.5)}, metrics=["mean_itl_ms", "median_tpot_ms",
                                                                          "median_e2el_ms"])  # fmt: skip
    rows = [row for row in result["cases"] if row["variant"] == "b"]
    for name in ("equal_requests", "equal_lengths", "first_difference", "mean_itl_ms"):
        assert {row[name] for row in rows} == {None}
    found = by_metric(result["verdicts"])
    assert found["median_e2el_ms"]["text"] == "not comparable: the outputs' tokens are not known"
    assert found["median_tpot_ms"]["outcome"] == "better" and "mean_itl_ms" not in found
    assert result["not_judged"] == ["mean_itl_ms"] and "not judged: ITL mean (ms)" in ab_lines(result)[-1]


def test_a_difference_within_the_controls_is_noise(tmp_path):
    # The control is the baseline's own backend, whose every second pass is slow.
    class Moody(Clocked):
        def generate(self, prompts, params):
            self.factor = 1.3 if len(self.passes) % 2 else 1.0
            return super().generate(prompts, params)

    result = run(tmp_path, {"a": Moody(), "b": Clocked(1.12, 0.001)}, WorkloadConfig(1, 4, 5), rounds=20)
    control, found = result["control"][0], result["verdicts"][0]
    assert control["ratio_low"] < 0.9 or control["ratio_high"] > 1.1
    assert found["outcome"] == "no winner"


def test_too_few_rounds_are_refused_before_anything_runs(tmp_path):
    backends = {"a": Clocked(), "b": Clocked(3.0, 0.01)}
    for few in ({"rounds": 6}, {"rounds": 2, "target": 0.01, "max_rounds": 6}):
        with pytest.raises(ConfigError, match=r"ab.rounds=6 can give no verdict: median_ttft_ms, .* least 7"):
            run(tmp_path, backends, **few)
    assert backends["a"].passes == [] and not (tmp_path / "result.json").exists()
    one = run(tmp_path, backends, rounds=6, metrics=["median_tpot_ms"])
    assert [row["outcome"] for row in one["verdicts"]] == ["worse"]


def test_a_target_goes_on_until_intervals_are_narrow_or_the_limit(tmp_path):
    drift = SimpleNamespace(value=1.0)
    backends = {"a": Clocked(drift=drift), "b": Clocked(drift=drift)}
    steady = run(tmp_path / "a", backends, rounds=8, target=0.05, max_rounds=40)
    assert steady["metrics"]["rounds"] == 8
    noisy = run(tmp_path / "b", {"a": Clocked(noise=0.5), "b": Clocked(noise=0.5, seed=1)}, rounds=8,
                target=0.001, max_rounds=19)  # fmt: skip
    assert noisy["metrics"]["rounds"] == 19


def test_two_results_compare_variant_by_variant(tmp_path):
    for name, factor in (("one", 1.0), ("two", 2.0)):
        backends = {"a": Clocked(factor, 0.01), "b": Clocked(factor * 1.5, 0.01, 1)}
        run(tmp_path / name, backends, config={"seed": int(factor)})
    found = compare([tmp_path / "one", tmp_path / "two"], floor=0.0)
    labels = [verdict.trial.case for verdict in found.verdicts if verdict.trial.metric == "median_tpot_ms"]
    assert labels[0] == "a bs=1 in=4 out=5" and len(labels) == 6
    assert all(verdict.outcome == "worse" for verdict in found.verdicts)


def test_agreement_of_tokens():
    assert token_agreement([[1, 2], [3]], [[1, 2], [3]]) == {
        "equal_requests": 1.0, "equal_lengths": True, "first_difference": None,
    }  # fmt: skip
    assert token_agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]])["first_difference"] == 1
    assert token_agreement([[1, 2]], [[1]]) == {
        "equal_requests": 0.0, "equal_lengths": False, "first_difference": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": True}, r"ab\.variants is empty: add 'ab\.variants\.NAME=\[KEY=VALUE\]'"),
        ({"variants": {"a b": []}}, "'a b' is no name"),
        ({"variants": {"a": "engine.overlap=false"}}, r"ab\.variants\.a must be a list of overrides"),
        ({"variants": {"base": ["x=1"]}}, "give a second variant"),
        ({"rounds": 0}, "ab.rounds"),
        ({"target": 1.5}, "ab.target must be above 0 and below 1"),
        ({"target": 0.01, "rounds": 20, "max_rounds": 10}, "ab.max_rounds 10 is below ab.rounds 20"),
        ({"metrics": ["median_tpt_ms"]}, "unknown metric 'median_tpt_ms'; did you mean 'median_tpot_ms'"),
    ],
)
def test_what_makes_no_sense_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        AbSection(**section)


def test_a_case_that_does_not_fit_a_variant_is_found_before_anything_runs(tmp_path):
    short = Clocked()
    short.max_model_len = 8
    with pytest.raises(ConfigError, match="case b1_p4_n5: 4 \\+ 5 tokens exceed the limit of clocked of 8"):
        run(tmp_path, {"a": Clocked(), "b": short})
    assert not short.passes and not (tmp_path / "result.json").exists()


def test_a_single_variant_stands_against_the_command_line_as_it_is():
    assert AbSection(variants={"x": ["a=1"]}).all_variants == {"base": [], "x": ["a=1"]}
    assert list(AbSection(variants={"x": ["a=1"], "y": []}).all_variants) == ["x", "y"]


@pytest.mark.parametrize("more", [{}, {"turns": 3, "think_s": 0.1}, {"concurrency": [1, 2]}])
def test_traffic_is_measured_too(tmp_path, monkeypatch, more):
    clock = VirtualClock()
    timed = functools.partial(measure.drive, clock=clock, sleep=clock.sleep)
    monkeypatch.setattr(measure, "drive", timed)
    workload = ThroughputWorkload(
        num_requests=6, prompt_len=Lengths(4, 8), output_len=Lengths(3, 6), **more
    )  # fmt: skip
    engines = {
        n: FakeLLM(clock=clock, advance=clock.advance, step_s=s) for n, s in (("a", 0.01), ("b", 0.02))
    }
    backends = {name: MoejaxBackend(llm) for name, llm in engines.items()}
    variants = [Arm(name, [], backend) for name, backend in backends.items()]
    with run_into(tmp_path, "throughput_ab") as this:
        result = run_ab(variants, workload, AbSection(rounds=8), this)
    assert result["experiment"] == "throughput_ab"
    found = by_metric(result["verdicts"])
    assert found["output_throughput"]["outcome"] == "worse"
    # Thirteen steps of 10 or 20 ms, and thinking 0.2 s on both.
    assert found["output_throughput"]["ratio"] == pytest.approx(0.33 / 0.46 if "turns" in more else 0.5)
    users = more.get("concurrency", [None])
    assert [row.get("concurrency") for row in result["cases"]] == users * 3
    assert {row["request_rate"] for row in result["cases"]} == {None if "concurrency" in more else "inf"}
    with pytest.raises(ConfigError, match="an A/B run needs the same requests in every pass"):
        TrafficLoad(dataclasses.replace(workload, duration_s=1.0), list(backends.values()))


@pytest.mark.parametrize("turns", [1, 2])
def test_figures_of_one_tenant_with_and_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """What the others cost it is seen, and its tokens are compared with its own alone."""
    clock, two = VirtualClock(), EngineConfig(max_num_seqs=2)
    timed = functools.partial(measure.drive, clock=clock, sleep=clock.sleep)
    monkeypatch.setattr(measure, "drive", timed)
    mix = {"victim": RequestKind(share=2.0), "neighbour": RequestKind(output_len=12)}
    workload = ThroughputWorkload(num_requests=12, prompt_len=6, output_len=4, mix=mix, turns=turns)
    arms = [
        Arm(name, [], MoejaxBackend(FakeLLM(two, clock=clock, advance=clock.advance)))
        for name in ("alone", "beside")
    ]
    ab = AbSection(
        variants={"alone": [], "beside": ["x=1"]}, rounds=8, tenant="victim", alone=["alone"],
        metrics=["mean_ttft_ms", "max_ttft_ms"],
    )  # fmt: skip
    with run_into(tmp_path, "throughput_ab") as this:
        result = run_ab(arms, workload, ab, this)
    found = by_metric(result["verdicts"])
    assert found["mean_ttft_ms"]["outcome"] == "worse" and found["mean_ttft_ms"]["ratio"] > 1.5
    alone, _, beside = result["cases"]
    assert alone["equal_requests"] == beside["equal_requests"] == 1.0
    assert alone["batch_size"] == beside["batch_size"] < alone["num_requests"] == 12
    rows = {(row["variant"], row["group"]): row["requests"] for row in result["groups"]}
    victims = 8 * alone["batch_size"]
    assert rows == {("beside", "tenant victim"): victims, ("beside", "tenant neighbour"): 96 - victims}


def test_a_tenant_that_is_not_there_is_told() -> None:
    workload = ThroughputWorkload(num_requests=4, prompt_len=6, output_len=4, mix={"a": RequestKind()})
    with pytest.raises(ConfigError, match=r"ab\.tenant: unknown tenant 'b' .*a"):
        TrafficLoad(workload, [MoejaxBackend(FakeLLM())], "b")
    two: dict[str, list[str]] = {"one": [], "two": ["x=1"]}
    for more, message in (
        ({"alone": ["one"]}, "it needs ab.tenant"),
        ({"alone": ["three"], "tenant": "a"}, "unknown variant 'three'"),
    ):
        with pytest.raises(ConfigError, match=message):
            AbSection(variants=two, **more)
