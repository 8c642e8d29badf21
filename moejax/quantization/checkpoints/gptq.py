"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and transformers write them.

    qweight  int32 [D · bits / 32, F]     codes, packed along the inputs, lowest bits first
    qzeros   int32 [G, F · bits / 32]     zero points, packed along the outputs
    scales   float [G, F]
    g_idx    int32 [D]                    the group of each input

value = (code - zero) · scale. `checkpoint_format` "gptq" stores zero points less one, as AutoGPTQ always did;
"gptq_v2" stores them as they are. GPTQModel takes the ones from a word as a whole, so that a zero point of 0
borrows from the next; adding them back to the word, modulo 2^32, undoes it. With `desc_act` inputs were
quantized by falling activation, and their groups are those of that order: `g_idx`. GPTQModel's `dynamic`
changes settings for modules that a pattern matches, or leaves them out ("-:").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moejax.core.errors import CheckpointError
from moejax.quantization.checkpoints.convention import Convention, QuantFields, Role, Verdict
from moejax.quantization.checkpoints.scheme import (
    FLOATS,
    Arrays,
    Complain,
    Need,
    Scheme,
    check_finite,
    group_index,
    our_codes,
    words_to_codes,
    zero_points,
)
from moejax.quantization.formats import WeightFormat


@dataclass(frozen=True)
class GptqScheme(Scheme):
    """Attributes beside the format: `less_one`, where zero points are stored less one."""

    less_one: bool = True

    main = words = "qweight"
    scale = "scales"

    def needs(self, D: int, F: int) -> dict[str, Need]:
        bits, (G, _) = self.format.bits, self.format.scale_shape(D, F)
        return {
            "qweight": Need(((-(-D * bits // 32), F),), ("I32",)),
            "qzeros": Need(((G, -(-F * bits // 32)),), ("I32",)),
            "scales": Need(((G, F),), FLOATS),
            "g_idx": Need(((D,),), ("I32",), optional=not self.format.indexed),
        }

    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        fmt, bits = self.format, self.format.bits
        codes = words_to_codes(tensors["qweight"].T, bits)[:, :D]
        ones = np.int32(0xFFFFFFFF // (2**bits - 1) if self.less_one else 0)  # 1 in each field of a word
        zeros = words_to_codes(tensors["qzeros"] + ones, bits)[:, :F]
        check_finite("scales", tensors["scales"], complain)
        other = "gptq_v2" if self.less_one else "gptq"
        hint = f" (sym is true; is checkpoint_format {other!r}?)"
        parts = {"scales": tensors["scales"], **zero_points("qzeros", zeros, fmt, complain, hint)}
        if "g_idx" in tensors:
            order = "desc_act is false or static_groups true" if fmt.group else "group_size is -1"
            parts |= group_index("g_idx", tensors["g_idx"], fmt, D, complain, order)
        return {"values": our_codes(codes, fmt), **parts}


@dataclass(frozen=True)
class Gptq(Convention):
    """A GPTQ checkpoint.

    Attributes:
        scheme: of every module but those of `overrides`.
        overrides: patterns with a scheme, or None for modules that are left out; the first match counts.
        modules: ends of the names of the quantized modules; none says nothing.
        head: whether the output projection is quantized too.
    """

    scheme: GptqScheme
    overrides: tuple[tuple[re.Pattern[str], GptqScheme | None], ...]
    modules: tuple[str, ...]
    head: bool

    def verdict(self, module: str, role: Role) -> Verdict:
        matching = [scheme for pattern, scheme in self.overrides if pattern.match(module)]
        scheme = matching[0] if matching else self.scheme
        if scheme is None or role == "embedding" or (role == "head" and not self.head):
            return Verdict(None)
        if role == "linear" and self.modules and not any(module.endswith(f".{m}") for m in self.modules):
            return Verdict(None)
        return Verdict(scheme, must=role in ("linear", "head"))


def parse_gptq(fields: QuantFields) -> Gptq:
    """Raises `ConfigError` for what is not read here and `CheckpointError` for what is malformed."""
    layout = fields.take("checkpoint_format", "format", default="gptq")
    fields.one_of("checkpoint_format", layout, ("gptq", "gptq_v2"), "GPTQ")
    fields.one_of("is_marlin_format", fields.take("is_marlin_format", default=False), (False,), "GPTQ")
    fields.one_of("pack_dtype", fields.take("pack_dtype", default="int32"), ("int32",), "GPTQ")
    base = _scheme(fields, {}, layout)
    overrides = []
    dynamic = fields.take("dynamic", default={})
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{fields.source}.dynamic must map patterns to settings, got {dynamic!r}")
    for pattern, settings in dynamic.items():
        scheme = None if pattern.startswith("-:") else _scheme(fields, settings, layout)
        text = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        try:
            overrides.append((re.compile(text), scheme))
        except re.error as error:
            raise CheckpointError(f"{fields.source}.dynamic: {pattern!r} is no pattern ({error})") from None
    inside = fields.take("modules_in_block_to_quantize", default=[])
    flat = [name for item in inside for name in (item if isinstance(item, list) else [item])]
    return Gptq("gptq", base, tuple(overrides), tuple(flat), fields.flag("lm_head", False))


def _scheme(fields: QuantFields, changes: Mapping[str, Any], layout: str) -> GptqScheme:
    merged = QuantFields({**fields.raw, **changes}, fields.source)
    bits = merged.integer("bits")
    merged.one_of("bits", bits, (4, 8), "GPTQ")
    group, meta = merged.group(), merged.take("meta", default={})
    static = merged.take("static_groups", default=isinstance(meta, dict) and meta.get("static_groups"))
    fmt = WeightFormat(
        "int4" if bits == 4 else "int8",
        "group" if group else "channel",
        group,
        symmetric=merged.flag("sym", True),
        indexed=group > 0 and merged.flag("desc_act", False) and not static,
    )
    return GptqScheme(fmt, layout == "gptq")
