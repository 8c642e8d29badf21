"""mode=tune: what is tried, what wins, and the table that kernels then read."""

import pytest

pytest.importorskip("triton")

from moejax.bench.kernels.config import KernelSelection, TuneSection
from moejax.bench.kernels.tune import candidates, merge, predict_us, tune_spec
from pallas_kernels.static import report_op
from pallas_kernels.static.compiler import Compiler
from pallas_kernels.tuned import Entry, configure, read_table, write_table
from tests.bench.kernels.toy import Config, heuristic, toy


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    with Compiler(1, tmp_path_factory.mktemp("cache")) as pool:
        yield pool


def test_candidates_start_with_the_heuristic():
    op = toy()
    kind, spec = op.implementations["pallas_triton"], op.specs[0]
    found = candidates(kind, spec, 5)
    assert found[0] == heuristic(spec.problem) and len(found) == len(set(found)) == 5
    assert len(candidates(kind, spec, 1000)) == 15


def test_more_bytes_in_flight_are_predicted_faster(compiler):
    """Four warps ask for more at a time than one, and 16 programs for more than one."""
    op = toy()

    def predicted(config):
        rows = report_op(
            op, compiler, targets=("sm_80",), wanted=lambda i, s: s.name == "toy_16", config=config
        ).rows
        return predict_us(rows)

    assert predicted(Config(4, 4)) < predicted(Config(4, 1))
    assert predicted(Config(1, 1)) < predicted(Config(16, 1))


@pytest.mark.parametrize("timed", [False, True])
def test_the_winner_is_the_fastest_sound_one(compiler, timed):
    config = KernelSelection(mode="tune", tune=TuneSection(device="a100", max_configs=4))
    op = toy()
    entry, row = tune_spec(op, "pallas_triton", op.specs[0], compiler, config, "a100", timed=timed)
    assert entry.problem == {"T": 16, "dtype": "float32"} and entry.timed == timed
    assert (entry.microseconds is not None) == timed
    assert row["sound"] == row["tried"] == 4
    assert row["us"] <= row["heuristic_us"]


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
    assert found(100) == (Config(8), why)
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
