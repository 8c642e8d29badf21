"""A quantized checkpoint whose configuration and tensors disagree: one error, one line, all of it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.errors import CheckpointError, ConfigError, MoejaxError
from tests.checkpoint import packing
from tests.checkpoint.meshes import FAMILIES
from tests.checkpoint.packing import CONVENTIONS, quantize_directory
from tests.decoding import random_model

SINGLE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.experts.0.up_proj"  # among the first of all
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source") / "model"
    save_pretrained(random_model(FAMILIES["qwen3_moe"]), directory)
    return directory


@pytest.fixture
def failure(source, tmp_path):
    """Makes a checkpoint, changes it, and returns the text of the one error that loading it raises."""

    def fail(name, *, config=None, tensors=None, error=CheckpointError):
        quantize_directory(source, tmp_path / "model", tmp_path / "plain", CONVENTIONS[name])
        path = tmp_path / "model" / "config.json"
        whole = json.loads(path.read_text())
        if callable(config):
            config(whole["quantization_config"])
        else:
            whole["quantization_config"] |= config or {}
        path.write_text(json.dumps(whole))
        held = packing.load_bytes(tmp_path / "model" / SINGLE)
        if tensors is not None:
            tensors(held)
            save_file({key: np.ascontiguousarray(value) for key, value in held.items()}, path.parent / SINGLE)
        with pytest.raises(MoejaxError) as caught:
            load_pretrained(tmp_path / "model")
        assert type(caught.value) is error, caught.value
        text = str(caught.value)
        assert "\n" not in text and str(tmp_path / "model") in text
        return text

    return fail


def plain_weight(tensors, module, D=32, F=32):
    for key in [key for key in tensors if key.startswith(f"{module}.")]:
        del tensors[key]
    tensors[f"{module}.weight"] = np.ones((F, D), np.float32)


# --- What is there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gptq", ["qweight", "qzeros", "scales"]),
        ("gptq-act-order", ["g_idx"]),
        ("awq", ["qzeros"]),
        ("ct-int4-asym", ["weight_zero_point", "weight_shape"]),
        ("ct-w8a8-static", ["input_scale", "weight_scale"]),
        ("fp8-blocks", ["weight"]),
    ],
)
def test_missing_tensors_are_all_listed(failure, name, parts):
    gone = [f"{module}.{part}" for module in (Q, EXPERT.format(3, "up")) for part in parts]
    message = failure(name, tensors=lambda held: [held.pop(key) for key in gone])
    assert f"{len(gone)} missing" in message
    for key in gone:
        assert key in message


def test_an_expert_without_any_tensor_is_missing(failure):
    def edit(held):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del held[f"{EXPERT.format(5, 'down')}.{part}"]

    assert f"1 missing: {EXPERT.format(5, 'down')}.qweight" in failure("gptq", tensors=edit)


def test_tensors_that_a_scheme_does_not_have_are_unmapped(failure):
    def edit(held):
        held[f"{Q}.weight_zero_point"] = np.zeros((4, 4), np.int32)
        held[f"{Q}.qweight"] = np.zeros((4, 4), np.int32)
        held["model.layers.0.self_attn.z_proj.weight_packed"] = np.zeros((4, 4), np.int32)

    message = failure("ct-w8a8", tensors=edit)
    assert "2 unmapped" in message and f"{Q}.qweight" in message and "z_proj.weight_packed" in message
    assert f"{Q}.weight_zero_point is [4, 4]" in message  # there may be one, in the shape of the scales


def test_left_out_but_quantized_and_the_other_way_round(failure):
    def change(config):
        config["ignore"] = [*config["ignore"], Q, r"re:.*\.1\.mlp\.experts\.[02]\.up_proj"]

    def edit(held):
        plain_weight(held, "model.layers.1.self_attn.v_proj", F=8)

    message = failure("ct-int4", config=change, tensors=edit)
    assert "3 quantized, although config.json leaves them in full precision" in message
    for module in (Q, EXPERT.format(0, "up"), EXPERT.format(2, "up")):
        assert module in message
    assert (
        "1 in full precision, although config.json has them quantized: model.layers.1.self_attn.v_proj"
        in message
    )


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq", {"dynamic": {r"-:model\.layers\.0\.self_attn\.q_proj": {}}}),
        ("awq", {"modules_to_not_convert": ["gate", Q]}),
        ("awq", {"modules_to_not_convert": ["layers.0.self_attn.q_proj"]}),
        ("fp8-blocks", {"modules_to_not_convert": [Q]}),
        ("fp8-tensor", {"ignored_layers": [Q]}),
        ("ct-w8a8", {"ignore": [*packing.GATES, Q]}),
    ],
)
def test_every_convention_can_leave_modules_out(failure, name, config):
    assert f"1 quantized, although config.json leaves them in full precision: {Q}" in failure(
        name, config=config
    )


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-blocks", "ct-w8a8"])
def test_every_convention_quantizes_what_is_not_left_out(failure, name):
    message = failure(name, tensors=lambda held: plain_weight(held, Q))
    assert f"1 in full precision, although config.json has them quantized: {Q}" in message


def test_experts_must_be_alike(failure):
    def edit(held):
        plain_weight(held, EXPERT.format(4, "gate"), F=16)
        key = f"{EXPERT.format(1, 'up')}.scales"
        held[key] = held[key].astype(np.float32)

    message = failure("gptq", tensors=edit)
    assert f"in full precision beside quantized experts: {EXPERT.format(4, 'gate')}.weight" in message
    assert "layers.1.moe.experts.up_proj: int4_g8_sf16 with float16 scales" in message
    assert f"with float32 scales ({EXPERT.format(1, 'up')})" in message


def test_an_expert_under_two_names(tmp_path):
    """Mixtral's experts have two names, and one of them is there under both."""
    save_pretrained(random_model(FAMILIES["mixtral"]), tmp_path / "source")
    quantize_directory(tmp_path / "source", tmp_path / "model", tmp_path / "plain", CONVENTIONS["awq"])
    held = packing.load_bytes(tmp_path / "model" / SINGLE)
    one, other = "model.layers.0.block_sparse_moe.experts.3.w1", "model.layers.0.mlp.experts.3.gate_proj"
    held |= {f"{other}.{name}": held[f"{one}.{name}"] for name in ("qweight", "qzeros", "scales")}
    save_file(held, tmp_path / "model" / SINGLE)
    with pytest.raises(CheckpointError, match=f"1 doubly mapped: ({one} and {other}|{other} and {one})"):
        load_pretrained(tmp_path / "model")


def test_nothing_is_quantized(failure):
    def edit(held):
        for key in list(held):
            if key.endswith(".qweight"):
                plain_weight(held, key.removesuffix(".qweight"))

    message = failure("gptq", tensors=edit)
    assert "all quantized tensors that quant_method 'gptq' says there are" in message


def test_a_quantized_embedding(failure):
    def edit(held):
        held["model.embed_tokens.weight_scale"] = np.ones((96, 1), np.float32)

    assert "1 quantized embeddings, not supported: model.embed_tokens" in failure("ct-w8a8", tensors=edit)


# --- Shapes and dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq", {"group_size": 16}, f"{UP}.scales is [4, 16], expected [2, 16]: groups of 8, not 16"),
        ("gptq", {"group_size": -1}, f"{UP}.scales is [4, 16], expected [1, 16]"),
        ("gptq", {"bits": 8}, f"{UP}.qweight is [4, 16], expected [8, 16]: codes of 4 bits, not 8"),
        ("awq", {"group_size": 16}, f"{UP}.scales is [4, 16], expected [2, 16]: groups of 8, not 16"),
        ("fp8-blocks", {"weight_block_size": [16, 16]}, f"{UP}.weight_scale_inv is [2, 4], expected [1, 2]"),
    ],
)
def test_another_group_size_or_bits_than_the_configuration_says(failure, name, change, said):
    assert said in failure(name, config=change)


@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        (
            "ct-int4",
            {"group_size": 16},
            f"{UP}.weight_scale is [16, 4], expected [16, 2]: groups of 8, not 16",
        ),
        (
            "ct-int4",
            {"num_bits": 8},
            f"{UP}.weight_packed is [16, 4], expected [16, 8]: codes of 4 bits, not 8",
        ),
        ("ct-int4", {"symmetric": False}, f"{UP}.weight_zero_point"),
        ("ct-w8a8", {"strategy": "tensor"}, f"{UP}.weight_scale is [16, 1], expected [1] or []"),
        ("ct-fp8-blocks", {"block_structure": [16, 16]}, f"{UP}.weight_scale is [2, 4], expected [1, 2]"),
    ],
)
def test_other_weights_than_the_group_says(failure, name, weights, said):
    message = failure(name, config=lambda c: c["config_groups"]["group_0"]["weights"].update(weights))
    assert said in message


def test_dtypes_are_all_listed(failure):
    def edit(held):
        held[f"{Q}.weight"] = held[f"{Q}.weight"].astype(np.int8)
        held[f"{EXPERT.format(0, 'up')}.weight_scale"] = np.ones((16, 1), np.int32)
        held["model.norm.weight"] = np.ones(32, np.int8)

    message = failure("ct-fp8-dynamic", tensors=edit)
    assert f"{Q}.weight is I8, expected F8_E4M3" in message
    assert "weight_scale is I32, expected F32 or BF16 or F16" in message
    assert "of a dtype other than F32, BF16, F16: model.norm.weight is I8" in message


def test_a_group_that_does_not_divide(failure):
    message = failure("gptq", config={"group_size": 12})
    assert "groups of 12 do not divide its 32 inputs; use 32 or 16" in message


def test_quantized_tensors_without_a_configuration(source, tmp_path):
    quantize_directory(source, tmp_path / "model", tmp_path / "plain", CONVENTIONS["gptq"])
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"168|224 tensors are of quantized weights.*no quantization_config"
    ):
        load_pretrained(tmp_path / "model")


# --- Values -------------------------------------------------------------------------------------------------


def test_zero_points_of_a_symmetric_checkpoint(failure):
    message = failure("gptq-asym", config={"sym": True})
    assert "with values that do not fit config.json" in message
    assert f"{UP}.qzeros: zero points from 0 to 15 where a symmetric format has 8" in message


def test_the_other_version_of_the_format_is_guessed(failure):
    message = failure("gptq", config={"checkpoint_format": "gptq_v2"})
    assert f"{UP}.qzeros: zero points 7 where a symmetric format has 8" in message
    assert "is checkpoint_format 'gptq'?" in message


def test_groups_out_of_order_without_activation_order(failure):
    message = failure("gptq-act-order", config={"desc_act": False})
    assert f"{UP}.g_idx: groups are not in order, although desc_act is false" in message


def test_a_group_that_is_not_there(failure):
    def edit(held):
        held[f"{Q}.g_idx"][3] = 4

    assert f"{Q}.g_idx: groups from 0 to 4, and there are 4" in failure("gptq-act-order", tensors=edit)


def test_a_stored_shape_that_is_another(failure):
    def edit(held):
        held[f"{Q}.weight_shape"] = np.asarray([32, 30], np.int64)

    assert f"{Q}.weight_shape: [32, 30] for a weight of [32, 32]" in failure("ct-int4", tensors=edit)


def test_scales_that_are_no_numbers(failure):
    def edit(held):
        held[f"{Q}.weight_scale"][3] = np.nan
        held[f"{EXPERT.format(7, 'down')}.weight_scale"][0] = np.inf
        held[f"{EXPERT.format(6, 'down')}.weight"][2, 2] = np.nan

    message = failure("ct-fp8-dynamic", tensors=edit)
    assert "3 with values that do not fit config.json" in message
    for key in (
        f"{Q}.weight_scale",
        f"{EXPERT.format(7, 'down')}.weight_scale",
        f"{EXPERT.format(6, 'down')}.weight",
    ):
        assert f"{key}: NaN or infinite" in message


# --- Configurations that are not read -----------------------------------------------------------------------

GROUP = {"targets": ["Linear"], "weights": packing.weights_args("int", 4, "group")}


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("gptq", {"quant_method": "gguf"}, "quant_method='gguf' is not supported for reading"),
        ("gptq", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported for reading; convert"),
        ("gptq", {"quant_method": "mxfp8"}, "supported: 'gptq', 'awq', 'fp8', 'compressed-tensors'"),
        ("gptq", lambda c: [c.pop(name) for name in ("quant_method", "desc_act")], "quant_method=None is"),
        ("gptq", {"checkpoint_format": None, "format": "gptq_p"}, "checkpoint_format='gptq_p'"),
        ("gptq", {"bits": 3}, "bits=3 is not supported for GPTQ; supported: 4, 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "supported: 'gptq', 'gptq_v2'"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype='int16'"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 2}}}, "bits=2 is not supported"),
        ("awq", {"bits": 8}, "bits=8 is not supported for AWQ"),
        ("awq", {"version": "gemv"}, "version='gemv' is not supported for AWQ; supported: 'gemm'"),
        ("awq", {"version": None, "format": "gemv_fast"}, "version='gemv_fast' is not supported for AWQ"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt='e5m2'"),
        ("fp8-blocks", {"weight_block_size": [128, 64]}, "blocks are squares"),
        ("fp8-blocks", {"activation_scheme": "static"}, "activation_scheme='static'"),
        ("fp8-tensor", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("ct-int4", {"format": "marlin-24"}, "format='marlin-24' is not supported; supported: pack"),
        ("ct-int4", {"format": "float-quantized"}, "int of 4 bits in float-quantized is not supported"),
        ("ct-int4", {"quantization_status": "initialized"}, "quantization_status='initialized'"),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("ct-int4", {"transform_config": {"config_groups": {"u": {}}}}, "rotations are not supported"),
        ("ct-int4", {"config_groups": {"g": GROUP | {"output_activations": {}}}}, "output_activations"),
        ("ct-int4", {"config_groups": {"W4A16": ["Linear"]}}, "presets by name are not read"),
        ("ct-int4", {"kv_cache_scheme": packing.weights_args("float", 8, "tensor")}, "set quant.kv_cache"),
        (
            "ct-int4",
            {"config_groups": {"g": {"targets": [], "weights": packing.weights_args("int", 8, "token")}}},
            "weights.strategy='token' is not supported",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(failure, name, config, said):
    assert said in failure(name, config=config, error=ConfigError)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("gptq", {"bits": "four"}, "quantization_config.bits must be an integer, got 'four'"),
        ("gptq", {"group_size": 0}, "group_size must be positive, or -1 for channels, got 0"),
        ("gptq", {"sym": "yes"}, "sym must be true or false, got 'yes'"),
        ("gptq", {"dynamic": {"+:(": {}}}, "'+:(' is no pattern"),
        ("awq", {"modules_to_not_convert": "gate"}, "must be a list of names, got 'gate'"),
        ("awq", {"modules_to_not_convert": ["re:("]}, "'re:(' is no pattern"),
        ("fp8-blocks", {"weight_block_size": 128}, "must be two positive integers, got 128"),
        ("ct-int4", {"config_groups": {}}, "config_groups names no groups"),
        ("ct-int4", {"ignore": ["re:("]}, "'re:(' is no pattern"),
    ],
)
def test_what_is_malformed_is_named(failure, name, config, said):
    assert said in failure(name, config=config)


def test_a_quantization_config_that_is_no_object(source, tmp_path):
    quantize_directory(source, tmp_path / "model", tmp_path / "plain", CONVENTIONS["gptq"])
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": "gptq"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="must be an object, got 'gptq'"):
        load_pretrained(tmp_path / "model")
