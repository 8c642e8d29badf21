"""The launcher of experiments: configs compose, mistakes end in one line, jobs and sweeps behave."""

import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from experiments.launch.app import launch, output_dir
from experiments.launch.command_line import query_line, translate
from experiments.launch.compose import CONFIG_DIR, build_job, composer, schema_of
from experiments.launch.notebook import main_of, names
from experiments.launch.schema import (
    GenerateConfig,
    KernelsConfig,
    LatencyConfig,
    QuantizationConfig,
    ScalingConfig,
    StressConfig,
    ThroughputConfig,
    TrainExperimentConfig,
)
from experiments.launch.structured import build, mirror
from moejax.bench.backends.config import BackendOptions
from moejax.bench.traffic import Lengths
from moejax.bench.workload import LatencyCase, latency_cases
from moejax.core.checked import Checked
from moejax.core.config import EngineConfig
from moejax.core.errors import CheckpointError, ConfigError
from moejax.train.config import TrainConfig

SCHEMAS: dict[str, type] = {
    "latency": LatencyConfig,
    "throughput": ThroughputConfig,
    "generate": GenerateConfig,
    "train": TrainExperimentConfig,
    "quantization": QuantizationConfig,
    "scaling": ScalingConfig,
    "kernels": KernelsConfig,
    "stress": StressConfig,
}
REPOSITORY = CONFIG_DIR.parent


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def compose(name: str, *overrides: str) -> Any:
    """The experiment's dataclass for a command line, without running anything."""
    with composer(name, SCHEMAS[name]) as composed:
        return build_job(SCHEMAS[name], composed.config(translate(overrides)))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def trace_file(*rows: dict[str, Any]) -> str:
    """A trace in the working directory."""
    lines = [json.dumps(row) for row in rows or ({"time": 0.0, "prompt_len": 4, "output_len": 2},)]
    Path("trace.jsonl").write_text("\n".join(lines))
    return "trace.jsonl"


class Recorder:
    """An experiment that notes what it was given, and raises what it is told to for the seeds it is told."""

    def __init__(self, raises: Mapping[int, BaseException] | None = None) -> None:
        self.raises = raises or {}
        self.configs: list[LatencyConfig] = []
        self.folders: list[Path] = []

    @property
    def main(self) -> Any:
        def main(config: LatencyConfig) -> None:
            self.configs.append(config)
            self.folders.append(output_dir())
            if config.seed in self.raises:
                raise self.raises[config.seed]
            print(json.dumps({"seed": config.seed}))

        return main


def launch_latency(*argv: str, raises: Mapping[int, BaseException] | None = None) -> tuple[int, Recorder]:
    recorder = Recorder(raises)
    return launch(recorder.main, "latency", list(argv)), recorder


def launch_throughput(*argv: str) -> tuple[int, Recorder]:
    recorder = Recorder()

    def main(config: ThroughputConfig) -> None:
        recorder.main(config)

    return launch(main, "throughput", list(argv)), recorder


# --- configs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_default_config_gives_the_dataclass(name: str) -> None:
    config = compose(name) if name != "generate" else compose(name, "prompts=[a,b]")
    assert type(config) is SCHEMAS[name]


@pytest.mark.parametrize("group", ["model", "parallel", "engine", "quant", "tracker", "hardware"])
def test_every_option_of_a_group_composes(group: str) -> None:
    names = options(group)
    assert names
    for name in names:
        needs = {("model", "checkpoint"): ["model.path=x"]}
        needs["parallel", "auto"] = ["hardware=a100_80gb", "parallel.auto=4"]
        extra = needs.get((group, name), [])
        assert compose("latency", f"{group}={name}", *extra)


def test_every_workload_is_of_the_experiment_that_it_says() -> None:
    for name in options("workload"):
        header = (CONFIG_DIR / "workload" / f"{name}.yaml").read_text().splitlines()[0]
        mine, other = ("latency", "throughput")[:: -1 if "experiments.throughput" in header else 1]
        extra = [f"workload.trace_file={trace_file()}"] if name == "trace" else []
        assert compose(mine, f"workload={name}", *extra)
        with pytest.raises(ConfigError, match=f"workload={name} is a preset of {mine}:"):
            compose(other, f"workload={name}", *extra)


def test_peers_preset_has_the_three_cases() -> None:
    config = compose("latency", "experiment=peers_medium", "model.path=x")
    cases = ((1, 128, 64), (8, 128, 64), (16, 32, 64))
    assert latency_cases(config.workload) == [LatencyCase(*case) for case in cases]
    assert config.model.dtype == "float32"


def test_a_length_is_a_number_or_a_distribution() -> None:
    def lengths(*overrides: str) -> Any:
        return compose("throughput", *overrides).workload.output_len

    assert lengths() == Lengths(8, 128)
    assert lengths("workload.output_len=64") == 64
    assert lengths("workload.output_len.low=4", "workload.output_len.high=9") == Lengths(4, 9)
    tail = ("workload.output_len.kind=lognormal", "workload.output_len.mean=32", "workload.output_len.std=40")
    assert lengths(*tail) == Lengths(8, 128, "lognormal", 32.0, 40.0)
    assert lengths("workload=bursty", "workload.output_len.high=512").high == 512
    assert lengths("workload=bursty", "workload.output_len=3") == 3


def test_rates_are_numbers_or_inf() -> None:
    assert compose("throughput").workload.request_rate == math.inf
    assert compose("throughput", "workload.request_rate=2.5").workload.request_rate == 2.5
    assert compose("throughput", "workload=poisson", "workload.request_rate=inf").workload.num_requests == 128


@pytest.mark.parametrize("name", ["poisson", "bursty"])
def test_a_workload_brings_no_objectives_of_its_own(name: str) -> None:
    """A goodput is of objectives that somebody has asked for."""
    assert not compose("throughput", f"workload={name}").workload.slo
    asked = compose("throughput", f"workload={name}", "workload.slo.ttft_ms=150")
    assert asked.workload.slo.ttft_ms == 150


def test_quick_throughput_compares_the_two_modes() -> None:
    config = compose("throughput", "experiment=quick_throughput")
    assert config.engine.batching == "continuous" and config.workload.compare == ("continuous", "static")
    assert (config.workload.num_requests, config.workload.output_len) == (64, Lengths(8, 256))


def test_rate_sweep_is_a_sweep_without_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, recorder = launch_throughput("experiment=rate_sweep")
    assert code == 0, capsys.readouterr().err
    assert [config.workload.request_rate for config in recorder.configs] == [4, 8, 16, 32, 64]
    code, recorder = launch_throughput("-m", "experiment=rate_sweep", "workload.request_rate=1,2")
    assert [config.workload.request_rate for config in recorder.configs] == [1, 2]


# Sections in which an experiment's own config says something else than the dataclass.
OTHER_THAN_DEFAULT = {
    "simulate": {"engine", "simulate"},
    "generate": {"sampling"},
    "stress": {"engine"},
    "quantization": {"quantization"},
    "routing_policies": {"routing_policies"},
    "offload": {"offload"},
}


@pytest.mark.parametrize("name", names())
def test_values_that_a_config_repeats_for_its_readers_are_the_dataclasses_defaults(name: str) -> None:
    schema = OmegaConf.structured(mirror(schema_of(main_of(name))))
    left_out = {"defaults", *OTHER_THAN_DEFAULT.get(name, ())}
    body = {
        key: value
        for key, value in OmegaConf.load(CONFIG_DIR / f"{name}.yaml").items()
        if key not in left_out
    }
    assert OmegaConf.merge(schema, body) == schema


@pytest.mark.parametrize("kind", options("backend"))
def test_a_backends_config_repeats_the_defaults(kind: str) -> None:
    schema = OmegaConf.structured(mirror(BackendOptions))
    merged = OmegaConf.merge(schema, OmegaConf.load(CONFIG_DIR / "backend" / f"{kind}.yaml"))
    assert merged == OmegaConf.merge(schema, {"kind": kind})


def test_train_config_is_the_librarys_own() -> None:
    assert isinstance(compose("train"), TrainConfig)


def test_prompts_are_one_text_or_several() -> None:
    assert compose("generate", "prompts=Once upon a time").prompts == ["Once upon a time"]
    assert compose("generate", "prompts=[a,7,true]").prompts == ["a", "7", "true"]
    for overrides in (["prompts=[]"], ["prompts=[[a]]"], ["prompts=[a,b]", "stream=true"]):
        with pytest.raises(ConfigError, match="prompt"):
            compose("generate", *overrides)


def test_preset_wins_over_the_experiments_own_values_and_loses_to_the_command_line() -> None:
    assert compose("train", "experiment=train_smoke").steps == 30
    assert compose("train", "experiment=train_smoke", "steps=7").steps == 7
    assert compose("latency", "experiment=quick").workload.iterations == 10


def test_one_seed_reaches_the_workload_unless_it_has_its_own() -> None:
    assert compose("latency", "seed=7").workload.seed == 7
    assert compose("latency", "seed=7", "workload.seed=1").workload.seed == 1


# --- mistakes -----------------------------------------------------------------------------------------------

MISTAKES = [
    (["workload.batchsize=3"], ["unknown key 'workload.batchsize'; did you mean 'workload.batch_size'?"]),
    (["batch_size=3"], ["did you mean 'workload.batch_size'?"]),
    (["+workload.foo=3"], ["unknown key 'workload.foo'", "prompt_len"]),
    (["+foo=3"], ["unknown key 'foo'"]),
    (["modle=tiny"], ["unknown key 'modle'; did you mean 'model'?"]),
    (["hydra.rum.dir=x"], ["unknown key 'hydra.rum.dir'"]),
    (["model/size=big"], ["unknown config group 'model/size'"]),
    (
        ["model=olmoe_1b_7b", "model.hf_config.num_layers=2"],
        ["did you mean 'model.hf_config.num_hidden_layers'?"],
    ),
    (["model=tinny"], ["unknown option 'tinny'; did you mean 'tiny'?", "mixtral_8x7b"]),
    (["workload=3"], ["unknown option '3'", "latency"]),
    (["seed.x=3"], ["unknown key 'seed.x': 'seed' is a value without keys"]),
    (["foo@bar=3"], ["unknown config group 'foo'"]),
    (["workload=bursty"], ["workload=bursty is a preset of throughput: ", "(presets of latency: batch_"]),
    (
        ["experiment=foo"],
        [
            "unknown preset 'foo' (known: ab, deterministic, kv_eviction, latency_matrix,",
            "quick, rollouts, speculation, tiers)",
        ],
    ),
    (["experiment=train_smoke"], ["a preset of train: python -m experiments.train experiment=train_smoke"]),
    (["experiment=quick_throughput"], ["is a preset of throughput: ", "(presets of latency: ab, "]),
    (["workload.zzz=3"], ["unknown key 'workload.zzz' (keys of 'workload': batch_size"]),
    (["name=x"], ["unknown key 'name' (known: ab, backend, engine, experiment"]),
    (["hydra/launcher=joblib"], ["moejax[sweep]"]),
    (["+model=tiny"], ["leave out the '+'"]),
    (["+seed=3"], ["leave out the '+'"]),
    (["workload.batch_size=abc"], ["workload.batch_size must be an integer", "'abc'"]),
    (["workload.batch_size=[1,0]"], ["workload.batch_size[1] must be an integer of at least 1, got 0"]),
    (["workload.iterations=abc"], ["workload.iterations must be an integer, got 'abc'"]),
    (["workload.iterations=null"], ["workload.iterations", "null"]),
    (["verbose=maybe"], ["verbose must be true or false, got 'maybe'"]),
    (["tracker.tags=a"], ["tracker.tags must be a list"]),
    (["workload.slo=3"], ["workload.slo must be a section with keys ttft_ms", "got 3"]),
    (["workload.slo.ttft_ms=-1"], ["workload.slo.ttft_ms must be"]),
    (["workload.pairing=zap"], ["unknown value 'zap'; did you mean 'zip'?"]),
    (["workload.temperature=-1"], ["workload", "temperature must be"]),
    (["engine.moe.execution=groupd"], ["did you mean 'grouped'?"]),
    (["parallel.tp=0"], ["parallel.tp must be an integer of at least 1"]),
    (["parallel=ep9"], ["did you mean 'ep8'?"]),
    (["workload.batch_size=999"], ["exceeds engine.max_num_seqs"]),
    (["model=mixtral_8x7b", "model.path=x"], ["model.path or model.hf_config"]),
    (["model=checkpoint"], ["'model.path' has no value yet"]),
    (["~model"], ["'model' has no value yet"]),
    (["seed=${nothing}"], ["seed", "'nothing' not found"]),
    (["workload.prompts_file=nope.txt"], ["no file 'nope.txt'"]),
    (["workload.batch_size=[1,2"], ["cannot read the value in 'workload.batch_size=[1,2'"]),
    (["workload.batch_size=1,8"], ["[1,8] for a list", "-m"]),
    (["seed=range(0,3)"], ["add -m"]),
    (["--cfg", "job", "seed=1,2"], ["[1,2] for a list", "-m"]),
    (["-m", "hydra.verbose=true,false"], ["Hydra's own settings cannot be swept"]),
    (["-m", "workload.temperature=interval(0,1)"], ["an interval is for a search", "optuna"]),
    (["seed"], ["cannot read argument 'seed': write KEY=VALUE"]),
    (["a b=3"], ["cannot read argument 'a b=3': write KEY=VALUE with a key"]),
    (["--multirn"], ["did you mean '--multirun'?"]),
    (["--cfg", "jobs"], ["invalid choice", "jobs"]),
    (["-m", "--cfg", "job"], ["exclude each other"]),
    (["--resolve"], ["--resolve goes with --cfg"]),
    (["--config-dir", "nowhere"], ["'nowhere' is not a folder"]),
    (["--config-name", "latencyy"], ["unknown config 'latencyy'; did you mean 'latency'?"]),
    (["-sc", "install=tcsh"], ["tcsh", "bash"]),
    (["-m", "seed=1,abc"], ["seed must be an integer, got 'abc'"]),
    (["-m", "model=tiny,tinny"], ["did you mean 'tiny'?"]),
]


@pytest.mark.parametrize(("argv", "expected"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistake_is_one_line_and_leaves_nothing(
    argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, recorder = launch_latency(*argv)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for text in expected:
        assert text in err
    assert out == ""
    assert recorder.configs == []
    assert list(tmp_path.iterdir()) == []


THROUGHPUT_MISTAKES = [
    (["workload.request_rate=fast"], ["workload.request_rate must be a number, got 'fast'"]),
    (["workload.request_rate=0"], ["workload.request_rate must be requests per second above 0, or inf"]),
    (["workload.burstiness=2"], ["workload.burstiness needs a finite workload.request_rate"]),
    (["workload.num_requests=0"], ["workload.num_requests must be an integer of at least 1, got 0"]),
    (["workload.num_requests=null"], ["workload.num_requests=null takes all rows"]),
    (["workload.batch_size=3"], ["unknown key 'workload.batch_size'"]),
    (
        ["workload.output_len.hihg=9"],
        ["unknown key 'workload.output_len.hihg'", "'workload.output_len.high'"],
    ),
    (["workload.output_len.high=many"], ["workload.output_len.high must be an integer, got 'many'"]),
    (["workload.output_len.low=900"], ["workload.output_len: low 900 exceeds high 128"]),
    (["workload.output_len.kind=gauss"], ["workload.output_len.kind: unknown value 'gauss'", "lognormal"]),
    (["workload.output_len.kind=normal"], ["workload.output_len: kind=normal needs mean"]),
    (["workload.output_len.mean=5"], ["workload.output_len: kind=uniform has no mean"]),
    (["workload.output_len=0"], ["workload.output_len must be an integer of at least 1 or a distribution"]),
    (["workload.output_len=[8,256]"], ["workload.output_len", "section", "low", "high"]),
    (["workload.output_len=8", "workload.output_len.low=9"], ["workload.output_len"]),
    (["workload.compare=[statik]"], ["workload.compare[0]: unknown value 'statik'; did you mean 'static'?"]),
    (["workload.compare=static"], ["workload.compare must be a list: workload.compare=[static]"]),
    (["workload.trace_file=nope.jsonl"], ["there is no file 'nope.jsonl'"]),
    (["workload.trace_speedup=2"], ["workload.trace_speedup needs workload.trace_file"]),
    (["workload=trace"], ["add workload.trace_file=FILE"]),
    (["workload.slo.ttft_ms=0"], ["workload.slo.ttft_ms must be a positive number"]),
    (["workload=latency"], ["workload=latency is a preset of latency: "]),
    (["engine.batching=statik"], ["engine.batching", "did you mean 'static'?"]),
    (["experiment=rate_sweep", "workload.request_rate=4,-1"], ["workload.request_rate", "-1"]),
]


@pytest.mark.parametrize(
    ("argv", "expected"), THROUGHPUT_MISTAKES, ids=[" ".join(argv) for argv, _ in THROUGHPUT_MISTAKES]
)
def test_mistake_in_traffic_is_one_line_and_leaves_nothing(
    argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, recorder = launch_throughput(*argv)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for text in expected:
        assert text in err
    assert (out, recorder.configs, list(tmp_path.iterdir())) == ("", [], [])


def test_bad_trace_line_is_found_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = trace_file({"time": 0.0}, {"time": "soon"})
    code, recorder = launch_throughput("workload=trace", f"workload.trace_file={path}")
    err = capsys.readouterr().err
    assert code == 2 and "trace.jsonl:2: `time` must be a number of seconds" in err and err.count("\n") == 1
    assert recorder.configs == [] and [item.name for item in tmp_path.iterdir()] == ["trace.jsonl"]
    code, _ = launch_throughput(f"workload.trace_file={trace_file()}", "workload.request_rate=3")
    assert code == 2 and "exclude each other" in capsys.readouterr().err


def test_broken_yaml_and_unreadable_values_name_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (presets := tmp_path / "mine" / "experiment").mkdir(parents=True)
    (presets / "broken.yaml").write_text("workload: [1,\n")
    (presets / "typo.yaml").write_text("# @package _global_\nworkload:\n  batchsize: 3\n")
    for name, expected in (("broken", "broken.yaml"), ("typo", "experiment/typo")):
        code, _ = launch_latency("--config-dir", "mine", f"experiment={name}")
        err = capsys.readouterr().err
        assert code == 2 and err.count("\n") == 1 and expected in err, err


def test_unwritable_output_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for argv in (["hydra.run.dir=file/run"], ["-m", "seed=1", "hydra.sweep.dir=file/sweep"]):
        code, recorder = launch_latency(*argv)
        err = capsys.readouterr().err
        assert code == 2 and err.startswith("error: cannot write ") and err.count("\n") == 1, err
        assert "file/" in err and "Not a directory" in err
        assert recorder.configs == []


# --- jobs ---------------------------------------------------------------------------------------------------


def test_run_gets_dataclasses_and_its_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, recorder = launch_latency("workload.batch_size=[2,4]", "tracker.tags=[a,b]", "seed=3")
    out, err = capsys.readouterr()
    assert (code, json.loads(out), err) == (0, {"seed": 3}, "")
    (config,), (folder,) = recorder.configs, recorder.folders
    assert type(config) is LatencyConfig and type(config.engine) is EngineConfig
    assert config.workload.batch_size == [2, 4] and config.tracker.tags == ("a", "b")
    assert re.fullmatch(r"outputs/latency/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(folder.relative_to(tmp_path)))
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize(("flags", "key"), [((), "hydra.run.dir"), (("-m",), "hydra.sweep.dir")])
def test_a_folder_named_after_the_time_is_new(flags: tuple[str, ...], key: str, tmp_path: Path) -> None:
    for number in ("", "_2", "_3"):
        code, recorder = launch_latency(*flags, f"{key}=mine/${{now:%Y}}")
        place = recorder.folders[0].relative_to(tmp_path / "mine")
        assert code == 0 and re.fullmatch(rf"\d{{4}}{number}", place.parts[0])


def test_a_used_folder_is_refused_or_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    here = ("hydra.run.dir=here", "seed=1")
    assert launch_latency(*here)[0] == 0
    (tmp_path / "here" / "itl.png").touch()
    capsys.readouterr()
    code, recorder = launch_latency(*here)
    assert (code, recorder.configs) == (2, [])
    assert capsys.readouterr().err == (
        "error: 'here' holds a run already (.hydra, itl.png): choose another folder, or say overwrite=true\n"
    )
    for seed, raises in ((2, {2: CheckpointError("no such model")}), (3, {})):
        code, recorder = launch_latency(*here, f"seed={seed}", "overwrite=true", raises=raises)
        assert len(recorder.configs) == 1 and recorder.configs[0].overwrite
        # Neither has written a result, so the first run's stays.
        assert "seed=1" in (tmp_path / "here" / ".hydra" / "overrides.yaml").read_text()
        assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [".hydra", "itl.png"]


def test_a_run_that_is_refused_late_leaves_nothing(tmp_path: Path) -> None:
    assert launch_latency(raises={0: CheckpointError("no such model")})[0] == 2
    assert list(tmp_path.iterdir()) == []
    assert launch_latency(raises={0: KeyError("a defect")})[0] == 1
    assert len(list(tmp_path.glob("outputs/latency/*/.hydra"))) == 1


def test_values_may_ask_for_the_jobs_folder(tmp_path: Path) -> None:
    code, recorder = launch_latency("tracker.dir=${hydra:runtime.output_dir}/wandb", "hydra.run.dir=here")
    assert code == 0
    assert recorder.configs[0].tracker.dir == str(tmp_path / "here" / "wandb")


def test_users_error_in_a_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = launch_latency(raises={0: CheckpointError("missing keys:\n  a\n  b")})
    assert (code, capsys.readouterr().err) == (2, "error: missing keys: a b\n")


def test_defect_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (KeyError("ours"), ValueError("ours"), OSError(2, "ours", "file")):
        code, _ = launch_latency(raises={0: error})
        err = capsys.readouterr().err
        assert code == 1
        assert err.startswith("Traceback") and "ours" in err and "in main" in err


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = launch_latency(raises={0: KeyboardInterrupt()})
    assert (code, capsys.readouterr().err) == (130, "interrupted\n")


def test_sweep_runs_each_value_in_its_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, recorder = launch_latency("-m", "seed=1,2")
    out, _ = capsys.readouterr()
    assert code == 0
    *jobs, where, last = out.splitlines()
    assert [json.loads(line)["seed"] for line in jobs] == [1, 2]
    assert Path(where.removeprefix("results: "), "sweep.json").is_file()
    assert json.loads(last) == {"experiment": "latency", "jobs": 2, "finished": 2, "failed": 0}
    places = [folder.relative_to(tmp_path).parts for folder in recorder.folders]
    assert [(parts[:2], parts[3]) for parts in places] == [(("multirun", "latency"), n) for n in "01"]


def test_sweep_goes_on_after_a_failing_job(capsys: pytest.CaptureFixture[str]) -> None:
    code, recorder = launch_latency("-m", "seed=1,2,3", raises={2: CheckpointError("bad")})
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line.lower()]
    assert code == 2
    assert errors == ["error: job 1 (seed=2): bad"]
    assert [config.seed for config in recorder.configs] == [1, 2, 3]


def test_defect_outranks_a_users_error_in_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    for raises in ({1: KeyError("x"), 2: ConfigError("y")}, {1: ConfigError("y"), 2: KeyError("x")}):
        code, _ = launch_latency("-m", "seed=1,2", raises=raises)
        assert code == 1
    assert "error: job" in capsys.readouterr().err


def test_shown_not_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for argv, expected in (
        (
            ["--help"],
            "experiment: ab, deterministic, kv_eviction, latency_matrix, latency_matrix_a100, lora, ",
        ),
        (["--help"], "peers_medium_dummy, quick, rollouts, speculation, tiers\nhardware: "),
        (["--cfg", "job"], "path: tiny"),
        (["--cfg", "job", "-p", "workload", "--resolve"], "seed: 0"),
        (["--info", "defaults"], "workload/latency"),
    ):
        code, recorder = launch_latency(*argv)
        out, err = capsys.readouterr()
        assert code == 0 and expected in out, (argv, out, err)
        assert recorder.configs == []
    assert list(tmp_path.iterdir()) == []


def test_from_the_command_line(tmp_path: Path) -> None:
    """As a program from another folder: the schema of `__main__`, exit codes, completion's query."""
    script = tmp_path / "scratch.py"
    script.write_text(
        "from experiments.launch.app import run_experiment\n"
        "from experiments.launch.schema import LatencyConfig\n"
        "def main(config: LatencyConfig) -> None:\n"
        "    print(config.seed)\n"
        "if __name__ == '__main__':\n"
        "    run_experiment(main, 'latency')\n"
    )

    def call(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", str(script), *argv],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        )  # fmt: skip

    done = call("seed=5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
    done = call("sed=5")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("error: unknown key 'sed'; did you mean 'seed'?")
        and done.stderr.count("\n") == 1
    )
    done = call("-sc", "query=bash", COMP_LINE="python -m experiments.latency model=mix")
    assert done.stdout.split() == ["model=mixtral_8x7b"]


# --- parts --------------------------------------------------------------------------------------------------


def test_query_line_strips_the_program() -> None:
    assert query_line("python -m experiments.latency model=t") == "app model=t"
    assert query_line(".venv/bin/python -X dev -m experiments.latency a=1 ") == "app a=1 "
    assert query_line("") == "app "


@dataclass(frozen=True)
class Inner(Checked, section="inner"):
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Outer(Checked):
    name: str
    either: int | list[int] = 1
    limit: float | None = None
    level: Literal[1, 2] = 1
    inner: Inner = field(default_factory=lambda: Inner(kind="b"))
    free: dict[str, Any] | None = None


def test_mirror_and_build_are_inverse() -> None:
    config = OmegaConf.structured(mirror(Outer))
    config.merge_with(
        OmegaConf.create({"name": "x", "either": [1, 2], "inner": {"sizes": [3]}, "free": {"k": 1}})
    )
    built = build(Outer, config)
    assert built == Outer("x", either=[1, 2], inner=Inner("b", (3,)), free={"k": 1})
    config.inner.kind = "c"
    with pytest.raises(ConfigError, match=r"inner.kind: unknown value 'c'.*known: a, b"):
        build(Outer, config)


def test_mirror_is_pickled_by_name() -> None:
    """Sweeps in other processes depend on it: a class pickled by value is another class there."""
    assert pickle.loads(pickle.dumps(mirror(EngineConfig))) is mirror(EngineConfig)
