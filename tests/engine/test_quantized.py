"""The engine on quantized weights: the same tokens as dequantized ones, whatever runs them and where."""

import dataclasses
import functools
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moejax import LLM, EngineConfig, MoeConfig, ParallelConfig, SamplingParams, save_pretrained
from moejax.checkpoint.hf import load_pretrained
from moejax.core.config import LatentConfig
from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig, QuantRule
from moejax.engine.opening.quantize import check_split
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, initialize, iter_params, specs
from moejax.nn.quantized import QuantizedWeight, quantized_weights, weight_size
from moejax.ops.dispatch import choose_quantized
from moejax.perf.memory import held_weights, tensor_bytes
from moejax.ptq.on_load import QuantizeOnLoad
from moejax.quantization.arithmetic import dequantize
from moejax.quantization.formats import QTensor, parse_format
from moejax.quantization.rtn import round_to_nearest
from moejax.sharding.axes import Axes
from moejax.sharding.rules import shardings
from pallas_kernels.qformats import tile_codes
from tests.engine.mesh_models import ENGINE, FAMILIES, prompts
from tests.engine.test_mesh import LAYOUTS, RELATIVE, outcome
from tests.perf.steps import decode_step_cost

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def family(name: str) -> Any:
    """Wide enough for groups of 32 inputs and pieces of 64 on two devices."""
    config = FAMILIES[name].replace(hidden_size=128, moe_intermediate_size=128, intermediate_size=128)
    if config.shared_expert_intermediate_size:
        config = config.replace(shared_expert_intermediate_size=128)
    if config.latent is not None:
        return config.replace(
            latent=LatentConfig(64, rope_dim=16, nope_dim=16, value_dim=16, q_rank=64), head_dim=32
        )
    return config.replace(head_dim=32 if name == "qwen3_moe" else 16)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def made(name: str) -> str:
        directory = tmp_path_factory.mktemp(f"quantized-{name}")
        save_pretrained(Decoder(family(name), seed=3), directory)
        return str(directory)

    return made


def rtn(fmt: str, *rules: tuple[str, str], implementation: str = "auto") -> QuantConfig:
    chosen = [QuantRule(pattern, "rtn", form) for pattern, form in rules]
    return QuantConfig("rtn", fmt, rules=chosen, implementation=implementation)


def dequantized(llm: LLM, directory: Path) -> str:
    """A checkpoint of the very numbers that a quantized model stands for, in full precision."""
    config = llm.config
    plain = Decoder(config)
    values = {path: dequantize(w.tensor()) for path, w in quantized_weights(llm.model)}
    values |= {path: p[...] for path, p in iter_params(llm.model) if p.get_metadata("spec").shape}
    for path, param in iter_params(plain):
        value = values[path]
        if value.shape != param.get_metadata("spec").shape:  # experts that are stored transposed
            value = value.swapaxes(-1, -2)
        param.set_value(value)
    save_pretrained(plain, directory)
    return str(directory)


RUNS = {
    "qwen2_moe": rtn("int4_g32", ("*.shared_expert.*", "int8")),
    "qwen3_moe": rtn("int8", ("lm_head", "int8"), ("layers.0.moe.router", "int8")),
    "mixtral": rtn("nvfp4", ("*.attention.*", "fp8_block128")),
    "olmoe": rtn("int4_g64_asym", ("*.down_proj", "int8_asym")),
    "gpt_oss": rtn("mxfp4", ("*.up_proj", "int8")),
    "deepseek_v3": rtn("int4_g32", ("*.kv_b_proj", "int8"), ("*.kv_a_proj", "fp8_e4m3")),
}


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name != "qwen3_moe"),
    ],
)
def test_tokens_are_those_of_the_dequantized_weights(name: str, model: Any, tmp_path: Path) -> None:
    """Every family, with prompts in chunks and a cache so small that sequences are preempted."""
    scarce = dataclasses.replace(
        ENGINE, max_num_batched_tokens=8, block_size=4, num_blocks=13, token_buckets=[8], block_buckets=[13],
        moe=MoeConfig(), strict_compile=True,
    )  # fmt: skip
    asked = prompts(6)
    codes = LLM(model(name), engine=scarce, quant=RUNS[name])
    codes.warmup(max_total_len=28, sampling_params=[GREEDY])
    got = [out.outputs[0].token_ids for out in codes.generate(asked, GREEDY)]
    codes.engine.scheduler.check_integrity()
    assert codes.stats()["preemptions"] > 0 and not codes.ledger.recompiles
    floats = LLM(dequantized(codes, tmp_path), engine=scarce)
    assert got == [out.outputs[0].token_ids for out in floats.generate(asked, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dequantize", "pallas_triton"])
def test_each_implementation_gives_the_same_tokens(implementation: str) -> None:
    asked = prompts(2)
    engine = dataclasses.replace(ENGINE, max_num_seqs=2, seq_buckets=[2], num_blocks=12, block_buckets=[12],
                                 moe=MoeConfig())  # fmt: skip
    config = family("qwen2_moe").replace(num_layers=1, moe_layers=(True,), sliding_windows=(None,))
    found = []
    for chosen in ("xla", implementation):
        quant = rtn("int4_g32", implementation=chosen)
        llm = LLM(config, load_format="dummy", engine=engine, quant=quant)
        found.append([out.outputs[0].token_ids for out in llm.generate(asked, GREEDY)])
        values = {r.key: r.value for r in llm.resolutions}
        assert values["quant.implementation"] == chosen
        assert values["quant.layout"] == ("tiled" if chosen == "pallas_triton" else "plain")
        assert (values["engine.moe.grouped_matmul"] == "pallas_triton") == (chosen == "pallas_triton")
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_block128"])
def test_float8_as_bits_is_float8(fmt: str, model: Any, tmp_path: Path) -> None:
    """Codes kept as bits give the same tokens and logprobs, and the same checkpoint."""
    found = []
    for layout in ("auto", "plain"):
        llm = LLM(model("mixtral"), engine=ENGINE, quant=dataclasses.replace(rtn(fmt), layout=layout))
        values = {r.key: r.value for r in llm.resolutions}
        assert values["quant.layout"] == ("bits" if layout == "auto" else "plain")
        kept = {str(weight.tensor().values.dtype) for _, weight in quantized_weights(llm.model)}
        assert kept == ({"uint8"} if layout == "auto" else {"float8_e4m3fn"})
        asked = dataclasses.replace(GREEDY, logprobs=1)
        outputs = [out.outputs[0] for out in llm.generate(prompts(2), asked)]
        llm.save_pretrained(tmp_path / layout)
        held = load_pretrained(tmp_path / layout).model
        weights = {path: weight.tensor() for path, weight in quantized_weights(held)}
        found.append(([out.token_ids for out in outputs], [out.logprobs for out in outputs], weights))
    assert found[0][0] == found[1][0]
    for ours, plain in zip(found[0][1], found[1][1], strict=True):
        for one, other in zip(ours, plain, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-5
    jax.tree.map(np.testing.assert_array_equal, found[0][2], found[1][2])
    assert {weight.values.dtype for weight in found[0][2].values()} == {np.dtype("float8_e4m3fn")}


def test_what_is_resolved_and_reported(model: Any) -> None:
    llm = LLM(model("qwen3_moe"), engine=ENGINE, quant=rtn("int4_g32", ("lm_head", "int8")))
    found = {r.key: r for r in llm.resolutions}
    # Three attention layers of four projections, two sparse and one dense layer of three, and the head.
    assert found["quant.format"].value == "21 × int4_g32, 1 × int8"
    assert found["quant.implementation"].value == "xla"
    report = llm.quant_report
    assert report is not None and len(report.weights) == 22
    assert f"{report.quantized_bits_per_weight:.3f} bits" in found["quant.format"].reason
    held, numbers = weight_size(llm.model)
    assert held == report.bytes == sum(p[...].nbytes for _, p in iter_params(llm.model))
    assert numbers == report.num_params and report.float_bytes == 4 * numbers
    assert all(0 < error < 0.2 for w in report.weights for error in w.weight_error)
    plain = LLM(model("qwen3_moe"), engine=ENGINE)
    assert plain.quant_report is None and not any(r.key == "quant.format" for r in plain.resolutions)


def test_no_two_float_weights_are_alive(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are quantized as they come: while one is stored, no earlier one is there in floating point."""
    earlier: list[Any] = []
    plain = QuantizeOnLoad.take

    def watch(self: Any, place: Any, name: str, param: Any, value: Any) -> None:
        assert all(reference() is None for reference in earlier)
        plain(self, place, name, param, value)
        if name in self._plan:
            assert isinstance(param.get_value(), jax.ShapeDtypeStruct)
            earlier.append(weakref.ref(value))

    monkeypatch.setattr(QuantizeOnLoad, "take", watch)
    LLM(model("mixtral"), engine=ENGINE, quant=rtn("int8"))
    LLM(family("mixtral"), engine=ENGINE, quant=rtn("int8"), load_format="dummy")


def test_dummy_weights_are_those_of_the_float_model() -> None:
    """The same codes as quantizing what the seed gives, whatever the layout."""
    config = family("qwen2_moe")
    llm = LLM(config, engine=ENGINE, quant=rtn("int8"), load_format="dummy", seed=5)
    plain = Decoder(config)
    initialize(plain, 5)
    values = dict(iter_params(plain))
    for path, weight in quantized_weights(llm.model):
        w = np.asarray(values[path][...], np.float64)
        step = np.asarray(weight.scales[...], np.float64)
        assert np.abs(w - np.asarray(dequantize(weight.tensor()), np.float64)).max() <= 0.5001 * step.max()


# --- On a mesh ----------------------------------------------------------------------------------------------

MESHES = {
    ("tp2", "qwen2_moe"): ({"tp": 2}, rtn("int4_g32", ("*.shared_expert.*", "w8a8"))),
    ("ep4_tp2", "qwen3_moe"): (LAYOUTS["ep4_tp2"], rtn("w8a8", ("lm_head", "int8"))),
    ("dp_attention_ep4_tp2", "olmoe"): (LAYOUTS["dp_attention_ep4_tp2"], rtn("int4_g64_asym")),
    ("dp_attention_ep8", "mixtral"): (LAYOUTS["dp_attention_ep8"], rtn("fp8")),
    ("pp2_ep4", "qwen3_moe"): (LAYOUTS["pp2_ep4"], rtn("int8")),
}


def agree_but_for_ties(got: Any, want: Any) -> None:
    """Equal tokens, and log-probabilities half of them as close as of floats.

    Sums in another order differ by roundings, and so does a weight's quotient by its scale from one compiled
    program to another: a number next to the middle of two codes may take either, and what comes after it, a
    near tie of the router included, is then that of another code.
    """
    assert got[0] == want[0]
    for a, b in zip(got[1:], want[1:], strict=True):
        assert np.median(np.abs(a - b)) <= RELATIVE * np.abs(b).max()


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("case", MESHES, ids="-".join)
def test_a_mesh_gives_what_one_device_gives(case: tuple[str, str], model: Any) -> None:
    parallel, quant = MESHES[case]
    directory = model(case[1])
    alone = LLM(directory, engine=ENGINE, quant=quant)
    llm = LLM(directory, engine=ENGINE, quant=quant, parallel=ParallelConfig(**parallel))
    codes = dict(quantized_weights(alone.model))
    for stage in llm.stages:
        for path, weight in quantized_weights(stage):
            one, spread = (
                w.values.get_metadata("spec").without_padding(np.asarray(w.values[...])).view(np.uint8)
                for w in (codes[path], weight)
            )
            assert np.mean(one != spread) < 1e-4, path
    agree_but_for_ties(outcome(llm, 6), outcome(alone, 6))


@pytest.mark.multidevice
@pytest.mark.slow
@pytest.mark.parametrize("product", ["blocks_mixed", "blocks_uniform", "pallas_triton"])
def test_scales_of_hidden_rows_are_found_together(product: str, model: Any) -> None:
    """w8a8 with a split hidden dimension, by each way of running experts in blocks."""
    engine = dataclasses.replace(ENGINE, moe=MoeConfig(grouped_matmul=product))  # type: ignore[arg-type]
    implementation = "pallas_triton" if product == "pallas_triton" else "xla"
    quant, directory = rtn("w8a8", implementation=implementation), model("mixtral")
    single = outcome(LLM(directory, engine=engine, quant=quant), 4)
    llm = LLM(directory, engine=engine, quant=quant, parallel=ParallelConfig(tp=2))
    agree_but_for_ties(outcome(llm, 4), single)


@pytest.mark.slow
@pytest.mark.multidevice
def test_moving_experts_moves_their_codes(model: Any) -> None:
    """Tokens do not change when quantized experts and their replicas move, and nothing is compiled again."""
    engine = dataclasses.replace(ENGINE, strict_compile=True)
    parallel = ParallelConfig(ep=4, attention="data", redundant_experts=4)
    quant = rtn("int4_g32", ("*.down_proj", "int8_asym"))
    llm = LLM(model("qwen2_moe"), engine=engine, quant=quant, parallel=parallel)
    llm.warmup(max_total_len=28, sampling_params=[GREEDY])
    asked = prompts(6)
    before = [out.outputs[0].token_ids for out in llm.generate(asked, GREEDY)]
    loads = np.ones((2, 16), np.int64)
    loads[:, :3] = 40
    done = llm.rebalance(loads)
    assert done.applied and done.comparison.bytes_moved > 0
    assert before == [out.outputs[0].token_ids for out in llm.generate(asked, GREEDY)]
    assert not llm.ledger.recompiles


@pytest.mark.multidevice
@pytest.mark.parametrize("axes", [("embed", "expert_mlp"), ("expert_mlp", "embed")], ids="-".join)
def test_each_device_has_tiles_of_its_own(axes: tuple[str, str]) -> None:
    """Outputs of any number, or inputs, over devices: the tiles of each part are a part of the tiles."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    spread = Axes(sizes=(("ep", 2), ("tp", 2)), local=("ep",), tp=("tp",))
    fmt, spec = parse_format("int4_g64_asym"), ParamSpec((4, 128, 70), ("expert", *axes), "float32")
    q = round_to_nearest(jax.random.normal(jax.random.key(0), spec.shape), fmt)
    weight, empty = QuantizedWeight(spec, fmt), QuantizedWeight(spec, fmt)
    places = shardings(specs(weight), mesh, spread)
    parts = {name: jax.device_put(getattr(q, name), place) for name, place in places.items()}
    weight.set(QTensor.of(parts, fmt, 128))
    weight.tile(), empty.tile()
    values = weight.tensor().values
    assert values.sharding == shardings(specs(weight), mesh, spread)["values"]
    assert weight.tensor().shape == spec.shape and specs(empty) == specs(weight)
    np.testing.assert_array_equal(values, tile_codes(q.values))
    np.testing.assert_array_equal(dequantize(weight.tensor()), dequantize(q))


@pytest.mark.slow
@pytest.mark.multidevice
def test_tiles_through_split_experts_a_move_and_a_checkpoint(model: Any, tmp_path: Path) -> None:
    """Tiles of experts on 2 x 2 devices, moved and saved: tokens as with codes in rows, the same codes."""
    engine = dataclasses.replace(ENGINE_DEFAULT_MOE, max_num_seqs=2, max_num_batched_tokens=16)
    parallel = ParallelConfig(ep=2, tp=2, attention="data", redundant_experts=2)
    quant = rtn("int4_g64", ("*attention*", "int8"), implementation="pallas_triton")
    asked, short = prompts(2), dataclasses.replace(GREEDY, max_tokens=3)

    def opened(**options: Any) -> LLM:
        return LLM(model("qwen2_moe"), engine=engine, **options)

    def tokens(llm: LLM) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in llm.generate(asked, short)]

    tiled = opened(quant=quant, parallel=parallel)
    rows = opened(quant=dataclasses.replace(quant, layout="plain"), parallel=parallel)
    assert {r.key: r.value for r in tiled.resolutions}["quant.layout"] == "tiled"
    want = tokens(rows)
    assert tokens(tiled) == want
    loads = np.ones((2, 16), np.int64)
    loads[:, :3] = 40
    assert tiled.rebalance(loads).applied
    assert tokens(tiled) == want
    save_pretrained(tiled.model, tmp_path)
    saved = dict(quantized_weights(load_pretrained(tmp_path).model))
    alone = dict(quantized_weights(opened(quant=dataclasses.replace(quant, implementation="xla")).model))
    assert saved.keys() == alone.keys()
    for path, weight in saved.items():
        np.testing.assert_array_equal(weight.values[...], alone[path].values[...])


@pytest.mark.multidevice
def test_replicas_hold_the_same_codes(model: Any) -> None:
    parallel = ParallelConfig(ep=4, attention="data", redundant_experts=4)
    llm = LLM(model("qwen2_moe"), engine=ENGINE, quant=rtn("int8"), parallel=parallel)
    for path, weight in quantized_weights(llm.model):
        if "experts" in path:
            values = np.asarray(weight.values[...])
            assert values.shape[0] == 20
            np.testing.assert_array_equal(values[16:], values[:4])


class TestSplit:
    SPEC = ParamSpec((192, 256), ("heads", "embed"), "float32")

    def axes(self, devices: int) -> Axes:
        return Axes(sizes=(("tp", devices),), tensor=("tp",), tp=("tp",))

    @pytest.mark.parametrize(
        ("fmt", "devices", "words"),
        [
            ("int4_g64", 2, r"groups of 64 inputs, which 192 inputs over 2 devices \(96 each\) cut"),
            ("int4", 2, r"pieces of packed bytes of 64 inputs, which 192 inputs over 2 devices"),
            ("int8_g32", 4, r"groups of 32 inputs, which 192 inputs over 4 .*at most 2 devices"),
            ("fp8_block128", 2, r"groups of 128 inputs, which 192 inputs"),
        ],
    )
    def test_cut_groups_and_pieces_are_named(self, fmt: str, devices: int, words: str) -> None:
        with pytest.raises(ConfigError, match=rf"layers\.0\.o_proj: .*{words}"):
            check_split("layers.0.o_proj", self.SPEC, parse_format(fmt), self.axes(devices))

    @pytest.mark.parametrize(
        ("fmt", "devices"), [("int4_g64", 3), ("int8", 4), ("int8_g32", 2), ("int4", 3), ("int4_g64", 1)]
    )
    def test_whole_ones_pass(self, fmt: str, devices: int) -> None:
        check_split("o_proj", self.SPEC, parse_format(fmt), self.axes(devices))

    def test_outputs_are_cut_by_blocks_alone(self) -> None:
        spec = ParamSpec((256, 192), ("embed", "heads"), "float32")
        check_split("q_proj", spec, parse_format("int4_g64"), self.axes(2))
        with pytest.raises(ConfigError, match=r"groups of 128 outputs, which 192 outputs over 2"):
            check_split("q_proj", spec, parse_format("fp8_block128"), self.axes(2))


# --- Errors -------------------------------------------------------------------------------------------------


class TestErrors:
    def test_kernels_for_a_format_without(self) -> None:
        quant = rtn("int8", ("*.down_proj", "nvfp4"), implementation="pallas_triton")
        words = r"quant.implementation=pallas_triton: .*layers\.0\.\S*down_proj: nvfp4: no kernel"
        with pytest.raises(ConfigError, match=words):
            LLM(family("olmoe"), engine=ENGINE_DEFAULT_MOE, quant=quant, load_format="dummy")

    def test_kernels_with_another_expert_product(self) -> None:
        quant = rtn("int8", implementation="pallas_triton")
        with pytest.raises(ConfigError, match=r"the expert products run on ragged_dot"):
            LLM(family("olmoe"), engine=ENGINE, quant=quant, load_format="dummy")

    @pytest.mark.parametrize(
        ("platform", "capability", "words"),
        [("gpu", "7.5", "compute capability 7.5, and they need 8.0"), ("tpu", None, "for GPUs, .*a tpu")],
    )
    def test_kernels_on_a_device_that_cannot(self, platform: str, capability: str, words: str) -> None:
        assert choose_quantized("auto", platform, capability).value == "xla"
        with pytest.raises(ConfigError, match=words):
            choose_quantized("pallas_triton", platform, capability)

    def test_auto_on_a_gpu(self) -> None:
        assert choose_quantized("auto", "gpu", "8.0").value == "pallas_triton"
        choice = choose_quantized("auto", "gpu", "8.0", "down_proj: nvfp4: no kernel")
        assert choice.value == "xla" and "nvfp4" in choice.reason

    def test_calibration_needs_a_tokenizer_and_one_device(self, model: Any) -> None:
        quant = QuantConfig("gptq", "int4_g32")
        with pytest.raises(ConfigError, match=r"quant.method=gptq calibrates with text, .*no tokenizer"):
            LLM(model("olmoe"), engine=ENGINE, quant=quant)
        with pytest.raises(ConfigError, match=r"calibrates on one device: .*save_pretrained"):
            LLM(model("olmoe"), engine=ENGINE, quant=quant, parallel=ParallelConfig(ep=2))

    def test_an_unused_rule(self) -> None:
        with pytest.raises(ConfigError, match="is not used"):
            LLM(family("olmoe"), engine=ENGINE, quant=rtn("int8", ("nothing", "int8")), load_format="dummy")


ENGINE_DEFAULT_MOE: EngineConfig = dataclasses.replace(ENGINE, moe=MoeConfig())


# --- Bytes --------------------------------------------------------------------------------------------------


def test_costs_count_what_is_held() -> None:
    """A decode step reads codes and scales; an expert's bytes are those of its part of the stacks."""
    config = family("qwen2_moe")
    quant = rtn("int4_g32", ("layers.1.moe.experts.*", "int8"))
    llm = LLM(config, engine=ENGINE, quant=quant, load_format="dummy")
    declared = specs(llm.model)
    held = held_weights(llm.config, declared)
    size = 3 * 128 * 128
    of_experts = {key: part for key, part in held.items() if key[1] in ("experts_gate_up", "experts_down")}
    expert = [sum(part for (layer, _), part in of_experts.items() if layer == n) for n in (0, 1)]
    assert expert == [size / 2 + size / 32 * 2, size + 3 * 128 * 4]
    hits = np.array([3.0, 5.0])
    cost = decode_step_cost(llm.config, 2, 10.0, hits, weights=held)
    always = sum(held.values()) - sum(of_experts.values())
    assert cost.weight_bytes == always + 3 * expert[0] + 5 * expert[1]
    plain = decode_step_cost(llm.config, 2, 10.0, hits)
    assert plain.cache_bytes == cost.cache_bytes and plain.flops == cost.flops
    floats = held_weights(config, specs(Decoder(config)))
    gates = 2 * 128 * 4  # of the shared experts, which the formula leaves out
    assert decode_step_cost(config, 2, 10.0, hits, weights=floats).weight_bytes == pytest.approx(
        plain.weight_bytes + gates
    )
    whole = sum(tensor_bytes(name, spec, config, ParallelConfig()) for name, spec in declared.items())
    assert whole == weight_size(llm.model)[0]
