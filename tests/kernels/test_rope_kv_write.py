"""`rope_kv_write` against its contract."""

import functools
import itertools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.core.config import ModelConfig
from moejax.nn.rope import apply_rope, rope_tables
from pallas_kernels import _compat
from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.errors import KernelError
from pallas_kernels.fp8 import encode_e5m2
from pallas_kernels.kv import KV_LARGEST, dequantize_kv, is_quantized, quantize_kv
from pallas_kernels.rope_kv_write import OP, rope_kv_write, triton_jit
from pallas_kernels.rope_kv_write.pallas_triton import Config
from tests.examples import slow_but
from tests.kernels.contract import ULP, Contract, limit_for, normal
from tests.kernels.triton_interpreter import run_twins

QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
# Half a step of rounding to nearest: relative to the number, and absolute for the smallest ones.
STEP = {"int8": (0.0, 0.5), "float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}


def _arrays(rng, T, H, K, Dh, *, R=None, N=5, bs=4, dtype="float32", pages=None, slots=None):
    """Random tokens, pages full of random numbers, and distinct slots, a fourth of them padding."""
    pages = pages or dtype
    if slots is None:
        slots = np.where(rng.random(T) < 0.25, -1 - rng.integers(0, 9, T), rng.permutation(N * bs)[:T])
    angle = rng.uniform(0, 1000, (T, (R or Dh) // 2))
    pools = [normal(rng, (N, K, bs, Dh), "float32") for _ in range(2)]
    arrays = {
        "q": normal(rng, (T, H, Dh), dtype),
        "k": normal(rng, (T, K, Dh), dtype),
        "v": normal(rng, (T, K, Dh), dtype, 3.0),
        "cos": jnp.asarray(np.cos(angle), jnp.float32),
        "sin": jnp.asarray(np.sin(angle), jnp.float32),
        "slot_mapping": jnp.asarray(slots, jnp.int32),
    }
    for name, pool in zip("kv", pools, strict=True):
        if is_quantized(pages):
            arrays[f"{name}_pages"], arrays[f"{name}_scale"] = quantize_kv(pool, pages)
        else:
            arrays[f"{name}_pages"] = pool.astype(pages)
    return arrays


class RopeKvWriteContract(Contract):
    op, api = OP, staticmethod(rope_kv_write)

    def check_written(self, arrays, ours=None, config=None):
        """Every slot: its token's row, within the rounding of the format, or else the old bytes."""
        ours = self.run(arrays, {}, config) if ours is None else ours
        pages = str(arrays["k_pages"].dtype)
        plain = {n: a for n, a in arrays.items() if not n.endswith("_scale")}
        # The same write to unquantized pages, in float64.
        plain |= {n: jnp.full(arrays[n].shape, jnp.nan, jnp.float32) for n in ("k_pages", "v_pages")}
        q, *wanted = self.expect(plain, {})
        dtype = arrays["q"].dtype
        error = np.abs(np.asarray(ours[0], np.float64) - q) / np.abs(q).max()
        assert error.max() <= limit_for(dtype, 2)
        for name, got, scale, want in zip("kv", ours[1:3], ours[3:5], wanted, strict=False):
            old, old_scale = arrays[f"{name}_pages"], arrays.get(f"{name}_scale")
            kept = np.isnan(want)
            np.testing.assert_array_equal(_bytes(got)[kept], _bytes(old)[kept])
            value = np.asarray(got, np.float64)
            if is_quantized(pages):
                value = np.asarray(dequantize_kv(got, scale), np.float64)
            if not is_quantized(pages):
                limit = np.full(want.shape, limit_for(dtype, 2) + ULP[pages]) * np.nanmax(
                    np.abs(want), initial=0.0
                )
            else:
                row = kept.all(-1)
                np.testing.assert_array_equal(np.asarray(scale)[row], np.asarray(old_scale)[row])
                expected = np.abs(want).max(-1) / KV_LARGEST[pages]
                np.testing.assert_allclose(
                    np.asarray(scale)[~row], np.where(expected == 0, 1, expected)[~row], 2e-6
                )
                relative, absolute = STEP[pages]
                # A float32 rounding of the rotated number may tip it over the middle between two codes.
                limit = (
                    relative * np.abs(want) + absolute * np.asarray(scale, np.float64)[..., None]
                ) * 1.001
                limit += 4e-6 * np.abs(want).max(-1)[..., None]
            assert (np.abs(value - want)[~kept] <= limit[~kept]).all()
        return ours

    @pytest.mark.parametrize(
        "dtype,pages",
        [
            ("bfloat16", "bfloat16"),
            pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
            ("float16", "float32"),
            pytest.param("bfloat16", "int8", marks=pytest.mark.slow),
            ("float16", "float8_e4m3fn"),
            ("bfloat16", "float8_e5m2"),
        ],
    )
    def test_dtypes(self, rng, dtype, pages):
        self.check_written(_arrays(rng, 6, 4, 2, 16, dtype=dtype, pages=pages))

    @pytest.mark.parametrize(
        "T,H,K,Dh,R,bs",
        slow_but(
            [(1, 1, 1, 8, 8, 1), (7, 6, 2, 64, 64, 3), (3, 5, 5, 80, 32, 4), (4, 2, 2, 128, 96, 5)],
            [
                (1, 1, 1, 8, 8, 1),
                (7, 6, 2, 64, 64, 3),
                (5, 7, 1, 40, 40, 16),
                (3, 5, 5, 80, 32, 4),
                (9, 8, 2, 24, 2, 2),
                (4, 2, 2, 128, 96, 5),
                (2, 3, 3, 256, 256, 8),
            ],
        ),
    )
    def test_shapes(self, rng, T, H, K, Dh, R, bs):
        """Groups, heads and page sizes that are no powers of two, and partial rotation."""
        pages = "int8" if T % 2 else "float32"
        self.check_written(_arrays(rng, T, H, K, Dh, R=R, bs=bs, N=9, pages=pages))

    @pytest.mark.parametrize("pages", slow_but(["float32"], ["float32", "int8"]))
    def test_every_padding_pattern(self, rng, pages):
        """All 2^8 choices of which of 8 tokens store anything."""
        arrays = _arrays(rng, 8, 2, 1, 8, N=3, pages=pages)
        names = [n for n in arrays if n != "slot_mapping"]
        run = jax.jit(
            lambda slots: self.api(
                **{n: arrays[n] for n in names}, slot_mapping=slots, implementation=self.implementation
            )
        )
        for used in itertools.product([False, True], repeat=8):
            slots = jnp.asarray(np.where(used, rng.permutation(12)[:8], -1), jnp.int32)
            self.check_slots_moved(arrays, slots, run(slots))

    def check_slots_moved(self, arrays, slots, ours):
        """Written slots differ from the old pages, all others do not."""
        used = np.zeros(12, bool)
        used[np.asarray(slots)[np.asarray(slots) >= 0]] = True
        for old, new in zip((arrays["k_pages"], arrays["v_pages"]), ours[1:3], strict=True):
            changed = (_bytes(old) != _bytes(new)).any(axis=(1, 3)).reshape(-1)
            np.testing.assert_array_equal(changed, used)

    @pytest.mark.parametrize(
        "dtype,pages,H,K,Dh,R,wide",
        [
            pytest.param("float32", "float32", 4, 2, 16, 16, False, marks=pytest.mark.slow),
            pytest.param("bfloat16", "bfloat16", 6, 2, 80, 32, False, marks=pytest.mark.slow),
            ("bfloat16", "bfloat16", 96, 8, 128, 64, False),  # GLM-4.5
            pytest.param("bfloat16", "int8", 24, 2, 128, 32, False, marks=pytest.mark.slow),
            pytest.param("bfloat16", "bfloat16", 8, 1, 128, 128, False, marks=pytest.mark.slow),
            ("float32", "int8", 2, 2, 24, 24, False),
            ("float32", "float32", 3, 3, 16, 16, True),
            pytest.param("bfloat16", "bfloat16", 6, 2, 80, 32, True, marks=pytest.mark.slow),
            pytest.param("bfloat16", "float8_e5m2", 1, 1, 64, 64, True, marks=pytest.mark.slow),
            pytest.param("float16", "int8", 10, 5, 24, 24, True, marks=pytest.mark.slow),
        ],
    )
    def test_norms(self, rng, dtype, pages, H, K, Dh, R, wide):
        self.check_norms(rng, dtype, pages, H, K, Dh, R, wide, lambda a: self.run(a, {"eps": 1e-5}))

    def check_norms(self, rng, dtype, pages, H, K, Dh, R, wide, run):
        """Each head, or with `wide` all heads of a token together, are normalised before their rotation, as
        `rms_norm` does it: what one kernel after the other gives, but for a rounding or two."""
        arrays = _arrays(rng, 9, H, K, Dh, R=R, dtype=dtype, pages=pages)
        # Heads of other sizes: what divides each by its own is not what divides all by theirs.
        arrays |= {
            n: arrays[n] * jnp.arange(1, arrays[n].shape[1] + 1, dtype=dtype)[None, :, None] for n in "qk"
        }
        heads = {"q_norm": (H,), "k_norm": (K,)}
        norms = {name: normal(rng, (*(n if wide else ()), Dh), dtype) for name, n in heads.items()}
        ours = run(arrays | norms)
        plain = self.expect(
            arrays | {n: jnp.zeros((5, K, 4, Dh), jnp.float32) for n in ("k_pages", "v_pages")} | norms
            | {n: None for n in ("k_scale", "v_scale")}, {"eps": 1e-5}
        )  # fmt: skip
        # Rounded before and after the weight; then the rotation.
        limit = limit_for(dtype, 2, Dh * H if wide else Dh) + 2 * ULP[dtype]
        assert np.abs(np.asarray(ours[0], np.float64) - plain[0]).max() <= limit * np.abs(plain[0]).max()
        slots = np.asarray(arrays["slot_mapping"])
        slots = slots[slots >= 0]
        limit += 0.0 if pages == dtype else 2.0**-3 if pages == "float8_e5m2" else 1 / 127
        for pool, scale, want in zip(ours[1:3], ours[3:], plain[1:3], strict=True):
            stored = np.asarray(dequantize_kv(pool, scale), np.float64)[slots // 4, :, slots % 4]
            want = want[slots // 4, :, slots % 4]
            assert np.abs(stored - want).max() <= limit * np.abs(want).max()

    def test_poisoned_pages(self, rng):
        """Nothing of a page is read: in pages full of NaN only the slots written are numbers."""
        arrays = _arrays(rng, 8, 4, 2, 16)
        slots = np.asarray(arrays["slot_mapping"])
        assert len(set(slots[slots >= 0])) == (slots >= 0).sum()
        poison = {n: jnp.full_like(arrays[n], jnp.nan) for n in ("k_pages", "v_pages")}
        written = np.isin(np.arange(20), slots).reshape(5, 4)
        for pool in self.run(arrays | poison, {})[1:3]:
            filled = ~np.isnan(np.asarray(pool))
            assert (filled == written[:, None, :, None]).all()

    def test_page_boundaries(self, rng):
        """A run of tokens over three pages in any order, first and last slot of the pool among them."""
        slots = np.concatenate([4 * 4 + np.arange(4), 0 * 4 + np.arange(4), 2 * 4 + np.arange(3)])
        self.check_written(_arrays(rng, 11, 2, 2, 16, slots=slots))

    def test_past_the_pool(self, rng):
        """Slots past the pool store nothing."""
        arrays = _arrays(rng, 4, 2, 1, 8, slots=[20, 3, 2**31 - 1, -(2**31)])
        self.check(arrays, {}, limit=limit_for("float32", 2))

    @pytest.mark.parametrize("pages", slow_but(["int8"], QUANTIZED))
    def test_rows_of_zeros(self, rng, pages):
        """A row of zeros has scale 1; so has one whose scale would be subnormal."""
        arrays = _arrays(rng, 3, 2, 2, 16, pages=pages, slots=[1, 7, 12])
        arrays["k"] = arrays["k"].at[0].set(0.0).at[1, 0].set(1e-40)
        arrays["v"] = arrays["v"].at[2].set(0.0)
        _, k, v, k_scale, v_scale = self.run(arrays, {})
        assert (k_scale[0, :, 1] == 1).all() and (v_scale[3, :, 0] == 1).all() and k_scale[1, 0, 3] == 1
        assert (np.asarray(k, np.float32)[0, :, 1] == 0).all() and (
            np.asarray(v, np.float32)[3, :, 0] == 0
        ).all()

    @pytest.mark.parametrize(
        "pages,scale",
        slow_but(
            [("int8", 1e-30), ("float8_e4m3fn", 1e30), ("float8_e5m2", 1e-30)],
            itertools.product(QUANTIZED, [1e-30, 1e30]),
        ),
    )
    def test_magnitudes(self, rng, pages, scale):
        """The scale takes any magnitude; within a row magnitudes differ by 2^20."""
        arrays = _arrays(rng, 5, 2, 2, 16, pages=pages)
        spread = jnp.asarray(2.0 ** rng.integers(-20, 1, (5, 2, 16)), jnp.float32)
        arrays |= {n: arrays[n] * spread * scale for n in ("k", "v")}
        self.check_written(arrays)

    @pytest.mark.parametrize("pages", slow_but(["int8"], QUANTIZED))
    def test_stores_as_kv_says(self, rng, pages):
        """Values, which are not rotated, have the very codes and scales of `kv.quantize_kv`."""
        arrays = _arrays(rng, 64, 2, 2, 64, N=20, pages=pages, slots=rng.permutation(80)[:64])
        _, _, pool, _, scales = self.run(arrays, {})
        codes, scale = quantize_kv(arrays["v"], pages)
        slots = np.asarray(arrays["slot_mapping"])
        np.testing.assert_allclose(np.asarray(scales)[slots // 4, :, slots % 4], scale, 1e-6)
        ours = _bytes(pool)[slots // 4, :, slots % 4].astype(np.int32)
        # A division that rounds otherwise may move a number on the middle between two codes by one.
        differ = ours != _bytes(codes)
        assert differ.mean() < 1e-3 and np.abs(ours - _bytes(codes))[differ].max(initial=0) <= 1

    def test_rows_do_not_mix(self, rng):
        arrays = _arrays(rng, 6, 4, 2, 16, slots=[3, 0, 9, 6, 17, -1])
        arrays["k"] = arrays["k"].at[2].set(jnp.nan)
        arrays["q"] = arrays["q"].at[4, 1].set(jnp.nan)
        q, k, v, *_ = self.run(arrays, {})
        assert np.argwhere(np.isnan(q).any(-1)).tolist() == [[4, 1]]
        assert np.argwhere(np.isnan(k).any((1, 3))).tolist() == [[2, 1]]
        assert not np.isnan(v).any()

    def test_the_models_tables(self, rng):
        """cos and sin as `moejax.nn.rope` makes them, the rotation as it applies them."""
        config = ModelConfig(
            family="olmoe", vocab_size=8, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2,
            head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, intermediate_size=8,
            moe_layers=(True,), sliding_windows=(None,), max_position_embeddings=8192,
        )  # fmt: skip
        arrays = _arrays(rng, 6, 4, 2, 16)
        positions = jnp.asarray(rng.integers(0, 5000, (2, 3)), jnp.int32)
        cos, sin = rope_tables(config, positions, jnp.asarray([5000, 5000], jnp.int32))
        arrays |= {"cos": cos.reshape(6, 8), "sin": sin.reshape(6, 8)}
        want = apply_rope(arrays["q"].reshape(2, 3, 4, 16), cos, sin).reshape(6, 4, 16)
        np.testing.assert_allclose(self.run(arrays, {})[0], want, atol=2e-6)


class TestPallas(RopeKvWriteContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("tokens,warps", slow_but([(1, 1), (16, 4)], [(1, 1), (4, 2), (16, 4)]))
    def test_configurations(self, rng, tokens, warps):
        self.check_written(_arrays(rng, 11, 6, 2, 24, R=16, pages="int8"), config=Config(tokens, warps))

    def test_configurations_with_norms_of_all_heads(self, rng):
        """Tokens that share a program do not share their sums."""
        arrays = _arrays(rng, 11, 6, 3, 24, R=16)
        norms = {"q_norm": normal(rng, (6, 24), "float32"), "k_norm": normal(rng, (3, 24), "float32")}
        self.check(arrays | norms, {"eps": 1e-5}, limit=limit_for("float32", 2, 6 * 24), config=Config(4, 4))

    @pytest.mark.parametrize(
        "T,H,Dh,R,dtype,pages",
        slow_but(
            [(7, 5, 24, 8, "bfloat16", "bfloat16"), (3, 4, 48, 8, "float32", "int8")],
            [
                (7, 5, 24, 8, "bfloat16", "bfloat16"),
                (1, 16, 576, 64, "bfloat16", "bfloat16"),
                (3, 4, 48, 8, "float32", "int8"),
                (5, 3, 40, 24, "float16", "float8_e4m3fn"),
            ],
        ),
    )
    def test_latents(self, rng, T, H, Dh, R, dtype, pages):
        """Keys alone: queries, pages and scales as with values beside them, of which there is nothing."""
        arrays = _arrays(rng, T, H, 1, Dh, R=R, dtype=dtype, pages=pages, slots=rng.permutation(20)[:T])
        alone = {n: a for n, a in arrays.items() if not n.startswith("v")}
        static = {"v": None, "v_pages": None}
        if not is_quantized(pages):
            self.check(alone, static, limit=limit_for(dtype, 2))
            return
        got, both = self.run(alone, static), OP.reference(**arrays)
        assert got[2] is None and got[4] is None
        stored, want = (np.asarray(dequantize_kv(x[1], x[3])) for x in (got, both))
        # The middle between two codes may be passed by a rounding.
        assert (
            np.abs(stored - want).max()
            <= 2 * STEP[pages][0] * np.abs(want).max() + 1.01 * np.asarray(both[3]).max()
        )
        assert (stored != want).mean() < 0.01
        np.testing.assert_allclose(
            np.asarray(got[0]), np.asarray(both[0]), rtol=4 * ULP[dtype], atol=ULP[dtype]
        )

    def test_donated_pages_are_written_in_place(self, rng):
        arrays = _arrays(rng, 3, 2, 2, 16)
        lowered = jax.jit(rope_kv_write, donate_argnames=("k_pages", "v_pages")).lower(**arrays)
        assert lowered.as_text().count("tf.aliasing_output") == 2


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax-triton needs a CUDA device")
class TestTritonJit(RopeKvWriteContract):
    implementation = "triton_jit"


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def _twins(arrays, tokens=(1, 4), **static):
    """The twin's results, interpreted; they are the same for all numbers of tokens a program."""
    call = functools.partial(rope_kv_write, **arrays, **static, implementation="triton_jit")
    ours, *others = run_twins(triton_jit, [functools.partial(call, config=Config(n, 1)) for n in tokens])
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, ours, other)
    return ours


@pytest.mark.parametrize(
    "T,H,K,Dh,R,dtype,pages",
    [
        slow(7, 6, 2, 24, 16, "float32", "float8_e4m3fn"),
        slow(1, 1, 1, 8, 8, "float32", "float32"),
        slow(7, 6, 2, 64, 64, "float16", "float16"),
        slow(5, 7, 1, 40, 40, "float16", "int8"),
        slow(6, 5, 5, 80, 32, "float16", "float8_e5m2"),
        slow(9, 8, 2, 24, 2, "float32", "int8"),
        slow(4, 2, 2, 128, 96, "float16", "float32"),
    ],
)
def test_triton_jit_interpreted(rng, T, H, K, Dh, R, dtype, pages):
    """The twin's arithmetic without a GPU: padding, partial rotation, every format of pages."""
    arrays = _arrays(rng, T, H, K, Dh, R=R, dtype=dtype, pages=pages)
    pytest.importorskip("triton")
    TestTritonJit().check_written(arrays, _twins(arrays))


@pytest.mark.parametrize(
    "dtype,pages,H,K,Dh,R,wide",
    [
        ("float32", "float8_e5m2", 6, 3, 24, 16, True),
        slow("float32", "float32", 6, 2, 80, 32, False),
        slow("float16", "int8", 10, 5, 24, 24, True),
        slow("float16", "float16", 1, 1, 64, 64, False),
    ],
)
def test_triton_jit_norms_interpreted(rng, dtype, pages, H, K, Dh, R, wide):
    pytest.importorskip("triton")
    check = TestTritonJit().check_norms
    check(rng, dtype, pages, H, K, Dh, R, wide, lambda arrays: _twins(arrays, (4,), eps=1e-5))


@pytest.mark.parametrize("since", [False, True])
def test_triton_jit_writes_in_place(rng, monkeypatch, since):
    """Pools go to jax-triton 0.4 as references, which alias them; 0.3 has none, and is refused."""
    pytest.importorskip("triton")

    def before(*arrays, kernel, out_shape, grid, **options):
        raise AssertionError

    def call(*arrays, kernel, out_type, grid, **options):
        for ref in arrays[6:10]:
            ref[...] = ref[...] + jnp.ones((), ref.dtype)
        return jnp.zeros(out_type.shape, out_type.dtype)

    monkeypatch.setattr(_compat, "_adapt_dead_code_rule", lambda primitive: None)
    library = SimpleNamespace(triton_kernel_call_p=None)
    module = SimpleNamespace(triton_call=call if since else before, triton_lib=library)
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    arrays = _arrays(rng, 3, 2, 2, 16, pages="int8")
    run = functools.partial(rope_kv_write, **arrays, implementation="triton_jit", interpret=False)
    if since:
        names = ("k_pages", "v_pages", "k_scale", "v_scale")
        for name, new in zip(names, run()[1:], strict=True):
            np.testing.assert_array_equal(new, arrays[name] + jnp.ones((), arrays[name].dtype))
    else:
        with pytest.raises(KernelError, match=r"jax-triton older than 0\.4"):
            run()


def _bytes(array):
    """Bit patterns as integers."""
    array = np.asarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}") if array.dtype != np.int8 else array


def test_encodes_e5m2():
    """As ml_dtypes: all high halves of a float32 (so every code and every middle) and what follows."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    encode = jax.jit(encode_e5m2)
    for low in (0, 1, 0xFFFF):
        x = (high | np.uint32(low)).view(np.float32)
        x = x[np.abs(x) <= 57344]
        x = x[(np.abs(x) >= 2.0**-126) | (x == 0)]  # XLA's CPU code flushes subnormal numbers
        codes = np.asarray(encode(x))
        np.testing.assert_array_equal(codes, x.astype(ml_dtypes.float8_e5m2).view(np.uint8))
    assert encode_e5m2(jnp.asarray([np.inf, -1e9, np.nan], jnp.float32)).tolist() == [0x7B, 0xFB, 0x7F]


@pytest.mark.parametrize(
    "H,K,Dh,R,pages",
    slow_but(
        [
            (21, 7, 80, 32, "bfloat16"),
            (21, 7, 80, 32, "int8"),
            (21, 7, 80, 32, "float8_e4m3fn"),
            (8, 2, 24, 2, "float8_e5m2"),
            (4, 4, 128, 128, "float32"),
        ],
        [
            (*shape, pages)
            for shape in [(21, 7, 80, 32), (8, 2, 24, 2), (4, 4, 128, 128)]
            for pages in ("bfloat16", "float32", *QUANTIZED)
        ],
    ),
)
def test_lowers(rng, H, K, Dh, R, pages):
    """To Triton IR, which is stricter than interpretation. Of four heads all are normalised together."""
    arrays = _arrays(rng, 3, H, K, Dh, R=R, dtype="bfloat16", pages=pages)
    arrays |= {"q_norm": jnp.ones((H, Dh)), "k_norm": jnp.ones((K, Dh))} if H == K else {}
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
    [lowered] = lower_for_cuda(lambda **kw: rope_kv_write(**kw, interpret=False), abstract, 80)
    assert lowered.name == "rope_kv_write"


@pytest.mark.parametrize("spec", OP.specs, ids=lambda s: s.name)
def test_specs(spec):
    kind = OP.implementations["pallas_triton"]
    assert kind.heuristic(spec.problem) in list(kind.space(spec.problem))
    static = {**spec.static, "implementation": "reference"}
    q, k, *_ = jax.eval_shape(lambda kw: rope_kv_write(**kw, **static), spec.abstract)
    assert q.shape == spec.abstract["q"].shape and k.dtype == spec.abstract["k_pages"].dtype


def test_specs_have_valid_slots():
    for name in ("olmoe_1b_7b/decode_64", "olmoe_1b_7b/prefill_4096"):
        (spec,) = [spec for spec in OP.specs if spec.name == name]
        slots = jax.jit(lambda key, make=spec.make: make(key)["slot_mapping"])(jax.random.key(0))
        N, _, bs, _ = spec.abstract["k_pages"].shape
        assert np.unique(slots).size == slots.size and 0 <= slots.min() and slots.max() < N * bs


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": (0, 4, 16)}, "rope_kv_write: q: got shape .*, expected at least one element along T"),
        (
            {"k": (3, 2, 8)},
            r"rope_kv_write: k: got shape \[3, 2, 8\], expected .* with Dh=16 \(Dh is 16 in q\)",
        ),
        ({"sin": (3, 4)}, r"sin: got shape \[3, 4\], expected \[T, half\] with half=8"),
        ({"cos": (3, 16), "sin": (3, 16)}, "cos: got 16 angles, expected at most 8"),
        ({"v_pages": (5, 2, 8, 16)}, "v_pages: got shape .*, expected .* with bs=4"),
        ({"slot_mapping": (4,)}, "slot_mapping: got shape"),
        ({"q": (3, 5, 16)}, "q: got 5 heads, expected a multiple of the 2 KV heads"),
        ({"k_scale": (5, 2, 4)}, "k_scale: got an array with float32 pages, expected None"),
    ],
)
def test_bad_shapes(change, message):
    arrays = _arrays(np.random.default_rng(0), 3, 4, 2, 16)
    arrays |= {n: jnp.zeros(shape, arrays.get(n, arrays["q"]).dtype) for n, shape in change.items()}
    with pytest.raises(KernelError, match=message):
        rope_kv_write(**arrays)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"v": None}, "v_pages: got an array, expected None where v is"),
        ({"v": None, "v_pages": None, "k_pages": (5, 2, 4, 16)}, "k_pages: got shape"),
        (
            {"v": None, "v_pages": None, "q_norm": (16,), "k_norm": (16,)},
            "q_norm: got an array, expected None",
        ),
        (
            {"v": None, "v_pages": None, "q": (3, 4, 776), "k": (3, 1, 776), "k_pages": (5, 1, 4, 776)},
            "up to 768",
        ),
        (
            {"v": None, "v_pages": None, "implementation": "triton_jit"},
            "implementation pallas_triton for latents",
        ),
    ],
)
def test_bad_latents(rng, change, message):
    arrays = _arrays(rng, 3, 4, 1, 16)
    change = {n: jnp.zeros(x) if isinstance(x, tuple) else x for n, x in change.items()}
    with pytest.raises(KernelError, match=message):
        rope_kv_write(**arrays | change)


@pytest.mark.parametrize("Dh", [12, 264])
def test_bad_head_dimension(rng, Dh):
    with pytest.raises(KernelError, match=f"q: got head dimension {Dh}, expected a multiple of 8 up to 256"):
        rope_kv_write(**_arrays(rng, 3, 4, 2, Dh))


@pytest.mark.parametrize(
    "name,dtype,message",
    [
        ("k", "bfloat16", "k: got bfloat16, expected float32"),
        ("v_pages", "bfloat16", "v_pages: got bfloat16, expected float32"),
        ("cos", "bfloat16", "cos: got bfloat16, expected float32"),
        ("slot_mapping", "uint32", "slot_mapping: got uint32, expected int32"),
        ("k_pages", "int8", "k_scale: got None, expected float32"),
        ("k_pages", "int32", "k_pages: got int32"),
    ],
)
def test_bad_dtypes(rng, name, dtype, message):
    arrays = _arrays(rng, 3, 4, 2, 16)
    with pytest.raises(KernelError, match=message):
        rope_kv_write(**arrays | {name: arrays[name].astype(dtype)})


def test_pools_between_two_and_four_gigabytes(rng):
    """One-byte pools that Pallas would index with 32 bits, though they need 33."""
    arrays = _arrays(rng, 3, 4, 2, 16, pages="int8")
    arrays |= {n: jax.ShapeDtypeStruct((2**25, 2, 4, 16), jnp.int8) for n in ("k_pages", "v_pages")}
    arrays |= {n: jax.ShapeDtypeStruct((2**25, 2, 4), jnp.float32) for n in ("k_scale", "v_scale")}
    with pytest.raises(KernelError, match="k_pages: got 4294967296 elements of int8"):
        jax.eval_shape(lambda kw: rope_kv_write(**kw), arrays)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"k_norm": None}, "k_norm: got None, expected both norms, or neither"),
        ({"k_norm": jnp.ones((2, 16))}, r"k_norm: got shape \[2, 16\], expected .*\[Dh\]"),
        ({"q_norm": jnp.ones((4, 16))}, r"k_norm: got shape \[16\], expected .*\[K, Dh\]"),
        ({"q_norm": None}, "k_norm: got an array, expected both norms, or neither"),
        ({"eps": 0.0}, "eps: got 0.0, expected a positive number"),
    ],
)
def test_bad_norms(rng, changes, message):
    norms = {name: jnp.ones(16) for name in ("q_norm", "k_norm")}
    with pytest.raises(KernelError, match=message):
        rope_kv_write(**_arrays(rng, 3, 4, 2, 16) | norms | changes)
