"""`flash_attention`: checks its arguments and runs an implementation by name."""

from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import arrays_of, check_arrays, check_heads, check_that
from pallas_kernels.flash_attention import pallas_triton
from pallas_kernels.flash_attention.reference import flash_attention_reference
from pallas_kernels.flash_attention.specs import SPECS
from pallas_kernels.op import Implementation, Op, make_problem
from pallas_kernels.run import Options, run

OP = Op(
    name="flash_attention",
    reference=flash_attention_reference,
    implementations={"pallas_triton": Implementation.of(pallas_triton.flash_attention_pallas, pallas_triton)},
    specs=SPECS,
    sizes=("B", "Tq", "Tk"),
)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    lengths: jax.Array | None = None,
    q_offset: int | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes attention of q `[B, Tq, H, Dh]` on k and v `[B, Tk, K, Dh]`; see `flash_attention_reference`.

    Query i stands at position i + Tk - Tq unless `q_offset` says otherwise.

    Args:
        q, k, v: of one dtype, bfloat16, float16 or float32; Dh a multiple of 8 up to 256, H a multiple of K.
        window: needs `causal`.
        sinks: float32 `[H]`; lengths: int32 `[B]`.
        options: an implementation, "pallas_triton" or "reference", and how it runs; see `Options`.

    Raises:
        KernelError: shapes that disagree, no tokens, an unsupported dtype, head dimension or mask.
    """
    arguments = {
        "q": (q, "B Tq H Dh", FLOATS),
        "k": (k, "B Tk K Dh", (q.dtype,)),
        "v": (v, "B Tk K Dh", (q.dtype,)),
        "sinks": (sinks, "H", (jnp.float32,)),
        "lengths": (lengths, "B", (jnp.int32,)),
    }
    sizes = check_arrays(OP.name, arguments)
    H, K, Dh = sizes["H"], sizes["K"], sizes["Dh"]
    check_heads(OP.name, H, K, Dh)
    check_that(OP.name, "scale", scale > 0, scale, "a positive number")
    check_that(OP.name, "soft_cap", soft_cap is None or soft_cap > 0, soft_cap, "a positive number or None")
    if window is not None:
        check_that(OP.name, "window", window >= 1, window, "at least 1, or None")
        check_that(OP.name, "window", causal, "a window with causal=False", "causal=True")
    flags = {
        "causal": causal,
        "window": window is not None,
        "soft_cap": soft_cap is not None,
        "sinks": sinks is not None,
        "lengths": lengths is not None,
    }
    return run(
        OP,
        make_problem(**sizes, dtype=q.dtype, **flags),
        {
            **arrays_of(arguments),
            "scale": scale,
            "causal": causal,
            "window": window,
            "soft_cap": soft_cap,
            "q_offset": q_offset,
        },
        **options,
    )
