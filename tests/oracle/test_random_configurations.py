"""Configurations drawn at random beside transformers: what nobody thought of writing down as a case."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from tests.decoding import forward
from tests.numerics import assert_close
from tests.oracle import hf
from tests.oracle.cases import DENSE, Case, local_and_full, rope

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SEEDS = range(4)
Fields = dict[str, Any]


def draw_rope(draw: random.Random) -> Fields:
    kind = draw.choice(["default", "default", "linear", "dynamic", "yarn", "llama3"])
    of_kind: Fields = {
        "default": {"rope_theta": draw.choice([1e4, 5e5, 100.0])},
        "linear": {"factor": draw.choice([2.0, 3.5])},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": draw.choice([2.0, 4.0]), "original_max_position_embeddings": 16},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    }[kind]  # fmt: skip
    if kind == "yarn":
        further: list[Fields] = [
            {},
            {"beta_fast": 16.0, "beta_slow": 2.0},
            {"attention_factor": 0.8},
            {"mscale": 0.707, "mscale_all_dim": draw.choice([0.707, 1.0])},
            {"truncate": False},
        ]
        of_kind |= draw.choice(further)
    return rope(kind, **of_kind)


def draw_common(draw: random.Random) -> Fields:
    heads = draw.choice([2, 4, 6])
    return {
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 3, 4, 6) if heads % n == 0]),
        "hidden_size": draw.choice([24, 36, 48]),
        "vocab_size": draw.choice([96, 97, 131]),
        "max_position_embeddings": draw.choice([16, 32, 64]),
        "rope_parameters": draw_rope(draw),
        "tie_word_embeddings": draw.random() < 0.3,
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "hidden_act": draw.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh", "relu"]),
    }


def draw_layers(draw: random.Random, fields: Fields, other: str = "sliding_attention") -> list[str]:
    kinds = ["full_attention", other]
    return [draw.choice(kinds) for _ in range(fields["num_hidden_layers"])]


def draw_fields(family: str, draw: random.Random) -> Fields:
    """Fields of a family's configuration that transformers takes."""
    fields = draw_common(draw)
    heads, some = fields["num_attention_heads"], lambda: draw.random() < 0.5
    experts, width = draw.choice([4, 6, 8, 12]), draw.choice([8, 12, 20])
    top = draw.randint(1, min(experts, 5))
    if family not in DENSE:
        fields["num_experts_per_tok"] = top
    if family in ("mixtral", "minimax", "minimax_m2", "phimoe", "granitemoe", "gpt_oss"):
        fields["num_local_experts"] = experts
    if family in ("qwen2_moe", "qwen3_moe", "olmoe", "hunyuan_v1_moe"):
        fields["num_experts"] = experts
    if family in ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "dots1"):
        fields["norm_topk_prob"] = some()
    if family in ("olmoe", "phimoe", "granitemoe", "qwen2_moe"):  # whose heads share the width
        fields["hidden_size"] = heads * draw.choice([6, 8, 12])
    elif family not in ("deepseek_v2", "deepseek_v3"):
        fields["head_dim"] = draw.choice([4, 8, 12, 16, 20])
    if family not in ("mixtral", "qwen2_moe", "minimax", "minimax_m2", "ernie4_5_moe"):
        fields["attention_bias"] = some()
    if family in ("qwen2_moe", "qwen3_moe"):
        fields |= {
            "moe_intermediate_size": width,
            "decoder_sparse_step": draw.choice([1, 1, 2]),
            "mlp_only_layers": draw.choice([[], [0]]),
        }
        if some():
            window, below = draw.choice([3, 9]), draw.choice([0, 1, 2])
            fields |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": below}
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1"):
        groups = draw.choice([n for n in (1, 2, 3, 4) if experts % n == 0 and experts // n >= 2])
        chosen = draw.randint(1, groups)
        fields |= {
            "num_experts_per_tok": min(top, chosen * (experts // groups)),
            "n_routed_experts": experts,
            "n_group": groups,
            "topk_group": chosen,
            "n_shared_experts": draw.choice([1, 2]),
            "moe_intermediate_size": width,
            "first_k_dense_replace": draw.choice([0, 1]),
            "routed_scaling_factor": draw.choice([1.0, 2.5]),
        }
    if family in ("deepseek_v2", "deepseek_v3"):
        fields |= {
            "num_key_value_heads": heads,
            "kv_lora_rank": draw.choice([8, 20]),
            "q_lora_rank": draw.choice([None, 14]),
            "qk_rope_head_dim": draw.choice([4, 8]),
            "qk_nope_head_dim": draw.choice([6, 10]),
            "v_head_dim": draw.choice([6, 12, 16]),
        }
    if family in ("glm4_moe", "minimax_m2"):
        fields["rope_parameters"] |= {"partial_rotary_factor": draw.choice([0.5, 1.0])}
        fields["head_dim"] = draw.choice([8, 12, 20])  # more than one pair is rotated
    return fields | draw_special(family, draw, fields, top=top, experts=experts, width=width)


def draw_special(
    family: str, draw: random.Random, fields: Fields, *, top: int, experts: int, width: int
) -> Fields:
    """What only this family has, or has under another name."""

    def some() -> bool:
        return draw.random() < 0.5

    if family == "mixtral":
        return {"sliding_window": draw.choice([None, 4, 11])}
    if family == "minimax":
        kinds = ("full_attn", "linear_attn", "mlp")
        names = [f"{kind}_{name}_factor" for kind in kinds for name in ("alpha", "beta")]
        return {
            "layer_types": draw_layers(draw, fields, "linear_attention"), "block_size": draw.choice([4, 256]),
            "sliding_window": draw.choice([None, 4]), **{name: draw.choice([1, 0.7, 1.6]) for name in names},
        }  # fmt: skip
    if family == "qwen2_moe":
        return {"shared_expert_intermediate_size": draw.choice([8, 30]), "qkv_bias": some()}
    if family == "olmoe":
        return {"clip_qkv": draw.choice([None, 2.0])}
    if family == "deepseek_v2":
        return {"topk_method": draw.choice(["greedy", "group_limited_greedy"])}
    if family == "deepseek_v3":
        return {"rope_interleave": some()}
    if family == "glm4_moe":
        return {"use_qk_norm": some()}
    if family == "dots1" and some():
        return {"sliding_window": 5, "layer_types": draw_layers(draw, fields)}
    if family == "llama":
        return {"mlp_bias": some()}
    if family == "hunyuan_v1_moe":
        return {"moe_topk": top}
    if family == "phimoe":
        return {
            "num_experts_per_tok": 2, "sliding_window": draw.choice([None, 4]),
            "lm_head_bias": some() and not fields["tie_word_embeddings"],
            "router_jitter_noise": draw.choice([0.01, 0.1]), "rope_parameters": rope("default"),
        }  # fmt: skip
    if family == "ernie4_5_moe":
        return {
            "moe_num_experts": experts, "moe_k": top, "moe_intermediate_size": width,
            "moe_num_shared_experts": draw.choice([0, 1, 2]), "moe_layer_start_index": draw.choice([0, 1]),
            "moe_layer_interval": draw.choice([1, 2]), "moe_layer_end_index": fields["num_hidden_layers"] - 1,
        }  # fmt: skip
    if family == "granitemoe":
        return {
            "attention_multiplier": draw.choice([0.1, 0.3]), "embedding_multiplier": draw.choice([1.0, 6.0]),
            "residual_multiplier": draw.choice([0.3, 1.0]), "logits_scaling": draw.choice([0.8, 3.0]),
        }  # fmt: skip
    if family == "gpt_oss":
        windows = {"sliding_window": draw.choice([3, 9]), "layer_types": draw_layers(draw, fields)}
        return {"hidden_act": "silu", **windows}
    if family == "gemma3_text":
        return {
            "sliding_window": draw.choice([3, 9]), "layer_types": draw_layers(draw, fields),
            "query_pre_attn_scalar": draw.choice([8, 24]), "hidden_activation": fields.pop("hidden_act"),
            "final_logit_softcapping": draw.choice([None, 5.0, 30.0]),
            "rope_parameters": local_and_full(fields["rope_parameters"]),
        }  # fmt: skip
    return {}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", hf.CONFIGS)
def test_logits_and_what_we_write(family: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"{family} {seed}")
    fields = draw_fields(family, draw)
    case = Case(f"{family}-{seed}", family, fields, draw.choice(["float32", "float32", "bfloat16"]))
    hf.save(hf.build(case), tmp_path / "theirs", case.dtype)
    theirs = hf.load(tmp_path / "theirs")
    tokens = hf.random_tokens(96, 2, 30)
    expected = hf.logits(theirs, tokens)
    model, _ = load_pretrained(tmp_path / "theirs", dtype="float32")
    assert_close(forward(model, tokens)[0], expected, 1e-4)
    save_pretrained(model, tmp_path / "ours")
    assert_close(hf.logits(hf.load(tmp_path / "ours"), tokens), expected, 1e-4)
