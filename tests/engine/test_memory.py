"""What an engine is said to hold, against what it allocates; and what is said where that is too much."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest

from experiments.launch.app import launch
from experiments.throughput import main
from moejax import LLM, EngineConfig, QuantConfig
from moejax.core import host
from moejax.core.config import LatentConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.engine import llm as llm_module
from moejax.engine.opening import memory
from moejax.engine.opening.memory import EngineMemory
from moejax.engine.opening.resolve import resolve
from moejax.engine.opening.weights import Weights, load
from moejax.engine.pipeline.runner import PipelineRunner
from tests.model_shapes import LATENT, LINEAR, SINKS, TWO_LAYERS

WIDE = TWO_LAYERS.replace(
    vocab_size=512, hidden_size=128, head_dim=32, moe_intermediate_size=64, max_position_embeddings=256
)
LATENTS = LatentConfig(kv_rank=64, rope_dim=16, nope_dim=32, value_dim=32, q_rank=48)
INT8 = QuantConfig(method="rtn", format="int8")
MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "gqa": (WIDE, {}),
    "latent": (WIDE.replace(**LATENT | {"head_dim": 48, "latent": LATENTS}), {}),
    "window and sinks": (WIDE.replace(**SINKS, sliding_windows=(32, None)), {}),
    "states": (WIDE.replace(**LINEAR), {}),
    "int8": (WIDE, {"quant": INT8}),
    "int4, int8 cache": (WIDE, {"quant": QuantConfig(method="rtn", format="int4_g64", kv_cache="int8")}),
    "ep2 tp2": (WIDE.replace(num_heads=8), {"parallel": ParallelConfig(ep=2, tp=2)}),
    "data ep2": (WIDE, {"parallel": ParallelConfig(ep=2, attention="data")}),
    "pp2": (WIDE, {"parallel": ParallelConfig(pp=2)}),
}
ENGINE = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=128, block_size=16, num_blocks=128, compile_cache=False
)


def of_a_device(arrays: Any) -> float:
    """Floating point and codes on the first device; where experts are is told in int32."""
    leaves = [x for x in jax.tree.leaves(arrays) if x.dtype != "int32"]
    return float(sum(x.addressable_shards[0].data.nbytes for x in leaves))


def planned_weights(model: ModelConfig) -> Weights:
    return load(resolve(model, engine=ENGINE, load_format="dummy"), fill=False)


def planned(model: ModelConfig, engine: EngineConfig = ENGINE, **options: Any) -> EngineMemory:
    resolved = resolve(model, engine=engine, load_format="dummy", **options)
    return EngineMemory.of(resolved, load(resolved, fill=False))


@pytest.mark.multidevice
@pytest.mark.parametrize("name", MODELS)
def test_weights_and_cache_are_what_is_allocated(name: str) -> None:
    model, options = MODELS[name]
    with LLM(model, load_format="dummy", engine=ENGINE, **options) as llm:
        held, runner = llm.memory.held, llm.runner
        parts = runner.stages if isinstance(runner, PipelineRunner) else [runner]
        sizes = []
        for part in parts:
            pages = [pool.take(len(pool.layout.sizes)) for pool in part.pools]
            sizes.append((of_a_device(part.functions.leaves), of_a_device((pages, part.pool.take_states()))))
        assert (held.weights, held.cache) == max(sizes, key=sum)


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "name", [name if name == "states" else pytest.param(name, marks=pytest.mark.slow)
             for name in MODELS]
)  # fmt: skip
def test_the_formula_is_within_a_tenth_of_the_compiled_program(name: str) -> None:
    model, options = MODELS[name]
    llm = LLM(model, load_format="dummy", engine=ENGINE, fill=False, **options)
    compiled = llm.check_memory(None, compiles=True)
    assert compiled.compiled and not llm.memory.compiled
    assert llm.memory.total == pytest.approx(compiled.total, rel=0.1)


def test_every_part_counts() -> None:
    whole = planned(WIDE).certificate()
    coded = planned(WIDE, quant=QuantConfig(kv_cache="int8")).certificate()
    assert coded.held.cache / whole.held.cache == pytest.approx((32 + 4) / (4 * 32))
    windows = planned(MODELS["window and sinks"][0]).certificate().held
    assert 0 < windows.window_cache < windows.cache
    states = planned(MODELS["states"][0]).certificate().held
    assert states.states == (ENGINE.max_num_seqs + 1) * WIDE.num_heads * WIDE.head_dim**2 * 4
    held = whole.held
    assert held.embedding_weights == 2 * 4 * WIDE.vocab_size * WIDE.hidden_size
    assert 0 < held.attention_weights < held.other_weights - held.embedding_weights
    stored = dataclasses.replace(ENGINE, preemption="swap", swap_memory_gb=0.5)
    assert planned(WIDE, stored).certificate().beside == pytest.approx(whole.beside + 5e8)


@pytest.mark.multidevice
def test_what_is_replicated_counts_on_every_device() -> None:
    one, two = (planned(WIDE, parallel=ParallelConfig(tp=n)).certificate().held for n in (1, 2))
    assert two.expert_weights == one.expert_weights / 2
    kept = 2 * 4 * (WIDE.num_layers * (WIDE.num_experts + 2) + 1) * WIDE.hidden_size  # routers and norms
    assert two.weights > one.weights / 2 and two.weights - one.weights / 2 <= kept


def available(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    for module in (llm_module, memory):
        monkeypatch.setattr(module, "device_limit", lambda *_, **__: size)


def test_what_cannot_fit_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 4.6e6)
    loads: list[bool] = []

    def noted(resolved: Any, on_progress: Any = None, *, fill: bool = True, **rest: Any) -> Weights:
        loads.append(fill)
        return load(resolved, on_progress, fill=fill, **rest)

    monkeypatch.setattr(llm_module, "load", noted)
    with pytest.raises(ConfigError) as refused:
        LLM(WIDE, load_format="dummy", engine=ENGINE)
    assert loads == [False]
    line, _, ways = str(refused.value).partition("; what makes it fit: ")
    assert line.startswith("memory of a device: 5.7 MB of 4.6 MB: weights 2.5 MB (experts 1.6 MB, attention ")
    assert "cache 2.1 MB, largest step 1.1 MB (formula), beside them 18.4 kB do not fit" in line
    # Every remedy is one, and no larger number is.
    chosen = dict(way.split("=") for way in ways.split(", or "))
    assert list(chosen) == ["engine.num_blocks", "quant"]
    assert chosen["quant"] == "int4_rtn_g64"
    blocks = int(chosen["engine.num_blocks"])
    fits = [
        planned(WIDE, dataclasses.replace(ENGINE, num_blocks=size)).certificate(4.6e6).certain
        for size in (blocks, blocks + 1)
    ]
    assert fits == [True, False]
    assert planned(WIDE, quant=QuantConfig(method="rtn", format="int4_g64")).certificate(4.6e6).certain
    LLM(WIDE, load_format="dummy", engine=dataclasses.replace(ENGINE, num_blocks=blocks)).close()
    LLM(WIDE, load_format="dummy", engine=dataclasses.replace(ENGINE, memory_check="off")).close()


def test_two_settings_are_named_where_one_does_not_suffice() -> None:
    with pytest.raises(ConfigError, match=r"what makes it fit: quant=int4_rtn_g64 with engine\.num_blocks="):
        planned(WIDE).check(2.9e6, planned_weights(WIDE))
    with pytest.raises(ConfigError, match="do not fit; no limit, format or layout is sure to"):
        planned(WIDE).check(1e5, planned_weights(WIDE))
    # Devices that are elsewhere do not share the host's memory.
    with pytest.raises(ConfigError, match=r"what makes it fit: .*, or parallel\.ep=2$"):
        planned(WIDE).check(4.2e6, None)


def test_the_step_is_compiled_where_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[float] = []
    compiled = EngineMemory.compiled_step

    def noted(*args: Any) -> float:
        steps.append(compiled(*args))
        return steps[-1]

    monkeypatch.setattr(EngineMemory, "compiled_step", noted)
    one = planned(WIDE).certificate()
    weights = planned_weights(WIDE)
    assert not planned(WIDE).check(2 * one.total, weights).compiled and not steps
    assert planned(WIDE).check(1.02 * one.total, weights).compiled and len(steps) == 1


def test_a_run_that_cannot_fit_ends_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    available(monkeypatch, 1e6)
    assert launch(main, "throughput", ["hydra.run.dir=out", "workload.num_requests=2"]) == 2
    err = capsys.readouterr().err
    assert "do not fit; " in err and err.count("\n") == 1
    assert not list(tmp_path.rglob("result.json"))


def test_the_hosts_memory_is_what_its_groups_leave(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    assert 0 < host.host_memory(tmp_path) <= 1.5 * free
    for controllers, names in (("", ("max", "current")), ("memory", ("limit_in_bytes", "usage_in_bytes"))):
        root = tmp_path / f"of {controllers}"
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(f"0:{controllers}:/a/b\n")
        group = root / "sys/fs/cgroup" / controllers / "a"
        (group / "b").mkdir(parents=True)
        for name, text in zip(names, ("3000\n", "2500\n"), strict=True):
            (group / f"memory.{name}").write_text(text)
        (group / "memory.stat").write_text("anon 1\ninactive_file 700\n")
        assert host.host_memory(root) == 3000 - 2500 + 700
