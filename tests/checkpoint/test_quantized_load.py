"""Quantized checkpoints of every convention, packed by hand: what is loaded is what is stored, to the bit."""

import json
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax import LLM, SamplingParams
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.nn.param import iter_params
from moejax.nn.quantized import quantized_weights
from moejax.quantization.arithmetic import dequantize
from tests.checkpoint import packing
from tests.checkpoint.meshes import FAMILIES
from tests.checkpoint.packing import CONVENTIONS, WIDE, Convention, quantize_directory
from tests.checkpoint.quantized_models import assert_same_values, quantized_model, same_weights
from tests.decoding import forward, random_model
from tests.examples import slow_but

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

MODELS = FAMILIES | {
    "tied": FAMILIES["qwen3_moe"].replace(tie_word_embeddings=True),
    "wide": FAMILIES["qwen3_moe"].replace(
        hidden_size=64, moe_intermediate_size=64, num_experts=4, head_dim=8, num_layers=1, moe_layers=(True,),
        sliding_windows=(None,),
    ),
}  # fmt: skip

Make = Callable[[str, Convention], tuple[Path, Path]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain checkpoints, by family."""
    root = tmp_path_factory.mktemp("sources")
    for name, config in MODELS.items():
        save_pretrained(random_model(config), root / name)
    return root


@pytest.fixture
def make(sources: Path, tmp_path: Path) -> Make:
    """(model, convention) → directories of the quantized checkpoint and of its values."""

    def directories(model: str, convention: Convention) -> tuple[Path, Path]:
        quantize_directory(sources / model, tmp_path / "quantized", tmp_path / "plain", convention)
        return tmp_path / "quantized", tmp_path / "plain"

    return directories


def check(make: Make, model: str, convention: Convention) -> None:
    directory, plain = make(model, convention)
    expected = load_pretrained(plain).model
    loaded = load_pretrained(directory)
    assert_same_values(loaded.model, expected, convention.format)
    stored = sum(tensor.nbytes for tensor in packing.load_bytes(directory / SINGLE).values())
    assert loaded.stats.bytes_read == stored
    same_weights(load_pretrained(directory, dequantize=True).model, expected)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_every_convention_loads_exactly(make, name):
    check(make, "qwen3_moe", CONVENTIONS[name])


@pytest.mark.parametrize(
    ("model", "name"),
    slow_but(
        [
            *(("mixtral", name) for name in ("gptq-act-order", "ct-int4-asym")),
            *(("qwen2_moe", name) for name in ("awq", "fp8-blocks")),
            *(("olmoe", "ct-w8a8"), ("tied", "awq")),
        ],
        [
            (model, name)
            for model in ("mixtral", "qwen2_moe", "olmoe", "tied")
            for name in ("gptq-act-order", "awq", "ct-int4-asym", "ct-w8a8", "fp8-blocks")
        ],
    ),
)
def test_every_family_loads_exactly(make, model, name):
    check(make, model, CONVENTIONS[name])


@pytest.mark.parametrize("name", WIDE)
def test_pieces_of_64_inputs(make, name):
    check(make, "wide", WIDE[name])


TOKENS = np.random.default_rng(1).integers(0, 96, (2, 7))


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "ct-int4-asym", "ct-int8-packed", "fp8-blocks"])
def test_logits_are_those_of_the_values(make, name):
    """Dequantized, the model is the plain checkpoint's in every bit of its logits."""
    directory, plain = make("qwen3_moe", CONVENTIONS[name])
    dequantized, expected = (
        load_pretrained(directory, dequantize=True).model,
        load_pretrained(plain).model,
    )
    np.testing.assert_array_equal(forward(dequantized, TOKENS)[0], forward(expected, TOKENS)[0])


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("gptq-act-order", "ct-int8-packed", "fp8-blocks")
        ),
    ],
)
def test_logits_of_weights_that_stay_quantized(make, name):
    """Products have their operands in another order there, so that sums round otherwise: the bound is what
    logits may differ from another library's, 1e-4 of the largest."""
    directory, plain = make("qwen3_moe", CONVENTIONS[name])
    wanted = np.asarray(forward(load_pretrained(plain).model, TOKENS)[0])
    found = forward(load_pretrained(directory).model, TOKENS)[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-int8-packed", "fp8-blocks"])
def test_logits_by_dequantizing_are_exact(make, name):
    """Kept as codes and run by "dequantize", the model is the plain checkpoint's in every bit. Experts as one
    product over the stack: a loop's single rows are summed in an order that XLA chooses with the slice."""
    directory, plain = make("qwen3_moe", CONVENTIONS[name])
    moe = MoeConfig(grouped_matmul="ragged_dot")
    model = load_pretrained(directory, moe=moe).model
    for _, weight in quantized_weights(model):
        weight.implementation = "dequantize"
    expected = load_pretrained(plain, moe=moe).model
    np.testing.assert_array_equal(forward(model, TOKENS)[0], forward(expected, TOKENS)[0])


def test_shards_with_an_index(make):
    """The tensors of one matrix in several files."""
    directory, plain = make("olmoe", CONVENTIONS["gptq-asym"])
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    names = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    keys = sorted(tensors)
    for i, name in enumerate(names):
        save_file({key: tensors[key] for j, key in enumerate(keys) if j % 3 == i}, directory / name)
    weight_map = {key: names[j % 3] for j, key in enumerate(keys)}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    expected = load_pretrained(plain).model
    assert_same_values(load_pretrained(directory).model, expected, "int4_g8_asym_sf16")


@pytest.mark.parametrize("layout", ["edf", "efd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_and_layout_of_dequantized_weights(make, layout, dtype):
    directory, plain = make("qwen3_moe", CONVENTIONS["ct-int4"])
    options = {"dtype": dtype, "moe": MoeConfig(expert_layout=layout)}
    dequantized = load_pretrained(directory, dequantize=True, **options).model
    same_weights(dequantized, load_pretrained(plain, **options).model)


def test_the_layout_of_experts_does_not_matter_to_quantized_ones(make):
    directory, plain = make("qwen3_moe", CONVENTIONS["awq"])
    loaded = load_pretrained(directory, dtype="bfloat16", moe=MoeConfig(expert_layout="efd")).model
    expected = dict(iter_params(load_pretrained(plain).model))
    for path, weight in quantized_weights(loaded):
        np.testing.assert_array_equal(dequantize(weight.tensor()), expected[path][...])
    assert loaded.norm.scale[...].dtype == "bfloat16"


def test_static_scales_of_activations_are_kept(make):
    directory, _ = make("qwen3_moe", CONVENTIONS["ct-w8a8-static"])
    stored = load_file(directory / SINGLE)
    model = load_pretrained(directory).model
    kept = model.layers[1].moe.experts.down_proj.input_scale[...]
    keys = [f"model.layers.1.mlp.experts.{e}.down_proj.input_scale" for e in range(8)]
    np.testing.assert_array_equal(kept, np.stack([stored[key] for key in keys]).astype(np.float32))
    assert kept.shape == (8, 1)


def test_codes_lie_as_the_kernels_want_them(make):
    """Byte r of a piece of 64 inputs holds input r and input r + 32."""
    directory, _ = make("wide", WIDE["ct-int4-g64"])
    stored = load_file(directory / SINGLE)["model.layers.0.self_attn.q_proj.weight_packed"]
    nibbles = [[(int(w) >> (4 * i)) & 15 for w in row for i in range(8)] for row in stored]
    values = np.asarray(load_pretrained(directory).model.layers[0].attention.q_proj.kernel.values[...])
    for o, row in enumerate(nibbles):
        assert values[o].tolist() == [row[r] | row[r + 32] << 4 for r in range(32)]


# --- What configurations say beside the numbers -------------------------------------------------------------


def rewritten(
    directory: Path, change: Callable[[dict], object], edit: Callable[[dict], object] | None = None
) -> Path:
    """Changes `quantization_config`, and the tensors, in place."""
    config = json.loads((directory / "config.json").read_text())
    change(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))
    if edit is not None:
        tensors = packing.load_bytes(directory / SINGLE)
        edit(tensors)
        save_file(tensors, directory / SINGLE)
    return directory


def as_stored(directory: Path, plain: Path, *modules: str) -> Callable[[dict], None]:
    """Puts plain weights of modules in place of the quantized ones."""
    values = load_file(plain / SINGLE)

    def edit(tensors: dict) -> None:
        for key in list(tensors):
            if any(key.startswith(f"{module}.") for module in modules):
                del tensors[key]
        tensors |= {f"{module}.weight": values[f"{module}.weight"] for module in modules}

    return edit


def test_gptq_settings_of_single_modules(make, tmp_path):
    """GPTQModel's `dynamic`: other bits for some modules, none for others; the first pattern counts."""
    directory, plain = make("qwen3_moe", CONVENTIONS["gptq"])
    rng, values = np.random.default_rng(3), load_file(plain / SINGLE)
    module = "model.layers.1.self_attn.q_proj"
    made, weight = packing.gptq(bits=8, group=16, act_order=True)(rng, 32, 32)
    left = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]

    def edit(tensors):
        as_stored(directory, plain, *left)(tensors)
        tensors |= {f"{module}.{name}": tensor for name, tensor in made.items()}

    dynamic = {
        r"-:model\.layers\.0\.self_attn\..*": {},
        r"+:.*\.1\.self_attn\.q_proj": {"bits": 8, "group_size": 16, "desc_act": True},
        r".*\.q_proj": {"bits": 4, "group_size": 32},
    }
    rewritten(directory, lambda config: config.update(dynamic=dynamic), edit)
    loaded = load_pretrained(directory).model
    weights = {path: weight.format.name for path, weight in quantized_weights(loaded)}
    assert weights["layers.1.attention.q_proj.kernel"] == "int8_g16_sf16_indexed"
    assert weights["layers.1.attention.k_proj.kernel"] == "int4_g8_sf16"
    assert not any(path.startswith("layers.0.attention") for path in weights)
    np.testing.assert_array_equal(dequantize(loaded.layers[1].attention.q_proj.kernel.tensor()), weight.T)
    expected = values[f"{left[0]}.weight"].T
    np.testing.assert_array_equal(loaded.layers[0].attention.q_proj.kernel[...], expected)


def test_a_quantized_output_projection(make):
    directory, _ = make("qwen3_moe", CONVENTIONS["gptq"])
    made, weight = packing.gptq()(np.random.default_rng(3), 32, 96)

    def edit(tensors):
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head.{name}": tensor for name, tensor in made.items()}

    loaded = load_pretrained(rewritten(directory, lambda config: config.update(lm_head=True), edit)).model
    np.testing.assert_array_equal(dequantize(loaded.lm_head.kernel.tensor()), weight.T)


def test_group_indices_that_say_nothing_new_may_be_absent(make):
    """Old GPTQ files; and compressed-tensors' -1 where none was set."""
    directory, plain = make("qwen3_moe", CONVENTIONS["gptq"])
    rewritten(directory, dict, lambda held: [held.pop(key) for key in list(held) if "g_idx" in key])
    assert_same_values(load_pretrained(directory).model, load_pretrained(plain).model, "int4_g8_sf16")


def test_group_indices_of_minus_one(make):
    directory, plain = make("qwen3_moe", CONVENTIONS["ct-int4"])

    def edit(held):
        for key in list(held):
            if key.endswith(".weight_packed"):
                held[key.replace("packed", "g_idx")] = np.full(8 * held[key].shape[1], -1, np.int32)

    rewritten(directory, dict, edit)
    assert_same_values(load_pretrained(directory).model, load_pretrained(plain).model, "int4_g8")


def test_zero_points_that_a_symmetric_scheme_stores_all_the_same(make):
    directory, plain = make("qwen3_moe", CONVENTIONS["ct-w8a8"])

    def edit(held):
        for key in list(held):
            if key.endswith(".weight_scale"):
                held[key.replace("scale", "zero_point")] = np.zeros(held[key].shape, np.int8)

    rewritten(directory, dict, edit)
    assert_same_values(load_pretrained(directory).model, load_pretrained(plain).model, "int8_a8")


def test_blocks_whose_scales_are_powers_of_two(make):
    directory, _ = make("qwen3_moe", CONVENTIONS["fp8-blocks"])
    module = "model.layers.0.self_attn.q_proj"
    exponents = np.random.default_rng(2).integers(110, 130, (4, 4)).astype(np.uint8)

    def edit(held):
        for key in list(held):
            if key.endswith("_scale_inv"):
                held[key] = np.full(held[key].shape, 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)
        held[f"{module}.weight_scale_inv"] = exponents.view(ml_dtypes.float8_e8m0fnu)

    rewritten(directory, dict, edit)
    codes = packing.load_bytes(directory / SINGLE)[f"{module}.weight"].astype(np.float32)
    kernel = load_pretrained(directory).model.layers[0].attention.q_proj.kernel
    assert kernel.format.name == "float8_e4m3fn_b8_se8m0"
    wide = np.kron(2.0 ** (exponents.astype(int) - 127), np.ones((8, 8)))
    np.testing.assert_array_equal(dequantize(kernel.tensor()), (codes * wide.astype(np.float32)).T)


def test_static_groups_go_by_place_in_spite_of_activation_order(make):
    directory, plain = make("qwen3_moe", CONVENTIONS["gptq"])
    rewritten(directory, lambda config: config.update(desc_act=True, static_groups=True))
    assert_same_values(load_pretrained(directory).model, load_pretrained(plain).model, "int4_g8_sf16")


def test_compressed_tensors_with_several_groups(make):
    """Names before patterns before classes; `format` of each group; a group that quantizes nothing."""
    directory, plain = make("qwen3_moe", CONVENTIONS["ct-int4"])
    module, expert = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts.{}.up_proj"
    rng, left = np.random.default_rng(5), "model.layers.1.self_attn.k_proj"
    made = {module: packing.plain("float", "tensor")(rng, 32, 32)}
    made |= {expert.format(e): packing.packed(8, group=16)(rng, 32, 16) for e in range(8)}

    def edit(tensors):
        as_stored(directory, plain, left)(tensors)
        for name, (stored, _) in made.items():
            for key in [key for key in tensors if key.startswith(f"{name}.")]:
                del tensors[key]
            tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}

    def change(config):
        args, base = packing.weights_args, config["config_groups"].pop("group_0")
        config["format"] = "mixed-precision"
        config["config_groups"] = {
            "all": base | {"format": "pack-quantized"},
            "experts": {
                "targets": [r"re:.*\.1\.mlp\.experts\.\d+\.up_proj$"], "weights": args("int", 8, "group", 16),
            },
            "one": {"targets": [module], "weights": args("float", 8, "tensor"), "format": "naive-quantized"},
            "none": {"targets": [left], "weights": None},
        }  # fmt: skip

    loaded = load_pretrained(rewritten(directory, change, edit)).model
    weights = {path: weight for path, weight in quantized_weights(loaded)}
    assert weights["layers.0.attention.o_proj.kernel"].format.name == "float8_e4m3fn_tensor"
    assert weights["layers.1.moe.experts.up_proj"].format.name == "int8_g16"
    assert weights["layers.0.moe.experts.up_proj"].format.name == "int4_g8"
    assert "layers.1.attention.k_proj.kernel" not in weights
    stack = np.stack([made[expert.format(e)][1].T for e in range(8)])
    np.testing.assert_array_equal(dequantize(weights["layers.1.moe.experts.up_proj"].tensor()), stack)


@pytest.mark.parametrize(
    "names",
    [["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"], ["mlp.gate"], None],
    ids=["paths", "part", "none"],
)
def test_lists_of_modules_that_are_not_converted(make, names):
    """The router is in full precision whether it is named or not, and "gate" does not mean `gate_proj`."""
    directory, plain = make("qwen3_moe", CONVENTIONS["awq"])
    rewritten(directory, lambda config: config.update(modules_to_not_convert=names))
    assert_same_values(load_pretrained(directory).model, load_pretrained(plain).model, "int4_g8_asym_sf16")


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("fp8-blocks", None, "activations are not quantized by groups"),
        ("ct-int4", packing.inputs_args("int"), "dynamic by token, is asked for"),
        ("ct-w8a8", packing.inputs_args("int") | {"symmetric": False}, "asymmetric int of 8 bits"),
    ],
)
def test_activations_that_are_not_quantized_as_asked_are_said_so(make, caplog, name, inputs, said):
    directory, _ = make("qwen3_moe", CONVENTIONS[name])
    if inputs is not None:
        rewritten(directory, lambda c: c["config_groups"]["group_0"].update(input_activations=inputs))
    with caplog.at_level(logging.WARNING):
        model = load_pretrained(directory).model
    assert said in caplog.text and "in the model's dtype" in caplog.text
    assert {weight.format.activations for _, weight in quantized_weights(model)} == {"none"}


def test_the_engine_runs_what_is_published(make):
    """The same tokens as from the plain checkpoint, which has the same values."""
    directory, plain = make("qwen3_moe", CONVENTIONS["gptq-act-order-asym-bf16"])
    params = SamplingParams(max_tokens=8, temperature=0.0)
    answers = [LLM(str(path)).generate([[1, 2, 3, 4, 5]], params) for path in (directory, plain)]
    quantized, expected = ([out.outputs[0].token_ids for out in outs] for outs in answers)
    assert quantized == expected
    with pytest.raises(ConfigError, match="load_format='dummy' makes no quantized weights"):
        LLM(str(directory), load_format="dummy")


def test_host_memory_while_loading(sources, tmp_path):
    """Beside the model at most what the largest weight's stack takes, and its matrices one at a time.

    What numpy and Python allocate is traced; host buffers that JAX takes over count as the model.
    """
    config = MODELS["wide"].replace(hidden_size=256, moe_intermediate_size=512, num_experts=16, num_layers=2,
                                    moe_layers=(True, True), sliding_windows=(None, None))  # fmt: skip
    save_pretrained(quantized_model(config, "int4_g64_asym"), tmp_path)
    tracemalloc.start()
    model = load_pretrained(tmp_path).model
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = sum(param[...].nbytes for _, param in iter_params(model))
    stack = max(sum(a.nbytes for a in jax.tree.leaves(w.tensor())) for _, w in quantized_weights(model))
    matrix = 256 * 512  # codes of a byte each
    assert peak <= held + stack + 8 * matrix, (peak, held, stack)


def test_a_plain_model_is_not_touched(sources):
    loaded = load_pretrained(sources / "qwen3_moe").model
    assert not dict(quantized_weights(loaded))
    assert all(isinstance(param[...], jax.Array) for _, param in iter_params(loaded))
