"""`quantized_matmul`: checks its arguments and runs an implementation by name."""

from typing import Any, Unpack

import jax

from pallas_kernels.errors import bind_shapes
from pallas_kernels.op import Implementation, Op, make_problem
from pallas_kernels.qformats import QuantizedTensor, check_quantized
from pallas_kernels.quantized_grouped_matmul.api import check_activations
from pallas_kernels.quantized_matmul import pallas_triton
from pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from pallas_kernels.quantized_matmul.specs import SPECS
from pallas_kernels.run import Options, run

OP = Op(
    name="quantized_matmul",
    reference=quantized_matmul_reference,
    implementations={
        "pallas_triton": Implementation.of(pallas_triton.quantized_matmul_pallas, pallas_triton)
    },
    specs=SPECS,
    sizes=("T",),
)


def quantized_matmul(
    x: jax.Array,
    w: QuantizedTensor,
    *,
    x_scale: jax.Array | None = None,
    out_dtype: Any = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes `x @ w`, w quantized; see `quantized_matmul_reference`.

    Args:
        x: `[T, D]`, bfloat16, float16 or float32. With a `w8a8` weight it is quantized per row on the way, or
            comes as int8 with x_scale float32 `[T]`, as `quantize_rows` makes both.
        w: `[D, F]` in one of the formats of `pallas_kernels.qformats`.
        out_dtype: None: x's, float32 if that is int8.
        options: an implementation, "pallas_triton" or "reference", and how it runs; see `Options`.

    Returns:
        `[T, F]`.

    Raises:
        KernelError: shapes that disagree, no tokens, an unsupported dtype or format.
    """
    sizes = check_quantized(OP.name, "w", w, "D F")
    sizes = bind_shapes(OP.name, {"x": (x, "T D")}, **sizes)
    check_activations(OP.name, x, x_scale, w, out_dtype, options.get("config"))
    return run(
        OP,
        make_problem(**sizes, dtype=x.dtype, **w.format.problem),
        {"x": x, "w": w, "x_scale": x_scale, "out_dtype": out_dtype},
        **options,
    )
