"""The grouped products as Pallas kernels: configurations, and which kernels run.

The modes:
- "fused" decodes weights on their way to the tensor cores and reads the fewest bytes: for few rows.
- "separate", of SwiGLU only: gate and up in a fused kernel each. With both in one there are not registers
  enough for tiles of 64 rows by 128 outputs, and in narrower ones several warps decode the same weights.
- "dequantize_once" writes the weights out in floating point and multiplies by these: it moves eight to ten
  times the bytes of 4-bit weights, but decodes each only once, and pays where an expert has many blocks of
  rows.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.groups import Activation, gated
from pallas_kernels.op import Problem
from pallas_kernels.qformats import Format, QuantizedTensor
from pallas_kernels.quantized_grouped_matmul.convert import dequantize_pallas, quantize_rows_pallas
from pallas_kernels.quantized_grouped_matmul.product import Tile, product

MODES = ("fused", "separate", "dequantize_once")

# Rows per expert from which a decoded copy of the weights is the cheaper way (see `once_pays`).
_MANY_ROWS = {"a100": 2048}
_MANY_ROWS_ELSEWHERE = 512
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Config:
    """`mode`: see above; a program's outputs and inputs a step, parts of the reduction."""

    mode: str
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    def tile(self, block_m: int) -> Tile:
        return Tile(block_m, self.block_n, self.block_k, self.split_k, self.num_warps, self.num_stages)


def once_pays(fmt: Format, rows: int, device: str | None = None) -> bool:
    """Returns whether to dequantize once for `rows` rows per matrix.

    Decoding costs about 4 instructions a weight for every 128 rows, which is 1.4e-13 s on an H100 if nothing
    hides it; a decoded copy costs its write and its reading back, 1.2e-12 s a weight. Fused kernels decode
    between the tensor cores' instructions and lose some of their rate besides, so the point is where the
    first comes to half of the second. `w8a8` decodes nothing.

    On an A100 a copy's 4 bytes a weight take 2e-12 s while products of 512 rows take 3.3e-12: half as much
    again, where decoding, which other pipes than the tensor cores' do, costs at most that and is partly
    hidden. From 2,048 rows on the copy is an eighth. Estimates, none of them timed.
    """
    return fmt.kind != "w8a8" and rows >= _MANY_ROWS.get(device or "", _MANY_ROWS_ELSEWHERE)


def fused_tile(
    fmt: Format, block_m: int, blocks: int, D: int, F: int, matrices: int, wide: bool
) -> tuple[int, int, int, int, int]:
    """Returns block_n, block_k, split_k, num_warps, num_stages for `blocks` blocks of rows.

    Args:
        wide: x is float32: products are multiply-adds, tiles small.
    """
    if wide:
        return 32, 64 if fmt.packed else 32, 1, 4, 2
    # Those of which sums are kept apart: scales of `mxfp4` go to the weights.
    powers = fmt.kind == "mxfp4"
    group = 0 if powers else fmt.group
    # Two programs for each multiprocessor at least: narrower tiles, then shares of the reduction.
    enough, most = 2 * _MULTIPROCESSORS, 8
    if block_m <= 32:
        # A warp has 32 outputs: a fragment of x then serves four products, and registers suffice.
        # Sums by groups of 32 spill a few registers at 128 outputs (sm_80, XLA's own compiler).
        widest = 64 if fmt.group == 32 else 128
        if block_m == 16:
            block_n, least, block_k = widest // matrices, 32, 128
        else:
            block_n, least, block_k = 128 // matrices if powers else 64, 64, 128
        warps = lambda n: n // 32 if block_m == 16 else 4 if powers else 2 * matrices  # noqa: E731
    elif block_m == 64 and 2 * blocks * -(-F // 128) < enough:
        # Sums by groups of 64 spill with 128 inputs a turn (sm_80, XLA's own compiler).
        block_k = 64 if group in (32, 64) or fmt.kind == "fp8" else 128
        block_n, least, most = 128, 128, 4
        warps = lambda n: 8 if group == 32 else 4  # noqa: E731
    elif fmt.kind == "w8a8":
        return 128, 128, 1, 8 if block_m > 64 or matrices > 1 else 4, 3
    elif block_m == 64:
        return 128, 64, 1, *((8, 3) if group == 32 else (4, 4))
    else:
        # Sums by group double the accumulators.
        return 64 if group and fmt.kind != "fp8" else 128, 64, 1, 8, 3
    while block_n > least and blocks * -(-F // block_n) < enough:
        block_n //= 2
    split = 1
    while split < most and split * blocks * -(-F // block_n) < enough and D >= 8 * split * block_k:
        split *= 2
    stages = 3 if block_m == 64 and group == 32 else 4
    return block_n, block_k, split, warps(block_n), stages


def heuristic(problem: Problem) -> Config:
    """Chooses by `fused_tile` and `once_pays`."""
    fmt, block_m, blocks = _read(problem)
    matrices, wide = int(problem["matrices"]), problem["dtype"] == "float32"
    D, F, E = (int(problem[name]) for name in ("D", "F", "E"))
    mode = "fused"
    if once_pays(fmt, int(problem["P"]) // E, str(problem.get("device", ""))):
        mode = "dequantize_once"
    elif matrices == 2 and block_m >= 64 and fmt.kind != "w8a8" and not wide:
        mode, matrices = "separate", 1
    return Config(mode, *fused_tile(fmt, block_m, blocks, D, F, matrices, wide))


def space(problem: Problem) -> Iterable[Config]:
    """Modes, tiles, splits, warps and stages; those that cannot fit shared memory are left out."""
    fmt, block_m, blocks = _read(problem)
    matrices, best = int(problem["matrices"]), heuristic(problem)
    seen = {best}
    if fmt.kind != "w8a8":
        seen.add(replace(best, mode="dequantize_once"))
    for tile in tiles(fmt, block_m, blocks, int(problem["F"]), matrices):
        seen.add(Config("fused", *tile))
    if matrices == 2 and block_m >= 64:
        for tile in tiles(fmt, block_m, blocks, int(problem["F"]), 1):
            seen.add(Config("separate", *tile))
    return sorted(seen, key=lambda c: tuple(vars(c).values()))


def tiles(
    fmt: Format, block_m: int, blocks: int, F: int, matrices: int
) -> list[tuple[int, int, int, int, int]]:
    """Returns candidates: what fits shared memory and registers, split only where programs are few."""
    candidates: list[tuple[int, int, int, int, int]] = []
    few, enough = block_m <= 32, 2 * _MULTIPROCESSORS
    code, x_size = 0.5 if fmt.packed else 1.0, 1 if fmt.kind == "w8a8" else 2
    for block_n in (32, 64, 128) if few else (64, 128):
        programs = blocks * -(-F // block_n)
        near = [s for s in (1, 2, 4, 8) if enough <= 2 * s * programs <= 4 * enough]
        splits = near or [8 if 8 * programs < enough else 1]
        for block_k in (128, 256) if few and fmt.packed else (64, 128):
            for warps in {max(1, block_n // 32), 4} if few else (4, 8):
                for stages in (3, 4):
                    shared = stages * block_k * (x_size * block_m + matrices * code * block_n)
                    sums = matrices * block_m * block_n / (32 * warps) * (2 if fmt.group else 1)
                    if shared <= 100 * 1024 and sums <= 128:
                        candidates.extend((block_n, block_k, split, warps, stages) for split in splits)
    return candidates


def _read(problem: Problem) -> tuple[Format, int, int]:
    block_m = int(problem["block_m"])
    return Format.of(problem), block_m, int(problem["P"]) // block_m


def activations(
    x: jax.Array, x_scale: jax.Array | None, fmt: Format, interpret: bool | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns x and its scales as the kernel takes them."""
    if fmt.kind == "w8a8" and x_scale is None:
        return quantize_rows_pallas(x, interpret=interpret)
    return x, x_scale


def out_type(x: jax.Array, out_dtype: Any) -> Any:
    """Returns the output's dtype; see the references."""
    if out_dtype is not None:
        return out_dtype
    return jnp.float32 if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype


def quantized_grouped_matmul_pallas(
    x: jax.Array,
    w: QuantizedTensor,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    x_scale: jax.Array | None = None,
    out_dtype: Any = None,
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `quantized_grouped_matmul_reference`."""
    table = (rows, block_expert, num_blocks)
    options: dict[str, Any] = {"row_scale": row_scale, "out_dtype": out_type(x, out_dtype)}
    if config.mode == "dequantize_once":
        from pallas_kernels.grouped_matmul import grouped_matmul

        matrix = dequantize_pallas(w, x.dtype, interpret=interpret)
        options |= {"block_m": block_m, "bias": bias, "interpret": interpret}
        return grouped_matmul(x, matrix, *table, **options)
    x, x_scale = activations(x, x_scale, w.format, interpret)
    options |= {"table": table, "biases": (bias,), "x_scale": x_scale, "interpret": interpret}
    return product("quantized_grouped_matmul", x, (w,), config.tile(block_m), **options)


def quantized_grouped_swiglu_pallas(
    x: jax.Array,
    gate: QuantizedTensor,
    up: QuantizedTensor,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: Activation = "silu",
    x_scale: jax.Array | None = None,
    out_dtype: Any = None,
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `quantized_grouped_swiglu_reference`."""
    out, table = out_type(x, out_dtype), (rows, block_expert, num_blocks)
    matrices: Sequence[QuantizedTensor] = (gate, up)
    if config.mode == "dequantize_once":
        from pallas_kernels.grouped_swiglu import grouped_swiglu

        gate_once, up_once = (dequantize_pallas(w, x.dtype, interpret=interpret) for w in matrices)
        options: dict[str, Any] = {"block_m": block_m, "activation": activation, "interpret": interpret}
        options |= {"gate_bias": gate_bias, "up_bias": up_bias}
        return grouped_swiglu(x, gate_once, up_once, *table, **options).astype(out)
    x, x_scale = activations(x, x_scale, gate.format, interpret)
    shared: dict[str, Any] = {"table": table, "x_scale": x_scale, "interpret": interpret}
    call = functools.partial(product, "quantized_grouped_swiglu", x, tile=config.tile(block_m), **shared)
    if config.mode == "separate":
        pair = zip(matrices, (gate_bias, up_bias), strict=True)
        sums = [call(matrices=(w,), biases=(bias,), out_dtype=jnp.float32) for w, bias in pair]
        return gated(activation)(*sums).astype(out)
    return call(matrices=matrices, biases=(gate_bias, up_bias), activation=activation, out_dtype=out)
