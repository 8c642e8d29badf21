"""Models on a mesh, saved as Hugging Face directories or by shards, and restored onto other meshes."""

import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint import orbax
from moejax.checkpoint.hf import load_config, load_pretrained, save_pretrained
from moejax.checkpoint.sharded import WEIGHTS, restore_sharded, save_sharded
from moejax.core.config import ModelConfig, MoeConfig
from moejax.core.errors import CheckpointError, ConfigError, MoejaxError, OutputError
from moejax.models.decoder import Decoder
from moejax.moe.replicas import held_experts
from moejax.nn.param import iter_params, specs
from tests.checkpoint.meshes import (
    FAMILIES,
    PRESETS,
    REPLICAS,
    assert_placed,
    placement,
    replicated,
    slots_by_path,
    spread,
    values_of,
)
from tests.decoding import random_model

pytestmark = pytest.mark.multidevice

SINGLE = "model.safetensors"
ROOT = Path(__file__).resolve().parents[2]
CONFIG = FAMILIES["qwen3_moe"]


def on_mesh(preset: str | None, config: ModelConfig = CONFIG, **options) -> Decoder:
    """A random model, spread."""
    model = random_model(config, **options)
    if preset is not None:
        spread(model, placement(PRESETS[preset], config)(specs(model)))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on tp8, saved by shards."""
    directory = tmp_path_factory.mktemp("sharded")
    save_sharded(on_mesh("tp8"), directory)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """`saved`, to be spoilt."""
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def failure(directory: Path, model: Decoder, error=CheckpointError, **options) -> str:
    with pytest.raises(MoejaxError) as caught:
        restore_sharded(directory, model, **options)
    assert type(caught.value) is error, caught.value
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    return str(caught.value)


# --- as Hugging Face directories ------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layout", ["edf", "efd"])
def test_a_spread_model_saves_as_one_that_is_not(tmp_path, preset, layout):
    save_pretrained(on_mesh(None), tmp_path / "one")
    save_pretrained(on_mesh(preset, moe=MoeConfig(expert_layout=layout)), tmp_path / "mesh")
    expected, found = load_file(tmp_path / "one" / SINGLE), load_file(tmp_path / "mesh" / SINGLE)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert load_config(tmp_path / "mesh") == CONFIG


def test_each_expert_is_saved_once_whatever_its_slots(tmp_path):
    save_pretrained(on_mesh(None), tmp_path / "one")
    build, place = replicated(PRESETS["ep8"]), placement(PRESETS["ep8"], CONFIG)
    slots = slots_by_path(build(CONFIG))
    model, _ = load_pretrained(tmp_path / "one", build=build, shardings=place, expert_of=slots)
    save_pretrained(model, tmp_path / "again", expert_of=slots)
    expected, found = load_file(tmp_path / "one" / SINGLE), load_file(tmp_path / "again" / SINGLE)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    with pytest.raises(ConfigError, match="16 slots for 1 experts, and the model has 8"):
        save_pretrained(model, tmp_path / "wrong", expert_of=dict.fromkeys(slots, (0,) * 16))
    assert not list(tmp_path.glob("wrong/*"))


def test_replica_tables_say_which_expert_is_where(tmp_path):
    """A fresh model with replicas, saved without `expert_of`: by its own tables."""
    save_pretrained(on_mesh(None), tmp_path / "one")
    build, place = replicated(PRESETS["ep8"]), placement(PRESETS["ep8"], CONFIG)
    slots = held_experts(build(CONFIG))
    assert slots is not None
    model, _ = load_pretrained(tmp_path / "one", build=build, shardings=place, expert_of=slots)
    save_pretrained(model, tmp_path / "again")
    expected, found = load_file(tmp_path / "one" / SINGLE), load_file(tmp_path / "again" / SINGLE)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    model = on_mesh("ep8")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_saving_leaves_no_copy_on_the_host(tmp_path):
    """JAX keeps what `np.asarray` made of an array that is spread; one tensor at a time must be there."""
    config = CONFIG.replace(vocab_size=8192, hidden_size=128, moe_intermediate_size=256)
    model = on_mesh("ep4_tp2", config)
    total = sum(param[...].nbytes for _, param in iter_params(model))
    largest = max(param[...].nbytes for _, param in iter_params(model))
    tracemalloc.start()
    try:
        save_pretrained(model, tmp_path, max_shard_bytes=largest)
        alive, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert alive < 500_000 < total / 10
    # A shard that is full, the tensor that did not fit into it, and that one before it was turned.
    assert peak < 3 * largest + 500_000 < total, (peak, largest, total)


# --- by shards ------------------------------------------------------------------------------------

TRIPS = [
    ("tp8", "ep8"), ("ep8", None), (None, "ep4_tp2"), ("dp_attention_ep8", "tp8"),
    ("two_nodes_ep8", "dp_attention_ep8"), (None, None),
]  # fmt: skip


@pytest.mark.parametrize("before, after", TRIPS)
def test_any_mesh_to_any_other(tmp_path, before, after):
    family = "qwen2_moe" if after == "ep8" else "qwen3_moe"
    config = FAMILIES[family].replace(dtype="bfloat16" if before is None else "float32")
    model = on_mesh(before, config)
    save_sharded(model, tmp_path)
    assert load_config(tmp_path) == config
    restored = Decoder(load_config(tmp_path))
    if after is None:
        restore_sharded(tmp_path, restored)
        for _, param in iter_params(restored):
            assert param[...].sharding.device_set == {jax.devices()[0]}
        for name, value in values_of(restored).items():
            np.testing.assert_array_equal(value, values_of(model)[name], err_msg=name)
        return
    placed = placement(PRESETS[after], config)(specs(restored))
    restore_sharded(tmp_path, restored, placed)
    assert_placed(restored, placed, values_of(model))


def test_arrays_in_many_chunks(tmp_path, monkeypatch):
    """Chunks are smaller than shards, and the new mesh cuts through both."""
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 256)
    model = on_mesh(None)
    save_sharded(model, tmp_path)
    stored = orbax.v1.metadata(tmp_path / WEIGHTS).metadata
    # An expert of [32, 16] in chunks of 256 bytes, no chunk with parts of two.
    chunk = stored["layers.0.moe.experts.up_proj"].storage_metadata.chunk_shape
    assert chunk[0] == 1 and np.prod(chunk) == 64
    restored = Decoder(CONFIG)
    placed = placement(PRESETS["ep4_tp2"], CONFIG)(specs(restored))
    restore_sharded(tmp_path, restored, placed)
    assert_placed(restored, placed, values_of(model))


def test_restoring_rounds_to_the_models_dtype(saved):
    config = CONFIG.replace(dtype="bfloat16")
    restored = Decoder(config)
    placed = placement(PRESETS["ep8"], config)(specs(restored))
    restore_sharded(saved, restored, placed)
    dtype = restored.norm.scale[...].dtype
    assert_placed(restored, placed, {n: v.astype(dtype) for n, v in values_of(on_mesh(None)).items()})


def test_an_older_checkpoint_goes_only_when_told(copied):
    other = on_mesh("ep8", seed=5)
    with pytest.raises(OutputError, match=r"there already.*overwrite=True"):
        save_sharded(other, copied)
    restored = Decoder(CONFIG)
    restore_sharded(copied, restored)
    np.testing.assert_array_equal(restored.norm.scale[...], on_mesh(None).norm.scale[...])
    save_sharded(other, copied, overwrite=True)
    restore_sharded(copied, restored)
    for name, value in values_of(restored).items():
        np.testing.assert_array_equal(value, values_of(other)[name], err_msg=name)


def test_replicas_are_kept_with_what_is_in_them(tmp_path):
    save_pretrained(on_mesh(None), tmp_path / "hf")
    build, place = replicated(PRESETS["ep8"]), placement(PRESETS["ep8"], CONFIG)
    slots = slots_by_path(build(CONFIG))
    model, _ = load_pretrained(tmp_path / "hf", build=build, shardings=place, expert_of=slots)
    save_sharded(model, tmp_path / "sharded", expert_of=slots)
    restored = build(CONFIG)
    placed = placement(PRESETS["ep4_tp2"], CONFIG)(specs(restored))
    restore_sharded(tmp_path / "sharded", restored, placed, expert_of=slots)
    assert_placed(restored, placed, values_of(model))
    moved = {name: REPLICAS[0] for name in slots}
    message = failure(tmp_path / "sharded", build(CONFIG), expert_of=moved)
    assert "3 with other experts in the slots" in message and "layers.1.moe.experts.up_proj" in message
    assert "6 with other experts in the slots" in failure(tmp_path / "sharded", build(CONFIG))
    assert "6 misshapen" in failure(tmp_path / "sharded", Decoder(CONFIG))


# --- errors ---------------------------------------------------------------------------------------


def test_no_folder(tmp_path):
    assert f"no {WEIGHTS} folder" in failure(tmp_path / "nowhere", Decoder(CONFIG))
    (tmp_path / WEIGHTS).mkdir()
    assert "not a readable checkpoint" in failure(tmp_path, Decoder(CONFIG))


def test_all_that_does_not_fit_is_listed_with_shapes(saved):
    """Another model: no projection norm, dense first layer, a wider vocabulary."""
    config = CONFIG.replace(
        qk_norm="none", qkv_bias=True, vocab_size=104, moe_layers=(False, True), intermediate_size=24
    )
    message = failure(saved, Decoder(config))
    for part in (
        "2 misshapen: embedding.table is [96, 32], expected [104, 32], lm_head.kernel is [32, 96]",
        "9 missing:", "layers.0.attention.k_proj.bias [8]", "layers.0.mlp.gate_proj.kernel [32, 24]",
        "8 unknown:", "layers.0.attention.q_norm.scale [4]", "layers.0.moe.experts.gate_proj [8, 32, 16]",
    ):  # fmt: skip
        assert part in message, (part, message)


def test_another_layout_is_no_mere_shape(tmp_path):
    """Square experts have the same shape either way round."""
    config = CONFIG.replace(hidden_size=32, moe_intermediate_size=32, intermediate_size=32)
    save_sharded(on_mesh(None, config), tmp_path)
    message = failure(tmp_path, Decoder(config, moe=MoeConfig(expert_layout="efd")))
    assert "6 of another moe.expert_layout" in message and "layers.0.moe.experts.down_proj" in message


def test_a_run_that_is_no_model(tmp_path):
    orbax.save_tree({"a": np.zeros(3)}, tmp_path / WEIGHTS, {}, overwrite=False)
    assert "not a readable checkpoint of a model's weights" in failure(tmp_path, Decoder(CONFIG))


RESTORE = """
import sys
from moejax.checkpoint.hf import load_config
from moejax.checkpoint.sharded import restore_sharded
from moejax.core.errors import CheckpointError
from moejax.models.decoder import Decoder
for directory in sys.argv[1:]:
    try:
        restore_sharded(directory, Decoder(load_config(directory)))
    except CheckpointError as error:
        print("error:", error)
    else:
        print("restored")
"""


def test_damaged_folders(saved, tmp_path):
    """In a process of its own: the readers that Orbax leaves behind end with errors that nobody catches."""
    shares, files = {"empty": 0.0, "half": 0.5, "most": 0.999}, ("_METADATA", "manifest.ocdbt", "d")
    for name in (*shares, *files, "whole"):
        state = shutil.copytree(saved, tmp_path / name) / WEIGHTS / "state"
        for path in state.glob("**/d/*"):
            data = path.read_bytes()
            path.write_bytes(data[: int(len(data) * shares.get(name, 1.0))])
        if name in files:
            moved = state / name
            moved.rename(moved.with_suffix(".gone"))
    directories = [str(tmp_path / name) for name in (*shares, *files, "whole")]
    done = subprocess.run(
        [sys.executable, "-c", RESTORE, *directories], capture_output=True, text=True, cwd=ROOT, check=True
    )
    *damaged, whole = done.stdout.splitlines()
    assert len(damaged) == 6 and whole == "restored", done.stdout
    for directory, line in zip(directories, damaged, strict=False):
        assert line.startswith(f"error: {directory}/{WEIGHTS}: not a readable checkpoint"), line


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write to the output folder") as caught:
        save_sharded(on_mesh(None), tmp_path / "file" / "model")
    assert "\n" not in str(caught.value)


def test_a_part_that_other_processes_do_not_share(tmp_path, saved, monkeypatch):
    """A pipeline stage within one process: Orbax's own error comes after it has begun to write."""
    model = on_mesh("ep8")
    placed = placement(PRESETS["ep8"], CONFIG)(specs(model))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"lie on some of 2 processes only.*save_pretrained"):
        save_sharded(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert "embedding.table the first" in failure(saved, Decoder(CONFIG), ConfigError, shardings=placed)
