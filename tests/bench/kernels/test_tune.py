"""mode=tune: what is tried, what wins, and the table that kernels then read."""

import json
from dataclasses import asdict

import jax.numpy as jnp
import pytest

from moejax.bench.kernels import bench, tune
from moejax.bench.kernels.config import KernelSelection, TuneSection
from moejax.bench.kernels.device_timing import Timed
from moejax.bench.kernels.row import Row
from moejax.bench.kernels.tune import candidates, run_tune, tune_spec
from moejax.bench.kernels.worker import Asked
from pallas_kernels.op import Implementation
from pallas_kernels.tuned import Entry, add_entries, configure, read_table, write_table
from tests.bench.kernels.toy import Config, heuristic, selected, space, toy
from tests.bench.runs import run_into


def test_candidates_start_with_the_heuristic():
    op = toy()
    kind, spec = op.implementations["pallas_triton"], op.specs[0]
    found = candidates(kind, spec, 5)
    assert found[0] == heuristic(spec.problem) and len(found) == len(set(found)) == 5
    assert len(candidates(kind, spec, 1000)) == 15


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


def tuned(op):
    config = KernelSelection(mode="tune", tune=TuneSection(max_configs=4))
    spec, kind = op.specs[0], op.implementations["pallas_triton"]
    tried = candidates(kind, spec, 4)
    rows = sound([Asked(toy, "pallas_triton", spec.name, "sm_80", choice) for choice in tried])
    report = list(zip(tried, rows, strict=True))
    return tune_spec(op, "pallas_triton", spec, report, config, "a100")


def test_the_winner_is_the_fastest(untouched):
    untouched([5.0, 4.0, 2.0, 3.0])
    op = toy()
    assert candidates(op.implementations["pallas_triton"], op.specs[0], 4) == ALL
    entry, row = tuned(op)
    assert entry == Entry("pallas_triton", {"T": 16, "dtype": "float32"}, asdict(ALL[2]), 2.0)
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


def test_a_run_writes_what_kernels_then_take(untouched, monkeypatch, tmp_path, capsys):
    """For this problem, then the nearest, else the heuristic's."""
    untouched([5.0, 4.0, 2.0, 3.0])
    op = toy()
    monkeypatch.setattr(tune, "select", lambda *names: [selected(op)])
    monkeypatch.setattr(tune, "require_gpu", lambda mode: None)
    monkeypatch.setattr(tune, "device_key", lambda: "a100")
    data = tmp_path / "data"
    config = KernelSelection(mode="tune", tune=TuneSection(max_configs=4, data_dir=str(data)))
    with run_into(tmp_path / "out", "kernels", {"mode": "tune"}) as run:
        run_tune(config, run)
    table = json.loads((data / "a100" / "toy.json").read_text())
    assert [entry["microseconds"] for entry in table["entries"]] == [2.0, 2.0]
    assert {"jax", "jaxlib", "date", "commit"} <= table.keys()
    assert "tuned" in capsys.readouterr().err

    def found(T, **more):
        problem = {"T": T, "dtype": "float32"}
        return configure(op, "pallas_triton", problem, device="a100", data=data, **more)

    entries = {entry["problem"]["T"]: Config(**entry["config"]) for entry in table["entries"]}
    assert found(16) == (entries[16], "tuned for this problem on a100")
    assert found(50) == (entries[64], "tuned for the nearest problem T=64 on a100")
    assert found(16, config=Config(1)) == (Config(1), "explicit")
    other = configure(op, "pallas_triton", {"T": 16, "dtype": "int8"}, device="a100", data=data)
    assert other == (Config(4), "heuristic: no table of a100 has a similar problem")


def test_configurations_come_in_order(tmp_path):
    """Explicit, tuned for this, nearest tuned, heuristic; another dtype is never near."""
    op = toy()

    def entry(T, rows):
        config = {"rows": rows, "num_warps": 1, "num_stages": 1}
        return Entry("pallas_triton", {"T": T, "dtype": "float32"}, config, 1.0)

    def found(T, dtype="float32", **more):
        problem = {"T": T, "dtype": dtype}
        return configure(op, "pallas_triton", problem, device="a100", data=tmp_path, **more)

    assert found(16) == (Config(4), "heuristic: no table of a100 has a similar problem")
    write_table(tmp_path, "a100", "toy", [entry(16, 2)], jax="0")
    assert found(16) == (Config(2), "tuned for this problem on a100")
    assert found(20) == (Config(2), "tuned for the nearest problem T=16 on a100")
    # Too far: more than two doublings.
    assert found(70)[1] == "heuristic: no table of a100 has a similar problem"
    assert found(16, dtype="bfloat16")[0] == Config(4)
    assert found(16, config=Config(1)) == (Config(1), "explicit")
    with pytest.raises(TypeError, match="config is a dict; pallas_triton takes Config"):
        found(16, config={"rows": 1})


def test_a_new_entry_replaces_the_old_one(tmp_path):
    old = Entry("a", {"T": 1}, {"rows": 1}, 3.0)
    new, other = old._replace(microseconds=2.0), old._replace(implementation="b")
    write_table(tmp_path, "h100", "toy", [old, other])
    add_entries(tmp_path, "h100", "toy", [new], date="2026-11-21")
    assert sorted(read_table(tmp_path, "h100", "toy")) == [new, other]
    assert not list(tmp_path.glob("**/*.part"))
