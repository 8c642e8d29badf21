"""Our own layout (`quant_method` "moejax"): the arrays of a `QTensor` by name, as they lie in memory.

It holds every format. `quantization_config` has the formats' fields by name, and the name for each module;
`*` in a module stands for all experts.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moejax.core.errors import CheckpointError
from moejax.quantization.checkpoints.convention import Convention, QuantFields, Role, Verdict
from moejax.quantization.checkpoints.scheme import (
    Arrays,
    Complain,
    Need,
    WrittenScheme,
    check_finite,
    group_index,
)
from moejax.quantization.formats import WeightFormat

METHOD = "moejax"
VERSION = 1
DTYPES = {
    "int8": "I8", "uint8": "U8", "int32": "I32", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float32": "F32", "bfloat16": "BF16", "float16": "F16",
}  # fmt: skip
"""Safetensors' names of our arrays' dtypes."""


@dataclass(frozen=True)
class OwnScheme(WrittenScheme):
    main = "values"
    scale = "scales"

    def needs(self, D: int, F: int) -> dict[str, Need]:
        parts = self.format.parts((D, F))
        return {name: Need((part.shape,), (DTYPES[part.dtype.name],)) for name, part in parts.items()}

    def settled(self, dtype: str) -> WeightFormat:
        return self.format

    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        for name in ("scales", "tensor_scale", "input_scale"):
            if name in tensors and (name != "scales" or self.format.scale_dtype != "e8m0"):
                check_finite(name, tensors[name], complain)
        if self.format.bits > 8 or self.format.numbers.startswith("float8"):
            check_finite("values", tensors["values"], complain)
        if self.format.indexed:
            group_index("group_index", tensors["group_index"], self.format, D, complain)
        return dict(tensors)

    def write(self, parts: Mapping[str, np.ndarray], D: int, F: int) -> Arrays:
        return dict(parts)


@dataclass(frozen=True)
class Own(Convention):
    weights: Mapping[str, OwnScheme]

    def verdict(self, module: str, role: Role) -> Verdict:
        parts = module.split(".")
        if len(parts) > 2 and parts[-3] == "experts":
            parts[-2] = "*"
        scheme = self.weights.get(".".join(parts))
        return Verdict(scheme)


def parse_own(fields: QuantFields) -> Own:
    """Raises `CheckpointError` for what is malformed."""
    fields.one_of("version", fields.take("version"), (VERSION,), METHOD)
    try:
        schemes = {name: OwnScheme(WeightFormat(**raw)) for name, raw in fields.raw["formats"].items()}
        return Own(METHOD, {module: schemes[name] for module, name in fields.raw["weights"].items()})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{fields.source} is damaged ({error})") from None


def own_config(formats: Mapping[str, WeightFormat]) -> dict[str, Any]:
    """Returns the `quantization_config` of modules (with `*` for experts) in these formats."""
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "formats": {fmt.name: dataclasses.asdict(fmt) for fmt in formats.values()},
        "weights": {module: fmt.name for module, fmt in formats.items()},
    }
