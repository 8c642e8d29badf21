"""What is wrong with a checkpoint is said in one error that names all of it."""

import gc
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoint.directory import load_config, resolve_model_dir
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.checkpoint.maps import TABLES
from moejax.checkpoint.maps.rules import Rule, Target
from moejax.checkpoint.plan import MAX_LISTED, plan_load
from moejax.core.errors import CheckpointError, ConfigError, MoejaxError
from moejax.nn.param import specs

Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def failure(path, error=CheckpointError, **options):
    """The text of the one error that loading raises; one line."""
    with pytest.raises(MoejaxError) as caught:
        load_pretrained(path, **options)
    assert type(caught.value) is error, caught.value
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_untouched_checkpoint_loads(saved):
    load_pretrained(saved)


def test_missing_keys_are_all_listed(change_weights):
    gone = [Q, "lm_head.weight", EXPERT.format(2, "up"), "model.layers.1.mlp.gate.weight"]
    message = failure(change_weights(lambda tensors: [tensors.pop(key) for key in gone]))
    assert "4 missing" in message
    for key in gone:
        assert key in message


def test_unmapped_keys_are_all_listed(change_weights):
    strange = [
        "model.layers.0.self_attn.q_proj.bias",  # attention_bias is off
        "model.layers.2.input_layernorm.weight",  # there are two layers
        EXPERT.format(4, "gate"),  # and four experts
        "model.layers.0.mlp.gate.weight",  # layer 0 is dense
        "model.layers.1.mlp.gate_proj.weight",  # layer 1 is not
        "model.layers.1.mlp.shared_expert.up_proj.weight",  # Qwen3-MoE has none
        "vision_tower.weight",
    ]
    message = failure(change_weights(lambda t: t.update({key: np.zeros(1, np.float32) for key in strange})))
    assert "7 unmapped" in message and "missing" not in message
    for key in strange:
        assert key in message


def test_misshapen_keys_are_all_listed_with_both_shapes(change_weights):
    def edit(tensors):
        tensors[Q] = np.zeros((16, 8), np.float32)
        tensors[EXPERT.format(3, "down")] = np.zeros((8, 16), np.float32)  # transposed
        tensors["model.norm.weight"] = np.zeros((17,), np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((40, 16, 1), np.float32)

    message = failure(change_weights(edit))
    assert "4 misshapen" in message and "missing" not in message
    for part in (
        f"{Q} is [16, 8], expected [16, 16]",
        f"{EXPERT.format(3, 'down')} is [8, 16], expected [16, 8]",
        "model.norm.weight is [17], expected [16]",
        "model.embed_tokens.weight is [40, 16, 1], expected [40, 16]",
    ):
        assert part in message


def test_keys_that_fill_the_same_are_all_listed(change_weights):
    """The stacked layout beside the layout by expert."""

    def edit(tensors):
        tensors["model.layers.1.mlp.experts.down_proj"] = np.zeros((4, 16, 8), np.float32)

    message = failure(change_weights(edit))
    assert "4 doubly mapped" in message
    for expert in range(4):
        assert EXPERT.format(expert, "down") in message


def test_faults_of_every_kind_come_in_one_error(change_weights):
    def edit(tensors):
        del tensors["model.norm.weight"]
        tensors["extra"] = np.zeros(1, np.float32)
        tensors[Q] = np.zeros((4, 4), np.float32)
        tensors["model.layers.1.mlp.experts.down_proj"] = np.zeros((4, 16, 8), np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float64)

    message = failure(change_weights(edit))
    for kind in ("1 missing", "1 unmapped", "1 misshapen", "4 doubly mapped", "lm_head.weight is F64"):
        assert kind in message


def test_a_long_list_is_cut_and_counted(change_weights):
    message = failure(
        change_weights(lambda t: t.update({f"x{i:02d}": np.zeros(1, np.float32) for i in range(30)}))
    )
    assert "30 unmapped" in message and f"and {30 - MAX_LISTED} more" in message and "x00" in message


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.float64])
def test_other_dtypes_are_refused(change_weights, dtype):
    """Integers that happen to have the right shape are a quantized tensor, not weights."""

    def edit(tensors):
        for expert in (0, 3):
            key = EXPERT.format(expert, "up")
            tensors[key] = np.ones(tensors[key].shape, dtype)

    message = failure(change_weights(edit))
    assert EXPERT.format(0, "up") in message and EXPERT.format(3, "up") in message and "dtype" in message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_weights_are_all_named(change_weights, value):
    keys = ["model.norm.weight", EXPERT.format(1, "gate")]

    def edit(tensors):
        for key in keys:
            tensors[key].reshape(-1)[3] = value

    message = failure(change_weights(edit))
    assert "2 with NaN or infinite values" in message
    for key in keys:
        assert key in message
    assert Q not in message


def test_values_too_large_for_float16_are_named(change_weights):
    directory = change_weights(lambda tensors: tensors[Q].__setitem__((0, 0), 1e6))
    message = failure(directory, dtype="float16")
    assert Q in message and "float16" in message
    load_pretrained(directory, dtype="bfloat16")


def test_nothing_is_left_of_a_failed_load(change_weights):
    """No array of the model outlives the error, although all but one weight had been read."""
    directory = change_weights(lambda tensors: tensors["model.norm.weight"].__setitem__(0, np.nan))
    before = {id(array) for array in jax.live_arrays()}
    failure(directory)
    gc.collect()  # the error's traceback
    assert not [array.shape for array in jax.live_arrays() if id(array) not in before]
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", SINGLE]


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated_file(saved, keep):
    """Cut in the length field, in the header, in the middle and one byte before the end."""
    path = saved / SINGLE
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    message = failure(saved)
    assert SINGLE in message and "truncated or corrupted" in message


@pytest.mark.parametrize(
    "content",
    [b"not a safetensors file at all", b"\xff" * 64, (10).to_bytes(8, "little") + b"{bad json}" + b"\0" * 40],
    ids=["text", "huge header", "bad header"],
)
def test_garbage_file(saved, content):
    (saved / SINGLE).write_bytes(content)
    message = failure(saved)
    assert SINGLE in message and "truncated or corrupted" in message


@pytest.fixture
def sharded(tmp_path, tiny_model):
    save_pretrained(tiny_model, tmp_path / "sharded", max_shard_bytes=4000)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 3
    return tmp_path / "sharded"


def test_missing_shards_are_all_named(sharded):
    shards = sorted(sharded.glob("model-*.safetensors"))
    for path in shards[1:3]:
        path.unlink()
    message = failure(sharded)
    assert shards[1].name in message and shards[2].name in message and shards[0].name not in message


def test_truncated_shard_is_named(sharded):
    path = sorted(sharded.glob("model-*.safetensors"))[2]
    path.write_bytes(path.read_bytes()[:-5])
    assert path.name in failure(sharded)


def test_a_key_in_two_shards_is_named_with_both(sharded):
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    tensors = load_file(second)
    stolen = next(iter(load_file(first).items()))
    save_file(tensors | dict([stolen]), second)
    message = failure(sharded)
    assert "1 doubly mapped" in message
    for part in (stolen[0], first.name, second.name):
        assert part in message


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": 3}']
)
def test_bad_index(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in failure(sharded)


def test_no_weights_at_all(saved):
    (saved / SINGLE).unlink()
    message = failure(saved)
    assert SINGLE in message and INDEX in message and "load_format=dummy" in message


def test_weights_in_pytorchs_format_only(saved):
    (saved / SINGLE).rename(saved / "pytorch_model.bin")
    message = failure(saved)
    assert "pytorch_model.bin" in message and "safetensors" in message


def test_no_config(saved):
    (saved / "config.json").unlink()
    assert "config.json: not found" in failure(saved)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", b"{'single': 'quotes'}"])
def test_config_is_not_json(saved, content):
    (saved / "config.json").write_bytes(content)
    message = failure(saved)
    assert "config.json" in message and "JSON" in message


def test_config_is_a_folder(saved):
    (saved / "config.json").unlink()
    (saved / "config.json").mkdir()
    assert "config.json" in failure(saved)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"n_group": 8}, "n_group=8"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantization_config"),
        ({"num_hidden_layers": "many"}, "config.json"),
        ({"hidden_act": "mish"}, "mish"),
    ],
)
def test_configs_that_are_refused(change_config, fields, named):
    message = failure(change_config(**fields), ConfigError)
    assert named in message and "config.json" in message


def test_a_config_that_does_not_fit_the_weights(change_config):
    """Every tensor of another width is listed, not the first alone."""
    message = failure(change_config(hidden_size=32))
    assert re.search(r"\d\d misshapen", message) and Q in message


def test_unknown_dtype(saved):
    assert "did you mean 'bfloat16'" in failure(saved, ConfigError, dtype="bfloat")


def test_unknown_model_names_and_files(tmp_path):
    with pytest.raises(ConfigError, match=r"'no-such-model'.*not a directory"):
        resolve_model_dir("no-such-model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a Hugging Face directory"):
        load_config(tmp_path / "file")


def test_a_key_that_two_rules_match_is_an_error(tiny_model):
    """A fault of a key table, which must not be settled by the rules' order."""
    rules = (
        *TABLES["qwen3_moe"],
        Rule("model.norm.{l}", ()),
        Rule("model.norm.weight", (Target("norm.scale"),)),
    )
    with pytest.raises(CheckpointError, match=r"1 matching several rules: model\.norm\.weight"):
        plan_load(
            {"model.norm.weight": (16,)}, specs(tiny_model), rules, num_experts=4, tied=False, source="here"
        )
