"""`quantization_config` of a model's directory → what it says of each module."""

from collections.abc import Callable
from typing import Any

from moejax.core.errors import CheckpointError, ConfigError, unknown
from moejax.quantization.checkpoints import awq, compressed_tensors, fp8, gptq, own
from moejax.quantization.checkpoints.convention import Convention, QuantFields

METHODS: dict[str, Callable[[QuantFields], Convention]] = {
    "gptq": gptq.parse_gptq,
    "awq": awq.parse_awq,
    "fp8": fp8.parse_fp8,
    "compressed-tensors": compressed_tensors.parse_compressed,
    "moejax": own.parse_own,
}

MARKS = frozenset({
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "input_scale",
    "input_zero_point", "input_global_scale", "values", "zeros", "tensor_scale", "group_index",
})  # fmt: skip
"""Last names of tensors that only quantized modules have, in any convention."""


def parse_quantization(raw: Any, source: str) -> Convention:
    """Returns the convention of a checkpoint.

    Args:
        raw: the value of `quantization_config`.
        source: the file, for messages.

    Raises:
        ConfigError: a convention, or something of one, that is not read here; what is, is named.
        CheckpointError: it is malformed.
    """
    if not isinstance(raw, dict):
        raise CheckpointError(f"{source}: quantization_config must be an object, got {raw!r}")
    method = raw.get("quant_method")
    if method not in METHODS:
        kind = unknown("quant_method", str(method), METHODS)
        raise ConfigError(f"{source}: quantization_config: {kind}; convert the checkpoint to one of these")
    fields = QuantFields(raw, f"{source}: quantization_config")
    try:
        return METHODS[method](fields)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{fields.source}: a field has the wrong type ({error})") from error
    except ConfigError as error:
        text = str(error)
        raise (error if text.startswith(source) else ConfigError(f"{fields.source}: {text}")) from None
