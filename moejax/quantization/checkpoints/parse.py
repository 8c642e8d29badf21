"""`quantization_config` of a model's directory → what it says of each module."""

from collections.abc import Callable
from typing import Any

from moejax.core.errors import CheckpointError, ConfigError
from moejax.quantization.checkpoints import awq, compressed_tensors, fp8, gptq, mxfp4, own
from moejax.quantization.checkpoints.convention import Convention, QuantFields

METHODS: dict[str, Callable[[QuantFields], Convention]] = {
    "gptq": gptq.parse_gptq,
    "awq": awq.parse_awq,
    "fp8": fp8.parse_fp8,
    "compressed-tensors": compressed_tensors.parse_compressed,
    "mxfp4": mxfp4.parse_mxfp4,
    "moejax": own.parse_own,
}

UNNAMED = {"config_groups": "compressed-tensors", "zero_point": "awq", "desc_act": "gptq"}
"""Fields that tell a method by, where an older tool did not name it."""

MARKS = frozenset({
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "input_scale",
    "input_zero_point", "input_global_scale", "values", "zeros", "tensor_scale", "group_index", "blocks",
    "kept", "gate_up_proj_blocks", "down_proj_blocks",
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
    fields = QuantFields(raw, f"{source}: quantization_config")
    method = raw.get("quant_method") or next((UNNAMED[field] for field in UNNAMED if field in raw), None)
    fields.one_of("quant_method", method, METHODS, "reading; convert the checkpoint")
    try:
        return METHODS[str(method)](fields)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{fields.source}: a field has the wrong type ({error})") from error
    except ConfigError as error:
        text = str(error)
        raise (error if text.startswith(source) else ConfigError(f"{fields.source}: {text}")) from None
