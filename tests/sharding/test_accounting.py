"""The formulas of communication and memory, against the engine's compiled steps on eight virtual devices."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.moe import MoeConfig
from moejax.core.parallel import PRESETS, ParallelConfig
from moejax.engine.opening.resolve import resolve
from moejax.engine.opening.start import make_runner
from moejax.engine.opening.weights import load
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.step.ledger import CompileLedger
from moejax.engine.step.limits import CacheSpec, StepKey
from moejax.engine.step.sampler import SamplerMode
from moejax.models.decoder import Decoder
from moejax.moe.exchange_cost import exchange_cost, exchange_hops
from moejax.moe.exchange_size import capacity_buckets
from moejax.moe.expert_parallel import choose_exchange
from moejax.nn.param import specs
from moejax.perf.comm import Exchange, step_comm
from moejax.perf.memory import device_memory
from moejax.sharding.hlo import Collective, bytes_on_wire, collectives, compare, taken
from moejax.sharding.pipeline import Transfer, TransferKey, split_layers
from moejax.sharding.spmd import MeshDevices
from tests.examples import slow_but
from tests.model_shapes import LATENT, LINEAR
from tests.perf.models import LAYOUTS, small_model
from tests.plain.step_extras import extra_terms

pytestmark = pytest.mark.multidevice

BLOCKS, BLOCK_SIZE, LONGEST = 16, 4, 32
# "ragged_dot" compiles fastest; what runs on a device makes no difference here.
ENGINE = EngineConfig(
    max_num_seqs=8,
    block_size=BLOCK_SIZE,
    num_blocks=BLOCKS,
    max_model_len=LONGEST,
    compile_cache=False,
    moe=MoeConfig(grouped_matmul="ragged_dot"),
)
ROOT = Path(__file__).resolve().parents[2]
# The vocabulary is padded wherever it is split.
MODEL = small_model(vocab_size=99, num_layers=2, moe_layers=(True, False), sliding_windows=(None, None))

WITH_STATES = MODEL.replace(**LINEAR)

HERE = [name for name, layout in PRESETS.items() if 1 < layout.num_devices <= 8]
QUICK = ("pp2_ep4",)
OTHERS = [
    name for name, layout in LAYOUTS.items() if layout.num_devices > 1 and layout not in PRESETS.values()
]


def decode(rows: int = 8, record: bool = False) -> StepKey:
    """A greedy decode step of so many rows in each data group."""
    return StepKey(rows, 0, BLOCKS, 1, SamplerMode(), record, -1)


class Program(NamedTuple):
    """A stage's compiled step: its layers, what runs it, where, and the collectives in it."""

    layers: range
    runner: DeviceRunner
    place: MeshDevices
    found: list[Collective]


def make_stages(model: ModelConfig, parallel: ParallelConfig) -> tuple[list[DeviceRunner], list[MeshDevices]]:
    """The engine's runner of each pipeline stage, and its devices."""
    resolved = resolve(model, model.dtype, parallel, ENGINE, load_format="dummy")
    places = [place for place in resolved.places if isinstance(place, MeshDevices)]
    cache = CacheSpec(BLOCKS, BLOCK_SIZE, LONGEST, model.dtype)
    runner = make_runner(resolved, load(resolved), cache, CompileLedger())
    return [runner] if isinstance(runner, DeviceRunner) else list(runner.stages), places


def compile_step(model: ModelConfig, parallel: ParallelConfig, key: StepKey) -> list[Program]:
    layers = split_layers(model, parallel.pp, parallel.stage_layers)
    return [
        Program(own, runner, place, collectives(runner.program(key), place.mesh))
        for own, runner, place in zip(layers, *make_stages(model, parallel), strict=True)
    ]


def exchanges(program: Program, model: ModelConfig, parallel: ParallelConfig, key: StepKey) -> list[Exchange]:
    """The step's exchange, once for each size that it chooses among."""
    tokens, axes = key.rows + key.tokens, program.place.axes
    size: dict[str, int] = {"hidden": model.hidden_size, "itemsize": jnp.dtype(model.dtype).itemsize}
    top_k, local = model.num_experts_per_tok, model.num_experts // parallel.ep
    method = choose_exchange(
        parallel.exchange, tokens=tokens, **size, top_k=top_k, axes=axes, platform="cpu", num_local=local
    ).value
    cost = exchange_cost(method, model, parallel, tokens)
    if cost.choices == 1:
        return [cost]
    part, hops = -(-tokens // cost.microbatches), exchange_hops(method, model, parallel)
    return [replace(cost, capacities=capacities) for capacities in capacity_buckets(part, top_k, hops)]


def check(
    model: ModelConfig, parallel: ParallelConfig, key: StepKey, scored: tuple[int, int] = (0, 0)
) -> list[Program]:
    """Bytes by axes and kind are those of the formulas, in every stage, whatever size the exchange takes."""
    programs = compile_step(model, parallel, key)
    for program in programs:
        assert any(found.axes for found in program.found)
        for bucket, exchange in enumerate(exchanges(program, model, parallel, key)):
            size = {"tokens": key.rows + key.tokens, "rows": key.rows}
            terms = step_comm(model, parallel, **size, exchange=exchange, layers=program.layers)
            terms += extra_terms(
                model,
                parallel,
                exchange,
                program.layers,
                **size,
                logprobs=key.mode.logprobs,
                prompt_logprobs=key.prompt_logprobs,
                scored=scored,
                record=key.record,
            )
            within = [term for term in terms if term.role != "pipeline"]
            ran = taken(program.found, lambda branch, bucket=bucket: bucket)
            assert compare(within, ran, program.place.axes) == []
    return programs


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in HERE],
)
def test_bytes_of_every_preset(layout: str) -> None:
    check(MODEL, PRESETS[layout], decode())


@pytest.mark.parametrize("layout", slow_but(["tp8"], HERE))
def test_bytes_with_latent_attention(layout: str) -> None:
    check(MODEL.replace(**LATENT), PRESETS[layout], decode())


@pytest.mark.parametrize("layout", slow_but([], HERE))
def test_bytes_with_linear_attention(layout: str) -> None:
    """Of which the norm of all heads' outputs is one more sum; and steps with chunks, which fork states."""
    check(WITH_STATES, PRESETS[layout], decode()._replace(tokens=16))


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
def test_bytes_of_other_layouts(layout: str) -> None:
    check(MODEL, LAYOUTS[layout], decode())


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["allgather", "hierarchical"])
def test_bytes_of_the_cluster(exchange: str) -> None:
    """Thirty-two virtual devices take a process of their own."""
    program = (
        "from tests.sharding.test_accounting import *\n"
        "assert jax.device_count() == 32\n"
        f"layout = replace(PRESETS['cluster_4x8'], exchange={exchange!r})\n"
        "check(MODEL.replace(num_experts=32), layout, decode(33))\n"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=32", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | flags, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_bytes_between_stages() -> None:
    """The programs that move activations on, and the newest tokens back."""
    parallel, key = LAYOUTS["pp2_ep4"], decode()
    stages, places = make_stages(MODEL, parallel)
    slots = ENGINE.max_num_seqs
    arrays = [stages[1].place.struct((key.rows, MODEL.hidden_size), jnp.float32), stages[1].last]
    moved = []
    for source, target, array in ((0, 1, arrays[0]), (1, 0, arrays[1])):
        transfer = Transfer(places[source], places[target], CompileLedger().get, "transfer")
        program = transfer.program(TransferKey(array.shape, str(array.dtype)))
        (found,) = collectives(program, transfer._mesh)
        assert (found.axes, found.executions) == (("pp",), 1)
        moved.append((found.kind, found.operand_bytes, bytes_on_wire(found)))
    terms = step_comm(MODEL, parallel, tokens=key.rows, rows=key.rows, layers=[0])
    (term,) = (term for term in terms if term.role == "pipeline")
    last = 4 * (slots + 1)
    assert moved == [(term.kind, term.operand_bytes, term.total_bytes), (term.kind, last, last)]
    terms = step_comm(MODEL, parallel, tokens=key.rows, rows=key.rows, layers=[1])
    assert not any(term.role == "pipeline" for term in terms)


@pytest.mark.parametrize("layout", slow_but(["dp_attention_ep4_tp2"], ["tp8", "dp_attention_ep4_tp2"]))
def test_bytes_of_a_step_with_everything(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt chunks, log-probabilities, recorded routing, sampling that is not greedy, and scores, of whose
    logits there is room for six rows at a time."""
    monkeypatch.setattr("moejax.engine.step.functions.MAX_LOGIT_ELEMENTS", 6 * MODEL.vocab_size)
    mode = SamplerMode(greedy=False, filters=True, penalty=True, logprobs=3)
    check(MODEL, LAYOUTS[layout], StepKey(8, 16, BLOCKS, 1, mode, True, 3), scored=(3, 6))


EXCHANGES: list[tuple[str, dict[str, Any], int]] = [
    ("dp_attention_ep8", {"exchange": "allgather", "dispatch_microbatches": 2}, 1),
    ("dp_attention_ep8", {"exchange": "all_to_all"}, 2),
    ("dp_attention_ep8", {"exchange": "all_to_all", "exchange_capacity": 1.5}, 1),
    ("dp_attention_ep4_tp2", {"exchange": "all_to_all", "dispatch_microbatches": 2}, 2),
    ("two_nodes", {"exchange": "all_to_all"}, 2),
    ("two_nodes", {"exchange": "hierarchical"}, 2),
    ("two_nodes", {"exchange": "hierarchical", "dispatch_microbatches": 2}, 2),
    ("two_nodes", {"exchange": "hierarchical", "exchange_capacity": 1.0}, 1),
    ("four_nodes", {"exchange": "hierarchical"}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "changes", "choices"), EXCHANGES)
def test_bytes_of_every_exchange(layout: str, changes: dict[str, Any], choices: int) -> None:
    """With the fewest tokens for which there is more than one size to choose from."""
    parallel, key = replace(LAYOUTS[layout], **changes), decode(rows=33, record=True)
    (program,) = check(MODEL, parallel, key)
    found = exchanges(program, MODEL, parallel, key)
    assert (found[0].method, len(found) >= choices) == (parallel.exchange, True)
    assert (choices > 1) == any(collective.branches for collective in program.found)


MODELS = {
    "norm over the projection": MODEL.replace(family="olmoe", qk_norm="projection"),
    "tied, one key head": MODEL.replace(num_kv_heads=1, tie_word_embeddings=True),
    "float16": MODEL.replace(dtype="float16"),
    "a vocabulary that divides": MODEL.replace(vocab_size=96),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep4_tp2", "dp_attention_ep4_tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_other_models(name: str, layout: str) -> None:
    """float16 stands for bfloat16, which XLA:CPU moves as float32."""
    check(MODELS[name], LAYOUTS[layout], decode())


@pytest.mark.parametrize(
    "layout",
    slow_but(["ep4_tp2", "dp_attention_ep8", "pp2_ep4"], [name for name in LAYOUTS if name != "single"]),
)
@pytest.mark.parametrize(
    "model", [MODEL, pytest.param(WITH_STATES, marks=pytest.mark.slow)], ids=["pages", "states"]
)
def test_memory_is_what_lies_on_each_device(model: ModelConfig, layout: str) -> None:
    """Weights and cache of an engine; the tables of replicas are not tensors of the model."""
    parallel = LAYOUTS[layout]
    layers = split_layers(model, parallel.pp, parallel.stage_layers)
    how: Any = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "stages": layers}
    how["sequences"] = ENGINE.max_num_seqs + 1
    stages, places = make_stages(model, parallel)
    expected = device_memory(model, parallel, specs(Decoder(model)), **how)
    for runner, place, found in zip(stages, places, expected, strict=True):
        held = {device: 0 for device in place.mesh.devices.flat}
        pages = runner.pool.take(len(runner.buckets.segments.sizes))
        for array in jax.tree.leaves((runner.functions.leaves, pages, runner.pool.take_states())):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes if jnp.issubdtype(array.dtype, jnp.floating) else 0
        assert set(held.values()) == {found.total}
