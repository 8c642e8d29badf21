"""Rules that give each weight its method and format.

A rule's pattern is matched against whole paths of weights without their last `.kernel`:
`layers.3.moe.experts.down_proj`, `layers.0.attention.q_proj`, `lm_head`. `*` stands for any characters, dots
included; nothing else is special. The first rule that matches a weight decides; what no rule matches takes
the configuration's method and format.

Router, shared expert's gate, output projection and embeddings are PROTECTED: the default leaves them in full
precision, and a rule reaches router, gate and projection only if its pattern spells the name out
(`layers.*.moe.router`, but not `layers.*.moe.*`), so that a broad pattern never quantizes the router by
accident. Embeddings are looked up and not multiplied, and vectors (norms, biases) have no inputs to share a
scale: no rule can quantize them. It knows names and shapes only, no model.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moejax.core.errors import ConfigError
from moejax.core.quant import SPARSE, QuantConfig, QuantRule
from moejax.quantization.formats import WeightFormat, parse_format

PROTECTED = ("router", "shared_gate", "kv_b_proj", "lm_head", "embedding")
"""Parts of a path that a pattern must spell out to reach the weight."""

CALIBRATED = ("gptq", "awq", "smoothquant", "wanda")
"""Methods that need text."""


@dataclass(frozen=True)
class Chosen:
    """Quantization chosen for one weight: a method other than "none", and its format."""

    method: str
    format: WeightFormat

    @property
    def calibrated(self) -> bool:
        """Text is needed: for the method, or for a static scale of the activations."""
        return self.method in CALIBRATED or self.format.activations == "static"


def weight_name(path: str) -> str:
    """Returns the name that patterns are matched with: the parameter's path without a last `.kernel`."""
    return path.removesuffix(".kernel")


def protected(path: str) -> str | None:
    """Returns the name that keeps this weight in full precision by default; None where nothing does."""
    parts = path.split(".")
    return next((name for name in PROTECTED if name in parts), None)


def resolve_rules(quant: QuantConfig, weights: Mapping[str, tuple[int, ...]]) -> dict[str, Chosen]:
    """Returns the weights to be quantized, in the order of `weights`.

    Args:
        weights: path of every parameter → its shape `[D, F]` in canonical order, or one expert's. Vectors may
            be among them.

    Raises:
        ConfigError: an unknown format; a rule that decides for no weight, with the nearest paths; a rule for
            what cannot be quantized; a format that does not fit a weight; SmoothQuant for a format that
            leaves activations as they are.
    """
    matrices = {path: shape for path, shape in weights.items() if len(shape) >= 2}
    default = parse_format(quant.format)
    formats = [default if rule.format is None else parse_format(rule.format) for rule in quant.rules]
    for rule in quant.rules:
        if rule.format is not None and (rule.method or quant.method) == "none":
            raise ConfigError(
                f"quant.rules[{rule.pattern}] names the format {rule.format}, but its method is none; set "
                "method to rtn, gptq, awq, smoothquant, magnitude or wanda"
            )
    patterns = [_compile(rule.pattern) for rule in quant.rules]
    used: set[int] = set()
    chosen: dict[str, Chosen] = {}
    for path, shape in matrices.items():
        number = next((i for i, rule in enumerate(quant.rules) if _decides(rule, patterns[i], path)), None)
        if number is None:
            method: str = "none" if protected(path) else quant.method
            fmt = default
        else:
            rule = quant.rules[number]
            used.add(number)
            method, fmt = rule.method or quant.method, formats[number]
        if method == "none":
            continue
        _check(path, shape, method, fmt)
        chosen[path] = Chosen(method, fmt)
    for i in range(len(quant.rules)):
        if i not in used:
            raise ConfigError(_why_unused(quant.rules, i, weights))
    return chosen


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")))


def _decides(rule: QuantRule, pattern: re.Pattern[str], path: str) -> bool:
    """Returns whether a rule applies to this weight."""
    if not pattern.fullmatch(weight_name(path)):
        return False
    name = protected(path)
    return name is None or name in rule.pattern


def _check(path: str, shape: tuple[int, ...], method: str, fmt: WeightFormat) -> None:
    if protected(path) == "embedding":
        raise ConfigError(
            f"quant.rules: {path} is looked up, not multiplied, and stays in full precision; remove the rule"
            " or set its method to none"
        )
    if method == "smoothquant" and fmt.activations == "none":
        raise ConfigError(
            f"{path}: smoothquant is for formats that quantize activations too (w8a8, w8a8_static), not for "
            f"{fmt.name}; use awq for weights alone"
        )
    if fmt.sparse != (method in SPARSE):
        raise ConfigError(
            f"quant: {path}: methods magnitude and wanda, and they alone, make formats of two in four "
            f"(bf16_2of4, int8_2of4, …), got {method} with {fmt.name}; change quant.method or quant.format"
        )
    fmt.check(path, shape[-2], shape[-1])


def _why_unused(rules: Sequence[QuantRule], index: int, weights: Mapping[str, tuple[int, ...]]) -> str:
    """Returns one line that explains why a rule decided for no weight."""
    pattern = rules[index].pattern
    compiled = _compile(pattern)
    hit = [path for path in weights if compiled.fullmatch(weight_name(path))]
    start = f"quant.rules[{pattern}] is not used"
    free = [path for path in hit if len(weights[path]) >= 2 and not protected(path)]
    if free:
        earlier = next(r.pattern for r in rules[:index] if _decides(r, _compile(r.pattern), free[0]))
        return f"{start}: an earlier rule ({earlier}) decides for every weight that it matches; move it up"
    if any(protected(path) for path in hit):
        names = sorted({str(protected(path)) for path in hit} - {"None"})
        return (
            f"{start}: it matches only {', '.join(names)}, in full precision by default; spell the name out "
            f"(as in {weight_name(next(p for p in hit if protected(p)))}) to quantize it all the same"
        )
    if hit:
        return f"{start}: it matches only vectors ({hit[0]}), which stay in full precision; remove it"
    near = nearest(pattern, (path for path, shape in weights.items() if len(shape) >= 2))
    return f"{start}: no weight's path matches it; the nearest: {', '.join(near) or 'none'}"


def nearest(pattern: str, paths: Iterable[str]) -> list[str]:
    """Returns the three patterns over layers (numbers become `*`) of the weights most like `pattern`."""
    general = {re.sub(r"(?<=\.)\d+(?=\.)", "*", weight_name(path)) for path in paths}
    general_pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", pattern)
    return difflib.get_close_matches(general_pattern, sorted(general), n=3, cutoff=0.0)
