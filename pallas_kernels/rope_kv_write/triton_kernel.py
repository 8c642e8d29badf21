"""`rope_kv_write` in Triton's own language. Imports triton: only `triton_jit` imports this, when it runs.

The same arithmetic as `pallas_triton.py` and `fp8.py`, which say why. A head is two tiles, which are rotated
against each other: each is one half of what is rotated, and then one half of what is not.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(T, TOKENS: tl.constexpr, COUNT: tl.constexpr):
    """Returns each row's token, its head among COUNT for each token, and whether there is such a row."""
    WIDTH: tl.constexpr = triton.next_power_of_2(COUNT)
    row = tl.arange(0, TOKENS * WIDTH)
    token, head = tl.program_id(0) * TOKENS + row // WIDTH, row % WIDTH
    return token, tl.program_id(1) * COUNT + head, (token < T) & (head < COUNT)


@triton.jit
def _places(at, ok, R: tl.constexpr, DH: tl.constexpr):
    """Returns the offsets of both tiles of the heads `at`, and which elements exist."""
    i = tl.arange(0, triton.next_power_of_2(DH // 2))[None, :]
    first, second = i, i + DH // 2
    if R < DH:
        first, second = tl.where(i < R // 2, i, i + R // 2), tl.where(i < R // 2, i + R // 2, second)
    return at[:, None] * DH + first, at[:, None] * DH + second, ok[:, None] & (i < DH // 2)


@triton.jit
def _load(ptr, at, ok, R: tl.constexpr, DH: tl.constexpr):
    first, second, mask = _places(at, ok, R, DH)
    first, second = tl.load(ptr + first, mask=mask, other=0.0), tl.load(ptr + second, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store(ptr, at, ok, first, second, R: tl.constexpr, DH: tl.constexpr):
    first_at, second_at, mask = _places(at, ok, R, DH)
    tl.store(ptr + first_at, first.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + second_at, second.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(x_ptr, weight_ptr, cos_ptr, sin_ptr, at, token, head, ok, COUNT, TOKENS, R, DH, NORM, EPS):
    """Loads heads, normalises each, or all COUNT of a token together, and rotates them, in float32."""
    first, second = _load(x_ptr, at, ok, R, DH)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    if NORM != "none":
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DH
        if NORM == "projection":
            of_token = tl.reshape(mean, (TOKENS, mean.shape[0] // TOKENS))
            total = tl.broadcast_to(tl.sum(of_token, 1)[:, None], of_token.shape)
            mean = tl.reshape(total, mean.shape) / COUNT
        else:
            head = head * 0  # one weight: to load it for every row takes no exchange between threads
        weights = _load(weight_ptr, head, ok, R, DH)
        scale = tl.rsqrt(mean + EPS)[:, None]
        first = ((first * scale).to(kind) * weights[0].to(kind)).to(tl.float32)
        second = ((second * scale).to(kind) * weights[1].to(kind)).to(tl.float32)
    i = tl.arange(0, triton.next_power_of_2(DH // 2))[None, :]
    angle, rotated = token[:, None] * (R // 2) + i, i < R // 2
    cos = tl.load(cos_ptr + angle, mask=ok[:, None] & rotated, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=ok[:, None] & rotated, other=0.0)
    turned = first * cos - second * sin
    return tl.where(rotated, turned, first), tl.where(rotated, second * cos + first * sin, second)


@triton.jit
def _encode(x, LARGEST: tl.constexpr, MANTISSA: tl.constexpr):
    """Rounds float32 to int8, or to the codes of an 8-bit float with that many bits of mantissa."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if MANTISSA == 0:
        code = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        CUT: tl.constexpr = 23 - MANTISSA
        BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
        POWER: tl.constexpr = 24 - BIAS - MANTISSA
        a = tl.abs(x)
        bits = a.to(tl.int32, bitcast=True)
        normal = bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)
        small = (a + 2.0**POWER).to(tl.int32, bitcast=True) - ((127 + POWER) << 23)
        code = tl.where(a < 2.0 ** (1 - BIAS), small, (normal >> CUT) - ((127 - BIAS) << MANTISSA))
        code |= (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return code.to(tl.int8)


@triton.jit
def _put(pages_ptr, scales_ptr, at, ok, first, second, R, DH, LARGEST: tl.constexpr, MANTISSA: tl.constexpr):
    """Stores heads in their places of the pool, quantized where LARGEST, the largest code, is not 0."""
    if LARGEST > 0:
        # As integers, which are ordered as magnitudes are, NaN above all.
        bits = tl.maximum(tl.abs(first).to(tl.int32, bitcast=True), tl.abs(second).to(tl.int32, bitcast=True))
        scale = tl.max(bits, 1).to(tl.float32, bitcast=True) / LARGEST
        scale = tl.where(scale < 2.0**-126, 1.0, scale)
        tl.store(scales_ptr + at, scale, mask=ok)
        first = _encode(first / scale[:, None], LARGEST, MANTISSA)
        second = _encode(second / scale[:, None], LARGEST, MANTISSA)
    _store(pages_ptr, at, ok, first, second, R, DH)


@triton.jit
def rope_kv_write_kernel(
    x_ptr, cos_ptr, sin_ptr, slot_ptr, q_norm_ptr, k_norm_ptr, k_scale_ptr, v_scale_ptr, k_pages_ptr,
    v_pages_ptr, out_ptr, T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    BS: tl.constexpr, R: tl.constexpr, DH: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Takes, in a program, the keys, values and G queries of HEADS KV heads of a few tokens."""
    ALL: tl.constexpr = (G + 2) * K
    token, head, ok = _rows(T, TOKENS, HEADS * G)
    row = token * ALL + head
    first, second = _rotated(
        x_ptr, q_norm_ptr, cos_ptr, sin_ptr, row, token, head, ok, HEADS * G, TOKENS, R, DH, NORM, EPS
    )
    _store(out_ptr, token * (G * K) + head, ok, first, second, R, DH)

    token, head, ok = _rows(T, TOKENS, HEADS)
    slot = tl.load(slot_ptr + token, mask=ok, other=-1)
    valid = (slot >= 0) & (slot < N * BS)
    # 64 bits: a pool may have more than 2^31 elements.
    at = ((slot // BS).to(tl.int64) * K + head) * BS + slot % BS
    row = token * ALL + G * K + head
    first, second = _rotated(
        x_ptr, k_norm_ptr, cos_ptr, sin_ptr, row, token, head, ok, HEADS, TOKENS, R, DH, NORM, EPS
    )
    _put(k_pages_ptr, k_scale_ptr, at, valid, first, second, R, DH, LARGEST, MANTISSA)
    first, second = _load(x_ptr, row + K, ok, R, DH)
    _put(v_pages_ptr, v_scale_ptr, at, valid, first, second, R, DH, LARGEST, MANTISSA)
