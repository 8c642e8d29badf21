"""Stages of layers, what moves between them, and decoders of a few layers."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import ModelConfig, ParallelConfig, load_pretrained, save_pretrained
from moejax.core.errors import CheckpointError, ConfigError
from moejax.engine.step.ledger import CompileLedger
from moejax.models.decoder import Decoder
from moejax.nn.param import initialize, iter_params, specs
from moejax.sharding.hlo import collectives
from moejax.sharding.mesh import make_mesh
from moejax.sharding.pipeline import (
    Transfer,
    TransferKey,
    layer_costs,
    split_layers,
    stage_config,
)
from moejax.sharding.spmd import MeshDevices


def deep(config: ModelConfig, layers: int, **changes: object) -> ModelConfig:
    more = {"num_layers": layers, "moe_layers": (True,) * layers, "sliding_windows": (None,) * layers}
    return config.replace(**(more | changes))


# -- layers --------------------------------------------------------------------------------------------


def stage_costs(model: ModelConfig, stages: tuple[range, ...]) -> list[float]:
    costs = layer_costs(model)
    found = [sum(costs[layer] for layer in stage) for stage in stages]
    found[0] += 64 * model.hidden_size
    found[-1] += model.hidden_size * model.vocab_size
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_other_split_has_a_cheaper_dearest_stage(tiny_config: ModelConfig, seed: int) -> None:
    draw = np.random.default_rng(seed)
    layers, pp = int(draw.integers(3, 9)), int(draw.integers(2, 4))
    sparse = tuple(draw.random(layers) < 0.6)
    model = deep(
        tiny_config,
        layers,
        moe_layers=tuple(bool(x) for x in sparse),
        vocab_size=int(draw.integers(2, 200)),
        intermediate_size=int(draw.integers(1, 200)),
    )
    found = split_layers(model, pp)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    every = [
        stage_costs(model, tuple(itertools.starmap(range, itertools.pairwise((0, *ends, layers)))))
        for ends in itertools.combinations(range(1, layers), pp - 1)
    ]
    mine = stage_costs(model, found)
    least = min(max(costs) for costs in every)
    assert max(mine) == pytest.approx(least, rel=1e-12)
    squares = min(sum(c * c for c in costs) for costs in every if max(costs) <= least * (1 + 1e-12))
    assert sum(c * c for c in mine) == pytest.approx(squares, rel=1e-12)


def test_the_output_projection_takes_layers_from_the_last_stage(tiny_config: ModelConfig) -> None:
    small, large = deep(tiny_config, 8, vocab_size=8), deep(tiny_config, 8, vocab_size=2048)
    assert [len(stage) for stage in split_layers(small, 4)] == [2, 2, 2, 2]
    first, *_, last = split_layers(large, 4)
    assert len(last) == 1 < len(first)


def test_stages_as_asked(tiny_config: ModelConfig) -> None:
    model = deep(tiny_config, 5)
    assert split_layers(model, 3, [1, 3, 1]) == (range(0, 1), range(1, 4), range(4, 5))
    for wrong in ([1, 3], [1, 3, 2], [0, 4, 1]):
        with pytest.raises(ConfigError, match=r"parallel\.stage_layers .* 5 layers"):
            split_layers(model, 3, wrong)
    with pytest.raises(ConfigError, match=r"pp=6 stages .* has 5"):
        split_layers(model, 6)


# -- moving --------------------------------------------------------------------------------------------

LAYOUTS = [
    ParallelConfig(pp=2),
    ParallelConfig(pp=2, dp=2, tp=2),
    ParallelConfig(pp=2, ep=4, attention="data"),
    ParallelConfig(pp=4, ep=2),
]


@pytest.mark.optimized
@pytest.mark.multidevice
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_transfer_is_one_collective_permute_and_equals_device_put(
    layout: ParallelConfig, dtype: str
) -> None:
    plan = make_mesh(layout, num_kv_heads=2)
    places = [MeshDevices(mesh, plan.axes) for mesh in plan.stages]
    # Also backwards, as the sampled tokens go.
    for source, target in ((places[0], places[1]), (places[-1], places[0])):
        whole = jnp.arange(places[0].groups * 15).reshape(-1, 3).astype(dtype)
        x = jax.device_put(whole, source.sharding(plan.axes.data or None))
        permute = Transfer(source, target, CompileLedger().get, "transfer")
        moved, plain = permute(x), jax.device_put(x, permute._arrived)
        assert moved.sharding == plain.sharding
        assert moved.sharding.device_set == set(target.mesh.devices.flat)
        np.testing.assert_array_equal(np.asarray(moved), np.asarray(whole))
        np.testing.assert_array_equal(np.asarray(plain), np.asarray(whole))
        key = TransferKey(x.shape, dtype)
        (found,) = collectives(permute.program(key), permute._mesh)
        assert found.kind == "collective-permute"
        assert permute.program(key) is permute.program(key)
        text = permute.program(key).as_text()
        size = source.mesh.size
        pairs = ",".join(f"{{{i},{i + size}}}" for i in range(size))
        assert f"source_target_pairs={{{pairs}}}" in text


# -- decoders of a few layers --------------------------------------------------------------------------


def stages_of(model: ModelConfig, *parts: int) -> list[Decoder]:
    stages = [Decoder(model, layers=part) for part in split_layers(model, len(parts), list(parts))]
    for stage in stages:
        initialize(stage, 7)
    return stages


@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_the_whole_models_weights_and_give_what_it_gives(
    tiny_config: ModelConfig, tied: bool
) -> None:
    # Eleven layers: a stage's paths must not be sorted as text.
    sparse = tuple(layer % 5 == 0 for layer in range(11))
    model = deep(tiny_config, 11, moe_layers=sparse, tie_word_embeddings=tied)
    whole, stages = Decoder(model, seed=7), stages_of(model, 1, 9, 1)
    of_whole = dict(iter_params(whole))
    held = [dict(iter_params(stage)) for stage in stages]
    assert set(of_whole) == set().union(*held)
    twice = set(held[0]) & set(held[2])
    assert twice == ({"embedding.table"} if tied else set())
    for mine in held:
        for name, param in mine.items():
            np.testing.assert_array_equal(np.asarray(param[...]), np.asarray(of_whole[name][...]))
    tokens = jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32)
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    x = stages[0].embed(tokens)
    traces = []
    for stage in stages:
        x, _, found = stage.run(x, positions)
        traces += found
    hidden, _, wanted = whole.run(whole.embed(tokens), positions)
    # Not compiled, so the same operations in the same order.
    np.testing.assert_array_equal(np.asarray(x), np.asarray(hidden))
    np.testing.assert_array_equal(np.asarray(stages[-1].logits(x)), np.asarray(whole.logits(hidden)))
    assert [t is None for t in traces] == [t is None for t in wanted] == [not moe for moe in sparse]
    assert stage_config(model, stages[1].stage).moe_layers == sparse[1:10]


def test_a_stage_reads_its_own_tensors(tiny_config: ModelConfig, tmp_path: Path) -> None:
    model = deep(tiny_config, 3)
    save_pretrained(Decoder(model, seed=1), tmp_path)
    whole = load_pretrained(tmp_path)
    values = dict(iter_params(whole.model))
    read = 0
    for part in split_layers(model, 2, [1, 2]):
        loaded = load_pretrained(tmp_path, build=lambda config, part=part: Decoder(config, layers=part))
        for name, param in iter_params(loaded.model):
            np.testing.assert_array_equal(np.asarray(param[...]), np.asarray(values[name][...]))
        read += loaded.stats.bytes_read
    assert read == whole.stats.bytes_read


def test_a_stage_still_names_keys_that_nobody_has(tiny_config: ModelConfig, tmp_path: Path) -> None:
    model = deep(tiny_config, 3)
    save_pretrained(Decoder(model, seed=1), tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(CheckpointError, match=r"unmapped: model\.layers\.2"):
        load_pretrained(tmp_path, build=lambda config: Decoder(config, layers=range(0, 1)))


def test_specs_of_stages_are_the_whole_models(tiny_config: ModelConfig) -> None:
    model = deep(tiny_config, 4, tie_word_embeddings=True)
    whole = specs(Decoder(model))
    for part in split_layers(model, 2):
        mine = specs(Decoder(model, layers=part))
        assert mine.items() <= whole.items()
