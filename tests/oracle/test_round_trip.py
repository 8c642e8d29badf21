"""Checkpoints that go from one library to the other and back."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.numpy import load_file, save_file

from moejax import LLM, EngineConfig, QuantConfig, SamplingParams
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.models.registry import config_from_hf
from moejax.nn.param import iter_params, num_params
from tests.decoding import forward
from tests.examples import slow_but
from tests.models.published import PUBLISHED
from tests.numerics import assert_close, relative_l2
from tests.oracle import hf
from tests.oracle.cases import CASES, DENSE, by_name, fast_names, hf_fields

pytestmark = pytest.mark.oracle

NAMES = [case.name for case in CASES]
PER_FAMILY = [
    "mixtral-all-experts-mqa-tied-linear", "qwen2_moe-dense-layer", "qwen3_moe-dense-layers-bias-tied",
    "olmoe-clip-bias-gqa", "glm4_moe-plain", "dots1-plain", "minimax_m2-plain", "minimax-factors",
    "ernie4_5_moe-plain",
    "hunyuan_v1_moe-plain",
    "llama-biases-mqa-tied-llama3", "qwen3-window-biases-tied", "granitemoe-factors",
    "gemma3_text-windows-linear", "phimoe-biases-window-mqa",
]  # fmt: skip

# What follows from the configuration and is no weight, though transformers stores it.
DECAY = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def our_logits(model, tokens):
    return np.asarray(forward(model, tokens)[0])


@pytest.mark.parametrize("limit", [5_000_000_000, 20_000], ids=["single", "sharded"])
@pytest.mark.parametrize("name", slow_but(fast_names(), NAMES))
def test_what_we_save_loads_in_transformers(tmp_path, pair, name, limit):
    """Every tensor arrives bit for bit, every field means the same, and the logits are equal."""
    both = pair(name)
    save_pretrained(both.ours, tmp_path, max_shard_bytes=limit)
    assert (tmp_path / "model.safetensors").exists() == (limit > 20_000)
    # How transformers cuts prompts for linear attention, which moves last bits, is no field of ours.
    cut = {name: value for name, value in both.case.fields.items() if name == "block_size"}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **cut
    )
    info["missing_keys"] = [key for key in info["missing_keys"] if not key.endswith(DECAY)]
    assert not any(info.values()), info
    theirs = dict(both.theirs.named_parameters())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[key]), key
    tokens = hf.random_tokens(96, 2, 40)
    # transformers with transformers: what differs is whether the configuration survived, and in a last bit
    # where a file puts a tensor in memory.
    assert relative_l2(hf.logits(model.eval(), tokens), hf.logits(both.theirs, tokens)) <= 1e-6


@pytest.mark.parametrize("quant", [None, QuantConfig("rtn", "int8")], ids=["full", "int8"])
def test_a_saved_engine_opens_in_transformers_with_its_text(tmp_path, quant):
    """The same token ids of a text, the same special tokens, the same text of these ids."""
    llm = LLM("tiny", engine=EngineConfig(compile_cache=False), quant=quant)
    llm.save_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "saved")
    text = "def route(tokens):\n    return"
    ids = llm.tokenizer.encode(text)
    assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == llm.tokenizer.decode(ids)
    assert generation.eos_token_id == tokenizer.eos_token_id == llm.eos_token_ids[0]
    if quant is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        theirs = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
        ours = llm.generate(text, SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0]
        assert tokenizer.decode(theirs) == ours.text


@pytest.mark.parametrize("name", PER_FAMILY)
def test_a_model_born_here_gives_the_same_logits_there(tmp_path, name):
    case = by_name(name)
    config = config_from_hf(hf_fields(case) | {"model_type": case.family})
    model = Decoder(config, seed=5)
    save_pretrained(model, tmp_path)
    tokens = hf.random_tokens(96, 2, 40)
    expected = hf.logits(hf.load(tmp_path), tokens)
    assert expected.std() > 0.5
    assert_close(our_logits(model, tokens), expected, 1e-4)
    assert relative_l2(our_logits(model, tokens), expected) <= 1e-5


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PER_FAMILY)
def test_what_transformers_saves_loads_here(tmp_path, name, dtype, max_shard_size):
    """In its own dtype bit for bit, and in float32 exactly the widened values."""
    case = by_name(name)._replace(dtype=dtype)
    hf.save(hf.build(case), tmp_path, dtype, max_shard_size=max_shard_size)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size == "20KB")
    stored = {key: value for path in files for key, value in load_file(path).items()}

    same, config = load_pretrained(tmp_path)
    wide, _ = load_pretrained(tmp_path, dtype="float32")
    assert config.dtype == dtype
    seen = 0
    for (path, param), (_, widened) in zip(iter_params(same), iter_params(wide), strict=True):
        value = np.asarray(param[...])
        # What is added to a router's scores is kept as they are.
        assert str(value.dtype) == ("float32" if path.endswith("correction_bias") else dtype)
        np.testing.assert_array_equal(np.asarray(widened[...]), value.astype(np.float32))
        seen += value.size
        # Bits, not values: compare the bytes of what the file holds for this parameter.
        for key, part in parts_of(path, value, case.family):
            assert stored[key].tobytes() == np.ascontiguousarray(part).tobytes(), key
    assert seen == sum(value.size for key, value in stored.items() if not key.endswith(DECAY))

    tokens = hf.random_tokens(96, 1, 30)
    assert_close(our_logits(wide, tokens), hf.logits(hf.load(tmp_path), tokens), 1e-4)


def parts_of(path, value, family):
    """The checkpoint keys of a parameter, worked out by hand for some of each kind."""
    steps = path.split(".")
    if path == "embedding.table":
        yield "model.embed_tokens.weight", value
    elif path.endswith("attention.q_proj.kernel"):
        yield f"model.layers.{steps[1]}.self_attn.q_proj.weight", value.T
    elif path.endswith("moe.experts.up_proj") and family == "granitemoe":
        pass  # a half of a tensor
    elif path.endswith("moe.experts.up_proj"):
        w3 = family in ("mixtral", "minimax", "minimax_m2", "phimoe")
        block, up = ("block_sparse_moe", "w3") if w3 else ("mlp", "up_proj")
        for e in range(value.shape[0]):
            yield f"model.layers.{steps[1]}.{block}.experts.{e}.{up}.weight", value[e].T


@pytest.mark.parametrize("name", PER_FAMILY)
def test_the_layout_in_memory_loads_too(tmp_path, pair, name):
    """A plain dump of the state dictionary: experts stacked, gate and up in one tensor."""
    from safetensors.torch import save_file

    both = pair(name)
    tied = both.ours.config.tie_word_embeddings
    state = {
        key: value.contiguous().clone()
        for key, value in both.theirs.state_dict().items()
        if not (tied and key == "lm_head.weight")
    }
    assert any(key.endswith("experts.gate_up_proj") for key in state) or by_name(name).family in DENSE
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((both.directory / "config.json").read_text())
    loaded, _ = load_pretrained(tmp_path, dtype="float32")
    for (key, param), (_, expected) in zip(iter_params(loaded), iter_params(both.ours), strict=True):
        np.testing.assert_array_equal(param[...], expected[...], err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_config_means_the_same_in_both(pair, name):
    """What transformers wrote, read and written by us, is the same configuration for transformers."""
    both = pair(name)
    raw = json.loads((both.directory / "config.json").read_text())
    ours = config_from_hf(raw)
    from moejax.models.registry import config_to_hf

    written = config_to_hf(ours)
    config_class = hf.CONFIGS[both.case.family]
    theirs, back = config_class(**raw).to_dict(), config_class(**written).to_dict()
    for name_ in ("transformers_version", "dtype", "_name_or_path", "architectures"):
        theirs.pop(name_, None), back.pop(name_, None)
    # Ours names the dense layers one by one instead of by step, and always says the head's width.
    for either in (theirs, back):
        layers = range(either["num_hidden_layers"])
        step, dense = either.pop("decoder_sparse_step", 1), either.pop("mlp_only_layers", None) or []
        either["sparse"] = [i not in dense and (i + 1) % step == 0 for i in layers]
        head = either.pop("head_dim", None) or either["hidden_size"] // either["num_attention_heads"]
        either["head_dim"] = head
        for name_ in ("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "block_size"):
            either.pop(name_, None)
        if all(either["sparse"]) and "moe_intermediate_size" in either:
            either.pop("intermediate_size")
        either["rope_parameters"] = {k: v for k, v in either["rope_parameters"].items() if v is not None}
    if theirs["rope_parameters"].get("alpha"):  # ours writes the base that it makes
        alpha, exponent = theirs["rope_parameters"]["alpha"], theirs["head_dim"] / (theirs["head_dim"] - 2)
        base = theirs["rope_parameters"]["rope_theta"] * alpha**exponent
        theirs["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    if theirs["rope_parameters"].get("rope_type") == "yarn":
        theirs["rope_parameters"] = defaults | theirs["rope_parameters"]
    # Dropout, auxiliary loss and the like stay at transformers' defaults, which the cases do not change.
    assert back == theirs


@pytest.mark.parametrize("layout", ["hub", "model.language_model."])
def test_the_text_part_of_a_model_with_images(tmp_path, pair, layout):
    """Its configuration and its tensors lie a level deeper, as on the hub or as transformers 5 has them; the
    others are passed over, and the same logits come of it."""
    both = pair("gemma3_text-windows-linear")
    stored = load_file(next(both.directory.glob("*.safetensors")))
    outer = "language_model.model." if layout == "hub" else layout
    renamed = {key.replace("model.", outer, 1): value for key, value in stored.items()}
    images = {"vision_tower.x.weight", "multi_modal_projector.mm_soft_emb_norm.weight"}
    extra = {name if layout == "hub" else f"model.{name}": np.zeros(3, np.float32) for name in images}
    save_file(renamed | extra, tmp_path / "model.safetensors")
    text = json.loads((both.directory / "config.json").read_text())
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "vision_config": {}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"mm_tokens_per_image": 256}))
    model, read = load_pretrained(tmp_path, dtype="float32")
    assert read.family == "gemma3_text" and read.local_rope.theta == 100.0
    tokens = hf.random_tokens(96, 1, 30)
    np.testing.assert_array_equal(our_logits(model, tokens), our_logits(both.ours, tokens))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    """transformers counts the same parameters for the published configuration."""
    published = PUBLISHED[name]
    family = published.fields["model_type"]
    fields = {k: v for k, v in published.fields.items() if k != "model_type"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf.CONFIGS[family](**fields))
    theirs = sum(p.numel() for p in model.parameters())
    theirs += sum(b.numel() for name, b in model.named_buffers() if name.endswith("correction_bias"))
    assert theirs == published.parameters
    assert num_params(Decoder(config_from_hf(published.fields), moe=MoeConfig())) == published.parameters
