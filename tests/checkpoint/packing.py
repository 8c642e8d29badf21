"""Quantized checkpoints made from their formats' descriptions, number by number; nothing of moejax is used.

Each function draws the codes and scales of one matrix of D inputs and F outputs, and returns its tensors as a
checkpoint stores them and the float32 weight `[F, D]` that they stand for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

Made = tuple[dict[str, np.ndarray], np.ndarray]
Maker = Callable[[np.random.Generator, int, int], Made]


def word(fields: list[int], bits: int) -> int:
    """int32 whose lowest bits are the first field."""
    total = 0
    for place, value in enumerate(fields):
        assert 0 <= value < 2**bits
        total += value * 2 ** (bits * place)
    return total - 2**32 if total >= 2**31 else total


def words(line: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> list[int]:
    """A line of numbers in int32 words; `order` says which of a word's numbers comes lowest, next, ..."""
    per = 32 // bits
    line = [int(v) for v in line]
    line += [0] * (-len(line) % per)
    order = order or tuple(range(per))
    return [word([line[start + i] for i in order], bits) for start in range(0, len(line), per)]


def rows_in_words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    return np.asarray([words(row, bits, order) for row in numbers], np.int64).astype(np.int32)


def draw_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return (rng.uniform(0.5, 1.5, shape) * 0.02).astype(dtype)


def gptq(bits=4, group=8, sym=True, act_order=False, v2=False, dtype=F16, bias=False) -> Maker:
    """Version 1 is made of version 2 as GPTQModel does it: ones from whole words, with borrows."""

    def make(rng, D, F):
        size = D if group == -1 else group
        G = D // size
        codes = rng.integers(0, 2**bits, (D, F))
        zeros = np.full((G, F), 2 ** (bits - 1)) if sym else rng.integers(0, 2**bits, (G, F))
        if not sym:  # at a word's start, at its end, where nothing is left to borrow from, and a whole word
            per = 32 // bits
            zeros[:1, ::per] = zeros[-1:, per - 1 :: per] = zeros[:1, :per] = 0
        index = np.asarray([i // size for i in range(D)])
        if act_order:
            index = rng.permutation(index)
        scales = draw_scales(rng, (G, F), dtype)
        weight = np.zeros((F, D), np.float32)
        for i in range(D):
            g = index[i]
            weight[:, i] = (codes[i] - zeros[g]).astype(np.float32) * scales[g].astype(np.float32)
        stored = rows_in_words(zeros, bits)
        if not v2:
            ones = sum(2 ** (bits * place) for place in range(32 // bits))
            stored = ((stored.astype(np.int64) - ones) % 2**32).astype(np.uint32).view(np.int32)
        tensors = {
            "qweight": np.ascontiguousarray(rows_in_words(codes.T, bits).T),
            "qzeros": stored,
            "scales": scales,
            "g_idx": index.astype(np.int32),
        }
        if bias:
            tensors["bias"] = np.zeros(F, dtype)
        return tensors, weight

    return make


def awq(group=8, zero_point=True, dtype=F16) -> Maker:
    def make(rng, D, F):
        size = D if group == -1 else group
        codes = rng.integers(0, 16, (D, F))
        zeros = rng.integers(0, 16, (D // size, F)) if zero_point else np.full((D // size, F), 8)
        scales = draw_scales(rng, zeros.shape, dtype)
        weight = np.zeros((F, D), np.float32)
        for i in range(D):
            g = i // size
            weight[:, i] = (codes[i] - zeros[g]).astype(np.float32) * scales[g].astype(np.float32)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": rows_in_words(codes, 4, order), "scales": scales}
        if zero_point:
            tensors["qzeros"] = rows_in_words(zeros, 4, order)
        return tensors, weight

    return make


def grid_of(strategy: str, size: int, D: int, F: int) -> tuple[tuple[int, ...], Callable[[int, int], Any]]:
    """Shape of the scales in compressed-tensors, and where that of weight (o, i) is."""
    if strategy == "tensor":
        return (1,), lambda o, i: (0,)
    if strategy == "channel":
        return (F, 1), lambda o, i: (o, 0)
    if strategy == "block":
        return (-(-F // size), -(-D // size)), lambda o, i: (o // size, i // size)
    return (F, D // size), lambda o, i: (o, i // size)


def spread(grid: np.ndarray, at: Callable[[int, int], Any], D: int, F: int) -> np.ndarray:
    return np.asarray([[grid[at(o, i)] for i in range(D)] for o in range(F)])


def packed(bits=4, strategy="group", group=8, sym=True, order=False, dtype=BF16, packed_zeros=True) -> Maker:
    """compressed-tensors' pack-quantized."""

    def make(rng, D, F):
        shape, at = grid_of(strategy, group, D, F)
        half = 2 ** (bits - 1)
        codes = rng.integers(-half, half, (F, D))
        zeros = np.zeros(shape, int) if sym else rng.integers(-half, half, shape)
        scales = draw_scales(rng, shape, dtype)
        index = rng.permutation([i // group for i in range(D)]) if order else None
        where = at if index is None else (lambda o, i: (o, index[i]))
        z, s = spread(zeros, where, D, F), spread(scales.astype(np.float32), where, D, F)
        tensors = {
            "weight_packed": rows_in_words(codes + half, bits),
            "weight_scale": scales,
            "weight_shape": np.asarray([F, D], np.int64),
        }
        if not sym and packed_zeros and strategy in ("group", "channel"):
            tensors["weight_zero_point"] = np.ascontiguousarray(rows_in_words((zeros + half).T, bits).T)
        elif not sym:
            tensors["weight_zero_point"] = zeros.astype(np.int8)
        if index is not None:
            tensors["weight_g_idx"] = index.astype(np.int32)
        return tensors, (codes - z).astype(np.float32) * s

    return make


def draw_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Every bit pattern but NaN."""
    patterns = np.asarray([p for p in range(256) if p % 128 != 127], np.uint8)
    return rng.choice(patterns, shape).view(E4M3)


def plain(
    kind="int",
    strategy="channel",
    size=8,
    sym=True,
    static=False,
    dtype=F32,
    scale="weight_scale",
    input_scale="input_scale",
    stored: tuple[int, ...] | None = None,
    bits=8,
) -> Maker:
    """int-quantized, float-quantized, naive-quantized; and fp8 by other names and shapes of the scales."""

    def make(rng, D, F):
        shape, at = grid_of(strategy, size, D, F)
        half = 2 ** (bits - 1)
        codes = rng.integers(-half, half, (F, D)).astype(np.int8) if kind == "int" else draw_e4m3(rng, (F, D))
        zeros = np.zeros(shape, np.int8) if sym else rng.integers(-half, half, shape).astype(np.int8)
        scales = draw_scales(rng, shape, dtype)
        difference = codes.astype(np.float32) - spread(zeros, at, D, F).astype(np.float32)
        weight = difference * spread(scales.astype(np.float32), at, D, F)
        tensors = {"weight": codes, scale: scales if stored is None else scales.reshape(stored)}
        if not sym:
            tensors["weight_zero_point"] = zeros
        if static:
            tensors[input_scale] = rng.uniform(0.01, 0.1, (1,)).astype(dtype).reshape(() if stored else (1,))
        return tensors, weight

    return make


MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4(nv=True) -> Maker:
    """nvfp4-pack-quantized, mxfp4-pack-quantized."""

    def make(rng, D, F):
        size = 16 if nv else 32
        codes = rng.integers(0, 16, (F, D))
        values = np.asarray(
            [[MAGNITUDES[c % 8] * (-1 if c >= 8 else 1) for c in row] for row in codes], np.float32
        )
        if nv:
            scales = (rng.uniform(1, 400, (F, D // size))).astype(E4M3)
            whole = np.asarray([rng.uniform(1000, 9000)], np.float32)
            steps = scales.astype(np.float32) * (np.float32(1) / whole[0])
            tensors = {"weight_scale": scales, "weight_global_scale": whole}
        else:
            exponents = rng.integers(115, 125, (F, D // size)).astype(np.uint8)
            steps = np.asarray([[np.float32(2.0 ** (int(e) - 127)) for e in row] for row in exponents])
            tensors = {"weight_scale": exponents}
        octets = [[row[i] + 16 * row[i + 1] for i in range(0, D, 2)] for row in codes]
        tensors["weight_packed"] = np.asarray(octets, np.uint8)
        weight = values * np.asarray([[row[i // size] for i in range(D)] for row in steps], np.float32)
        return tensors, weight

    return make


def mxfp8() -> Maker:
    def make(rng, D, F):
        codes = draw_e4m3(rng, (F, D))
        exponents = rng.integers(110, 120, (F, D // 32)).astype(np.uint8)
        steps = np.asarray([[2.0 ** (int(row[i // 32]) - 127) for i in range(D)] for row in exponents])
        return {"weight": codes, "weight_scale": exponents}, codes.astype(np.float32) * steps.astype(
            np.float32
        )

    return make


def gptq_config(bits=4, group=8, sym=True, act_order=False, v2=False, **more) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym,
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "damp_percent": 0.1, "lm_head": False,
        "true_sequential": True, "static_groups": False, **more,
    }  # fmt: skip


def awq_config(group=8, zero_point=True, **more) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero_point, "version": "gemm",
        "modules_to_not_convert": ["gate"], **more,
    }  # fmt: skip


GATES = ["lm_head", r"re:.*\.gate$", r"re:.*shared_expert_gate$"]


def weights_args(kind: str, bits: int, strategy: str, size: int = 8, sym: bool = True, **more: Any) -> dict:
    block = {"block_structure": [size, size]} if strategy == "block" else {}
    return {
        "num_bits": bits, "type": kind, "symmetric": sym, "strategy": strategy, "dynamic": False,
        "group_size": size if "group" in strategy else None, "observer": "minmax", "observer_kwargs": {},
        **block, **more,
    }  # fmt: skip


def inputs_args(kind: str, static: bool = False) -> dict:
    return {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "tensor" if static else "token",
        "dynamic": not static, "group_size": None, "block_structure": None, "observer": None,
    }  # fmt: skip


def ct_config(layout: str, weights: dict, inputs: dict | None = None, **more) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": GATES, "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.9, **more,
    }  # fmt: skip


class Convention(NamedTuple):
    """How to make a matrix, the `quantization_config`, and the name of our format that it should become."""

    make: Maker
    config: dict[str, Any]
    format: str


def _gptq(name: str, dtype: np.dtype = F16, **options: Any) -> Convention:
    return Convention(gptq(dtype=dtype, **options), gptq_config(**options), name)


def _packed(name: str, dtype: np.dtype = BF16, **options: Any) -> Convention:
    o = {"bits": 4, "strategy": "group", "group": 8, "sym": True, "order": False} | options
    order = {"actorder": "group"} if o["order"] else {}
    args = weights_args("int", o["bits"], o["strategy"], o["group"], o["sym"], **order)
    return Convention(packed(dtype=dtype, **options), ct_config("pack-quantized", args), name)


def _plain(
    layout: str, name: str, kind: str, inputs: dict | None = None, dtype: np.dtype = F32, **options: Any
) -> Convention:
    o = {"strategy": "channel", "size": 8, "sym": True, "bits": 8} | options
    args = weights_args(kind, o["bits"], o["strategy"], o["size"], o["sym"])
    static = bool(inputs) and inputs["dynamic"] is False
    make = plain(kind, dtype=dtype, static=static, **options)
    return Convention(make, ct_config(layout, args, inputs), name)


BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
TENSOR = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}

CONVENTIONS: dict[str, Convention] = {
    "gptq": _gptq("int4_g8_sf16"),
    "gptq-asym": _gptq("int4_g8_asym_sf16", sym=False),
    "gptq-act-order": _gptq("int4_g8_sf16_indexed", act_order=True),
    "gptq-act-order-asym-bf16": _gptq("int4_g8_asym_indexed", BF16, act_order=True, sym=False),
    "gptq-v2-asym": _gptq("int4_g8_asym_sf16", sym=False, v2=True),
    "gptq-v2-8bit-asym": _gptq("int8_g8_asym_sf16", bits=8, sym=False, v2=True),
    "gptq-channels": _gptq("int4_sf16", group=-1),
    "gptq-8bit": _gptq("int8_g8_sf16", bits=8),
    "gptq-8bit-asym-channels": _gptq("int8_asym_sf16", bits=8, group=-1, sym=False),
    "awq": Convention(awq(), awq_config(), "int4_g8_asym_sf16"),
    "awq-channels-bf16": Convention(awq(-1, dtype=BF16), awq_config(-1), "int4_asym_sbf16"),
    "awq-symmetric": Convention(awq(zero_point=False), awq_config(zero_point=False), "int4_g8_sf16"),
    "ct-int4": _packed("int4_g8"),
    "ct-int4-asym": _packed("int4_g8_asym", sym=False),
    "ct-int4-asym-old-zeros": _packed("int4_g8_asym", sym=False, packed_zeros=False),
    "ct-int4-channels-asym": _packed("int4_asym_sbf16", strategy="channel", sym=False),
    "ct-int4-tensor-asym": _packed("int4_tensor_asym_sbf16", strategy="tensor", sym=False),
    "ct-int4-act-order": _packed("int4_g8_sf16_indexed", order=True, dtype=F16),
    "ct-int8-packed": _packed("int8_g8", bits=8),
    "ct-int8-packed-asym": _packed("int8_asym", F32, bits=8, strategy="channel", sym=False),
    "ct-w8a8": _plain("int-quantized", "int8_a8", "int", inputs_args("int")),
    "ct-w8a8-static": _plain("int-quantized", "int8_tensor_sbf16_a8static", "int", inputs_args("int", True),
                             BF16, strategy="tensor"),
    "ct-int4-in-int8": _plain("int-quantized", "int4_g8", "int", inputs_args("int"), BF16, strategy="group",
                              bits=4),
    "ct-int4-in-int8-asym": _plain("naive-quantized", "int4_asym", "int", sym=False, bits=4),
    "ct-int8-groups-asym": _plain("naive-quantized", "int8_g8_asym_sf32", "int", strategy="group", sym=False),
    "ct-fp8-static": _plain("float-quantized", "float8_e4m3fn_tensor_a8static", "float",
                            inputs_args("float", True), strategy="tensor"),
    "ct-fp8-dynamic": _plain("float-quantized", "float8_e4m3fn_sbf16_a8", "float", inputs_args("float"),
                             BF16),
    "ct-fp8-blocks": _plain("float-quantized", "float8_e4m3fn_b8", "float", strategy="block"),
    "fp8-blocks": Convention(plain("float", "block", scale="weight_scale_inv"), BLOCK, "float8_e4m3fn_b8"),
    "fp8-tensor": Convention(plain("float", "tensor", stored=()), TENSOR | {"activation_scheme": "dynamic"},
                             "float8_e4m3fn_tensor_a8"),
    "fp8-tensor-transformers": Convention(plain("float", "tensor", scale="weight_scale_inv", stored=(1, 1)),
                                          TENSOR | {"weight_block_size": None}, "float8_e4m3fn_tensor_a8"),
    "fp8-tensor-static": Convention(plain("float", "tensor", static=True),
                                    TENSOR | {"activation_scheme": "static"},
                                    "float8_e4m3fn_tensor_a8static"),
}  # fmt: skip

WIDE: dict[str, Convention] = {
    "nvfp4": Convention(fp4(), ct_config("nvfp4-pack-quantized", weights_args(
        "float", 4, "tensor_group", 16, scale_dtype="torch.float8_e4m3fn")), "nvfp4"),
    "mxfp4": Convention(fp4(nv=False), ct_config("mxfp4-pack-quantized", weights_args(
        "float", 4, "group", 32, scale_dtype="torch.uint8")), "mxfp4"),
    "mxfp8": Convention(mxfp8(), ct_config("mxfp8-quantized", weights_args(
        "float", 8, "group", 32, scale_dtype="torch.uint8")), "float8_e4m3fn_g32_se8m0"),
    "gptq-g32-act-order": _gptq("int4_g32_sf16_indexed", group=32, act_order=True),
    "awq-g64": Convention(awq(64), awq_config(64), "int4_g64_asym_sf16"),
    "ct-int4-g64": _packed("int4_g64", group=64),
}  # fmt: skip
"""For models whose matrices have multiples of 64 inputs, which we pack by 64."""

KEPT = ("norm", ".gate.weight", "shared_expert_gate", "embed_tokens", "lm_head", ".bias")
"""What of a checkpoint's keys stays in full precision."""


def quantize_directory(
    source: Path, quantized: Path, plain: Path, convention: Convention, seed: int = 0
) -> None:
    """A plain checkpoint in one file → one of the convention, and a plain one of the values that it has."""
    rng = np.random.default_rng(seed)
    tensors, values = {}, {}
    for key, value in load_file(source / "model.safetensors").items():
        if any(part in key for part in KEPT):
            tensors[key] = values[key] = value
            continue
        made, weight = convention.make(rng, value.shape[1], value.shape[0])
        module = key.removesuffix(".weight")
        tensors |= {f"{module}.{name}": tensor for name, tensor in made.items()}
        values[key] = weight
    config = json.loads((source / "config.json").read_text())
    for directory, held, more in (
        (quantized, tensors, {"quantization_config": convention.config}),
        (plain, values, {}),
    ):
        directory.mkdir()
        save_file(held, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config | more))


def load_bytes(path: Path) -> dict[str, np.ndarray]:
    """As safetensors' `load_file`, which has no float8 in numpy."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    named = {"F8_E4M3": E4M3, "F8_E5M2": ml_dtypes.float8_e5m2,
             "F8_E8M0": ml_dtypes.float8_e8m0fnu, "BF16": BF16, "F16": F16, "F32": F32,
             "I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64}  # fmt: skip
    found = {}
    for key, entry in header.items():
        start, stop = (8 + size + at for at in entry["data_offsets"])
        found[key] = np.frombuffer(raw[start:stop], named[entry["dtype"]]).reshape(entry["shape"]).copy()
    return found
