"""Paged decode in Triton's own language. Imports triton: only `triton_jit` imports this, when it runs.

The same arithmetic as `tiles.py` and `decode.py`, which say why; KV is "float" or the quantized dtype's name.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e38)
TINY = tl.constexpr(2.0**-100)
QUERY_HEADROOM = tl.constexpr(2.0**12)
WEIGHT_HEADROOM = tl.constexpr(2.0**15)


@triton.jit
def _share(seq, keys, work_ptr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Returns the first key and tile, the tile past the last, the first part and each part's tiles."""
    first_key = keys * 0
    if WINDOW > 0:
        first_key = tl.maximum(keys - WINDOW, 0)
    first = first_key // TILE
    past = (keys + TILE - 1) // TILE
    first_part = tl.load(work_ptr + seq)
    splits = tl.maximum(tl.load(work_ptr + seq + 1) - first_part, 1)
    per_split = tl.maximum((past - first + splits - 1) // splits, 1)
    return first_key, first, past, first_part, per_split


@triton.jit
def _keys(seq, lens_ptr, cu_ptr):
    """Returns a sequence's row of q, and how many keys it decodes over: 0 if it does not have one query."""
    row = tl.load(cu_ptr + seq)
    one = tl.load(cu_ptr + seq + 1) - row == 1
    return row, tl.where(one, tl.load(lens_ptr + seq), 0)


@triton.jit
def _decode(x, KV: tl.constexpr):
    """Returns stored numbers in float16, exactly."""
    wide = x.to(tl.int8, bitcast=True).to(tl.int16)
    if KV == "int8":
        value = (wide + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        tl.static_assert(KV == "float8_e5m2")
        value = (wide << 8).to(tl.float16, bitcast=True)
    return value


@triton.jit
def paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    cu_ptr,
    work_ptr,
    k_scale_ptr,
    v_scale_ptr,
    part_ptr,
    lse_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    DH: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FACTOR: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KV: tl.constexpr,
    F32: tl.constexpr,
):
    """Attends, in a program, one part of one sequence's context for the G query heads of one KV head."""
    G: tl.constexpr = H // K
    QUANTIZED: tl.constexpr = KV != "float"
    part = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(work_ptr + S + 1 + part)
    token, keys = _keys(seq, lens_ptr, cu_ptr)
    first_key, first, past, first_part, per_split = _share(seq, keys, work_ptr, WINDOW, TILE)
    begin = first + (part - first_part) * per_split
    end = tl.minimum(begin + per_split, past)
    if begin < end:
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, DP)
        at = head * G + row
        used = (row < G)[:, None] & (dim < DH)[None, :]
        q = tl.load(q_ptr + (token * H + at)[:, None] * DH + dim[None, :], mask=used, other=0.0)
        factor = tl.full((ROWS,), FACTOR, tl.float32)
        if QUANTIZED:
            q = q.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(q), 1), TINY)
            power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            factor = power * (FACTOR / QUERY_HEADROOM)
            q = (q * (1.0 / power * QUERY_HEADROOM)[:, None]).to(tl.float16)
        elif F32:
            q = q.to(tl.float32)

        top = tl.full((ROWS,), MASKED, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DP), tl.float32)
        unit = tl.full((), TINY, tl.float32)
        for i in range(begin, end):
            key = i * TILE + tl.arange(0, TILE)
            present = (key < keys) & (key >= first_key)
            slot = key % BS
            page = tl.load(table_ptr + seq * M + key // BS, mask=present, other=0)
            # 64 bits: a pool may have more than 2^31 elements.
            stored = (page.to(tl.int64) * K + head) * BS + slot
            offset = stored[:, None] * DH + dim[None, :]
            if DP == DH:
                k = tl.load(k_ptr + offset)
                v = tl.load(v_ptr + offset, mask=present[:, None], other=0.0)
            else:
                inside = (dim < DH)[None, :]
                k = tl.load(k_ptr + offset, mask=inside, other=0.0)
                v = tl.load(v_ptr + offset, mask=present[:, None] & inside, other=0.0)
            if QUANTIZED:
                k = _decode(k, KV)
                v = _decode(v, KV)
            elif F32:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor[:, None]
            if QUANTIZED:
                scores *= tl.load(k_scale_ptr + stored)[None, :]
            if SOFT_CAP > 0:
                scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * (SOFT_CAP * LOG2E)
            scores = tl.where(present[None, :], scores, MASKED)
            higher = tl.maximum(top, tl.max(scores, 1))
            fade = tl.exp2(top - higher)
            p = tl.exp2(scores - higher[:, None])
            total = total * fade + tl.sum(p, 1)
            top = higher
            if QUANTIZED:
                v_scale = tl.load(v_scale_ptr + stored, mask=present, other=0.0)
                larger = tl.maximum(unit, tl.max(v_scale, 0))
                p = p * (v_scale * (1.0 / larger * WEIGHT_HEADROOM))[None, :]
                fade = fade * (unit / larger)
                unit = larger
            acc = acc * fade[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        if QUANTIZED:
            acc = acc * (unit / WEIGHT_HEADROOM)
        place = (part * H + at).to(tl.int64)
        tl.store(part_ptr + place[:, None] * DH + dim[None, :], acc / total[:, None], mask=used)
        tl.store(lse_ptr + place, top + tl.log2(total), mask=row < G)


@triton.jit
def paged_decode_reduce_kernel(
    part_ptr,
    lse_ptr,
    lens_ptr,
    cu_ptr,
    work_ptr,
    sinks_ptr,
    out_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS_P: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Joins the parts of one head of one sequence; programs from S on write zeros to rows of no sequence."""
    program = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DP)
    if program < S:
        token, keys = _keys(program, lens_ptr, cu_ptr)
        _, first, past, first_part, per_split = _share(program, keys, work_ptr, WINDOW, TILE)
        split = tl.arange(0, SPLITS_P)
        used = split * per_split < past - first
        place = (first_part + split).to(tl.int64) * H + head
        lse = tl.load(lse_ptr + place, mask=used, other=MASKED)
        inside = (dim < DH)[None, :]
        part = tl.load(part_ptr + place[:, None] * DH + dim[None, :], mask=used[:, None] & inside, other=0.0)
        top = tl.max(lse, 0)
        if SINKS:
            sink = tl.load(sinks_ptr + head) * LOG2E
            top = tl.maximum(top, sink)
        weight = tl.exp2(lse - top)
        total = tl.sum(weight, 0)
        if SINKS:
            total += tl.exp2(sink - top)
        out = tl.sum(part * weight[:, None], 0) / total
        out = tl.where(keys > 0, out, 0.0)
        if tl.load(cu_ptr + program + 1) - token == 1:
            at = out_ptr + (token * H + head) * DH + dim
            tl.store(at, out.to(out_ptr.dtype.element_ty), mask=dim < DH)
    else:
        row = tl.load(cu_ptr + S) + (program - S) * PADDING + tl.arange(0, PADDING)
        zeros = tl.zeros((PADDING, DP), out_ptr.dtype.element_ty)
        rest = (row < T)[:, None] & (dim < DH)[None, :]
        tl.store(out_ptr + (row * H + head)[:, None] * DH + dim[None, :], zeros, mask=rest)
