"""Every configuration field is read, refused, or listed as ignored where nothing reads it."""

import dataclasses
import re
import shlex
import sys
import typing
from pathlib import Path

import pytest

from experiments.launch import schema
from experiments.launch.command_line import translate
from experiments.launch.compose import composer, plan_run, schema_of
from experiments.launch.notebook import compose, main_of
from experiments.launch.validate import CONFIG_DIR
from moejax import LLM
from moejax.bench.ignored import _RULES, ignored_settings
from moejax.core.checked import Checked
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig, QuantRule
from tests.bench.runs import run_into
from tests.engine.tiny import small_config

PARTS = {"engine": EngineConfig, "engine.moe": MoeConfig, "parallel": ParallelConfig, "quant": QuantConfig}
ROOT = Path(schema.__file__).parents[2]
SCHEMAS = [
    value
    for name, value in vars(schema).items()
    if dataclasses.is_dataclass(value) and value.__module__ == schema.__name__
]


def dataclasses_below(hint, known):
    """Adds all dataclasses that an annotation leads to."""
    if dataclasses.is_dataclass(hint) and hint not in known:
        known.add(hint)
        for inner in typing.get_type_hints(hint).values():
            dataclasses_below(inner, known)
    for inner in typing.get_args(hint):
        dataclasses_below(inner, known)
    return known


def test_every_field_of_every_configuration_is_read_outside_its_class():
    classes = set()
    for root in (*SCHEMAS, ModelConfig):
        dataclasses_below(root, classes)
    files = [
        path.read_text() for folder in ("moejax", "experiments") for path in (ROOT / folder).rglob("*.py")
    ]
    # What checks a value does not read it.
    code = re.sub(
        r"\n    def __post_init__.*?(?=\n    def |\n    @|\n\S)", "", "\n".join(files), flags=re.DOTALL
    )
    reads = set(re.findall(r"\.(\w+)\b(?! = )", code)) | set(re.findall(r'"(\w+)"', code))
    unread = {
        f"{cls.__name__}.{f.name}" for cls in classes for f in dataclasses.fields(cls) if f.name not in reads
    }
    assert len(classes) > 40 and not unread


@pytest.mark.parametrize(
    ("experiment", "overrides", "keys"),
    [
        ("latency", "quant.damping=0.1 quant.clip=mse quant.calibration.seq_len=64",
            "quant.damping quant.clip quant.calibration"),
        ("latency", "quant=int4_gptq_g64 quant.damping=0.1 quant.awq_grid=3 quant.percentile=99",
            "quant.awq_grid quant.percentile"),
        ("latency", "quant=int8 quant.format=w8a8_static quant.calibration.seq_len=64", ""),
        ("latency", "engine.num_blocks=64 engine.kv_cache_memory_gb=1", "engine.kv_cache_memory_gb"),
        ("latency", "engine.moe.execution=dense engine.moe.block_rows=8 engine.moe.capacity_factor=2",
            "engine.moe.block_rows engine.moe.capacity_factor"),
        ("latency", "parallel.tp=2 parallel.attention=data parallel.microbatches=2",
            "parallel.attention parallel.microbatches"),
        ("latency", "parallel.ep=2 parallel.exchange_capacity=2", "parallel.exchange_capacity"),
        ("latency", "workload.top_k=3 telemetry.enabled=false telemetry.interval_s=1",
            "workload.top_k telemetry.interval_s"),
        ("latency", "workload.temperature=1 workload.top_k=3 backend.timeout_s=5", "backend.timeout_s"),
        ("throughput", "ramp.factor=3 tracker=none tracker.project=x", "ramp.factor tracker.project"),
        ("throughput", "ramp.rates=[1,2] ramp.factor=3 ramp.refine=1", "ramp.factor"),
        ("generate", "sampling.temperature=0 sampling.seed=1", "sampling.seed"),
        ("kernels", "bench.repeats=3 mode=tune tune.max_configs=2", "bench.repeats"),
        ("scaling", "scaling.measure=off scaling.steps=3", "scaling.steps"),
        ("stress", "stress.phases=[long] stress.abort_share=0.1", "stress.abort_share"),
    ],
)  # fmt: skip
def test_what_nothing_reads_is_listed(experiment, overrides, keys):
    assert set(ignored_settings(compose(overrides.split(), experiment))) == set(keys.split())


def test_the_result_lists_them(tmp_path):
    ignored = ignored_settings(compose(["quant.smoothing=0.7"], "latency"))
    resolved = run_into(tmp_path, ignored=ignored).result(metrics={})["resolved"]
    assert resolved == {"quant.smoothing": {"value": "0.7", "reason": "ignored: for smoothquant"}}


def test_a_format_without_a_method_is_refused():
    for name in ("int4_g64", "nonsense"):
        with pytest.raises(
            ConfigError, match=rf"quant\.format={name} does nothing .*awq, smoothquant, magnitude or wanda"
        ):
            QuantConfig(format=name)
    assert QuantConfig(method="rtn") == QuantConfig(method="rtn", format="int8")
    assert QuantConfig(format="int4", rules=[QuantRule("*", method="rtn")]).format == "int4"
    with pytest.raises(ConfigError, match=r"quant\.format: unknown format 'nonsense'.*known: .*int4_g64"):
        LLM(small_config(), load_format="dummy", quant=QuantConfig("rtn", "nonsense"))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engine": EngineConfig(batching="static", num_blocks=8, moe=MoeConfig(execution="dense"))},
        {"quant": QuantConfig("rtn", "int4_g16", clip="percentile", kv_cache="int8")},
    ],
)
def test_an_engine_reads_all_its_settings_but_those_listed(sections, monkeypatch):
    """Attributes are recorded while an engine opens; copying and checking a field is not reading it."""
    read = set()

    def recording(self, name):
        if sys._getframe(1).f_globals["__name__"] not in ("dataclasses", "moejax.core.checked"):
            read.add((type(self), name))
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Checked, "__getattribute__", recording, raising=False)
    LLM(small_config(), load_format="dummy", **({"engine": EngineConfig(compile_cache=False)} | sections))
    monkeypatch.undo()
    config = schema.LatencyConfig(schema.ModelSection("tiny"), **sections)
    listed = {
        f"{path}.{name}"
        for path, names, unread, _ in _RULES
        if path in PARTS and unread(config)
        for name in names.split()
    }
    missed = {
        f"{path}.{f.name}"
        for path, cls in PARTS.items()
        for f in dataclasses.fields(cls)
        if (cls, f.name) not in read
    }
    assert missed <= listed and len(read) > 30


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml")))
def test_preset_says_what_it_costs_and_its_command_composes(name: str) -> None:
    header = (CONFIG_DIR / "experiment" / f"{name}.yaml").read_text()
    assert "# Cost: " in header and "# Gives: " in header
    command = re.search(r"^# python -m experiments\.(\w+) (.*?)(?:  .*)?$", header, re.MULTILINE)
    assert command is not None and f"experiment={name}" in command[2]
    jobs: list[typing.Any] = []
    with composer(command[1], schema_of(main_of(command[1]))) as compose_run:
        overrides = translate(shlex.split(command[2].rstrip(" \\")))
        plan = plan_run(compose_run, overrides, check=lambda *job: jobs.append(job[-1]))
    assert plan.config or plan.expected
    configs = [config for config in (*jobs, plan.config) if config is not None]
    assert not [ignored for ignored in map(ignored_settings, configs) if ignored]


def test_a_simulation_refuses_what_depends_on_attention():
    """Its attention is by formula, over whole contexts."""
    with pytest.raises(ConfigError, match=r"^engine\.kv_policy\.method=h2o: a simulation's attention reads"):
        compose(["engine.kv_policy.method=h2o"], experiment="simulate")


@pytest.mark.parametrize("experiment", ["simulate", "profile", "program", "scaling"])
def test_experts_in_tiers_are_refused_by_what_wants_whole_steps(experiment: str) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.experts\.resident, .*; leave them null"):
        compose(["engine.experts.resident=0.5"], experiment=experiment)
