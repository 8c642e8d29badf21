"""The `quantization_config` of compressed-tensors for formats of ours, where it has words for them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from moejax.quantization.checkpoints.compressed_tensors import METHOD
from moejax.quantization.checkpoints.layouts import LAYOUTS
from moejax.quantization.checkpoints.scheme import WrittenScheme
from moejax.quantization.formats import MXFP4, NVFP4, WeightFormat

EXPERT = "{e}"
"""Placeholder of the expert's number in a module's name."""


def why_not(fmt: WeightFormat) -> str | None:
    """Returns why compressed-tensors cannot say this format; None where it can."""
    if fmt.sparse:
        return "its sparse layouts are not written here"
    if fmt.numbers == "float8_e5m2":
        return "its float8 is float8_e4m3fn"
    if fmt.numbers == "float4_e2m1fn":
        return None if fmt in (MXFP4, NVFP4) else "its float4 is mxfp4 or nvfp4"
    if fmt.indexed:
        return "it has given up group indices (actorder 'group')"
    if fmt.scale_dtype == "e8m0" and (fmt.numbers, fmt.group) != ("float8_e4m3fn", 32):
        return "it has e8m0 scales for mxfp4 and mxfp8 only"
    return "it has float8 scales for nvfp4 only" if fmt.has_tensor_scale else None


def layout_name(fmt: WeightFormat) -> str:
    """Returns the layout name that compressed-tensors itself gives to weights of this format."""
    if fmt.numbers == "float4_e2m1fn":
        return "nvfp4-pack-quantized" if fmt.has_tensor_scale else "mxfp4-pack-quantized"
    if fmt.scale_dtype == "e8m0":
        return "mxfp8-quantized"
    if fmt.numbers.startswith("float8"):
        return "naive-quantized" if fmt.activations == "none" else "float-quantized"
    return "pack-quantized" if fmt.activations == "none" else "int-quantized"


def scheme_for(fmt: WeightFormat) -> WrittenScheme:
    """Returns the scheme that writes weights of this format."""
    return LAYOUTS[layout_name(fmt)][0](fmt)


def compressed_config(formats: Mapping[str, WeightFormat], left: Iterable[str]) -> dict[str, Any]:
    """Returns a config that targets "Linear", known to most libraries, or with several formats their modules.

    Args:
        formats: every quantized module, with `EXPERT` for all experts.
        left: the other linear modules.
    """
    left = tuple(left)
    of: dict[WeightFormat, list[str]] = {}
    for module, fmt in formats.items():
        of.setdefault(fmt, []).append(module)
    groups, layouts = {}, set()
    for i, (fmt, modules) in enumerate(of.items()):
        others = (*left, *(m for m, other in formats.items() if other != fmt))
        targets = ["Linear"] if len(of) == 1 else _names(modules, others)
        layouts.add(layout_name(fmt))
        groups[f"group_{i}"] = {"targets": targets, **_group(fmt), "format": layout_name(fmt)}
    return {
        "quant_method": METHOD,
        "format": next(iter(layouts)) if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _names(left, formats),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(fmt: WeightFormat) -> dict[str, Any]:
    kind = "int" if fmt.numbers.startswith("int") else "float"
    grouped = fmt.granularity == "group"
    weights: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": kind,
        "symmetric": fmt.symmetric,
        "strategy": "tensor_group" if fmt.has_tensor_scale else fmt.granularity,
        "group_size": fmt.group if grouped else None,
        "dynamic": False,
    }
    if fmt.granularity == "block":
        weights["block_structure"] = [fmt.group, fmt.group]
    if fmt.scale_dtype in ("e8m0", "float8_e4m3fn"):
        weights["scale_dtype"] = "torch.uint8" if fmt.scale_dtype == "e8m0" else "torch.float8_e4m3fn"
    inputs = None
    if fmt.activations != "none":
        dynamic = fmt.activations == "dynamic"
        strategy = "token" if dynamic else "tensor"
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return {"weights": weights, "input_activations": inputs, "output_activations": None}


def _names(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """Returns names or patterns of these modules and of none of the others, few where layers are alike."""
    layers: dict[str, list[str]] = {}
    for module in modules:
        shape = re.sub(r"\.layers\.(\d+)\.", ".layers.{l}.", module)
        number = re.search(r"\.layers\.(\d+)\.", module)
        layers.setdefault(shape, []).append(number.group(1) if number else "")
    elsewhere = {re.sub(r"\.layers\.\d+\.", ".layers.{l}.", module) for module in others}
    patterns = []
    for shape, numbers in layers.items():
        if "{l}" not in shape and EXPERT not in shape:
            patterns.append(shape)
            continue
        layer = f"(?:{'|'.join(numbers)})" if shape in elsewhere else r"\d+"
        text = re.escape(shape).replace(r"\{l\}", layer).replace(r"\{e\}", r"\d+")
        patterns.append(f"re:{text}$")
    return sorted(patterns)
