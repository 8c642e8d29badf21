"""Reading and writing `config.json`: published models, both generations of rope fields, what is refused."""

import copy
import gc
import json
from pathlib import Path

import jax
import pytest
import yaml

from moejax.core.config import ClampedSwiglu, ModelConfig, NormedResidual, RopeConfig, RouterConfig
from moejax.core.errors import ConfigError
from moejax.models.decoder import Decoder
from moejax.models.registry import FAMILIES, config_from_hf, config_to_hf
from moejax.nn.param import iter_params, num_params
from tests.models.published import PUBLISHED
from tests.oracle.cases import CASES, by_name, hf_fields

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"
SHAPES = [yaml.safe_load(path.read_text()).get("hf_config") for path in CONFIGS.glob("*.yaml")]
BY_FAMILY = {fields["model_type"]: fields for fields in SHAPES if fields}
BY_FAMILY |= {published.fields["model_type"]: published.fields for published in PUBLISHED.values()}
TWO_LEVELS = {"model_type": "two_level_moe", "n_group": 16, "topk_group": 4}
BY_FAMILY["two_level_moe"] = BY_FAMILY["qwen3_moe"] | TWO_LEVELS


def fields_of(family, **changes):
    return copy.deepcopy(BY_FAMILY[family]) | changes


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model(name):
    """Its configuration reads, and the abstract model has the published number of parameters, unallocated."""
    fields, parameters, billions = PUBLISHED[name]
    config = config_from_hf(fields)
    gc.collect()  # arrays of earlier tests, which may else go at any time
    live = len(jax.live_arrays())
    model = Decoder(config)
    assert num_params(model) == parameters
    assert round(parameters / 1e9, 1) == billions
    assert len(jax.live_arrays()) == live
    assert all(isinstance(p.get_value(), jax.ShapeDtypeStruct) for _, p in iter_params(model))
    assert config.dtype == "bfloat16"


def test_published_fields_arrive():
    read = {name: config_from_hf(published.fields) for name, published in PUBLISHED.items()}
    mixtral, qwen2, qwen3, olmoe, glm, dots, minimax, ernie, hunyuan, *others = read.values()
    gpt_oss, llama, dense_qwen, granite, gemma = others
    assert (mixtral.head_dim, mixtral.norm_topk_prob, mixtral.qk_norm) == (128, True, "none")
    assert mixtral.sliding_windows == (None,) * 32 and mixtral.rope == RopeConfig(theta=1e6)
    assert mixtral.bos_token_id == 1 and mixtral.eos_token_ids == (2,)
    assert (qwen2.qkv_bias, qwen2.attention_out_bias, qwen2.norm_topk_prob) == (True, False, False)
    assert qwen2.shared_expert_intermediate_size == 5632 and qwen2.sliding_windows == (None,) * 24
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.norm_topk_prob) == (128, "head", True)
    assert qwen3.head_dim * qwen3.num_heads != qwen3.hidden_size
    assert (olmoe.qk_norm, olmoe.clip_qkv, olmoe.norm_topk_prob, olmoe.rms_norm_eps) == (
        "projection",
        None,
        False,
        1e-5,
    )
    assert olmoe.moe_intermediate_size == 1024 and olmoe.pad_token_id == 1
    assert (glm.rotary_dim, glm.qk_norm, glm.qkv_bias, glm.attention_out_bias) == (64, "none", True, False)
    assert glm.mtp_layers == 1 and glm.moe_layers == (False, *(True,) * 45)
    assert glm.shared_expert_intermediate_size == 1408 and not glm.shared_expert_gate
    assert dots.router == RouterConfig("sigmoid", True, group_score="top2", scaling=2.5)
    assert dots.sliding_windows == (None,) * 62 and dots.shared_expert_intermediate_size == 2816
    assert (minimax.rotary_dim, minimax.head_dim, minimax.qk_norm) == (64, 128, "projection")
    assert minimax.router == RouterConfig("sigmoid", True) and minimax.mtp_layers == 3
    assert ernie.moe_layers == (False, *(True,) * 27) and ernie.rope.interleaved and ernie.mtp_layers == 1
    assert ernie.router == RouterConfig(correction_bias=True, norm_min=1e-12)
    assert (hunyuan.num_experts_per_tok, hunyuan.qk_norm) == (8, "rotated")
    assert hunyuan.rope == RopeConfig(theta=1e4 * 1000.0 ** (128 / 126))
    assert not any(llama.moe_layers) and (llama.rope.kind, llama.rope.factor) == ("llama3", 8.0)
    assert (dense_qwen.qk_norm, dense_qwen.sliding_windows) == ("head", (None,) * 36)
    factors = granite.attention_scale, granite.embedding_multiplier, granite.residual_multiplier
    assert (*factors, granite.logits_scaling) == (0.015625, 12.0, 0.22, 6.0)
    assert gemma.sliding_windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert (gemma.rope.theta, gemma.local_rope, gemma.attention_scale) == (1e6, RopeConfig(), 1 / 16)
    assert gemma.post_norms and gemma.eos_token_ids == (1, 106)
    assert gpt_oss.expert_swiglu == ClampedSwiglu(7.0, 1.702) and gpt_oss.sliding_windows == (128, None) * 12
    assert (gpt_oss.rope.kind, gpt_oss.rope.theta, gpt_oss.rope.truncate) == ("yarn", 1.5e5, False)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_round_trip_of_every_case(case):
    """read(write(config)) == config, through JSON text."""
    fields = json.loads(json.dumps(hf_fields(case) | {"model_type": case.family, "dtype": case.dtype}))
    config = config_from_hf(fields)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    assert config.dtype == case.dtype


@pytest.mark.parametrize("name", PUBLISHED)
def test_round_trip_of_published_models(name):
    config = config_from_hf(PUBLISHED[name].fields)
    written = config_to_hf(config)
    assert config_from_hf(written) == config
    assert written["architectures"] == PUBLISHED[name].fields["architectures"]
    assert written["model_type"] == PUBLISHED[name].fields["model_type"]


def test_two_levels_round_trip_and_name_their_groups() -> None:
    raw = fields_of("two_level_moe")
    config = config_from_hf(raw)
    assert config.router == RouterConfig(groups=16, top_groups=4, group_gate=True)
    assert config_from_hf(config_to_hf(config)) == config
    with pytest.raises(ConfigError, match="n_group"):
        config_from_hf({key: value for key, value in raw.items() if key != "n_group"})
    with pytest.raises(ConfigError, match="n_group 7"):
        config_from_hf(raw | {"n_group": 7})


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("deepseek_v2", "n_group"),
        ("deepseek_v3", "topk_group"),
        ("deepseek_v3", "kv_lora_rank"),
        ("glm4_moe", "n_group"),
        ("qwen3_moe", "num_attention_heads"),
    ],
)
def test_what_must_be_at_least_one_is_named_as_in_the_file(model_type: str, field: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^config\.json: {field} must be an integer of at least 1, got 0$"
    ):
        config_from_hf(fields_of(model_type) | {field: 0})


def test_several_end_tokens_round_trip():
    config = config_from_hf(fields_of("qwen3_moe", eos_token_id=[151645, 151643]))
    assert config.eos_token_ids == (151645, 151643)
    assert config_from_hf(config_to_hf(config)) == config


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192,
         "attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {"rope_type": "llama3", **LLAMA3},
    ],
    ids=lambda s: "none" if s is None else s.get("rope_type", s.get("type")),
)  # fmt: skip
# Gemma 3 has one for each kind of layer.
@pytest.mark.parametrize("family", [name for name in FAMILIES if "gemma" not in name])
def test_old_and_new_rope_fields_read_alike(family, scaling):
    """`rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (5) give one configuration."""
    if family == "gpt_oss" and scaling is None:
        pytest.skip("nothing said means YaRN here, see below")
    fields = fields_of(family)
    del fields["rope_theta"]
    old = {key: value for key, value in fields.items() if key != "rope_scaling"}
    new = dict(old)
    old |= {"rope_theta": 5e5, "rope_scaling": scaling}
    given = {key: value for key, value in (scaling or {}).items() if key != "type"}
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    ropes = {"rope_theta": 5e5, **given, "rope_type": kind}
    new |= {"rope_parameters": {"full_attention": ropes} if family == "gemma3_text" else ropes}
    config = config_from_hf(new)
    assert config_from_hf(old) == config
    assert (config.rope.kind, config.rope.theta) == (kind, 5e5)
    for name, value in given.items():
        if name != "rope_type":
            assert getattr(config.rope, name) == value
    assert config_from_hf(config_to_hf(config)) == config


def test_gpt_oss_has_rope_fields_and_layer_types_of_its_own():
    fields = fields_of("gpt_oss", rope_scaling=None, layer_types=None, swiglu_limit=None, dtype="float32")
    del fields["rope_theta"]
    config = config_from_hf(fields)
    assert config.replace(dtype="bfloat16") == config_from_hf(fields_of("gpt_oss"))


def test_yarn_takes_its_length_and_factor_from_the_model():
    """Without them: the original length is max_position_embeddings, the factor their ratio."""
    config = config_from_hf(
        fields_of("qwen3_moe", rope_scaling={"type": "yarn", "original_max_position_embeddings": 10240})
    )
    assert (config.rope.factor, config.rope.original_max_position_embeddings) == (4.0, 10240)
    config = config_from_hf(fields_of("qwen3_moe", rope_scaling={"type": "yarn", "factor": 2.0}))
    assert (config.rope.factor, config.rope.original_max_position_embeddings) == (2.0, 40960)


@pytest.mark.parametrize(
    "family, theta, eps",
    [("mixtral", 1e6, 1e-5), ("qwen2_moe", 1e4, 1e-6), ("qwen3_moe", 1e4, 1e-6), ("olmoe", 1e4, 1e-5)],
)
def test_absent_fields_take_the_familys_defaults(family, theta, eps):
    """transformers drops fields at their default when it writes; its defaults are per family."""
    fields = fields_of(family)
    for name in ("rope_theta", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "norm_topk_prob",
                 "decoder_sparse_step", "mlp_only_layers", "attention_bias", "qkv_bias"):  # fmt: skip
        fields.pop(name, None)
    config = config_from_hf(fields)
    assert (config.rope.theta, config.rms_norm_eps, config.hidden_act) == (theta, eps, "silu")
    assert config.norm_topk_prob == (family == "mixtral") and not config.tie_word_embeddings
    assert config.qkv_bias == (family == "qwen2_moe") and all(config.moe_layers)


WINDOW = {"use_sliding_window": True, "sliding_window": 100}


@pytest.mark.parametrize(
    "family, changes, expected",
    [
        ("mixtral", {"sliding_window": 64}, (64, 64, 64, 64)),
        ("qwen3_moe", WINDOW, (100, 100, 100, 100)),
        ("qwen3", WINDOW | {"max_window_layers": 3}, (None, None, None, 100)),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2}, (9, None, 9, None)),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 100}, (None,) * 4),
        ("qwen2_moe", WINDOW | {"max_window_layers": 3}, (100, None, 100, None)),
        ("qwen2_moe", WINDOW | {"max_window_layers": 1}, (100, None, None, None)),
        (
            "qwen2_moe",
            WINDOW
            | {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
            (None, None, 100, None),
        ),
    ],
)
def test_windows_per_layer(family, changes, expected):
    config = config_from_hf(fields_of(family, num_hidden_layers=4, **changes))
    assert config.sliding_windows == expected
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False, True)),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_which_layers_hold_experts(family, changes, expected):
    config = config_from_hf(fields_of(family, num_hidden_layers=4, **changes))
    assert config.moe_layers == expected
    assert config_from_hf(config_to_hf(config)) == config


def test_which_layers_are_linear():
    fields = hf_fields(by_name("minimax-factors")) | {"model_type": "minimax", "sliding_window": 5}
    config = config_from_hf(fields)
    assert config.linear_layers == (True, False, True) and config.paged_layers == (False, True, False)
    assert config.sliding_windows == (None, 5, None)
    assert config.normed_residual == NormedResidual((1.2, 0.6), (0.7, 1.3), (0.8, 1.1))
    assert config_from_hf(fields | {"layer_types": None}).linear_layers == (False, True, False)
    half = config_from_hf(fields | {"head_dim": 16, "rotary_dim": 8, "layer_types": ["full_attention"] * 3})
    assert (half.rotary_dim, half.linear_layers) == (8, ())
    for known in (config, half):
        assert config_from_hf(config_to_hf(known)) == known
    for wrong in (["linear_attention"] * 2, ["sliding_attention"] * 3):
        with pytest.raises(ConfigError, match=r"layer_types must name.*each of 3 layers"):
            config_from_hf(fields | {"layer_types": wrong})


REFUSED = [
    # Fields that change the computation and are not implemented are named, with their value.
    ("mixtral", {"attention_bias": True}, "attention_bias=True"),
    ("mixtral", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("mixtral", {"is_decoder": True}, "is_decoder=True"),
    ("qwen3_moe", {"n_group": 1, "routed_scaling_factor": 2.5}, "n_group=1, routed_scaling_factor=2.5"),
    ("olmoe", {"sliding_window": 128}, "sliding_window=128"),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3_moe", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "needs a short_factor"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
    (
        "qwen3_moe",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "short_factor and long_factor have 1 numbers; 64 pairs of a head rotate",
    ),
    ("qwen3_moe", {"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
    ("qwen3_moe", {"rope_scaling": {"type": "linear"}}, "needs a factor"),
    ("qwen3_moe", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {}}, "differ"),
    ("qwen3_moe", {"hidden_act": "siluu"}, "siluu"),
    # Values that make no model.
    ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds num_experts 128"),
    ("qwen3_moe", {"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
    ("qwen3_moe", {"head_dim": 7}, "head_dim must be even"),
    ("qwen3_moe", {"hidden_size": "wide"}, "hidden_size must be an integer"),
    ("qwen3_moe", {"mlp_only_layers": [48]}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"vocab_size": None}, "vocab_size"),
    ("qwen3_moe", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ("glm4_moe", {"partial_rotary_factor": 0.26}, "partial_rotary_factor 0.26 of head_dim 128 rotates 33"),
    ("glm4_moe", {"topk_method": "greedy"}, "topk_method='greedy'"),
    ("dots1", {"layer_types": ["sliding_attention"] * 62}, "sliding_window"),
    ("minimax_m2", {"rotary_dim": 256}, "partial_rotary_factor 2"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False"),
    ("minimax_m2", {"attn_type_list": [1, 0] * 31}, "attn_type_list"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
    ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval must be"),
    ("hunyuan_v1_moe", {"moe_topk": [8, 4] * 16}, "moe_topk=[8, 4,"),
    ("hunyuan_v1_moe", {"use_cla": True}, "use_cla=True"),
    ("hunyuan_v1_moe", {"moe_intermediate_size": 1024}, "moe_intermediate_size=1024"),
    ("mixtral", {"sliding_window": 0}, "sliding_window"),
    ("olmoe", {"head_dim": 64}, "head_dim"),
    ("qwen2_moe", {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window"),
    ("llama", {"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "full_attention and sliding_attention"),
    ("granitemoe", {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
    ("phimoe", {"tie_word_embeddings": True}, "lm_head_bias=True"),
    ("phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok=4"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window"),
    ("gpt_oss", {"swiglu_limit": -1.0}, "limit"),
    ("gpt_oss", {"head_dim": None}, "head_dim"),
]  # fmt: skip


@pytest.mark.parametrize("family, changes, named", REFUSED, ids=[f"{f}-{'-'.join(c)}" for f, c, _ in REFUSED])
def test_what_is_not_implemented_is_refused_by_name(family, changes, named):
    with pytest.raises(ConfigError) as caught:
        config_from_hf(fields_of(family, **changes), "here/config.json")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [{}, {"model_type": 3}, [], None, {"architectures": ["MixtralForCausalLM"]}])
def test_no_model_type(raw):
    with pytest.raises(ConfigError, match="model_type"):
        config_from_hf(raw)


def test_unsupported_model_type_lists_the_supported():
    with pytest.raises(ConfigError) as caught:
        config_from_hf({"model_type": "qwen3_mo"})
    for part in ("'qwen3_mo'", "did you mean 'qwen3_moe'", *FAMILIES):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "mixtral"},  # has no query norm
        {"sliding_windows": (4, None)},  # Qwen3-MoE has one window for all layers
        {"clip_qkv": 1.0},
        {"shared_expert_intermediate_size": 16},
        {"family": "olmoe", "qk_norm": "projection", "head_dim": 16},
    ],
    ids=lambda c: "-".join(c),
)
def test_a_config_that_the_family_cannot_express_is_not_written(tiny_config: ModelConfig, changes):
    """Else a saved model would compute something else when it is loaded."""
    with pytest.raises(ConfigError, match="cannot"):
        config_to_hf(tiny_config.replace(**changes))
