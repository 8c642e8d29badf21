"""Words and variants on the command line: what Hydra cannot read is written as what it can."""

import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments import compare as compare_experiment
from experiments import latency as latency_experiment
from experiments.launch.app import launch
from experiments.launch.command_line import before_flags, items, translate
from moejax.core.errors import ConfigError
from tests.results.simulated import latency_run


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [["a", "b"], ["a b/c", "x'y"], ['one " quote', "b,c"], ['say "no"', "back\\"], ["outputs/latency/1"]],
)
def test_words_are_read_back_as_they_were(words):
    (argument,) = translate(words, "runs")
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert items(argument.partition("=")[2]) == words  # and so a second translation changes nothing
    assert override.key_or_group == "runs" and [str(item) for item in override.value()] == words


def test_flags_their_values_and_overrides_are_no_words(tmp_path):
    argv = ["--config-dir", "elsewhere", "-cn", "name", "html=true", "--cfg", "job", "A"]
    assert translate(argv, "runs") == ['runs=["A"]', argv[4], *argv[:4], *argv[5:-1]]
    (tmp_path / "seed=1").mkdir()
    assert translate(["seed=1", "seed=2"], "runs") == ['runs=["seed=1"]', "seed=2"]
    assert translate(["A", "seed=3"]) == ["A", "seed=3"]  # an experiment without words


def test_what_is_added_to_a_command_line_stands_before_its_flags():
    argv = ["-m", *translate(["--config-dir", "elsewhere", "seed=1"])]
    assert before_flags(argv, ["seed=2"]) == ["-m", "seed=1", "seed=2", "--config-dir", "elsewhere"]
    assert before_flags(["seed=1"], ["seed=2"]) == ["seed=1", "seed=2"]


def test_words_and_the_list_at_once_are_refused():
    with pytest.raises(
        ConfigError, match=r"'A' and 'runs=\[B\]': give the runs either as words or as a list"
    ):
        translate(["A", "runs=[B]"], "runs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[engine.overlap=true]", ["engine.overlap=true"]),
        ("[a=1, b=[2,3] ,c={d:4}]", ["a=1", "b=[2,3]", "c={d:4}"]),
        ("engine.overlap=true", ["engine.overlap=true"]),
        ("['a=1',\"b=2,3\"]", ["a=1", "b=2,3"]),
        ("[]", []),
        ("", []),
    ],
)
def test_items_of_a_variant(text, expected):
    assert items(text) == expected
    (argument,) = translate([f"ab.variants.x={text}"])
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert [str(item) for item in override.value()] == expected


def launch_compare(*argv: str) -> int:
    return launch(compare_experiment.main, "compare", list(argv), positional="runs")


def test_compare_takes_folders_as_words(tmp_path, capsys):
    paths = [str(latency_run(tmp_path / name)) for name in "ab"]
    assert launch_compare(*paths, "metrics=[median_tpot_ms]") == 0
    captured = capsys.readouterr()
    assert "B against A: inputs are identical" in captured.err
    (folder,) = Path("outputs/compare").iterdir()
    line = json.loads((folder / "comparison.json").read_text())
    assert [run["path"] for run in line["runs"]] == paths and len(line["verdicts"]) == 1
    assert (folder / "ratios.png").is_file()
    where, said = captured.out.splitlines()
    assert where == f"results: {folder}"
    assert json.loads(said) == {"experiment": "compare", "runs": 2, "no_winner": 1}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "compare needs at least two runs, got 0"),
        (["a"], "compare needs at least two runs, got 1"),
        (["a", "gone"], "there is no run at gone: no such file or folder"),
        (["a", "empty"], "nothing to compare with: empty: no result.json"),
        (["a", "b", "across=[devise]"], "across[0]: unknown value 'devise'; did you mean 'device'?"),
        (["a", "b", "noise_floor=2"], "noise_floor must be at least 0 and below 1"),
        (["a", "b", "htlm=true"], "unknown key 'htlm'; did you mean 'html'?"),
    ],
)
def test_mistakes_end_in_one_line_and_leave_nothing(tmp_path, capsys, argv, message):
    for name in "ab":
        latency_run(tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert launch_compare(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["experiment=ab"], "ab.variants is empty: add 'ab.variants.NAME=[KEY=VALUE]'"),
        (
            ["ab.variants.x=[engine.overlp=false]"],
            "ab.variants.x: unknown key 'engine.overlp'; did you mean 'engine.overlap'?",
        ),
        (["ab.variants.x=engine.overlap=maybe"], "ab.variants.x: engine.overlap must be true or false"),
        (["ab.variants.x=[model=tinny]"], "x: model=tinny: unknown option 'tinny'; did you mean 'tiny'?"),
        (["ab.variants.x=[workload.batch_size=2]"], "ab.variants.x changes 'workload', which all"),
        (["ab.variants.x=[engine.overlap=true]"], "ab.variants.x is the same configuration as base"),
        (["ab.variants.x=[engine.max_num_seqs=1]"], "ab.variants.x: workload.batch_size 8 exceeds"),
        (["ab.variantz.x=[engine.overlap=false]"], "unknown key 'ab.variantz.x'; did you mean"),
        (["ab.variants.x=[engine.overlap=false]", "ab.rounds=0"], "ab.rounds"),
    ],
)  # fmt: skip
def test_a_variants_mistakes_are_the_command_lines(capsys, argv, message):
    assert launch(latency_experiment.main, "latency", argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err and not Path("outputs").exists()


@pytest.mark.slow
def test_variants_run_in_turns_on_the_shipped_model(capsys):
    argv = [
        "experiment=ab", "ab.variants.overlap=[engine.overlap=true]",
        "ab.variants.plain=[engine.overlap=false]", "tracker=none", "ab.rounds=8",
        "ab.variants.blocks=[engine.block_size=16,engine.max_num_seqs=8]",
        "workload.batch_size=1", "workload.prompt_len=4", "workload.output_len=4",
    ]  # fmt: skip
    assert launch(latency_experiment.main, "latency", argv) == 0
    captured = capsys.readouterr()
    folder = captured.out.splitlines()[0].removeprefix("results: ")
    result = json.loads(Path(folder, "result.json").read_text())
    assert [v["name"] for v in result["variants"]] == ["overlap", "control", "plain", "blocks"]
    assert [v["weights"] for v in result["variants"]] == ["its own", *["shared with overlap"] * 3]
    assert all(row["equal_requests"] == 1.0 for row in result["cases"])
    assert {row["samples"][0] for row in result["verdicts"]} == {8}
    assert result["metrics"]["recompiles_after_warmup"] == 0


@pytest.mark.parametrize(
    "argument, wanted",
    [
        ("workload.mix.chat.share=2", "+workload.mix={chat:{share:2}}"),
        ("+workload.mix.chat.prompt_len.low=2", "+workload.mix={chat:{prompt_len:{low:2}}}"),
        ("engine.scheduling.tenants.a.max_seqs=1", "+engine.scheduling.tenants={a:{max_seqs:1}}"),
        ("engine.scheduling.ageing_s=1", "engine.scheduling.ageing_s=1"),
    ],
)
def test_a_named_section_is_added_as_a_whole(argument: str, wanted: str) -> None:
    assert translate([argument]) == [wanted]
