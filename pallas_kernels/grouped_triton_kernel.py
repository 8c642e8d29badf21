"""`grouped_tiles`' products in Triton's own language. Imports triton: imported when `grouped_triton` runs."""

import triton
import triton.language as tl


@triton.jit
def grouped_product_kernel(
    x_ptr,
    w_ptr,
    up_ptr,
    rows_ptr,
    block_ptr,
    num_ptr,
    scale_ptr,
    out_ptr,
    R: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Computes one (block, f-tile) a program, in the order of `pallas_kernels.grouped_tiles.place`.

    ACT: of gate and up, `w_ptr` and `up_ptr`; "" for the one product with `w_ptr`.
    """
    N_TILES: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    EVEN_N: tl.constexpr = F % BLOCK_N == 0
    GATED: tl.constexpr = ACT != ""
    pid = tl.program_id(0)
    used = tl.load(num_ptr)
    if pid < used * N_TILES:
        if GROUP == 1:
            block = pid // N_TILES
            f = pid % N_TILES
        else:
            first = pid // (GROUP * N_TILES) * GROUP
            within = pid % (GROUP * N_TILES)
            height = tl.minimum(used - first, GROUP)
            block = first + within % height
            f = within // height
        slots = block * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = tl.load(rows_ptr + slots)
        filled = (rows >= 0) & (rows < R)
        cols = f * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = cols < F
        k = tl.arange(0, BLOCK_K)
        # 64 bits: a stack of experts, or the rows of a long prefill, may have more than 2^31 elements. Scalar
        # pointers move along the reduction, so that a thread keeps 32-bit offsets and no table of addresses.
        start = tl.load(block_ptr + block).to(tl.int64) * (D * F)
        w_ptr += start
        up_ptr += start
        step = k[:, None] * F + cols[None, :]
        row_at = rows.to(tl.int64) * D
        out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i in range(0, D, BLOCK_K):
            x_at = x_ptr + row_at[:, None] + k[None, :]
            if D % BLOCK_K == 0:
                x = tl.load(x_at, mask=filled[:, None], other=0.0)
                if EVEN_N:
                    w = tl.load(w_ptr + step)
                else:
                    w = tl.load(w_ptr + step, mask=inside[None, :], other=0.0)
            else:
                left = k < D - i
                x = tl.load(x_at, mask=filled[:, None] & left[None, :], other=0.0)
                mask = left[:, None] & inside[None, :]
                w = tl.load(w_ptr + step, mask=mask, other=0.0)
            if GATED:
                if D % BLOCK_K != 0:
                    u = tl.load(up_ptr + step, mask=mask, other=0.0)
                elif EVEN_N:
                    u = tl.load(up_ptr + step)
                else:
                    u = tl.load(up_ptr + step, mask=inside[None, :], other=0.0)
                up_ptr += BLOCK_K * F
            out = tl.dot(x, w, out, input_precision="ieee")
            if GATED:
                up = tl.dot(x, u, up, input_precision="ieee")
            x_ptr += BLOCK_K
            w_ptr += BLOCK_K * F
        # The names of pallas_kernels.groups.ACTIVATIONS.
        if ACT == "silu":
            out = out * tl.sigmoid(out) * up
        elif ACT == "gelu":
            out = 0.5 * out * (1.0 + tl.erf(out * 0.7071067811865476)) * up
        elif ACT == "gelu_tanh":
            # 0.5 (1 + tanh z) = sigmoid(2 z)
            out = out * tl.sigmoid(1.5957691216057308 * (out + 0.044715 * out * out * out)) * up
        else:
            tl.static_assert(not GATED or ACT == "relu")
            if GATED:
                out = tl.maximum(out, 0.0) * up
        if SCALED:
            out = out * tl.load(scale_ptr + slots)[:, None]
        at = out_ptr + slots.to(tl.int64)[:, None] * F + cols[None, :]
        if EVEN_N:
            tl.store(at, out.to(out_ptr.dtype.element_ty), mask=filled[:, None])
        else:
            tl.store(at, out.to(out_ptr.dtype.element_ty), mask=filled[:, None] & inside[None, :])
