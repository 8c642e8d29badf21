"""Loading onto a mesh: the same values as on one device, and no byte that is not needed."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoint.directory import weight_files
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.checkpoint.load import expert_slots, read_blocks
from moejax.checkpoint.maps import TABLES
from moejax.checkpoint.plan import Faults, plan_load
from moejax.checkpoint.tensors import TensorFiles
from moejax.core.errors import CheckpointError, ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import initialize, iter_params, specs
from moejax.sharding.mesh import make_mesh
from moejax.sharding.rules import shardings
from tests.checkpoint.meshes import (
    FAMILIES,
    PRESETS,
    assert_placed,
    placement,
    replicated,
    slots_by_path,
    values_of,
)
from tests.checkpoint.test_load_save import fuse_experts
from tests.decoding import random_model
from tests.model_shapes import TWO_LAYERS

pytestmark = pytest.mark.multidevice

SINGLE = "model.safetensors"
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family's checkpoint; `fused` is Qwen3-MoE's with stacked experts, `shards` in many files."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family, config in FAMILIES.items():
        save_pretrained(random_model(config), root / family)
    save_pretrained(random_model(FAMILIES["qwen3_moe"]), root / "fused")
    tensors = load_file(root / "fused" / SINGLE)
    fuse_experts(tensors, "mlp", (GATE, UP, DOWN), (0, 1), 8)
    save_file(tensors, root / "fused" / SINGLE)
    save_pretrained(random_model(FAMILIES["qwen3_moe"]), root / "shards", max_shard_bytes=9000)
    return {path.name: path for path in root.iterdir()}


def stored_bytes(directory: Path) -> int:
    return sum(tensor.nbytes for file in weight_files(directory) for tensor in load_file(file).values())


@pytest.mark.each_value
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", [*FAMILIES, "fused", "shards"])
def test_same_values_as_on_one_device_and_every_slice_read_once(directories, monkeypatch, family, preset):
    directory = directories[family]
    expected = values_of(load_pretrained(directory).model)
    config = FAMILIES.get(family, FAMILIES["qwen3_moe"])
    place, reads = placement(PRESETS[preset], config), []
    read = TensorFiles.read

    def watched(self, key, index):
        reads.append((key, str(index)))
        return read(self, key, index)

    monkeypatch.setattr(TensorFiles, "read", watched)
    loaded = load_pretrained(directory, shardings=place)
    model, found = loaded
    assert found == model.config == config
    assert_placed(model, place(specs(model)), expected)
    assert len(reads) == len(set(reads))
    # All devices together hold everything, and what several hold is still read once.
    assert loaded.stats.bytes_read == stored_bytes(directory)
    assert loaded.stats.tensors == len({key for key, _ in reads})
    assert loaded.stats.seconds > 0


def read_half(
    directory: Path, model: Decoder, parallel: ParallelConfig, devices
) -> tuple[TensorFiles, Faults]:
    """Reads what some devices hold, as their process would."""
    config, faults = model.config, Faults()
    placed = placement(parallel, config)(specs(model))
    with TensorFiles(weight_files(directory)) as files:
        plan = plan_load(
            files.shapes,
            specs(model),
            TABLES[config.family],
            num_experts=config.num_experts,
            tied=False,
            source="here",
        )
        for name, spec in specs(model).items():
            slots = expert_slots(name, spec, None, config.num_experts)
            layout = placed[name].devices_indices_map
            theirs = SimpleNamespace(addressable_devices=set(devices), devices_indices_map=layout)
            blocks = read_blocks(files, plan[name], spec, theirs, faults, slots=slots)
            held = [device for block in blocks for device in block.devices]
            assert sorted(device.id for device in held) == sorted(device.id for device in devices)
    return files, faults


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["edf", "efd"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", [*FAMILIES, "fused"])
def test_half_of_the_devices_read_their_half(directories, family, preset, layout):
    """Of a parameter that is split anywhere, four neighbours of eight devices hold half; else all of it."""
    config = FAMILIES.get(family, FAMILIES["qwen3_moe"])
    model = Decoder(config, moe=MoeConfig(expert_layout=layout))
    placed = placement(PRESETS[preset], config)(specs(model))
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        files, faults = read_half(directories[family], model, PRESETS[preset], devices)
        assert not faults.by_kind
        expected = 0
        for name, spec in specs(model).items():
            size = 4 * int(np.prod(spec.shape))
            whole = placed[name].is_fully_replicated
            expected += size if whole else size // 2
            assert not (whole and ".experts." in name and not name.endswith("down_bias"))
        assert files.bytes_read == expected


def test_one_device_reads_its_experts_only(directories):
    config = FAMILIES["olmoe"]
    model, device = Decoder(config), jax.devices()[3]
    files, _ = read_half(directories["olmoe"], model, PRESETS["dp_attention_ep8"], [device])
    experts = {key for key in files.keys_read if ".experts." in key}
    assert {int(key.split(".")[5]) for key in experts} == {6, 7}
    assert len(experts) == 2 * 2 * 3
    expert_bytes = sum(4 * int(np.prod(s.shape)) for n, s in specs(model).items() if ".experts." in n)
    assert files.bytes_read == stored_bytes(directories["olmoe"]) - expert_bytes * 7 // 8


@pytest.mark.parametrize("layout", ["edf", "efd"])
@pytest.mark.parametrize("family", ["qwen3_moe", "fused", "mixtral"])
def test_either_layout_of_experts(directories, family, layout):
    moe = MoeConfig(expert_layout=layout)
    expected = values_of(load_pretrained(directories[family], moe=moe).model)
    place = placement(PRESETS["ep4_tp2"], FAMILIES.get(family, FAMILIES["qwen3_moe"]))
    model, _ = load_pretrained(directories[family], moe=moe, shardings=place)
    assert_placed(model, place(specs(model)), expected)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_every_stored_and_wanted_dtype(tmp_path, stored, wanted):
    config = FAMILIES["qwen3_moe"]
    save_pretrained(random_model(config), tmp_path, dtype=stored)
    expected = values_of(load_pretrained(tmp_path, dtype=wanted).model)
    place = placement(PRESETS["ep4_tp2"], config)
    loaded = load_pretrained(tmp_path, dtype=wanted, shardings=place)
    assert_placed(loaded.model, place(specs(loaded.model)), expected)
    assert loaded.stats.bytes_read == stored_bytes(tmp_path)


def test_tied_embeddings(tmp_path):
    config = FAMILIES["mixtral"].replace(tie_word_embeddings=True)
    save_pretrained(random_model(config), tmp_path)
    size = stored_bytes(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file(tensors | {"lm_head.weight": np.full((96, 32), np.nan, np.float32)}, tmp_path / SINGLE)
    place = placement(PRESETS["tp8"], config)
    loaded = load_pretrained(tmp_path, shardings=place)
    assert loaded.model.lm_head is None and loaded.stats.bytes_read == size
    assert_placed(loaded.model, place(specs(loaded.model)), values_of(random_model(config)))


def test_pipeline_stages_on_meshes_of_their_own(directories):
    """Each stage's devices read its layers only; random weights and saving do not mind either."""
    config = FAMILIES["qwen3_moe"]
    plan = make_mesh(ParallelConfig(pp=2, ep=4), config.num_kv_heads)

    def place(declared):
        stages = [shardings(declared, mesh, plan.axes) for mesh in plan.stages]
        late = ("layers.1.", "norm.", "lm_head.")
        return {name: stages[name.startswith(late)][name] for name in declared}

    loaded = load_pretrained(directories["qwen3_moe"], shardings=place)
    placed = place(specs(loaded.model))
    assert_placed(loaded.model, placed, values_of(load_pretrained(directories["qwen3_moe"]).model))
    assert loaded.stats.bytes_read == stored_bytes(directories["qwen3_moe"])
    fresh, plain = Decoder(config), Decoder(config, seed=4)
    initialize(fresh, 4, placed)
    assert_placed(fresh, placed, values_of(plain))


def test_one_device_counts_too(directories):
    loaded = load_pretrained(directories["mixtral"])
    assert loaded.stats.bytes_read == stored_bytes(directories["mixtral"])
    assert loaded.stats.tensors == len(load_file(directories["mixtral"] / SINGLE))
    assert loaded.model.embedding.table[...].sharding.device_set == {jax.devices()[0]}
    assert not loaded.model.embedding.table[...].committed


def test_equal_shards_on_cpu_share_one_host_buffer(directories):
    """Virtual devices do not multiply what they all hold."""
    place = placement(PRESETS["dp_attention_ep8"], FAMILIES["olmoe"])
    model, _ = load_pretrained(directories["olmoe"], shardings=place)
    shards = model.embedding.table[...].addressable_shards
    assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == 1 and len(shards) == 8


# --- replicas of experts --------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["ep8", "ep4_tp2", "dp_attention_ep8", "tp8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "fused"])
def test_slots_hold_the_experts_that_they_are_told_to(directories, family, preset):
    directory, config, parallel = directories[family], FAMILIES["qwen3_moe"], PRESETS[preset]
    build, place = replicated(parallel), placement(parallel, config)
    slots = slots_by_path(build(config))
    expected = values_of(load_pretrained(directory).model)
    expected |= {name: expected[name][list(experts)] for name, experts in slots.items()}
    loaded = load_pretrained(directory, build=build, shardings=place, expert_of=slots)
    assert_placed(loaded.model, place(specs(loaded.model)), expected)
    # A replica costs no reading where its expert is in the same process.
    assert loaded.stats.bytes_read == stored_bytes(directory)
    unsharded = load_pretrained(directory, build=build, expert_of=slots)
    for name, value in values_of(unsharded.model).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert unsharded.stats.bytes_read == stored_bytes(directory)


@pytest.mark.parametrize(
    "slots, message",
    [
        (None, "16 slots for 16 experts, and the model has 8"),
        ((0, 1, 2, 3) * 4, "16 slots for 4 experts, and the model has 8"),
        ((0, 1, 2, 3, 4, 5, 6, 8) * 2, "every expert at least once"),
        ((0, 1, 2, 3, 4, 5, 6, 7), "an expert for each of 16 slots"),
        ((-1, 1, 2, 3, 4, 5, 6, 7) * 2, "every expert at least once"),
    ],
)
def test_slots_that_do_not_fit(directories, slots, message):
    build = replicated(PRESETS["ep8"])
    expert_of = None if slots is None else dict.fromkeys(slots_by_path(build(FAMILIES["qwen3_moe"])), slots)
    with pytest.raises(ConfigError, match=message) as caught:
        load_pretrained(directories["qwen3_moe"], build=build, expert_of=expert_of)
    assert "\n" not in str(caught.value)


# --- errors ---------------------------------------------------------------------------------------


def spoil(directory: Path, out: Path, edit) -> Path:
    """A copy of a checkpoint with its tensors changed."""
    out.mkdir()
    tensors = load_file(directory / SINGLE)
    edit(tensors)
    save_file(tensors, out / SINGLE)
    (out / "config.json").write_text((directory / "config.json").read_text())
    return out


EXPERT = "model.layers.1.mlp.experts.{}.{}.weight"


def test_not_finite_weights_are_named_once_by_who_reads_them(directories, tmp_path):
    def edit(tensors):
        tensors["model.embed_tokens.weight"][:] = np.nan  # every device's slice
        tensors[EXPERT.format(7, UP)][0, 0] = np.inf

    directory = spoil(directories["qwen3_moe"], tmp_path / "model", edit)
    config = FAMILIES["qwen3_moe"]
    with pytest.raises(CheckpointError, match="2 with NaN or infinite values") as caught:
        load_pretrained(directory, shardings=placement(PRESETS["ep8"], config))
    assert EXPERT.format(7, UP) in str(caught.value)
    model, kind = Decoder(config), "with NaN or infinite values"
    _, faults = read_half(directory, model, PRESETS["ep8"], jax.devices()[:4])
    assert list(faults.by_kind[kind]) == ["model.embed_tokens.weight"]
    _, faults = read_half(directory, model, PRESETS["ep8"], jax.devices()[7:])
    assert list(faults.by_kind[kind]) == ["model.embed_tokens.weight", EXPERT.format(7, UP)]


def test_too_large_for_float16_is_named(directories, tmp_path):
    def edit(tensors):
        tensors[EXPERT.format(2, DOWN)][-1, -1] = -1e6

    directory = spoil(directories["qwen3_moe"], tmp_path / "model", edit)
    place = placement(PRESETS["tp8"], FAMILIES["qwen3_moe"])
    with pytest.raises(CheckpointError, match=r"1 with values too large for float16.*experts\.2\.down_proj"):
        load_pretrained(directory, dtype="float16", shardings=place)


def test_missing_and_truncated(directories, tmp_path):
    place = placement(PRESETS["ep8"], FAMILIES["qwen3_moe"])
    directory = spoil(
        directories["qwen3_moe"], tmp_path / "model", lambda tensors: tensors.pop(EXPERT.format(5, GATE))
    )
    with pytest.raises(CheckpointError, match=r"1 missing: .*experts\.5\.gate_proj"):
        load_pretrained(directory, shardings=place)
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[:-9])
    with pytest.raises(CheckpointError, match="truncated or corrupted"):
        load_pretrained(directory, shardings=place)


def test_a_mesh_that_does_not_fit_is_named_before_anything_is_read(directories):
    with pytest.raises(ConfigError, match="'expert' of 8 does not divide"):
        load_pretrained(
            directories["qwen3_moe"],
            build=lambda config: Decoder(config),
            shardings=lambda declared: placement(ParallelConfig(ep=3), FAMILIES["mixtral"])(
                {name: spec for name, spec in declared.items() if "expert" in spec.axes}
            ),
        )


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["edf", "efd"])
@pytest.mark.parametrize("layout", ["plain", "stacked"])
@pytest.mark.parametrize("preset", ["tp8", "dp_attention_ep8"])
def test_host_memory_is_the_weights_and_one_slice(tmp_path, preset, layout, experts):
    """Beyond the arrays that stay, never more than one parameter, and the one slice of it that was read last.

    On CPU the host buffers become the arrays (equal shards share theirs), so that all together are one model.
    """
    config = TWO_LAYERS.replace(
        vocab_size=2048, hidden_size=128, num_layers=6, num_heads=8, head_dim=16, moe_intermediate_size=128,
        intermediate_size=128, moe_layers=(True,) * 6, sliding_windows=(None,) * 6, initializer_range=0.02,
    )  # fmt: skip
    model = random_model(config)
    total = sum(param[...].nbytes for _, param in iter_params(model))
    largest = max(param[...].nbytes for _, param in iter_params(model))
    save_pretrained(model, tmp_path)
    del model
    if layout == "stacked":
        tensors = load_file(tmp_path / SINGLE)
        fuse_experts(tensors, "mlp", (GATE, UP, DOWN), range(6), 8)
        save_file(tensors, tmp_path / SINGLE)
        del tensors
    place = placement(PRESETS[preset], config)
    tracemalloc.start()
    try:
        loaded = load_pretrained(tmp_path, moe=MoeConfig(expert_layout=experts), shardings=place)
        alive, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A megabyte for the modules themselves and the plan.
    assert alive < 1.01 * total + 1_000_000, (alive, total)
    assert peak - alive < 2 * largest + 1_000_000 < total / 3, (peak, alive, total, largest)
    del loaded
