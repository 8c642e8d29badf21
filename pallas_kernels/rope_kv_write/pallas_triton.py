"""`rope_kv_write` as a Pallas kernel: a program takes a few tokens' share of one KV head.

That is its key, its value and its G = H / K query heads, so that every program has the same work and small
batches still make T * K programs. Where a norm runs over all heads of a token, a program takes them all. The
two halves that are rotated against each other are two tiles.

q, k and v come as one array `[T, H + 2K, Dh]`: a packed projection is one, of which XLA would have to write
out three slices otherwise. With latents, which are keys alone, q is what is rotated of it: the rest, most of
it, does not pass through the kernel.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import both, cdiv, load, next_power_of_2, pallas_call, program_id, store
from pallas_kernels.fp8 import encode_e4m3, encode_e5m2
from pallas_kernels.kv import KV_LARGEST, is_quantized
from pallas_kernels.op import Problem
from pallas_kernels.rope_kv_write.reference import Written


@dataclass(frozen=True)
class Config:
    """`tokens` per program, a power of two."""

    tokens: int
    num_warps: int
    num_stages: int = 1


def heuristic(problem: Problem) -> Config:
    """Takes about 16 elements of q a thread in each half, one token a program until the card is full.

    Each of 2 * T * K programs at least keeps 1 KB in flight; the card needs a few MB: 4 warps from there. A
    program of all heads has half as many elements a thread, as its keys are as many more rows.
    """
    T, K, row = int(problem["T"]), int(problem["K"]), _row(problem)
    if problem["norm"] == "projection":
        return Config(1, num_warps=max(1, min(8, row // (32 * 8))))
    if T * K <= 2048 or problem["norm"] == "latent":
        most = 8 if problem["norm"] == "latent" else 4  # of all heads
        return Config(1, num_warps=max(1, min(most, row // (32 * 16))))
    tokens = max(1, min(16, 32 * 16 * 2 // row))
    return Config(min(tokens, next_power_of_2(T)), num_warps=max(1, min(4, tokens * row // (32 * 16))))


def space(problem: Problem) -> Iterable[Config]:
    """Tokens and warps, up to 64 elements a thread."""
    tiles = (Config(t, w) for t in (1, 2, 4, 8, 16, 32) for w in (1, 2, 4, 8))
    seen = {heuristic(problem)} | {c for c in tiles if c.tokens * _row(problem) <= 64 * 32 * c.num_warps}
    return sorted(seen, key=lambda c: (c.tokens, c.num_warps))


def _row(problem: Problem) -> int:
    """Returns half the elements of a token's q in a program."""
    heads = int(problem["H"]) // (1 if problem["norm"] == "projection" else int(problem["K"]))
    width = int(problem["R" if problem["norm"] == "latent" else "Dh"])
    return next_power_of_2(heads) * next_power_of_2(width // 2)


def _encode(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 within the dtype's range to the dtype, to nearest, ties to even.

    By integer arithmetic: sm_80 has no conversion to 8-bit floats, and Pallas no rounding.
    """
    if dtype == jnp.int8:
        # 1.5 * 2^23 has its last place at 1: the addition rounds, the low bits count.
        return (jax.lax.bitcast_convert_type(x + 12582912.0, jnp.int32) - 0x4B400000).astype(jnp.int8)
    code = encode_e4m3(x) if dtype == jnp.float8_e4m3fn else encode_e5m2(x)
    return jax.lax.bitcast_convert_type(code, dtype)


def _put(pages: Any, scales: Any, where: tuple[Any, Any, Any], valid: jax.Array, parts: list[Any]) -> None:
    """Stores rows, each of a token and head, in parts `(values [rows, n], columns [n], their mask [1, n] or
    None)`."""
    page, head, place = where
    dtype = jnp.dtype(pages.dtype)
    if is_quantized(dtype):
        largest = KV_LARGEST[str(dtype)]
        amax = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1) for x, _, _ in parts])
        scale = amax / largest
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
        store(scales.at[page, head, place], scale, mask=valid)
    for x, column, inside in parts:
        if is_quantized(dtype):
            x = _encode(jnp.clip(x / scale[:, None], -largest, largest), dtype)
        at = pages.at[page[:, None], head[:, None], place[:, None], column[None, :]]
        store(at, x.astype(dtype), mask=both(valid[:, None], inside))


def _kernel(
    *refs: Any,
    tokens: int,
    heads: int,
    T: int,
    K: int,
    G: int,
    N: int,
    bs: int,
    R: int,
    Dh: int,
    pools: int,
    eps: float,
    latent: bool = False,
) -> None:
    x_ref, cos_ref, sin_ref, slot_ref, *norms = refs[: -2 * pools - 1]
    out_ref, *outputs = refs[-pools - 1 :]
    key_ref, first_key = x_ref, G * K
    if latent:
        (key_ref,), norms, first_key = norms, [], 0
        outputs = [outputs[0], None, *outputs[1:], *outputs[1:]]
    q_norm, k_norm = norms or (None, None)
    k_pages, v_pages = outputs[:2]
    k_scales, v_scales = outputs[2:] or (None, None)
    half = R // 2
    column, inside = _columns(0, half)

    def rows(count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns each row's token, its head among `count` for each token, and whether there is such a row.
        The heads of a token follow one another, as they do in memory."""
        row, width = jnp.arange(tokens * next_power_of_2(count), dtype=jnp.int32), next_power_of_2(count)
        token, head = program_id(0) * tokens + row // width, row % width
        return token, program_id(1) * count + head, (token < T) & (head < count)

    def tile(ref: Any, row: Any, at: Any, cols: jax.Array, mask: jax.Array | None, ok: jax.Array) -> Any:
        index = (row[:, None], cols[None, :]) if at is None else (row[:, None], at[:, None], cols[None, :])
        return load(ref.at[index], mask=both(ok[:, None], mask), other=0.0).astype(jnp.float32)

    def rotated(ref: Any, row: Any, head: Any, first_head: int, ok: jax.Array, norm: Any) -> list[Any]:
        rest = ref.shape[-1] - R
        cos = tile(cos_ref, row, None, column, inside, ok)
        sin = tile(sin_ref, row, None, column, inside, ok)
        places = [(column, inside), (column + half, inside), *([_columns(R, rest)] if rest else [])]
        parts = [tile(ref, row, first_head + head, cols, mask, ok) for cols, mask in places]
        if norm is not None:
            square: Any = sum(jnp.sum(x * x, axis=1) for x in parts)
            width = Dh
            if len(norm.shape) == 2:
                of_token, width = square.reshape(tokens, -1), norm.shape[0] * Dh
                total = jnp.broadcast_to(jnp.sum(of_token, axis=1)[:, None], of_token.shape)
                square = total.reshape(square.shape)
            scale = jax.lax.rsqrt(square / width + eps)[:, None]
            parts = [
                weighted(x * scale, norm, head, ok, *place) for x, place in zip(parts, places, strict=True)
            ]
        first, second, *tail = parts
        parts = [first * cos - second * sin, second * cos + first * sin, *tail]
        return [(x, *place) for x, place in zip(parts, places, strict=True)]

    def weighted(x: jax.Array, norm: Any, head: Any, ok: Any, cols: jax.Array, mask: Any) -> jax.Array:
        index: Any = cols[None, :]
        if len(norm.shape) == 2:
            index, mask = (head[:, None], index), both(ok[:, None], mask)
        weight = load(norm.at[index], mask=mask, other=0.0).astype(x_ref.dtype)
        return (x.astype(x_ref.dtype) * weight).astype(jnp.float32)

    q_token, q_head, q_real = rows(heads * G)
    for x, cols, mask in rotated(x_ref, q_token, q_head, 0, q_real, q_norm):
        at = out_ref.at[q_token[:, None], q_head[:, None], cols[None, :]]
        store(at, x.astype(out_ref.dtype), mask=both(q_real[:, None], mask))

    token, head, real = rows(heads)
    slot = load(slot_ref.at[token], mask=real, other=-1)
    valid = (slot >= 0) & (slot < N * bs)
    # Page N of the masked rows is never touched on a GPU; interpreted, their index must not be a valid row's.
    slot = jnp.where(valid, slot, N * bs)
    where = (slot // bs, head, slot % bs)
    _put(k_pages, k_scales, where, valid, rotated(key_ref, token, head, first_key, real, k_norm))
    if latent:
        return
    whole, whole_inside = _columns(0, Dh)
    values = tile(x_ref, token, (G + 1) * K + head, whole, whole_inside, real)
    _put(v_pages, v_scales, where, valid, [(values, whole, whole_inside)])


def _columns(start: int, count: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns a power of two of columns from `start`, and which are real, `[1, n]` (None: all)."""
    width = next_power_of_2(count)
    offset = jnp.arange(width, dtype=jnp.int32)
    return start + offset, None if count == width else (offset < count)[None, :]


def rope_kv_write_pallas(
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
    config: Config,
    interpret: bool | None = None,
    call: Callable[..., Any] = pallas_call,
) -> Written:
    """See `rope_kv_write_reference`. Pages and scales are written in place where the caller donates them.

    `call`: also the twin's.
    """
    T, H, Dh = q.shape
    N, K, bs, _ = k_pages.shape
    pools = [pool for pool in (k_pages, v_pages, k_scale, v_scale) if pool is not None]
    sizes: dict[str, Any] = {"T": T, "K": K, "G": H // K, "N": N, "bs": bs, "R": 2 * cos.shape[1], "Dh": Dh}
    heads = K if q_norm is not None and q_norm.ndim == 2 else 1
    kernel = functools.partial(_kernel, tokens=config.tokens, heads=heads, pools=len(pools), eps=eps, **sizes)
    turned = q
    if v is None:
        turned = q[..., : sizes["R"]]
        inputs = [turned, cos, sin, slot_mapping, k]
        kernel = functools.partial(kernel, latent=True)
    else:
        # Side by side as the projection has them: of a packed one this is no copy. Of one token XLA sees that
        # only without the first axis, which it has dropped from its slices.
        shape = (-1,) if T == 1 else (T, -1)
        flat = jnp.concatenate([x.reshape(shape) for x in (q, k, v)], axis=-1)
        inputs = [flat.reshape(T, -1, Dh), cos, sin, slot_mapping]
        inputs += [norm for norm in (q_norm, k_norm) if norm is not None]
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (turned, *pools)]
    q_rotated, *written = call(
        kernel,
        name="rope_kv_write",
        grid=(cdiv(T, config.tokens), K // heads),
        out_shape=out,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        input_output_aliases={len(inputs) + i: 1 + i for i in range(len(pools))},
    )(*inputs, *pools)
    if v is None:
        q_rotated = jnp.concatenate([q_rotated, q[..., sizes["R"] :]], axis=-1)
        return q_rotated, written[0], None, written[1] if k_scale is not None else None, None
    scales = written[2:] or (None, None)
    return q_rotated, written[0], written[1], scales[0], scales[1]
