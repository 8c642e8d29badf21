"""mode=tune: what is tried, what wins, and the table that kernels then read."""

import json
from dataclasses import asdict

import jax.numpy as jnp
import pytest

from moejax.bench.kernels import bench, tune
from moejax.bench.kernels.config import KernelSelection, TuneSection
from moejax.bench.kernels.device_timing import Timed
from moejax.bench.kernels.model import predict_us
from moejax.bench.kernels.row import Row
from moejax.bench.kernels.static import compile_all
from moejax.bench.kernels.tune import candidates, merge, run_tune, tune_spec
from moejax.bench.kernels.worker import Asked
from pallas_kernels.op import Implementation
from pallas_kernels.tuned import Entry, configure, read_table, write_table
from tests.bench.kernels.toy import Config, heuristic, selected, space, toy
from tests.bench.runs import run_into
from tests.gpu_compiler import needs_gpu_compiler


def test_candidates_start_with_the_heuristic():
    op = toy()
    kind, spec = op.implementations["pallas_triton"], op.specs[0]
    found = candidates(kind, spec, 5)
    assert found[0] == heuristic(spec.problem) and len(found) == len(set(found)) == 5
    assert len(candidates(kind, spec, 1000)) == 15


@needs_gpu_compiler
def test_more_bytes_in_flight_are_predicted_faster():
    """Four warps ask for more at a time than one, and 16 programs for more than one."""
    tried = [Config(4, 4), Config(4, 1), Config(1, 1), Config(16, 1)]
    rows = compile_all([Asked(toy, "pallas_triton", "toy_16", "sm_80", config) for config in tried], 1)
    four, one, many, few = map(predict_us, rows)
    assert four < one and many < few


ALL = [Config(4), Config(1, 1), Config(2, 2), Config(8, 2)]
"""What is tried for 16 rows: `candidates` with max_configs=4."""


def sound(asked, workers=1):
    """Reports without a compiler: sound rows of the toy."""
    specs = {spec.name: spec for spec in toy().specs}
    return [
        [
            Row(
                "toy", one.implementation, one.spec, one.target, "toy", asdict(one.config), "explicit",
                "jaxlib", (specs[one.spec].problem["T"],), one.config.num_warps,
                **asdict(specs[one.spec].cost), registers=32, blocks_per_sm=8,
            )
        ] for one in asked
    ]  # fmt: skip


@pytest.fixture
def untouched(monkeypatch):
    """`tune` with sound reports, short chains, and times that are said beforehand, by configuration."""

    def setup(times, failed=()):
        def fake(chains, repeats):
            timed = {at: Timed((times[int(at)],) * 3, 4) for at in chains if int(at) not in failed}
            return timed, {at: "RuntimeError: out of memory" for at in chains if at not in timed}

        monkeypatch.setattr(tune, "compile_all", sound)
        monkeypatch.setattr(tune, "check_compilers", lambda selected: None)
        monkeypatch.setattr(bench, "measure", fake)
        monkeypatch.setattr(bench, "chain_length", lambda expected_us, call_bytes: 2)

    return setup


def tuned(op, timed=True):
    config = KernelSelection(mode="tune", tune=TuneSection(device="a100", max_configs=4))
    spec, kind = op.specs[0], op.implementations["pallas_triton"]
    tried = candidates(kind, spec, 4)
    rows = sound([Asked(toy, "pallas_triton", spec.name, "sm_80", choice) for choice in tried])
    report = list(zip(tried, rows, strict=True))
    return tune_spec(op, "pallas_triton", spec, report, config, "a100", timed=timed)


def test_the_winner_is_the_fastest(untouched):
    untouched([5.0, 4.0, 2.0, 3.0])
    op = toy()
    assert candidates(op.implementations["pallas_triton"], op.specs[0], 4) == ALL
    entry, row = tuned(op)
    assert entry == Entry("pallas_triton", {"T": 16, "dtype": "float32"}, asdict(ALL[2]), True, 2.0)
    assert (row["us"], row["heuristic_us"], row["tried"], row["sound"]) == (2.0, 5.0, 4, 4)
    assert not row["is_heuristic"]


def test_a_wrong_configuration_cannot_win(untouched, caplog):
    """The fastest gives NaN, the next a wrong factor, the third fails as it runs: the heuristic's is left."""

    def run(x, *, factor, config, interpret=None):
        return x * {Config(2, 2): jnp.nan, Config(1, 1): factor + 1}.get(config, factor)

    untouched([5.0, 1.0, 0.1, 0.5], failed=[3])
    entry, row = tuned(toy(pallas_triton=Implementation(run, Config, heuristic, space)))
    assert entry.config == asdict(ALL[0]) and row["is_heuristic"] and row["us"] == 5.0
    for text in ("not finite", "wrong result: relative error 3.3e-01", "RuntimeError: out of memory"):
        assert text in caplog.text
    assert caplog.text.count("dropped") == 3


def test_nothing_that_runs_gives_no_entry(untouched, caplog):
    untouched([1.0] * 4, failed=range(4))
    assert tuned(toy()) is None
    assert "no configuration runs and is right" in caplog.text


def test_untimed_the_heuristic_stays_unless_the_model_gains(untouched, monkeypatch):
    untouched([])
    for best, kept in ((9.0, True), (5.0, False)):
        times = iter([10.0, 12.0, best, 11.0])
        monkeypatch.setattr(tune, "predict_us", lambda rows, repeats, times=times: next(times))
        entry, row = tuned(toy(), timed=False)
        assert entry.config == asdict(ALL[0 if kept else 2]) and row["is_heuristic"] == kept
        assert not entry.timed and entry.microseconds is None
        assert row["reason"].startswith("the heuristic's: " if kept else "the model's best: gains 2.00")


def test_an_untimed_run_writes_what_kernels_then_take(untouched, monkeypatch, tmp_path, capsys):
    """tune.device=a100: entries marked untimed; for this problem, then the nearest, else the heuristic's."""
    untouched([])
    op = toy()
    monkeypatch.setattr(tune, "select", lambda *names: [selected(op)])
    data = tmp_path / "data"
    config = KernelSelection(
        mode="tune",
        tune=TuneSection(device="a100", max_configs=4, data_dir=str(data)),
    )
    with run_into(tmp_path / "out", "kernels", {"mode": "tune"}) as run:
        result = run_tune(config, run)
    table = json.loads((data / "a100" / "toy.json").read_text())
    assert [entry["timed"] for entry in table["entries"]] == [False, False]
    assert [entry["microseconds"] for entry in table["entries"]] == [None, None]
    assert "if the static model has it faster by 1.15" in table["rule"]
    assert result["metrics"]["timed"] is False
    assert "by the static model, untimed" in capsys.readouterr().err

    def found(T, **more):
        problem = {"T": T, "dtype": "float32"}
        return configure(op, "pallas_triton", problem, device="a100", data=data, **more)

    entries = {entry["problem"]["T"]: Config(**entry["config"]) for entry in table["entries"]}
    why = "chosen by the static model, untimed, for "
    assert found(16) == (entries[16], f"{why}this problem on a100")
    assert found(50) == (entries[64], f"{why}the nearest problem T=64 on a100")
    assert found(16, config=Config(1)) == (Config(1), "explicit")
    other = configure(op, "pallas_triton", {"T": 16, "dtype": "int8"}, device="a100", data=data)
    assert other == (Config(4), "heuristic: no table of a100 has a similar problem")


def test_configurations_come_in_order(tmp_path):
    """Explicit, tuned for this, nearest tuned, heuristic; another dtype is never near."""
    op = toy()

    def entry(T, rows, timed=True, dtype="float32"):
        config = {"rows": rows, "num_warps": 1, "num_stages": 1}
        return Entry("pallas_triton", {"T": T, "dtype": dtype}, config, timed, 1.0 if timed else None)

    def found(T, dtype="float32", **more):
        problem = {"T": T, "dtype": dtype}
        return configure(op, "pallas_triton", problem, device="a100", data=tmp_path, **more)

    assert found(16) == (Config(4), "heuristic: no table of a100 has a similar problem")
    write_table(tmp_path, "a100", "toy", [entry(16, 2), entry(256, 8, timed=False)], jax="0")
    assert found(16) == (Config(2), "tuned for this problem on a100")
    assert found(20) == (Config(2), "tuned for the nearest problem T=16 on a100")
    why = "chosen by the static model, untimed, for the nearest problem T=256 on a100"
    assert found(200) == (Config(8), why)
    # Too far: more than two doublings from what was timed, more than half a one from what was not.
    assert found(70)[1] == found(150)[1] == "heuristic: no table of a100 has a similar problem"
    assert found(16, dtype="bfloat16")[0] == Config(4)
    assert found(16, config=Config(1)) == (Config(1), "explicit")
    with pytest.raises(TypeError, match="config is a dict; pallas_triton takes Config"):
        found(16, config={"rows": 1})


def test_a_new_entry_replaces_the_old_one(tmp_path):
    old = Entry("a", {"T": 1}, {"rows": 1}, False, None)
    new, other = old._replace(timed=True, microseconds=2.0), old._replace(implementation="b")
    assert merge([old, other], [new]) == [new, other]
    write_table(tmp_path, "h100", "toy", [new, other], date="2026-11-21")
    assert sorted(read_table(tmp_path, "h100", "toy")) == [new, other]
    assert not list(tmp_path.glob("**/*.part"))
