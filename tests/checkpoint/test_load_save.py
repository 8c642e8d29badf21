"""Directories that load: every layout, dtype and family; and what saving leaves behind."""

import json
import logging
import os
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from moejax.checkpoint import hf
from moejax.checkpoint.directory import load_config
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.errors import CheckpointError, ConfigError, OutputError
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.models.registry import config_from_hf
from moejax.nn.param import iter_params
from tests.decoding import random_model
from tests.model_shapes import TWO_LAYERS
from tests.oracle.cases import CASES, hf_fields

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMPY = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
ONE_PER_FAMILY = {
    case.family: case for case in CASES if case.name in (
        "mixtral-plain", "qwen2_moe-dense-layer", "qwen3_moe-dense-layers-bias-tied", "olmoe-clip-bias-gqa",
        "glm4_moe-groups-qk-norm-bias-dense-layer-yarn", "minimax_m2-plain", "ernie4_5_moe-plain",
        "hunyuan_v1_moe-plain", "minimax-factors",
    )
}  # fmt: skip


def assert_same_weights(ours: Decoder, other: Decoder, dtype: str = "float32") -> None:
    """Bit for bit, after rounding `other` to `dtype`."""
    expected = dict(iter_params(other))
    for name, param in iter_params(ours):
        value = np.asarray(expected[name][...]).astype(NUMPY[dtype])
        assert param[...].dtype == NUMPY[dtype], name
        np.testing.assert_array_equal(np.asarray(param[...]), value, err_msg=name)


def family_model(family: str) -> Decoder:
    case = ONE_PER_FAMILY[family]
    return random_model(config_from_hf(hf_fields(case, "golden") | {"model_type": family}), seed=0)


@pytest.mark.each_value
@pytest.mark.parametrize("family", ONE_PER_FAMILY)
@pytest.mark.parametrize("limit", [5_000_000_000, 3000], ids=["single", "sharded"])
def test_what_is_saved_loads_the_same(tmp_path, family, limit):
    model = family_model(family)
    save_pretrained(model, tmp_path, max_shard_bytes=limit)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert (tmp_path / SINGLE).exists() == (not shards) == (limit > 3000)
    loaded, config = load_pretrained(tmp_path)
    assert config == model.config == load_config(tmp_path)
    assert_same_weights(loaded, model)
    if shards:
        index = json.loads((tmp_path / INDEX).read_text())
        stored = {path.name: load_file(path) for path in shards}
        assert index["weight_map"] == {key: name for name, tensors in stored.items() for key in tensors}
        sizes = [sum(t.nbytes for t in tensors.values()) for tensors in stored.values()]
        assert index["metadata"]["total_size"] == sum(sizes)
        # A tensor over the limit has a shard to itself.
        assert all(s <= limit or len(t) == 1 for s, t in zip(sizes, stored.values(), strict=True))


@pytest.mark.parametrize(
    "family, key",
    [("glm4_moe", "model.layers.3.eh_proj"), ("ernie4_5_moe", "model.mtp_block.0.self_attn.q_proj")],
)
def test_layers_that_predict_further_tokens_are_passed_over(tmp_path, family, key, caplog):
    """With a line of the log, as many as config.json says; without it they are unknown keys."""
    model = family_model(family)
    model.config = model.config.replace(mtp_layers=1)
    save_pretrained(model, tmp_path)
    extra = {f"{key}.weight": np.zeros((4, 4), np.float32)}
    save_file(load_file(tmp_path / SINGLE) | extra, tmp_path / SINGLE)
    with caplog.at_level(logging.INFO, "moejax.checkpoint.hf"):
        assert_same_weights(load_pretrained(tmp_path).model, model)
    name = ".".join(key.split(".")[:3])
    assert f"passed over {name}, which predict further tokens (tensors: 1)" in caplog.text
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key):
        load_pretrained(tmp_path)


def test_layers_and_experts_past_nine_keep_their_numbers(tmp_path, tiny_model):
    """Names sort as text, "10" before "2"; the numbers must not."""
    config = tiny_model.config.replace(
        num_layers=12, num_experts=11, moe_layers=(True,) * 12, sliding_windows=(None,) * 12
    )
    model = Decoder(config)
    for i, (_, param) in enumerate(iter_params(model)):
        spec = param.get_metadata("spec")
        values = np.arange(np.prod(spec.shape), dtype=np.float32).reshape(spec.shape)
        param.set_value(jnp.asarray(values + 10_000 * i))
    save_pretrained(model, tmp_path, max_shard_bytes=20_000)
    assert_same_weights(load_pretrained(tmp_path).model, model)
    stored = {k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()}
    expert = stored["model.layers.11.mlp.experts.10.down_proj.weight"]
    np.testing.assert_array_equal(expert, np.asarray(model.layers[11].moe.experts.down_proj[...])[10].T)


@pytest.mark.parametrize("stored", NUMPY)
@pytest.mark.parametrize("wanted", NUMPY)
def test_every_stored_and_wanted_dtype(tmp_path, tiny_model, stored, wanted):
    save_pretrained(tiny_model, tmp_path, dtype=stored)
    assert {t.dtype for t in load_file(tmp_path / SINGLE).values()} == {NUMPY[stored]}
    loaded, config = load_pretrained(tmp_path, dtype=wanted)
    assert config.dtype == loaded.config.dtype == wanted
    rounded = Decoder(tiny_model.config)
    for (_, empty), (_, param) in zip(iter_params(rounded), iter_params(tiny_model), strict=True):
        empty.set_value(param[...].astype(stored))
    assert_same_weights(loaded, rounded, wanted)


@pytest.mark.parametrize("stored", NUMPY)
def test_auto_dtype_is_the_stored_one(tmp_path, tiny_model, stored):
    save_pretrained(tiny_model, tmp_path, dtype=stored)
    loaded, config = load_pretrained(tmp_path)
    assert config.dtype == stored
    assert {param[...].dtype for _, param in iter_params(loaded)} == {NUMPY[stored]}


def fuse_experts(tensors, block, names, layers, experts):
    """The layout that transformers 5 keeps in memory: `[E, 2F, D]`, gate over up, and `[E, D, F]`."""
    gate, up, down = names
    for layer in layers:
        prefix = f"model.layers.{layer}.{block}.experts"
        take = lambda name: [tensors.pop(f"{prefix}.{e}.{name}.weight") for e in range(experts)]  # noqa: B023, E731
        halves = [np.concatenate(pair, axis=0) for pair in zip(take(gate), take(up), strict=True)]
        fused = f"model.layers.{layer}.mlp.experts"
        tensors[f"{fused}.gate_up_proj"] = np.stack(halves)
        tensors[f"{fused}.down_proj"] = np.stack(take(down))


@pytest.mark.parametrize("family", ONE_PER_FAMILY)
def test_stacked_experts_load_as_single_ones(tmp_path, family):
    model = family_model(family)
    save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    mixtral = family in ("mixtral", "minimax", "minimax_m2")
    block, names = (
        ("block_sparse_moe", ("w1", "w3", "w2"))
        if mixtral
        else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    sparse = [i for i, moe in enumerate(model.config.moe_layers) if moe]
    count = len(tensors)
    fuse_experts(tensors, block, names, sparse, model.config.num_experts)
    assert len(tensors) == count - len(sparse) * (3 * model.config.num_experts - 2)
    save_file(tensors, tmp_path / SINGLE)
    assert_same_weights(load_pretrained(tmp_path).model, model)


def test_mixtral_keys_under_mlp_load(tmp_path):
    model = family_model("mixtral")
    save_pretrained(model, tmp_path)
    tensors = {k.replace("block_sparse_moe", "mlp"): v for k, v in load_file(tmp_path / SINGLE).items()}
    tensors = {
        key.replace(".w1.", ".gate_proj.").replace(".w3.", ".up_proj.").replace(".w2.", ".down_proj."): value
        for key, value in tensors.items()
    }
    save_file(tensors, tmp_path / SINGLE)
    assert_same_weights(load_pretrained(tmp_path).model, model)


def test_mixtral_names_say_which_matrix_is_which(tmp_path):
    """w1 is the gate, w3 up, w2 down; a swap of w1 and w3 would round-trip unnoticed."""
    model = family_model("mixtral")
    save_pretrained(model, tmp_path)
    tensors, experts = load_file(tmp_path / SINGLE), model.layers[1].moe.experts
    for name, param in (("w1", experts.gate_proj), ("w3", experts.up_proj), ("w2", experts.down_proj)):
        stored = tensors[f"model.layers.1.block_sparse_moe.experts.3.{name}.weight"]
        np.testing.assert_array_equal(stored, np.asarray(param[...])[3].T)


def test_tied_embeddings_are_stored_once_and_a_stored_head_is_not_read(tmp_path, tiny_model):
    config = tiny_model.config.replace(tie_word_embeddings=True)
    model = random_model(config, seed=0)
    save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    assert "lm_head.weight" not in tensors
    # Some checkpoints store it all the same; it is the embedding again, whatever it holds.
    save_file(tensors | {"lm_head.weight": np.full((40, 16), np.nan, np.float32)}, tmp_path / SINGLE)
    loaded, _ = load_pretrained(tmp_path)
    assert loaded.lm_head is None
    assert_same_weights(loaded, model)


def test_stored_rotary_frequencies_are_known_and_derived(change_weights, tiny_model):
    directory = change_weights(
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    )
    assert_same_weights(load_pretrained(directory).model, tiny_model)


def test_parts_of_one_stack_may_lie_in_several_shards(tmp_path, tiny_model):
    save_pretrained(tiny_model, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    (tmp_path / SINGLE).unlink()
    names = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    for i, name in enumerate(names):
        save_file(
            {key: t for j, (key, t) in enumerate(sorted(tensors.items())) if j % 3 == i}, tmp_path / name
        )
    weight_map = {key: names[j % 3] for j, key in enumerate(sorted(tensors))}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same_weights(load_pretrained(tmp_path).model, tiny_model)


def test_loaded_weights_do_not_depend_on_the_file_any_more(saved, tiny_model):
    loaded, _ = load_pretrained(saved)
    with open(saved / SINGLE, "r+b") as file:
        file.write(b"\0" * os.path.getsize(saved / SINGLE))
    assert_same_weights(loaded, tiny_model)


# --- saving ---------------------------------------------------------------------------------------


def test_saving_again_replaces_the_layout(tmp_path, tiny_model):
    """Single over sharded and back: what loads is what was saved last."""
    other = random_model(tiny_model.config, seed=9)
    for model, limit in ((tiny_model, 4000), (other, 10**9), (tiny_model, 4000)):
        save_pretrained(model, tmp_path, max_shard_bytes=limit, overwrite=True)
        assert (tmp_path / INDEX).exists() == (limit == 4000) != (tmp_path / SINGLE).exists()
        assert_same_weights(load_pretrained(tmp_path).model, model)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: disk full")]
)
def test_a_failed_save_leaves_the_old_model_whole(monkeypatch, saved, tiny_model, error):
    """The disk fills up while the third shard is written."""
    calls = []

    def failing(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half")
            raise error
        save_file(tensors, path, metadata=metadata)

    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr(hf, "save_file", failing)
    with pytest.raises(OutputError, match="cannot write the model"):
        save_pretrained(random_model(tiny_model.config, seed=3), saved, max_shard_bytes=4000, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert_same_weights(load_pretrained(saved).model, tiny_model)


def test_an_unwritable_place_is_one_error(tmp_path, tiny_model):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write the model"):
        save_pretrained(tiny_model, tmp_path / "file" / "model")


def test_a_model_that_its_family_cannot_describe_is_not_saved(tmp_path, tiny_model):
    with pytest.raises(ConfigError, match="clip_qkv"):
        save_pretrained(random_model(tiny_model.config.replace(clip_qkv=1.0), seed=0), tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["edf", "efd"])
@pytest.mark.parametrize("layout", ["single", "sharded", "stacked"])
def test_host_memory_while_loading(tmp_path, layout, experts):
    """At most the model and twice its largest tensor at any time: never two copies of the model.

    What numpy and Python allocate is traced. Where JAX takes a host buffer over instead of copying it, that
    buffer counts as the model, so the bound is on what lies beyond the arrays that are alive at the end.
    """
    config = TWO_LAYERS.replace(
        vocab_size=2048, hidden_size=128, num_layers=6, head_dim=32, moe_intermediate_size=128,
        intermediate_size=128, moe_layers=(True,) * 6, sliding_windows=(None,) * 6, initializer_range=0.02,
    )  # fmt: skip
    model = random_model(config)
    total = sum(param[...].nbytes for _, param in iter_params(model))
    save_pretrained(model, tmp_path, max_shard_bytes=1_000_000 if layout == "sharded" else 10**9)
    if layout == "stacked":
        tensors = load_file(tmp_path / SINGLE)
        fuse_experts(tensors, "mlp", ("gate_proj", "up_proj", "down_proj"), range(6), 8)
        save_file(tensors, tmp_path / SINGLE)
        largest = max(t.nbytes for t in tensors.values())
        del tensors
    else:
        largest = max(param[...].nbytes for _, param in iter_params(model))
    del model
    assert total > 8 * largest
    tracemalloc.start()
    try:
        loaded = load_pretrained(tmp_path, moe=MoeConfig(expert_layout=experts))
        alive, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert alive < 1.1 * total + 1_000_000
    # A megabyte for the modules themselves and the plan.
    assert peak - alive < 2 * largest + 1_000_000, (peak, alive, total, largest)
    del loaded


@pytest.mark.parametrize("stacked", [False, True])
def test_transposed_experts_load_and_save_as_the_others(tmp_path, tiny_model, stacked):
    """The memory layout of experts is not seen on disk."""
    save_pretrained(tiny_model, tmp_path / "a")
    if stacked:
        tensors = load_file(tmp_path / "a" / SINGLE)
        fuse_experts(tensors, "mlp", ("gate_proj", "up_proj", "down_proj"), [1], 4)
        save_file(tensors, tmp_path / "a" / SINGLE)
    transposed, _ = load_pretrained(tmp_path / "a", moe=MoeConfig(expert_layout="efd"))
    for name, param in iter_params(transposed):
        if "experts" in name:
            value = np.asarray(dict(iter_params(tiny_model))[name][...])
            np.testing.assert_array_equal(param[...], value.swapaxes(1, 2))
    save_pretrained(transposed, tmp_path / "b")
    assert_same_weights(load_pretrained(tmp_path / "b").model, tiny_model)
