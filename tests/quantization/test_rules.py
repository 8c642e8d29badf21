"""Rules: which weight gets what, and what a rule that decides nothing says."""

import re

import pytest

from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig, QuantRule
from moejax.quantization.formats import parse_format
from moejax.quantization.rules import Chosen, resolve_rules

WEIGHTS = {
    "embedding.table": (96, 64),
    **{
        f"layers.{i}.{name}": shape
        for i in (0, 1, 10)
        for name, shape in {
            "input_norm.scale": (64,),
            "attention.q_proj.kernel": (64, 64),
            "attention.q_proj.bias": (64,),
            "attention.o_proj.kernel": (64, 64),
            "moe.router.kernel": (64, 8),
            "moe.experts.gate_proj": (8, 64, 32),
            "moe.experts.down_proj": (8, 32, 64),
            "moe.shared_gate.kernel": (64, 1),
        }.items()
    },
    "norm.scale": (64,),
    "lm_head.kernel": (64, 96),
}


def resolve(*rules, method="rtn", format="int4_g32", weights=WEIGHTS):
    return resolve_rules(QuantConfig(method=method, format=format, rules=list(rules)), weights)


def refused(*rules, **how):
    with pytest.raises(ConfigError) as caught:
        resolve(*rules, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_linears_and_experts_by_default_and_nothing_else():
    chosen = resolve()
    assert sorted(chosen) == sorted(
        path for path in WEIGHTS if re.search(r"experts\.|attention\.\w+\.kernel", path)
    )
    assert set(chosen.values()) == {Chosen("rtn", parse_format("int4_g32"))}


def test_nothing_without_a_method():
    assert resolve(QuantRule("*.down_proj", method="none"), method="none") == {}


def test_the_first_rule_that_matches_decides_and_takes_the_rest_from_the_configuration():
    chosen = resolve(
        QuantRule("layers.10.*.down_proj", method="none"),
        QuantRule("*.down_proj", format="int8"),
        QuantRule("layers.*.attention.*", method="gptq"),
    )
    assert "layers.10.moe.experts.down_proj" not in chosen
    assert chosen["layers.1.moe.experts.down_proj"] == Chosen("rtn", parse_format("int8"))
    assert chosen["layers.1.attention.q_proj.kernel"] == Chosen("gptq", parse_format("int4_g32"))
    assert chosen["layers.1.moe.experts.gate_proj"] == Chosen("rtn", parse_format("int4_g32"))


def test_a_star_spans_dots_and_other_characters_stand_for_themselves():
    assert "layers.1.moe.experts.gate_proj" not in resolve(QuantRule("layers.1.*", method="none"))
    assert "layers.10.moe.experts.gate_proj" in resolve(QuantRule("layers.1.*", method="none"))
    assert "no weight's path matches" in refused(QuantRule("layers.?.moe.experts.down_proj", method="none"))
    assert "no weight's path matches" in refused(QuantRule("moe.experts", method="none"))


def test_rules_alone_with_method_none():
    chosen = resolve(QuantRule("layers.1.moe.experts.*", method="awq", format="int8"), method="none")
    assert sorted(chosen) == ["layers.1.moe.experts.down_proj", "layers.1.moe.experts.gate_proj"]


def test_a_broad_pattern_leaves_the_router_alone_and_its_name_reaches_it():
    assert not any("router" in path or "shared_gate" in path for path in resolve(QuantRule("layers.*.moe.*")))
    chosen = resolve(QuantRule("layers.0.moe.router", format="int8"), QuantRule("*lm_head*", format="int8"))
    assert chosen["layers.0.moe.router.kernel"].format.name == "int8"
    assert "layers.1.moe.router.kernel" not in chosen and "lm_head.kernel" in chosen


def test_a_rule_that_matches_nothing_names_the_nearest():
    message = refused(QuantRule("layers.*.moe.expert.down_proj", method="gptq"))
    assert message.startswith("quant.rules[layers.*.moe.expert.down_proj] is not used")
    assert "layers.*.moe.experts.down_proj" in message


def test_a_rule_behind_a_broader_one_is_not_used():
    message = refused(QuantRule("*"), QuantRule("*.q_proj", method="gptq"))
    assert "earlier rule (*)" in message and "move it up" in message


@pytest.mark.parametrize("pattern", ["*rou*r", "layers.*.moe.r*"])
def test_a_rule_for_protected_weights_only_says_how_to_reach_them(pattern):
    message = refused(QuantRule(pattern, format="int8"))
    assert "full precision by default" in message and "layers.0.moe.router" in message


def test_vectors_and_embeddings_cannot_be_quantized():
    assert "only vectors" in refused(QuantRule("*norm.scale"))
    assert "looked up" in refused(QuantRule("embedding.table", format="int8"))
    assert "embedding.table" not in resolve(QuantRule("embedding.table", method="none"))


def test_a_format_without_a_method_is_an_error():
    assert "method is none" in refused(QuantRule("*.q_proj", format="int8"), method="none")


def test_smoothquant_needs_quantized_activations():
    assert "use awq" in refused(method="smoothquant")
    assert set(resolve(method="smoothquant", format="w8a8").values()) == {
        Chosen("smoothquant", parse_format("w8a8"))
    }


def test_a_group_that_does_not_divide_names_the_weight_and_what_does():
    message = refused(format="int4_g128")
    assert "layers.0.attention.q_proj" in message and "64" in message


def test_unknown_formats_are_named_even_in_a_rule_for_nothing():
    assert "did you mean" in refused(format="int4_g64_asm")
    assert "did you mean" in refused(QuantRule("nothing", format="int88"))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"method": "rtn"}, False),
        ({"method": "rtn", "format": "w8a8_static"}, True),
        ({"method": "gptq"}, True),
        ({"method": "none", "format": "w8a8_static", "rules": [QuantRule("*", method="none")]}, False),
        ({"method": "rtn", "rules": [QuantRule("*", method="awq")]}, True),
        ({"method": "rtn", "rules": [QuantRule("*", format="w8a8_static")]}, True),
    ],
)
def test_what_needs_text(config, text):
    quant = QuantConfig(**config)
    assert any(one.calibrated for one in resolve_rules(quant, WEIGHTS).values()) == text
