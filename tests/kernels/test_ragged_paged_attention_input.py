"""What `ragged_paged_attention` says of bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.ragged_paged_attention import check_block_table, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.pallas_triton import Config
from tests.kernels.test_ragged_paged_attention import batch


def _arguments(rng, **options):
    return {**batch(rng, [1, 3], [9, 12], **options), "scale": 1.0}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": (4, 3, 16)}, "q: got 3 heads, expected a multiple of the 2 KV heads"),
        (
            {"q": (4, 4, 20), "k_pages": (5, 2, 8, 20), "v_pages": (5, 2, 8, 20)},
            "q: got head dimension 20, expected a multiple of 8",
        ),
        (
            {"q": (4, 4, 264), "k_pages": (5, 2, 8, 264), "v_pages": (5, 2, 8, 264)},
            "dimension 264, .* up to 256",
        ),
        (
            {"k_pages": (5, 2, 12, 16), "v_pages": (5, 2, 12, 16)},
            "k_pages: got bs=12, expected a power of two",
        ),
        ({"k_pages": (5, 2, 4, 16), "v_pages": (5, 2, 4, 16)}, "bs=4, expected a power of two, at least 8"),
        ({"q": (4, 4, 32)}, r"k_pages: got shape \[25, 2, 8, 16\], expected .* Dh=32"),
        ({"v_pages": (6, 2, 8, 16)}, "v_pages: got shape .* N=25"),
        ({"q": (0, 4, 16)}, "q: got shape .*, expected at least one element along T"),
        ({"kv_lens": (3,)}, "kv_lens: got shape .* S=4"),
        ({"cu_q_lens": (2,)}, r"cu_q_lens: got shape \[2\], expected \[S\+1\] with S\+1=5"),
        ({"sinks": (3,)}, "sinks: got shape .* H=4"),
        ({"block_table": (4, 0)}, "block_table: .* at least one element along M"),
    ],
)
def test_bad_shapes(rng, change, message):
    arguments = _arguments(rng)
    for name, shape in change.items():
        arguments[name] = jnp.zeros(shape, arguments[name].dtype if name in arguments else jnp.float32)
    with pytest.raises(KernelError, match=f"ragged_paged_attention: .*{message}"):
        ragged_paged_attention(**arguments)


def test_bad_choices(rng):
    good, int8 = _arguments(rng), _arguments(rng, kv="int8")
    ones = jnp.ones(int8["k_scale"].shape)

    def fails(message, arguments=good, error=KernelError, **change):
        with pytest.raises(error, match=message):
            ragged_paged_attention(**{**arguments, **change})

    fails("q: got int32, expected bfloat16", q=good["q"].astype(jnp.int32))
    fails("k_pages: got uint8, expected bfloat16 or", k_pages=good["k_pages"].astype(jnp.uint8))
    fails("v_pages: got bfloat16, expected float32", v_pages=good["v_pages"].astype(jnp.bfloat16))
    fails("kv_lens: got float32, expected int32", kv_lens=good["kv_lens"].astype(jnp.float32))
    fails("k_scale: got an array, expected None with pages of float32", k_scale=ones)
    fails("v_scale: got None, expected an array with pages of int8", int8, v_scale=None)
    fails("k_scale: got bfloat16, expected float32", int8, k_scale=ones.astype(jnp.bfloat16))
    fails("k_scale: got shape", int8, k_scale=ones[:, :1])
    fails("scale: got 0.0", scale=0.0)
    fails("window: got 0", window=0)
    fails("soft_cap: got 0.0", soft_cap=0.0)
    fails("max_q_len: got 0", max_q_len=0)
    fails("one of reference, pallas_triton, triton_jit", implementation="mosaic")
    fails("config is a dict; pallas_triton takes Config", error=TypeError, config={})
    fails(
        "config.rows: got 16, expected at least H/K=20",
        _arguments(rng, H=20, K=1),
        config=Config(16, 4, 3, 16, 16, 4, 3),
    )
    fails("at most 128 query heads", _arguments(rng, H=130, K=1))


def test_too_large_for_32_bits():
    """One-byte pools from 2 to 4 GiB: Pallas would count past 2^31 in 32 signed bits."""
    shape = (2**31 // (8 * 32 * 128) + 1, 8, 32, 128)
    pages = jax.ShapeDtypeStruct(shape, jnp.int8)
    scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32)
    rest = {"q": ((1, 8, 128), jnp.float32), "block_table": ((1, 1), jnp.int32), "kv_lens": ((1,), jnp.int32)}
    arrays = {name: jax.ShapeDtypeStruct(*what) for name, what in rest.items()}
    arrays |= {"k_pages": pages, "v_pages": pages, "k_scale": scales, "v_scale": scales}
    arrays["cu_q_lens"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.raises(KernelError, match="k_pages: got 2147516416 elements of int8"):
        jax.eval_shape(lambda kw: ragged_paged_attention(**kw, scale=1.0), arrays)


def test_check_block_table(rng):
    arrays = batch(rng, [1, 3], [9, 12])
    names = ("block_table", "kv_lens", "cu_q_lens")
    good = {name: np.array(arrays[name]) for name in names}

    def check(**change):
        check_block_table(**{**good, **change}, num_pages=25, block_size=8, num_tokens=4)

    def fails(message, **change):
        with pytest.raises(KernelError, match=f"ragged_paged_attention: {message}"):
            check(**change)

    check()  # unused entries may be anything
    table = good["block_table"].copy()
    table[1, 1] = 25
    fails(r"block_table: got page 25 at \[1, 1\], expected 0 to N-1=24", block_table=table)
    table[1, 1] = -1
    fails(r"block_table: got page -1 at \[1, 1\]", block_table=table)
    fails("kv_lens: got 49 in row 0, expected 0 to M·bs=48", kv_lens=np.array([49, 12, 0, 0]))
    fails("kv_lens: got 2 in row 1, expected at least its 3 queries", kv_lens=np.array([9, 2, 0, 0]))
    fails("cu_q_lens: .* numbers that rise from 0", cu_q_lens=np.array([0, 3, 2, 4, 4]))
    fails("cu_q_lens: .* numbers that rise from 0", cu_q_lens=np.array([1, 2, 4, 4, 4]))
    fails(
        "cu_q_lens: got 5 at its end, expected at most T=4",
        cu_q_lens=np.array([0, 1, 4, 4, 5]),
        kv_lens=np.array([9, 12, 0, 3]),
    )
