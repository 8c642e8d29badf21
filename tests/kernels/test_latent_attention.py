"""`ragged_paged_attention` over latents: pages without values, which are the last numbers of their keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.ragged_paged_attention import OP, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.pallas_triton import Config
from pallas_kernels.work_list import LATENT_HEADS, MOST_QUERIES, latent_heads, latent_queries, most_splits
from tests.examples import slow_but
from tests.kernels.contract import Contract
from tests.kernels.test_ragged_paged_attention import QUANTIZED, SCALE, batch, limit, planned, slow

SMALL = Config(16, 4, 3, 16, 16, 4, 3)


def latents(rng, q_lens, kv_lens, *, rope=8, rank=16, **options):
    """As `batch`: whatever no query may see is NaN, or a page that does not exist."""
    arrays = batch(rng, q_lens, kv_lens, K=1, Dh=rope + rank, **options)
    return {name: array for name, array in arrays.items() if not name.startswith("v_")}


class TestPallas(Contract):
    op, api, implementation = OP, staticmethod(ragged_paged_attention), "pallas_triton"

    def check_latents(self, arrays, rank=16, config=None, **static):
        static = {"scale": SCALE, "v_pages": None, "value_dim": rank, **static}
        arrays = {"work_list": planned(arrays, 1, static.get("window")), **arrays}
        out = self.check(arrays, static, limit=limit(arrays), config=config)
        assert out.shape == (*arrays["q"].shape[:2], rank)
        return out

    @pytest.mark.parametrize(
        "dtype,kv,max_q_len",
        slow_but(
            [("bfloat16", None, None), ("bfloat16", "int8", 1)],
            [
                (d, k, n)
                for d in ("bfloat16", "float16", "float32")
                for k in (None, *QUANTIZED)
                for n in (None, 1)
            ],
        ),
    )
    def test_dtypes(self, rng, dtype, kv, max_q_len):
        """Decodes, chunks, a sequence without queries and rows of no sequence."""
        q_lens, kv_lens = ([1, 1, 0, 1], [37, 1, 9, 16]) if max_q_len else ([1, 7, 0, 1], [37, 20, 9, 16])
        arrays = latents(rng, q_lens, kv_lens, dtype=dtype, kv=kv, padding=150 if max_q_len else 2)
        self.check_latents(arrays, max_q_len=max_q_len)

    @pytest.mark.parametrize(
        "H,rope,rank,rows",
        [
            slow(5, 8, 24, 16),
            (24, 16, 40, 16),
            slow(20, 64, 512, 64),
            slow(7, 24, 136, 32),
            slow(37, 8, 8, 16),
        ],
    )
    def test_heads(self, rng, H, rope, rank, rows):
        """Heads that fill no tile, and more than one tile; lengths that are no powers of two; splits, whose
        reduction takes a value in pieces."""
        arrays = latents(rng, [1, 9, 1], [21, 30, 300], H=H, rope=rope, rank=rank, bs=32, padding=1)
        arrays["work_list"] = planned(arrays, 3)
        self.check_latents(arrays, rank, Config(16, 4, 3, rows, 16, 4, 3))

    @pytest.mark.parametrize("splits,rank", [slow(1, 16), (3, 264), slow(8, 16)])
    def test_splits(self, rng, splits, rank):
        """More splits than a context has keys for, and fewer; a query without keys."""
        arrays = latents(rng, [1, 1, 1, 1], [700, 512, 5, 40], bs=32, rank=rank, padding=90)
        arrays["kv_lens"] = arrays["kv_lens"].at[3].set(0)
        arrays["work_list"] = planned(arrays, splits)
        out = self.check_latents(arrays, rank, Config(64, 4, 3, 64, 32, 4, 3), max_q_len=1)
        assert (np.asarray(out)[3:] == 0).all()

    @pytest.mark.slow
    def test_lengths(self, rng):
        """Every number of keys around the borders of pages and tiles, decoded and as a chunk."""
        lengths = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48]
        self.check_latents(latents(rng, [1] * len(lengths), lengths), config=SMALL, max_q_len=1)
        self.check_latents(latents(rng, [min(n, 5) for n in lengths], lengths), config=SMALL)

    @pytest.mark.slow
    def test_masks(self, rng):
        arrays = latents(rng, [1, 11, 3], [45, 44, 3], window=5, sinks=True, padding=1)
        self.check_latents(arrays, window=5, soft_cap=0.7)

    @pytest.mark.parametrize("H", [4, slow(24)])
    def test_few_queries(self, rng, H):
        """Without a work list one is made: contexts of a few queries are split, with many heads they are a
        chunk's."""
        arrays = latents(rng, [1, 4, 8, 20], [200, 300, 129, 64], H=H, bs=64)
        static = {"scale": SCALE, "v_pages": None, "value_dim": 16}
        self.check(arrays, static, limit=limit(arrays))

    @pytest.mark.parametrize("kv", slow_but(["int8"], QUANTIZED))
    def test_magnitudes(self, rng, kv):
        """Far out of float16's range, with scales of all sizes."""
        arrays = latents(rng, [1, 3], [40, 33], kv=kv, magnitude=1e6, dtype="bfloat16")
        arrays["q"] = (arrays["q"].astype(jnp.float32) / 1e6).astype(jnp.bfloat16)
        self.check_latents(arrays)

    @pytest.mark.slow
    def test_rows_do_not_mix(self, rng):
        arrays = latents(rng, [1, 1, 1], [20, 24, 17])
        arrays["q"] = arrays["q"].at[1].set(jnp.nan)
        static = {"scale": SCALE, "v_pages": None, "value_dim": 16, "max_q_len": 1}
        out = self.run(arrays, static)
        assert jnp.isnan(out).any(axis=(1, 2)).tolist() == [i == 1 for i in range(16)]


def test_work_lists_fill_the_device():
    """One program a multiprocessor where it has many heads, two where it has few: 108 of an A100's."""
    assert [latent_heads(n) for n in (8, 16, 32, LATENT_HEADS, 128)] == [1, 1, 2, 2, 4]
    assert 8 - 1 + most_splits(8, latent_heads(64), 32768) == 108
    assert 2 * (8 - 1 + most_splits(8, latent_heads(128), 32768)) == 108
    assert [latent_queries(n) for n in (16, 17)] == [MOST_QUERIES, 1]


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"value_dim": None},
            "value_dim: got None, expected a multiple of 8 up to 512 where v_pages is None",
        ),
        ({"value_dim": 12}, "value_dim: got 12"),
        (
            {"value_dim": 24},
            "q: got head dimension 24, expected value_dim=24 and a multiple of 8 up to 256 before",
        ),
        ({"v_pages": (25, 1, 8, 24)}, "value_dim: got 16, expected None where there are v_pages"),
        ({"v_scale": (25, 1, 8)}, "v_scale: got an array, expected None with pages of None"),
        ({"k_pages": (25, 2, 8, 24)}, "k_pages: got 2 KV heads, expected 1 where a key holds its value"),
        ({"implementation": "triton_jit"}, "expected .*implementation pallas_triton for latents"),
    ],
)
def test_bad_input(rng, change, message):
    arguments = {
        **latents(rng, [1, 1], [9, 12]),
        "scale": 1.0,
        "v_pages": None,
        "value_dim": 16,
        "max_q_len": 1,
    }
    change = {name: jnp.zeros(x) if isinstance(x, tuple) else x for name, x in change.items()}
    with pytest.raises(KernelError, match=message):
        ragged_paged_attention(**arguments | change)


def test_latents_are_not_widened(rng):
    arrays = latents(rng, [1, 1], [9, 12])
    arrays["q"] = arrays["q"].astype(jnp.bfloat16)
    with pytest.raises(KernelError, match="latents in the dtype of q, or quantized"):
        ragged_paged_attention(**arrays, v_pages=None, scale=1.0, value_dim=16)


def test_they_are_not_copied(rng):
    """Keys and values are one argument's pages: nothing slices them."""
    arrays = latents(rng, [1, 1], [9, 12])
    static = {"scale": 1.0, "v_pages": None, "value_dim": 16}
    text = str(jax.make_jaxpr(lambda kw: ragged_paged_attention(**kw, **static))(arrays))
    pages = "f32[{}]".format(",".join(map(str, arrays["k_pages"].shape)))
    assert not [line for line in text.splitlines() if pages[:-1] in line and "slice" in line]
