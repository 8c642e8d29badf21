"""`rope_kv_write` as a `@triton.jit` kernel through jax-triton: the twin of `pallas_triton`, same tiles.

Pallas's Triton backend is on its way out (docs/decisions.md); this path does not need it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import triton_call
from pallas_kernels.kv import KV_LARGEST
from pallas_kernels.op import TRITON_TYPES, Problem, Spec, TritonSource
from pallas_kernels.rope_kv_write.pallas_triton import Config, rope_kv_write_pallas

_ARRAYS = "x cos sin slot q_norm k_norm k_scale v_scale k_pages v_pages out"
_POINTERS = [f"{name}_ptr" for name in _ARRAYS.split()]


def supports(problem: Problem) -> str | None:
    """Supports all but latents."""
    return "implementation pallas_triton for latents" if problem["norm"] == "latent" else None


def call(kernel: Any, *, name: str, out_shape: Any, interpret: Any, to: Any = None, **launch: Any) -> Any:
    """See `_compat.pallas_call`, for `pallas_triton`'s kernel; `interpret` is not possible.

    `to` takes the twin in place of `triton_call`.

    Raises:
        KernelError: there is no GPU, jax-triton is missing or older than 0.4, or interpretation is asked for.
    """
    del launch["input_output_aliases"]  # of outputs with the last inputs; here the kernel has them once

    def run(*arrays: jax.Array) -> list[jax.Array]:
        count = kernel.keywords["pools"]
        inputs, pools = arrays[:-count], arrays[-count:]
        norms, scales, pages = inputs[4:], pools[2:], str(pools[0].dtype)
        # Of eight-bit numbers the kernel writes bits: Triton's language has no float8_e4m3fn on sm_80.
        kind = jnp.int8 if scales else pools[0].dtype
        written = [*scales, *(jax.lax.bitcast_convert_type(x, kind) for x in pools[:2])]
        # Angles take the places of norms and scales that are not there, and are not read.
        taken = [*inputs[:4], *(norms or inputs[1:3]), *(() if scales else inputs[1:3])]
        types = [TRITON_TYPES.get(str(x.dtype), "*i32") for x in (*taken, *written, inputs[0])]
        twin = TritonSource(
            name="rope_kv_write_kernel",
            module="pallas_kernels.rope_kv_write.triton_kernel",
            signature=dict(zip(_POINTERS, types, strict=True)),
            constants={
                **{size.upper(): value for size, value in kernel.keywords.items() if size != "pools"},
                "NORM": ("head", "projection")[norms[0].ndim - 1] if norms else "none",
                "LARGEST": KV_LARGEST.get(pages, 0.0),
                "MANTISSA": {"float8_e4m3fn": 3, "float8_e5m2": 2}.get(pages, 0),
            },
            **launch,
        )
        static = {"out_shape": out_shape[0], "interpret": interpret, "in_place": written}
        out, *written = (to or triton_call)(name, twin, taken, **static)
        stored = [jax.lax.bitcast_convert_type(x, pools[0].dtype) for x in written[-2:]]
        return [out, *stored, *written[:-2]]

    return run


def sources(spec: Spec, config: Config) -> list[TritonSource]:
    """Returns the kernel of a spec, for the static report."""
    found: list[TritonSource] = []

    def record(_: str, twin: TritonSource, inputs: Any, *, in_place: Any, **static: Any) -> list[jax.Array]:
        found.append(twin)
        return [inputs[0], *in_place]

    run = functools.partial(rope_kv_write_pallas, config=config, call=functools.partial(call, to=record))
    jax.eval_shape(lambda arrays: run(**arrays, **spec.static), spec.abstract)
    return found
