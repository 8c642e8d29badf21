"""Writes quantized weights: as compressed-tensors where that has words for every format, else as our own.

Codes and scales are written as they are; what is read again is the same, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np

from moejax.checkpoint.load import expert_slots
from moejax.checkpoint.maps.rules import Rule
from moejax.checkpoint.plan import canonical_key
from moejax.core.checked import Among, check
from moejax.core.errors import ConfigError
from moejax.models.decoder import Decoder
from moejax.nn.param import ExpertOf, specs
from moejax.nn.quantized import QuantizedWeight, quantized_weights
from moejax.quantization.checkpoints.compressed_config import EXPERT, compressed_config, scheme_for, why_not
from moejax.quantization.checkpoints.layouts import divisor_of
from moejax.quantization.checkpoints.own import OwnScheme, own_config
from moejax.quantization.checkpoints.scheme import WrittenScheme
from pallas_kernels.qformats import untile_codes

FORMATS = ("auto", "compressed-tensors", "moejax")

Gather = Callable[[jax.Array], np.ndarray]


@dataclass(frozen=True)
class QuantizedSave:
    """Plan for writing a model's quantized weights.

    Attributes:
        config: the `quantization_config`.
        modules: path of each weight → its module in the checkpoint, with `{e}` for the experts.
        schemes: path → what writes its tensors.
        paths: of the parameters that all these weights consist of.
    """

    config: dict[str, Any]
    modules: dict[str, str]
    schemes: dict[str, WrittenScheme]
    weights: dict[str, QuantizedWeight]
    paths: frozenset[str]

    def tensors(
        self, gather: Gather, num_experts: int, expert_of: ExpertOf | None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (key, array), weight by weight. All processes must go through them."""
        for path, weight in self.weights.items():
            module, scheme, declared = self.modules[path], self.schemes[path], weight.stands_for
            slots = expert_slots(path, declared, expert_of, num_experts)
            arrays = {
                name: param.get_metadata("spec").without_padding(gather(param[...]))
                for name, param in weight.parts().items()
            }
            if arrays["values"].ndim > len(declared.shape):
                arrays["values"] = untile_codes(arrays["values"])
            arrays["values"] = arrays["values"].view(weight.format.code_dtype)
            D, F = declared.canonical_shape[-2:]
            for expert in range(num_experts) if EXPERT in module else (None,):
                one = arrays if expert is None else {k: v[slots.index(expert)] for k, v in arrays.items()}
                for name, value in scheme.write(one, D, F).items():
                    yield f"{module}.{name}".replace(EXPERT, str(expert)), np.ascontiguousarray(value)


def plan_save(model: Decoder, rules: Sequence[Rule], layout: str, gather: Gather) -> QuantizedSave | None:
    """Plans how quantized weights are written; None for a model without any.

    Args:
        layout: one of `FORMATS`; "auto" is compressed-tensors where that can say everything.

    Raises:
        ConfigError: an unknown format, or compressed-tensors was asked for and has no words for a weight.
    """
    check("quantized_format", layout, Annotated[str, Among(FORMATS)])
    weights = dict(quantized_weights(model))
    if not weights:
        return None
    modules = {path: _module(path, rules) for path in weights}
    reasons = {} if layout == "moejax" else _reasons(weights, rules, gather)
    if reasons and layout == "compressed-tensors":
        path, why = next(iter(reasons.items()))
        raise ConfigError(
            f"compressed-tensors cannot say {len(reasons)} of {len(weights)} weights, {path} "
            f"({weights[path].format.name}) the first: {why}; use quantized_format='moejax'"
        )
    native = layout == "moejax" or bool(reasons)
    formats = {modules[path]: weight.format for path, weight in weights.items()}
    schemes = {path: (OwnScheme if native else scheme_for)(weight.format) for path, weight in weights.items()}
    if native:
        config = own_config({module.replace(EXPERT, "*"): fmt for module, fmt in formats.items()})
    else:
        left = [  # linear layers in full precision
            _module(path, rules)
            for path, spec in specs(model).items()
            if path.endswith((".kernel", ".gate_proj", ".up_proj", ".down_proj")) and len(spec.shape) > 1
        ]
        config = compressed_config(formats, left)
    paths = frozenset(f"{path}.{name}" for path, weight in weights.items() for name in weight.parts())
    return QuantizedSave(config, modules, schemes, weights, paths)


def _module(path: str, rules: Sequence[Rule]) -> str:
    return canonical_key(path, rules, stacked=False)[0].removesuffix(".weight")


def _reasons(weights: dict[str, QuantizedWeight], rules: Sequence[Rule], gather: Gather) -> dict[str, str]:
    """Returns the paths of weights that compressed-tensors cannot say, and why."""
    reasons = {}
    for path, weight in weights.items():
        why = why_not(weight.format)
        if canonical_key(path, rules)[2].startswith(("fused", "stacked")):
            why = "transformers has all experts of this model in one tensor"
        if why is None and weight.tensor_scale is not None:
            scales = gather(weight.tensor_scale[...]).reshape(-1)
            # Zeros are of processes that have no part in it; process 0 has them all.
            if any(scale != 0 and divisor_of(scale) is None for scale in scales):
                why = "it stores the reciprocal of a tensor's scale, which float32 does not have"
        if why is not None:
            reasons[path] = why
    return reasons
