"""fp8 checkpoints (`quant_method` "fp8"): DeepSeek's and Qwen's by blocks, and those with one scale a tensor.

    weight            float8_e4m3fn [F, D]
    weight_scale_inv  float [⌈F / b⌉, ⌈D / b⌉]     with `weight_block_size` [b, b]; or powers of two, F8_E8M0
    weight_scale      float, one                   without
    input_scale       float, one                   with activation_scheme "static"

transformers calls the last two `weight_scale_inv` and `activation_scale`, and stacks those of experts:
`experts.gate_up_proj_scale_inv` is [E, 1, 1] or [E, 2 F / b, D / b], gate before up.

value = code · scale; in spite of its name `weight_scale_inv` is multiplied by (DeepSeek-V3's README).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from moejax.core.errors import CheckpointError
from moejax.quantization.checkpoints.convention import Listed, QuantFields
from moejax.quantization.checkpoints.layouts import PlainScheme
from moejax.quantization.checkpoints.scheme import Index, Shape
from moejax.quantization.formats import WeightFormat

STACKED = {"gate_up": {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}, "down": {"down_proj": 0, "w2": 0}}
"""The half of each stack that an expert's matrix has."""


@dataclass(frozen=True)
class BlockScheme(PlainScheme):
    scale = "weight_scale_inv"

    def scale_dtypes(self) -> tuple[str, ...]:
        return (*super().scale_dtypes(), "F8_E8M0")


@dataclass(frozen=True)
class Fp8(Listed):
    def parts(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[str, Index]]:
        ours = {"scale_inv": self.scheme.scale, "activation_scale": "input_scale"}
        parts: dict[str, tuple[str, Index]] = {}
        for key, shape in shapes.items():
            module, _, last = key.rpartition(".")
            stack, _, kind = last.removeprefix("weight_").rpartition("_proj_")
            if kind in ours and not stack:
                parts[f"{module}.{ours[kind]}"] = key, ()
            elif kind in ours and shape and stack in STACKED:
                rows = shape[1] // 2 if stack == "gate_up" and len(shape) == 3 else 0
                for e, (name, half) in itertools.product(range(shape[0]), STACKED[stack].items()):
                    index = (e, slice(half * rows, (half + 1) * rows)) if rows else (e,)
                    if f"{module}.{e}.{name}.weight" in shapes:
                        parts[f"{module}.{e}.{name}.{ours[kind]}"] = key, index
        return parts


def parse_fp8(fields: QuantFields) -> Fp8:
    """Raises `ConfigError` for what is not read here and `CheckpointError` for what is malformed."""
    scheme = fields.take("activation_scheme", default="dynamic")
    fields.one_of("activation_scheme", scheme, ("dynamic", "static"), "fp8")
    fields.one_of("fmt", fields.take("fmt", default="e4m3"), ("e4m3", "float8_e4m3fn"), "fp8")
    cache = fields.take("kv_cache_scheme")
    fields.one_of("kv_cache_scheme", cache, (None,), "fp8 (key/value caches have scales of their own)")
    left_out = (*fields.names("modules_to_not_convert"), *fields.names("ignored_layers"))
    block = fields.take("weight_block_size")
    if block is None:
        fmt = WeightFormat("float8_e4m3fn", "tensor", activations=scheme)
        return Fp8("fp8", PlainScheme(fmt), left_out)
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise CheckpointError(
            f"{fields.source}.weight_block_size must be two positive integers, got {block!r}"
        )
    size = int(block[0])
    fields.one_of("weight_block_size", block, ([size, size],), "fp8 (blocks are squares)")
    fields.one_of("activation_scheme", scheme, ("dynamic",), "fp8 with weight_block_size")
    fmt = WeightFormat("float8_e4m3fn", "block", size)
    note = "activations are not quantized by groups, as it asks for: products take them in the model's dtype"
    return Fp8("fp8", BlockScheme(fmt), left_out, notes=(note,))
