"""Named shapes of `rope_kv_write`: each model's heads, decode and prefill, plain and quantized pages."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv import is_quantized
from pallas_kernels.models import GLM, GLM_AIR, LATENTS, MINIMAX, MIXTRAL, MODELS, OLMOE, QWEN3, ModelShape
from pallas_kernels.op import Cost, Problem, Spec, make_problem

BLOCK = 32
_NORMS = {QWEN3.name: "head", GLM.name: "head", OLMOE.name: "projection", MINIMAX.name: "projection"}
_HALF = (GLM, GLM_AIR, MINIMAX)
"""Half of each head is rotated."""


def problem(
    T: int, H: int, K: int, Dh: int, R: int, bs: int, dtype: Any, pages: Any, *, norm: str
) -> Problem:
    """Returns the problem; `norm`: what is normalised first, "none", each "head" or a whole "projection"; or
    "latent" where there are no values."""
    return make_problem(T=T, H=H, K=K, Dh=Dh, R=R, bs=bs, dtype=dtype, pages=pages, norm=norm)


def _spec(model: ModelShape, phase: str, T: int, pages: Any) -> Spec:
    H, K, Dh, dtype = model.heads, model.kv_heads, model.head_dim, jnp.bfloat16
    N, norm = max(512, 2 * T // BLOCK), _NORMS.get(model.name, "none")
    latent = model.latent is not None
    R, vectors = Dh // 2 if model in _HALF else Dh, 2
    if model.latent is not None:
        R, vectors = Dh - model.latent, 1
    # Of queries beside latents only what is rotated has to move.
    width = R if latent else Dh

    def make(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 5)
        angle = jax.random.uniform(keys[3], (T, R // 2), jnp.float32, 0.0, 1000.0)
        page = jax.random.permutation(keys[4], N).astype(jnp.int32)
        token = jnp.arange(T, dtype=jnp.int32)
        # A prefill fills pages of its own; tokens at decode are of as many sequences.
        filled = page[token // BLOCK] * BLOCK + token % BLOCK
        slots = filled if phase == "prefill" else page[token] * BLOCK + (7 * token) % BLOCK
        arrays: dict[str, Any] = {
            "q": jax.random.normal(keys[0], (T, H, Dh), dtype),
            "k": jax.random.normal(keys[1], (T, K, Dh), dtype),
            "v": None if latent else jax.random.normal(keys[2], (T, K, Dh), dtype),
            "cos": jnp.cos(angle),
            "sin": jnp.sin(angle),
            "k_pages": jnp.zeros((N, K, BLOCK, Dh), pages),
            "v_pages": None if latent else jnp.zeros((N, K, BLOCK, Dh), pages),
            "slot_mapping": slots,
        }
        arrays = {name: array for name, array in arrays.items() if array is not None}
        if norm != "none":
            shapes = {"q_norm": (H, Dh), "k_norm": (K, Dh)}
            arrays |= {n: jnp.full((Dh,) if norm == "head" else s, 1.5, dtype) for n, s in shapes.items()}
        scale = jnp.ones((N, K, BLOCK), jnp.float32)
        return arrays | ({"k_scale": scale, "v_scale": scale} if is_quantized(pages) else {})

    stored = vectors * K * (Dh * jnp.dtype(pages).itemsize + (4 if is_quantized(pages) else 0))
    flops = (3.0 if norm == "none" else 7.0) * T * (H + K) * width
    moved = T * (2 * (2 * H * width + vectors * K * Dh) + 4 * R + stored + 4)
    kind = "" if pages == jnp.bfloat16 else f"/{jnp.dtype(pages)}"
    return Spec(
        name=f"{model.name}/{phase}_{T}{kind}",
        make=make,
        static={"v": None, "v_pages": None} if latent else {},
        problem=problem(T, H, K, Dh, R, BLOCK, dtype, pages, norm="latent" if latent else norm),
        cost=Cost(flops=flops, bytes=float(moved), unit="float32"),
        tags=frozenset({model.name, phase, str(jnp.dtype(pages))}),
    )


_SIZES = (("decode", 8), ("decode", 64), ("prefill", 4096))

SPECS = tuple(
    _spec(model, phase, T, jnp.bfloat16) for model in (*MODELS, *LATENTS) for phase, T in _SIZES
) + tuple(
    _spec(model, phase, T, pages)
    for model in (MIXTRAL, QWEN3)
    for pages in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
    for phase, T in (("decode", 64), ("prefill", 4096))
)
SPECS += tuple(
    _spec(model, phase, T, jnp.bfloat16)
    for model in _HALF
    for phase, T in (("decode", 64), ("prefill", 4096))
)
