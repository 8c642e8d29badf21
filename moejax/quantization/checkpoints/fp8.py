"""fp8 checkpoints (`quant_method` "fp8"): DeepSeek's and Qwen's by blocks, and those with one scale a tensor.

    weight            float8_e4m3fn [F, D]
    weight_scale_inv  float [⌈F / b⌉, ⌈D / b⌉]     with `weight_block_size` [b, b]; or powers of two, F8_E8M0
    weight_scale      float, one                   without
    input_scale       float, one                   with activation_scheme "static"

value = code · scale; in spite of its name `weight_scale_inv` is multiplied by (DeepSeek-V3's README).
"""

from dataclasses import dataclass

from moejax.core.errors import CheckpointError
from moejax.quantization.checkpoints.convention import Listed, QuantFields
from moejax.quantization.checkpoints.layouts import PlainScheme
from moejax.quantization.formats import WeightFormat

BLOCK_ACTIVATIONS = (
    "activations are not quantized by groups, as it asks for: products take them in the model's dtype"
)


@dataclass(frozen=True)
class BlockScheme(PlainScheme):
    scale = "weight_scale_inv"

    def scale_dtypes(self) -> tuple[str, ...]:
        return (*super().scale_dtypes(), "F8_E8M0")


def parse_fp8(fields: QuantFields) -> Listed:
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
        return Listed("fp8", PlainScheme(fmt), left_out)
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise CheckpointError(
            f"{fields.source}.weight_block_size must be two positive integers, got {block!r}"
        )
    size = int(block[0])
    fields.one_of("weight_block_size", block, ([size, size],), "fp8 (blocks are squares)")
    fields.one_of("activation_scheme", scheme, ("dynamic",), "fp8 with weight_block_size")
    fmt = WeightFormat("float8_e4m3fn", "block", size)
    return Listed("fp8", BlockScheme(fmt), left_out, notes=(BLOCK_ACTIVATIONS,))
