"""Comparing runs: inputs that differ are named, and a winner is called only where there is one."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moejax.core.errors import ConfigError
from moejax.report.compare import compare_and_print
from moejax.report.compare_plots import latency_cdfs, ratio_forest
from moejax.report.compare_tables import comparison_tables
from moejax.report.html import render_report
from moejax.results.compare import compare
from moejax.results.compare.inputs import MISSING, UNKNOWN
from moejax.results.metric_names import better_word, lower_is_better
from moejax.results.run_folders import run_names
from tests.results.simulated import CONFIG, PROVENANCE, changed, latency_run


def text_of(comparison, width=100) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in comparison_tables(comparison):
        console.print(table)
    return console.file.getvalue()


def outcomes(comparison) -> dict[str, str]:
    return {verdict.trial.metric: verdict.outcome for verdict in comparison.verdicts}


OTHER = changed(CONFIG, engine__overlap=False)


# --- verdicts -----------------------------------------------------------------------------------------------


def test_ten_per_cent_with_little_noise_is_found_and_said(tmp_path):
    paths = [latency_run(tmp_path / "a"), latency_run(tmp_path / "b", factor=0.9, seed=1, config=OTHER)]
    found = compare(paths)
    assert outcomes(found) == dict.fromkeys(("median_ttft_ms", "median_tpot_ms", "median_e2el_ms"), "better")
    verdict = found.verdicts[1]
    assert verdict.trial.ratio.low < 0.9 < verdict.trial.ratio.high and verdict.trial.effect == -1
    assert verdict.trial.samples == (10, 10) and verdict.trial.case is None
    assert any(line.startswith("  TPOT p50 (ms): B is faster than A by 1.1") for line in found.lines())
    assert len(found.case_verdicts) == 6 and all(v.outcome == "better" for v in found.case_verdicts)
    slower = compare(paths[::-1])
    assert set(outcomes(slower).values()) == {"worse"}
    assert any("B is slower than A by 1.1" in line for line in slower.lines())


def test_same_truth_has_no_winner(tmp_path):
    paths = [latency_run(tmp_path / str(seed), between=0.05, seed=seed) for seed in range(2)]
    found = compare(paths)
    assert set(outcomes(found).values()) == {"no winner"}
    assert "no winner: inside the noise: all metrics" in "\n".join(found.lines())


def test_a_small_sure_difference_between_sessions_is_refused_unless_the_floor_is_lowered(tmp_path):
    paths = [
        latency_run(tmp_path / "a", between=0.001),
        latency_run(tmp_path / "b", factor=1.015, between=0.001, seed=1, config=OTHER),
    ]
    assert {v.text for v in compare(paths).verdicts} == {"no winner: inside session noise"}
    assert set(outcomes(compare(paths, floor=0.005)).values()) == {"worse"}
    assert set(outcomes(compare(paths, floor=0.05)).values()) == {"no winner"}
    on_cpu = changed(PROVENANCE, device__platform="cpu")
    base = latency_run(tmp_path / "c", provenance=on_cpu)
    paths = [base, latency_run(tmp_path / "d", factor=1.4, provenance=on_cpu, config=OTHER)]
    assert {v.text for v in compare(paths).verdicts} == {"no winner: inside session noise"}  # 0.5 on CPU
    assert set(outcomes(compare(paths, floor=0.2)).values()) == {"worse"}


def test_a_run_with_the_baselines_inputs_shows_what_noise_is(tmp_path):
    base, again = latency_run(tmp_path / "a"), latency_run(tmp_path / "b", factor=1.15, seed=1)
    third = latency_run(tmp_path / "c", factor=1.1, seed=2, config=OTHER)
    alone = compare([base, third])
    assert set(outcomes(alone).values()) == {"worse"}
    beside = compare([base, again, third])
    mine = [verdict for verdict in beside.verdicts if verdict.trial.run == "C"]
    assert {verdict.outcome for verdict in mine} == {"no winner"}
    assert "B has A's inputs and differs by 1.1" in mine[0].text


def test_equal_inputs_have_no_winner_however_far_apart(tmp_path):
    paths = [latency_run(tmp_path / "a"), latency_run(tmp_path / "b", factor=3.0, seed=1)]
    found = compare(paths, floor=0.0)
    every = [*found.verdicts, *found.case_verdicts]
    assert len(every) == 9 and {v.outcome for v in every} == {"no winner"}
    assert all("session noise: B has A's inputs and differs by" in v.text for v in every)
    assert all(v.trial.p_value < 0.01 and v.trial.ratio.low > 2 for v in every)  # it is the rule that refuses


def test_too_few_iterations_say_how_many_are_needed(tmp_path):
    paths = [
        latency_run(tmp_path / n, factor=f, iterations=3, seed=i)
        for i, (n, f) in enumerate((("a", 1.0), ("b", 3.0)))
    ]
    found = compare(paths)
    assert {v.text for v in found.verdicts} == {"too few iterations: 3, needs 5"}
    # By itself one metric needs less.
    assert compare(paths, ["median_tpot_ms"]).verdicts[0].text == "too few iterations: 3, needs 4"
    enough = [
        latency_run(tmp_path / n, factor=f, iterations=5, seed=i, config=c)
        for i, (n, f, c) in enumerate((("c", 1.0, CONFIG), ("d", 3.0, OTHER)))
    ]
    assert set(outcomes(compare(enough)).values()) == {"worse"}


def test_a_high_percentile_of_few_values_is_not_judged(tmp_path):
    metrics = {"p99_ttft_ms": 1.0}
    paths = [latency_run(tmp_path / n, metrics=metrics) for n in "ab"]
    found = compare(paths, ["p99_ttft_ms"])
    assert not found.verdicts and "needs 100 values an iteration, has 1" in "\n".join(found.notes)


def test_counted_metrics_differ_without_a_test(tmp_path):
    paths = [latency_run(tmp_path / "a"), latency_run(tmp_path / "b", metrics={"model_bytes": 250})]
    found = {v.trial.metric: v for v in compare(paths).exact}
    assert found["model_bytes"].outcome == "differs" and found["model_bytes"].text == "less 4.00x"


@pytest.mark.parametrize(
    ("kind", "where", "change"),
    [
        ("model", "provenance", {"checkpoint_hash": "d" * 64}),
        ("model", "config", {"model__hf_config": {"layers": 2}}),
        ("workload", "provenance", {"workload_hash": "x" * 64}),
        ("device", "provenance", {"device__kind": "NVIDIA H100"}),
        ("device", "provenance", {"device__count": 8}),
    ],
)
def test_other_models_workloads_and_devices_have_no_winner_unless_asked_for(tmp_path, kind, where, change):
    base = {"config": CONFIG, "provenance": PROVENANCE}
    other = {**base, where: changed(base[where], **change)}
    paths = [latency_run(tmp_path / "a"), latency_run(tmp_path / "b", factor=0.5, seed=1, **other)]
    found = compare(paths)
    assert set(outcomes(found).values()) == {"not comparable"} and list(found.blocked["B"]) == [kind]
    assert all(v.text.startswith("not comparable: ") and " and " in v.text for v in found.verdicts)
    assert found.verdicts[0].trial.ratio.estimate == pytest.approx(0.5, rel=0.05)  # told, not judged
    assert set(outcomes(compare(paths, across=[kind])).values()) == {"better"}


def test_a_cpus_cores_are_a_device_only_where_jax_ran_on_the_cpu(tmp_path):
    fewer = changed(PROVENANCE, cpu__usable_cores=2)
    paths = [latency_run(tmp_path / "a"), latency_run(tmp_path / "b", factor=0.5, provenance=fewer)]
    assert "device" not in compare(paths).blocked["B"]
    cpu = [changed(p, device__platform="cpu", device__kind="cpu") for p in (PROVENANCE, fewer)]
    paths = [latency_run(tmp_path / n, provenance=p) for n, p in zip("cd", cpu, strict=True)]
    assert "device" in compare(paths).blocked["B"]


def test_cases_are_matched_by_what_they_ask_and_the_rest_is_named(tmp_path):
    workload = changed(CONFIG, workload__batch_size=[4, 16])
    other = changed(PROVENANCE, workload_hash="y" * 64)
    paths = [
        latency_run(tmp_path / "a"),
        latency_run(tmp_path / "b", cases=((4, 8, 5), (16, 8, 5)), config=workload, provenance=other),
    ]
    found = compare(paths)
    assert {verdict.trial.case for verdict in found.verdicts} == {None} and not found.case_verdicts
    assert found.verdicts[0].trial.base == pytest.approx(10.0, rel=0.05)  # the batch of 4 of both
    assert found.notes == ("only in A: bs=1 in=8 out=5", "only in B: bs=16 in=8 out=5")
    assert "workload" not in found.blocked["B"]  # the case that both have is the same
    # Prompts from a file may be others under the same name.
    filed = changed(workload, workload__prompts_file="p.jsonl")
    mine = changed(CONFIG, workload__prompts_file="p.jsonl")
    paths = [
        latency_run(tmp_path / "c", config=mine),
        latency_run(tmp_path / "d", cases=((4, 8, 5), (16, 8, 5)), config=filed, provenance=other),
    ]
    assert "workload" in compare(paths).blocked["B"]


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (((1, 8, 5), (4, 8, 5)), ((2, 8, 5),), "batch_size is 1, 4 in A and 2 in B"),
        (
            ((1, 8, 5),),
            ((2, 16, 5),),
            "batch_size is 1 in A and 2 in B; prompt_len is 8 in A and 16 in B",
        ),
        (((1, 8, 5), (4, 16, 5)), ((4, 8, 5), (1, 16, 5)), "each value is in both, but not together"),
    ],
)
def test_cases_that_do_not_match_say_why(mine, theirs, why, tmp_path):
    found = compare([latency_run(tmp_path / "a", cases=mine), latency_run(tmp_path / "b", cases=theirs)])
    assert not found.verdicts and not any(row.case for row in found.metrics)
    assert f"A and B have no case in common: {why}" in found.notes
    assert f"  no verdict: no case in common: {why}" in found.lines()


def test_iterations_too_few_for_any_percentile_are_the_reason(tmp_path):
    paths = [latency_run(tmp_path / name) for name in "ab"]
    for path in paths:
        result = json.loads((path / "result.json").read_text())
        result["metrics"]["p99_itl_ms"] = 2.0
        (path / "result.json").write_text(json.dumps(result))
    found = compare(paths, ["p99_itl_ms"])
    (line,) = [line for line in found.lines() if "no verdict" in line]
    assert line.startswith("  no verdict: ITL p99") and "needs 100 values an iteration, has 4" in line


def test_backends_within_a_run_are_cases_and_across_runs_what_differs(tmp_path):
    def with_backend(folder: Path, name: str) -> Path:
        latency_run(folder, factor=0.8 if name == "llama_cpp" else 1.0)
        result = json.loads((folder / "result.json").read_text())
        for case in result["cases"]:
            case["backend"] = name
        (folder / "result.json").write_text(json.dumps(result))
        return folder

    found = compare([with_backend(tmp_path / n, n) for n in ("moejax", "llama_cpp")])
    assert set(outcomes(found).values()) == {"better"}
    assert [(d.kind, d.values) for d in found.differences] == [("backend", ("moejax", "llama_cpp"))]


# --- inputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "change", "expected"),
    [
        ("config", {"engine__overlap": False}, ("configuration", "engine.overlap", (True, False))),
        ("config", {"quant__method": "gptq"}, ("quantization", "quant.method", ("none", "gptq"))),
        ("config", {"backend__kind": "x"}, ("backend", "backend.kind", (MISSING, "x"))),
        ("config", {"seed": 3}, ("seeds", "seed", (0, 3))),
        ("config", {"workload__iterations": 9}, ("configuration", "workload.iterations", (MISSING, 9))),
        ("provenance", {"git__commit": "f" * 40}, ("code", "git.commit", ("0" * 40, "f" * 40))),
        ("provenance", {"git__diff_hash": "q"}, ("code", "git.diff_hash", (None, "q"))),
        ("provenance", {"versions__jax": "0.11.0"}, ("versions", "jax", ("0.10.2", "0.11.0"))),
        ("provenance", {"versions__triton": "3.9"}, ("versions", "triton", (MISSING, "3.9"))),
        ("provenance", {"env__XLA_FLAGS": "-b"}, ("environment variables", "XLA_FLAGS", ("--a", "-b"))),
        ("provenance", {"device__driver": "570"}, None),  # the other does not say
        ("provenance", {"cpu__model": "Xeon"}, ("CPU", "cpu.model", ("EPYC", "Xeon"))),
        ("provenance", {"seeds__engine": 5}, ("seeds", "seeds.engine", (0, 5))),
        ("provenance", {"jax__jax_enable_x64": True}, ("JAX settings", "jax.jax_enable_x64", (False, True))),
        ("provenance", {"time_utc": "2030", "argv": ["x"], "state": {"load_1min": 9}, "config": {}}, None),
    ],
)  # fmt: skip
def test_each_input_that_differs_is_named_by_kind(tmp_path, where, change, expected):
    base = {"config": CONFIG, "provenance": PROVENANCE}
    other = {**base, where: changed(base[where], **change)}
    found = compare([latency_run(tmp_path / "a"), latency_run(tmp_path / "b", **other)])
    named = [(d.kind, d.key, d.values) for d in found.differences if UNKNOWN not in d.values]
    assert named == ([] if expected is None else [expected])
    assert found.identical_inputs(1) == (expected is None)
    if expected is not None:
        assert f"inputs differ: {expected[0]} (1)" in found.lines()[0]


def test_choices_and_programs_are_inputs_too_and_their_reasons_are_not(tmp_path):
    def extra(value, reason, keys, late=False):
        rows = [{"function": "step", "key": key, "after_warmup": late} for key in keys]
        return {"resolved": {"engine.kernels": {"value": value, "reason": reason}}, "compile_ledger": rows}

    one = latency_run(tmp_path / "a", **extra("xla", "r1", ("k1", "k2")))
    two = latency_run(tmp_path / "b", **extra("xla", "r2", ("k1", "k2")))
    same = compare([one, two])
    assert same.identical_inputs(1) and same.lines()[0].endswith("inputs are identical")
    three = latency_run(tmp_path / "c", **extra("triton", "r1", ("k1", "k3", "k4"), late=True))
    found = {(d.kind, d.key): d.values for d in compare([one, three]).differences}
    assert found == {
        ("kernel choices", "engine.kernels"): ("xla", "triton"),
        ("compiled programs", "programs"): (2, 3),
        ("compiled programs", "recompiled while measuring"): (0, 3),
        ("compiled programs", "programs that the first run lacks"): (0, 2),
    }
    assert "B compiled 3 programs while measuring" in compare([one, three]).notes


def test_where_results_go_is_no_input(tmp_path):
    tracked = changed(CONFIG, tracker__kind="wandb_offline")
    found = compare([latency_run(tmp_path / "a"), latency_run(tmp_path / "b", config=tracked)])
    assert found.differences[0].kind == "tracking" and found.identical_inputs(1)


def test_a_busy_machine_is_said(tmp_path):
    busy = changed(PROVENANCE, state__busy_percent=60.0)
    measured = changed(PROVENANCE, cpu__usable_cores=2)
    paths = [
        latency_run(tmp_path / "a", provenance=busy),
        latency_run(tmp_path / "b", provenance=measured, metrics={"mean_other_cpu_percent": 90.0}),
    ]
    notes = "\n".join(compare(paths).notes)
    assert "A: machine busy: 480 % of other CPU when the run began" in notes
    assert "B: machine busy: 90 % of other CPU while it was measured" in notes


def test_shares_of_different_roofs_are_not_compared(tmp_path):
    """A slower machine's share is of a lower roof; a data sheet is the same for all."""

    def run(name: str, bandwidth: float):
        roof = {"kind": "cpu", "bandwidth": bandwidth, "flops": {}, "source": "measured"}
        return latency_run(tmp_path / name, metrics={"mbu_percent": 40.0}, hardware=roof)

    same, apart = compare([run("a", 7e9), run("b", 7e9)]), compare([run("a", 7e9), run("c", 1.4e9)])
    assert "mbu_percent" in [row.name for row in same.metrics]
    assert "mbu_percent" not in [row.name for row in apart.metrics]
    assert "B: roof: 1.4 GB/s, measured once" in apart.notes and not any(
        "roof" in note for note in same.notes
    )


# --- what cannot be compared --------------------------------------------------------------------------------


def test_what_is_no_run_says_what_was_looked_for(tmp_path):
    run = latency_run(tmp_path / "runs" / "a")
    latency_run(tmp_path / "runs" / "b")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    (tmp_path / "schema.json").write_text('{"schema": 99}')
    cases = {
        "gone": "no run at .*gone: no such file",
        "other": r"is no run: there is no result\.json in it and no W&B log",
        "other/x.txt": "expected a run folder, a result.json",
        "runs": r"2 of its folders are runs: give .*runs/\*",
        "broken": "is not JSON",
        "schema.json": "has schema 99; this moejax reads schema 1",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            compare([run, tmp_path / name])
    with pytest.raises(ConfigError, match="at least two runs, got 1"):
        compare([run])


def test_other_experiments_and_unknown_names_are_refused(tmp_path):
    run = latency_run(tmp_path / "a")
    result = json.loads((run / "result.json").read_text())
    other = tmp_path / "b"
    other.mkdir()
    (other / "result.json").write_text(json.dumps({**result, "experiment": "throughput"}))
    with pytest.raises(
        ConfigError, match=r"'throughput' and .* of 'latency'.*compare runs of one experiment"
    ):
        compare([run, other])
    twin = latency_run(tmp_path / "c")
    with pytest.raises(ConfigError, match="unknown metric 'median_tpt_ms'; did you mean 'median_tpot_ms'"):
        compare([run, twin], ["median_tpt_ms"])
    with pytest.raises(ConfigError, match="across: unknown kind 'devise'; did you mean 'device'"):
        compare([run, twin], across=["devise"])
    with pytest.raises(ConfigError, match=r"noise_floor must be at least 0 and below 1"):
        compare([run, twin], floor=1.5)


def test_unfinished_runs_among_many_are_left_out_and_said(tmp_path, capsys):
    paths = [latency_run(tmp_path / name) for name in "ab"]
    unfinished = tmp_path / "c"
    unfinished.mkdir()
    (unfinished / "run.log").write_text("")
    compare_and_print([*paths, unfinished], None, tmp_path / "out")
    captured = capsys.readouterr()
    assert "left out" in captured.err and "the run failed or is not finished" in captured.err
    line = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [run["label"] for run in line["runs"]] == ["A", "B"]
    assert captured.out.startswith(f"results: {tmp_path}/out\n{{") and len(captured.out) < 400
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "comparison.json", "ratios.png", "distributions_0.png", "distributions_1.png",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"nothing to compare with: .*c: no result.json"):
        compare_and_print([paths[0], unfinished], None, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_runs_without_requests_keep_their_values_and_get_no_verdict(tmp_path):
    found = compare([latency_run(tmp_path / "a"), latency_run(tmp_path / "b", requests=False)])
    assert not found.verdicts and "B: no requests.jsonl: nothing to judge latencies by" in found.notes
    rows = [row for row in found.metrics if row.name == "median_tpot_ms"]
    assert [row.case for row in rows] == ["bs=1 in=8 out=5", "bs=4 in=8 out=5"]
    assert all(row.ratios[0] == 1.0 and row.ratios[1] is not None for row in rows)
    # No latency is of both cases; the values that each case has are in every form of the outcome.
    assert not any(row.name.endswith("_ms") and row.case is None for row in found.metrics)
    label = "median_tpot_ms [bs=4 in=8 out=5]"
    assert found.to_dict()["metrics"][label]["ratios"] == list(rows[1].ratios)
    assert label in render_report(found.runs, found) and "bs=4 in=8 out=5" in text_of(found)
    assert "no verdict: nothing of B was measured repeatedly" in "\n".join(found.lines())


# --- how it looks -------------------------------------------------------------------------------------------


def test_tables_fit_a_hundred_columns_and_many_runs_go_below_one_another(tmp_path):
    config = changed(CONFIG, engine__overlap=False)
    paths = [
        latency_run(tmp_path / f"run-{i}", seed=i, factor=1 + 0.2 * i, config=config if i else CONFIG)
        for i in range(6)
    ]
    for count in (2, 3, 6):
        found = compare(paths[:count])
        text = text_of(found)
        assert max(map(len, text.splitlines())) <= 100 and "…" not in text
        for word in ("engine.overlap", "TPOT p50 (ms)", "A100", "run-1"):
            assert word in text, text
    assert "True: A · False: B C D E F" in text


def test_forest_and_distributions_have_a_mark_for_every_verdict_and_run(tmp_path):
    found = compare([latency_run(tmp_path / n, seed=i) for i, n in enumerate("abc")])
    (axis,) = ratio_forest(found).axes
    assert len(axis.get_yticks()) == len(found.verdicts) + len(found.case_verdicts) == 18
    figure = latency_cdfs(found, 1)
    assert len(figure.axes[0].lines) == 6 and len(figure.legends[0].get_texts()) == 3
    assert latency_cdfs(compare([tmp_path / "a", latency_run(tmp_path / "d", requests=False)])) is None


def test_a_notebook_shows_the_same_tables_and_words(tmp_path):
    found = compare(
        [latency_run(tmp_path / "a"), latency_run(tmp_path / "b", factor=0.8, seed=1, config=OTHER)]
    )
    shown = found._repr_html_()
    assert (
        shown.count("<table") >= 4
        and "B is faster than A by 1.2" in shown
        and "inputs differ: configuration (1)" in shown
    )


def test_run_names_are_short_and_distinct(tmp_path):
    assert run_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ("x/run", "y/run")
    assert run_names([tmp_path / "x", tmp_path / "x"]) == ("x", "x (2)")


@pytest.mark.parametrize(
    ("lower", "names"),
    [
        (True, "median_ttft_ms p99_itl_ms std_e2el_ms p99_queue_ms median_us compile_seconds wall_seconds"
               " model_bytes kv_cache_allocated_bytes process_peak_bytes decode_step_mbytes bits_per_weight"
               " perplexity_int8 held_out_loss train/cross_entropy kl_int8 router_flips_int8 preemptions"
               " failed failed_steps"
               " dropped_assignments recompiles_after_warmup padding_waste energy_per_output_token_j"
               " cost_per_million_output_tokens sm_80_max_spill duration_s load/max_over_mean_layer0"),
        (False, "output_throughput request_goodput total_token_throughput tokens_per_s_per_user"
                " tokens_per_s_per_device decode_tokens_per_s train/tokens_per_s decode_bound_tokens_per_s"
                " speedup_over_static roofline_percent decode_percent_of_bound mfu_percent mbu_percent"
                " sm_80_min_occupancy decode_ratio_int8"),
        (None, "mean_batch_size max_running num_requests total_input_tokens steps variants p99_ttft_ratio"
               " speedup_over_static_low cache_fill mean_cpu_percent batch_size"),
    ],
)  # fmt: skip
def test_it_is_known_of_each_metric_whether_less_is_better(lower, names):
    for name in names.split():
        assert lower_is_better(name) is lower, name


def test_words_suit_what_is_measured():
    assert better_word("median_tpot_ms", better=True) == "faster"
    assert better_word("output_throughput", better=False) == "lower"
    assert better_word("model_bytes", better=True) == "less"
    assert better_word("perplexity", better=False) == "worse"
