"""`rms_norm`: checks its arguments and runs an implementation by name."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, check_arrays, check_that
from pallas_kernels.op import Implementation, Op, make_problem
from pallas_kernels.rms_norm import pallas_triton
from pallas_kernels.rms_norm.reference import rms_norm_reference
from pallas_kernels.rms_norm.specs import SPECS
from pallas_kernels.run import Options, run

KINDS = ("rms", "rms_unit_offset", "layer")

OP = Op(
    name="rms_norm",
    reference=rms_norm_reference,
    implementations={"pallas_triton": Implementation.of(pallas_triton.rms_norm_pallas, pallas_triton)},
    specs=SPECS,
    sizes=("T",),
)


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    slot_of: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    kind: str = "rms",
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]:
    """Computes `(rms_norm(x + residual) · weight, x + residual)`; see `rms_norm_reference`.

    Args:
        x, residual: `[T, D]` of one dtype, bfloat16, float16 or float32; weight: `[D]`, any of these. The
            residual may be a sum that is still to be made, of any of these: parts `[k, T, D]`, or with
            slot_of rows `[P, D]`.
        slot_of: int32 `[T, k]`, the rows of each sum, added up and masked as by `moe_combine`.
        bias: `[D]`, bfloat16, float16 or float32, of kind "layer" only.
        kind: "rms", "rms_unit_offset" or "layer".
        options: an implementation, "pallas_triton" or "reference", and how it runs; see `Options`.

    Raises:
        KernelError: shapes that disagree, no tokens, an unsupported dtype or kind.
    """
    rows = "P D" if slot_of is not None else "k T D" if residual is not None and residual.ndim == 3 else "T D"
    arguments = {
        "x": (x, "T D", FLOATS),
        "weight": (weight, "D", FLOATS),
        "residual": (residual, rows, (x.dtype,) if rows == "T D" else FLOATS),
        "slot_of": (slot_of, "T k", (jnp.int32,)),
        "bias": (bias, "D", FLOATS),
    }
    sizes = check_arrays(OP.name, arguments)
    check_that(OP.name, "eps", eps > 0, eps, "a positive number")
    check_that(OP.name, "kind", kind in KINDS, repr(kind), " or ".join(KINDS))
    check_that(OP.name, "bias", bias is None or kind == "layer", f"an array with kind {kind!r}", "None")
    # Plain norms keep the problem that tables were tuned for.
    other: dict[str, Any] = {} if kind == "rms" else {"kind": kind}
    return run(
        OP,
        make_problem(**sizes, dtype=x.dtype, residual=residual is not None, **other),
        {**arrays_of(arguments), "eps": eps, "kind": kind},
        **options,
    )
