"""`rope_kv_write`: checks its arguments and runs an implementation by name."""

import functools
from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS
from pallas_kernels.errors import MAX_HEAD_DIM, MAX_LATENT, arrays_of, check_arrays, check_heads, check_that
from pallas_kernels.kv import KV_DTYPES, check_pool_size, is_quantized
from pallas_kernels.op import Implementation, Op
from pallas_kernels.rope_kv_write import pallas_triton, triton_jit
from pallas_kernels.rope_kv_write.reference import Written, rope_kv_write_reference
from pallas_kernels.rope_kv_write.specs import SPECS, problem
from pallas_kernels.run import Options, run

OP = Op(
    name="rope_kv_write",
    reference=rope_kv_write_reference,
    implementations={
        "pallas_triton": Implementation.of(pallas_triton.rope_kv_write_pallas, pallas_triton),
        "triton_jit": Implementation.of(
            functools.partial(pallas_triton.rope_kv_write_pallas, call=triton_jit.call),
            pallas_triton,
            sources=triton_jit.sources,
            supports=triton_jit.supports,
        ),
    },
    specs=SPECS,
    sizes=("T",),
    # Pools are updated in place where they are donated: in a chain of timed calls each call takes the last
    # one's, or every call would be timed with a copy of the pools, many times its own bytes.
    carries={"k_pages": 1, "v_pages": 2, "k_scale": 3, "v_scale": 4},
)


def rope_kv_write(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    **options: Unpack[Options],
) -> Written:
    """Computes `(q rotated, k_pages, v_pages, k_scale, v_scale)`; see `rope_kv_write_reference`.

    Args:
        q: `[T, H, Dh]`, k, v: `[T, K, Dh]`, of one dtype, bfloat16, float16 or float32; Dh a multiple of 8 up
            to 256, H a multiple of K. v None: latents (implementation "pallas_triton", without norms), of
            which K is 1 and Dh up to 512 more; then v_pages and v_scale are None, too, and returned as None.
        cos, sin: float32 `[T, R/2]`, R at most Dh.
        k_pages, v_pages: `[N, K, bs, Dh]` of one dtype. They and the scales are updated in place if the
            caller's jit donates them, and copied first if it does not.
        slot_mapping: int32 `[T]`.
        k_scale, v_scale: float32 `[N, K, bs]`, both where pages are int8 or fp8, neither where not; returned
            as None then.
        q_norm, k_norm: `[Dh]` both, or `[H, Dh]` and `[K, Dh]`, bfloat16, float16 or float32, or neither;
            eps: of both, positive.
        options: an implementation, "pallas_triton", "triton_jit" (through jax-triton, on a GPU only, with
            the same configurations) or "reference", and how it runs; see `Options`.

    Raises:
        KernelError: shapes that disagree, no tokens, an unsupported dtype, head dimension or pool size.
    """
    scales, wide = {"k_scale": k_scale, "v_scale": v_scale}, q_norm is not None and q_norm.ndim == 2
    norm = "projection" if wide else "none" if q_norm is None else "head"
    arguments = {
        "q": (q, "T H Dh", FLOATS),
        "k": (k, "T K Dh", (q.dtype,)),
        "v": (v, "T K Dh", (q.dtype,)),
        "cos": (cos, "T half", (jnp.float32,)),
        "sin": (sin, "T half", (jnp.float32,)),
        "k_pages": (k_pages, "N K bs Dh", KV_DTYPES),
        "v_pages": (v_pages, "N K bs Dh", (k_pages.dtype,)),
        "slot_mapping": (slot_mapping, "T", (jnp.int32,)),
        **{name: (scale, "N K bs", (jnp.float32,)) for name, scale in scales.items()},
        "q_norm": (q_norm, "H Dh" if wide else "Dh", FLOATS),
        "k_norm": (k_norm, "K Dh" if wide else "Dh", FLOATS),
    }
    quantized = is_quantized(k_pages.dtype)
    for (name, array), pages in zip(scales.items(), (k_pages, v_pages), strict=True):
        wanted = quantized and pages is not None
        expected = f"float32 [N, K, bs] with {k_pages.dtype} pages" if wanted else "None with such pages"
        got = "None" if array is None else f"an array with {k_pages.dtype} pages"
        check_that(OP.name, name, (array is not None) == wanted, got, expected)
    values = "None" if v_pages is None else "an array"
    check_that(
        OP.name, "v_pages", (v is None) == (v_pages is None), values, "None where v is, and only there"
    )
    sizes = check_arrays(OP.name, arguments)
    T, H, K, Dh, half, bs = (sizes[name] for name in ("T", "H", "K", "Dh", "half", "bs"))
    if v is None:
        check_that(OP.name, "k_pages", K == 1, f"{K} KV heads", "1 where v is None")
        most = MAX_HEAD_DIM + MAX_LATENT
        check_that(OP.name, "q", Dh % 8 == 0 and Dh <= most, Dh, f"a multiple of 8 up to {most}")
        check_that(OP.name, "q_norm", q_norm is None and k_norm is None, "an array", "None where v is None")
    else:
        check_heads(OP.name, H, K, Dh)
    check_that(
        OP.name, "cos", 2 * half <= Dh, f"{half} angles", f"at most {Dh // 2}, half the head dimension"
    )
    check_that(OP.name, "eps", eps > 0, eps, "a positive number")
    both = (q_norm is None) == (k_norm is None)
    check_that(OP.name, "k_norm", both, "None" if k_norm is None else "an array", "both norms, or neither")
    check_pool_size(OP.name, k_pages)
    return run(
        OP,
        problem(T, H, K, Dh, 2 * half, bs, q.dtype, k_pages.dtype, norm="latent" if v is None else norm),
        {**arrays_of(arguments), "eps": eps},
        **options,
    )
