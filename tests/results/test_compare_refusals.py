"""Runs of one workload of which a metric says nothing: other objectives or lengths, made-up instants."""

import json

from moejax.results.compare import compare
from moejax.results.compare.samples import latency_values
from tests.results.simulated import CONFIG, PROVENANCE, changed, latency_run

OTHER = changed(CONFIG, engine__overlap=False)


def outcomes(comparison) -> dict[str, str]:
    return {verdict.trial.metric: verdict.outcome for verdict in comparison.verdicts}


def test_goodput_under_other_objectives_has_no_winner(tmp_path):
    def run(name: str, slo: float, goodput: float, config=OTHER):
        rates = [
            {"case": case, "iteration": i, "request_goodput": goodput + 0.001 * i}
            for case in (0, 1) for i in range(10)
        ]  # fmt: skip
        config = changed(config, workload__slo={"ttft_ms": slo})
        metrics = {"request_goodput": goodput}
        return latency_run(tmp_path / name, config=config, metrics=metrics, iterations_rows=rates)

    base = run("a", 100.0, 1.0, CONFIG)
    same = compare([base, run("b", 100.0, 3.0)], ["request_goodput"])
    assert outcomes(same) == {"request_goodput": "better"}
    apart = compare([base, run("c", 1000.0, 3.0)], ["request_goodput", "median_ttft_ms"])
    assert outcomes(apart) == {"request_goodput": "not comparable", "median_ttft_ms": "no winner"}
    assert "objectives differ" in apart.verdicts[0].text


def test_made_up_instants_of_a_server_are_not_judged(tmp_path):
    paths = [latency_run(tmp_path / "a"), latency_run(tmp_path / "b", factor=0.5, seed=1, config=OTHER)]
    assert outcomes(compare(paths, ["median_tpot_ms"])) == {"median_tpot_ms": "better"}
    for path in paths:
        result = json.loads((path / "result.json").read_text())
        result["metrics"]["median_itl_ms"] = 1.0
        (path / "result.json").write_text(json.dumps(result))
    assert outcomes(compare(paths, ["median_itl_ms"])) == {"median_itl_ms": "better"}
    for row in result["cases"]:  # as `blank_unknown` leaves them
        row["mean_itl_ms"] = None
    (paths[1] / "result.json").write_text(json.dumps(result))
    found = compare(paths, ["median_itl_ms"])
    assert found.verdicts == () and any("instants are not known" in note for note in found.notes)
    assert latency_values(found.cases[1], "itl").size == 0 < latency_values(found.cases[1], "tpot").size


def test_shorter_outputs_are_less_work_and_no_winner_of_whole_requests(tmp_path):
    """The workload is the same, and one run's requests stopped early."""
    base = latency_run(tmp_path / "a")
    early = latency_run(tmp_path / "b", factor=0.9, seed=1, config=OTHER)
    file = early / "requests.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row | {"output_len": 3, "itl_ms": row["itl_ms"][:2]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = outcomes(compare([base, early]))
    assert found == {
        "median_ttft_ms": "better", "median_tpot_ms": "better", "median_e2el_ms": "not comparable"
    }  # fmt: skip


def test_a_peers_own_versions_are_inputs(tmp_path):
    """They are of another environment than ours."""

    def run(name: str, torch: str, **fields):
        peer = {"name": "hf", "kind": "hf_transformers", "versions": {"torch": torch}, "load_seconds": 1.0}
        return latency_run(tmp_path / name, provenance=changed(PROVENANCE, backends=[{**peer, **fields}]))

    base = run("a", "2.8")
    (found,) = compare([base, run("b", "2.9", load_seconds=2.0)]).differences
    assert (found.kind, found.key, found.values) == ("backend", "backends.hf.versions.torch", ("2.8", "2.9"))
    assert compare([base, run("c", "2.8", load_seconds=2.0)]).identical_inputs(1)
