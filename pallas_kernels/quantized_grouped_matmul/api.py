"""`quantized_grouped_matmul`, `quantized_grouped_swiglu`: check arguments, run an implementation by name."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, bind_shapes, check_arrays, check_dtype, check_that
from pallas_kernels.group_specs import problem
from pallas_kernels.groups import Activation, check_gated, check_table
from pallas_kernels.op import Implementation, Op
from pallas_kernels.qformats import MOST_CODES, PACK, QuantizedTensor, check_quantized
from pallas_kernels.quantized_grouped_matmul import pallas_triton
from pallas_kernels.quantized_grouped_matmul.reference import (
    quantized_grouped_matmul_reference,
    quantized_grouped_swiglu_reference,
)
from pallas_kernels.quantized_grouped_matmul.specs import SPECS, SWIGLU_SPECS
from pallas_kernels.run import Options, run

OP = Op(
    name="quantized_grouped_matmul",
    reference=quantized_grouped_matmul_reference,
    implementations={
        "pallas_triton": Implementation.of(pallas_triton.quantized_grouped_matmul_pallas, pallas_triton)
    },
    specs=SPECS,
    sizes=("P",),
)

SWIGLU_OP = Op(
    name="quantized_grouped_swiglu",
    reference=quantized_grouped_swiglu_reference,
    implementations={
        "pallas_triton": Implementation.of(pallas_triton.quantized_grouped_swiglu_pallas, pallas_triton)
    },
    specs=SWIGLU_SPECS,
    sizes=("P",),
)


def check_activations(
    op: str, x: jax.Array, x_scale: jax.Array | None, w: QuantizedTensor, out_dtype: Any, config: Any
) -> None:
    """Checks x's dtype for the format, its scales and the mode; R is bound by the caller."""
    if x_scale is None:
        check_dtype(op, "x", x, FLOATS)
    else:
        fmt = w.format
        check_that(op, "x_scale", fmt.kind == "w8a8", f"an array with {fmt.name}", "None unless w8a8")
        check_dtype(op, "x", x, (jnp.int8,))
        check_dtype(op, "x_scale", x_scale, (jnp.float32,))
        bind_shapes(op, {"x": (x, "R D"), "x_scale": (x_scale, "R")})
    if out_dtype is not None:
        check_dtype(op, "out_dtype", jnp.empty((), out_dtype), FLOATS)
    got = f"{w.values.size} bytes of codes"
    check_that(op, "w", w.values.size < MOST_CODES, got, "fewer than 2^31 on a device")
    if config is not None:
        check_config(op, config, w)


def check_config(op: str, config: Any, w: QuantizedTensor) -> None:
    """Checks an explicit configuration's mode and tile for the format; its class is checked later."""
    fmt, tile = w.format, [getattr(config, name, 64) for name in ("block_n", "block_k")]
    modes = [m for m in pallas_triton.MODES if m != "separate" or op == SWIGLU_OP.name]
    modes = [m for m in modes if m != "dequantize_once" or fmt.kind != "w8a8"]
    mode = getattr(config, "mode", "fused")
    check_that(op, "config.mode", mode in modes, repr(mode), f"{' or '.join(modes)} with {fmt.name}")
    # Nibbles come by pack blocks; a tile has the scale of one block of columns; products want 16, int8's 32.
    least = PACK if fmt.packed else 32 if fmt.kind == "w8a8" else 16
    most = fmt.scale_columns if fmt.scale_columns > 1 else 256
    powers = all(n > 0 and n & (n - 1) == 0 for n in tile)
    good = powers and 16 <= tile[0] <= most and tile[1] >= least
    expected = f"powers of two, block_n 16 to {most}, block_k at least {least}, with {fmt.name}"
    check_that(op, "config", good, f"block_n={tile[0]}, block_k={tile[1]}", expected)


def quantized_grouped_matmul(
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
    **options: Unpack[Options],
) -> jax.Array:
    """Computes `row_scale[p] · (x[rows[p]] @ w[e] + bias[e])` for each slot p of expert e, w quantized.

    Args:
        x: `[R, D]`, bfloat16, float16 or float32. With a `w8a8` weight it is quantized per row on the way, or
            comes as int8 with x_scale float32 `[R]`, as `quantize_rows` makes both.
        w: `[E, D, F]` in one of the formats of `pallas_kernels.qformats`.
        rows, block_expert, num_blocks, block_m, bias, row_scale: as of `grouped_matmul`.
        out_dtype: None: x's, float32 if that is int8.
        options: an implementation, "pallas_triton" or "reference", and how it runs; see `Options`.

    Returns:
        `[P, F]`; padding and blocks past `num_blocks` are undefined.

    Raises:
        KernelError: shapes that disagree, no rows, an unsupported dtype, format or block_m.
    """
    sizes = check_quantized(OP.name, "w", w, "E D F")
    arguments = {
        "x": (x, "R D", (x.dtype,)),
        "rows": (rows, "P", (jnp.int32,)),
        "bias": (bias, "E F", FLOATS),
        "row_scale": (row_scale, "P", (jnp.float32,)),
    }
    sizes = check_arrays(OP.name, arguments, **sizes)
    check_activations(OP.name, x, x_scale, w, out_dtype, options.get("config"))
    check_table(OP.name, rows, block_expert, num_blocks, block_m)
    shape = sizes["P"], sizes["D"], sizes["F"], sizes["E"], block_m, x.dtype
    return run(
        OP,
        problem(*shape, w.format, biased=bias is not None),
        {
            **arrays_of(arguments),
            "w": w,
            "block_expert": block_expert,
            "num_blocks": num_blocks,
            "block_m": block_m,
            "x_scale": x_scale,
            "out_dtype": out_dtype,
        },
        **options,
    )


def quantized_grouped_swiglu(
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
    **options: Unpack[Options],
) -> jax.Array:
    """Computes `grouped_swiglu` with quantized gate and up.

    Args:
        gate, up: `[E, D, F]`, of one format.
        gate_bias, up_bias, activation: as of `grouped_swiglu`.
        others: as of `quantized_grouped_matmul`.

    Returns:
        `[P, F]`; padding and blocks past `num_blocks` are undefined.

    Raises:
        KernelError: shapes or formats that disagree, no rows, an unsupported dtype, format or block_m.
    """
    name = SWIGLU_OP.name
    sizes = check_quantized(name, "gate", gate, "E D F")
    sizes = check_quantized(name, "up", up, "E D F", **sizes)
    check_that(name, "up", up.format == gate.format, up.format.name, f"gate's format, {gate.format.name}")
    arguments = {
        "x": (x, "R D", (x.dtype,)),
        "gate_bias": (gate_bias, "E F", FLOATS),
        "up_bias": (up_bias, "E F", FLOATS),
        "rows": (rows, "P", (jnp.int32,)),
    }
    sizes = check_arrays(name, arguments, **sizes)
    check_activations(name, x, x_scale, gate, out_dtype, options.get("config"))
    check_gated(name, activation, gate_bias, up_bias)
    check_table(name, rows, block_expert, num_blocks, block_m)
    shape = sizes["P"], sizes["D"], sizes["F"], sizes["E"], block_m, x.dtype
    return run(
        SWIGLU_OP,
        problem(*shape, gate.format, activation, gate_bias is not None),
        {
            **arrays_of(arguments),
            "gate": gate,
            "up": up,
            "block_expert": block_expert,
            "num_blocks": num_blocks,
            "block_m": block_m,
            "activation": activation,
            "x_scale": x_scale,
            "out_dtype": out_dtype,
        },
        **options,
    )
