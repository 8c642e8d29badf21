"""`ragged_paged_attention` against its contract."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.kv import is_quantized, quantize_kv
from pallas_kernels.ragged_paged_attention import (
    OP,
    ragged_paged_attention,
    triton_jit,
)
from pallas_kernels.ragged_paged_attention.chunk import query_tiles
from pallas_kernels.ragged_paged_attention.pallas_triton import Config, attention
from pallas_kernels.work_list import MOST_QUERIES, make_work_list
from tests.examples import examples, slow_but
from tests.kernels.contract import Contract, limit_for, normal
from tests.kernels.triton_interpreter import Launch, interpret
from tests.numerics import assert_close, tolerance

QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
SCALE = 0.2


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


_MAGNITUDES = [(-8, 0.0), (-4, 0.2), (0, 0.2), (6, 0.2)]


def batch(
    rng,
    q_lens,
    kv_lens,
    *,
    H=4,
    K=2,
    Dh=16,
    bs=8,
    padding=0,
    dtype="float32",
    kv=None,
    window=None,
    magnitude=1.0,
    sinks=False,
):
    """Random arguments; whatever no query may see is poison: NaN, and pages that do not exist.

    Few shapes for many tests: at least four sequences, 16 queries and 48 keys, the rest is unused.
    """
    kv = kv or dtype
    unused = [0] * (4 - len(q_lens))
    q_lens, kv_lens = [*q_lens, *unused], [*kv_lens, *unused]
    S, T = len(q_lens), max(16, sum(q_lens) + padding)
    M = max(48 // bs, -(-max(kv_lens) // bs))
    N = S * M + 1
    table = rng.permutation(N)[: S * M].reshape(S, M).astype(np.int32)
    seen = np.zeros((N, bs), bool)
    for s, (queries, keys) in enumerate(zip(q_lens, kv_lens, strict=True)):
        first = 0 if window is None else max(0, keys - queries - window + 1)
        for key in range(first if queries else keys, keys):
            seen[table[s, key // bs], key % bs] = True
        free = ~seen[table[s]].any(axis=1)
        table[s, free] = rng.choice([-1, N, 2**30], size=free.sum())
    arrays = {
        "q": normal(rng, (T, H, Dh), dtype),
        "block_table": jnp.asarray(table),
        "kv_lens": jnp.asarray(kv_lens, jnp.int32),
        "cu_q_lens": jnp.asarray([0, *np.cumsum(q_lens)], jnp.int32),
    }
    for name in "kv":
        rows = normal(rng, (N, K, bs, Dh), "float32", magnitude)
        if is_quantized(kv):
            rows *= jnp.asarray(np.exp(rng.normal(size=(N, K, bs, 1))), jnp.float32)  # scales of all sizes
            values, scale = quantize_kv(rows, kv)
            arrays[f"{name}_pages"] = values
            arrays[f"{name}_scale"] = jnp.where(seen[:, None, :], scale, jnp.nan)
        else:
            arrays[f"{name}_pages"] = jnp.where(seen[:, None, :, None], rows, jnp.nan).astype(kv)
    if sinks:
        arrays["sinks"] = normal(rng, (H,), dtype, 2.0)
    return arrays


def planned(arrays, splits, window=None, queries=1):
    """The batch's work list, as the host makes it."""
    kv_lens, q_lens = np.asarray(arrays["kv_lens"]), np.diff(np.asarray(arrays["cu_q_lens"]))
    keys = np.where((q_lens >= 1) & (q_lens <= queries), np.minimum(kv_lens, window or 2**30), 0)
    return jnp.asarray(make_work_list(keys, splits))


def limit(arrays):
    """Sums over Dh and over keys; probabilities, and what float16 makes of float32 queries, in between."""
    q, pages = arrays["q"], arrays["k_pages"]
    keys = arrays["block_table"].shape[1] * pages.shape[2]
    product = "float16" if is_quantized(pages.dtype) else str(jnp.promote_types(q.dtype, pages.dtype))
    return limit_for(q.dtype, q.shape[2], keys) + tolerance(1, 1, dtype=product)


class AttentionContract(Contract):
    """An implementation without prompt chunks is `decode_only`: of batches with chunks it must refuse all."""

    op, api = OP, staticmethod(ragged_paged_attention)
    decode_only = False

    def check_batch(self, arrays, config=None, **static):
        static = {"scale": SCALE, **static}
        if self.decode_only and static.get("max_q_len") != 1:
            with pytest.raises(KernelError, match="max_q_len=1"):
                self.run(arrays, static, config)
            return None
        if static.get("max_q_len") != 1:
            # However few its queries, a sequence is a chunk unless a test says otherwise.
            arrays = {"work_list": planned(arrays, 1, static.get("window")), **arrays}
        return self.check(arrays, static, limit=limit(arrays), config=config)

    @pytest.mark.parametrize(
        "dtype,max_q_len",
        [("bfloat16", None), ("float16", None), slow("float32", None), ("bfloat16", 1)],
    )
    def test_dtypes(self, rng, dtype, max_q_len):
        q_lens, kv_lens = ([1, 1, 0, 1], [37, 1, 9, 16]) if max_q_len else ([1, 7, 0, 1], [37, 20, 9, 16])
        arrays = batch(rng, q_lens, kv_lens, Dh=32, dtype=dtype, padding=150 if max_q_len else 2)
        self.check_batch(arrays, max_q_len=max_q_len)

    @pytest.mark.parametrize("H,K,Dh", [slow(3, 3, 80), (6, 2, 8), (20, 1, 24), slow(7, 1, 96)])
    def test_heads(self, rng, H, K, Dh):
        self.check_batch(batch(rng, [1, 9], [21, 30], H=H, K=K, Dh=Dh))

    @pytest.mark.parametrize(
        "window,soft_cap,sinks",
        [(1, None, False), (5, 0.7, True), slow(24, None, True), slow(None, 0.7, False)],
    )
    def test_masks(self, rng, window, soft_cap, sinks):
        arrays = batch(rng, [1, 11, 3], [45, 44, 3], window=window, sinks=sinks, padding=1)
        self.check_batch(arrays, window=window, soft_cap=soft_cap)

    @pytest.mark.parametrize(
        "group,dtype,kv,splits,window",
        [
            (2, "float32", None, 8, None),
            slow(2, "float32", None, 1, 300),
            slow(7, "bfloat16", None, 3, 300),
            slow(64, "float32", None, 5, None),
            slow(1, "bfloat16", "int8", 5, 20),
            slow(4, "bfloat16", "float8_e4m3fn", 8, None),
            slow(4, "float16", "float8_e5m2", 1, 33),
        ],
    )
    def test_few_queries(self, rng, group, dtype, kv, splits, window):
        """Beside decodes and chunks: contexts of sequences with a few queries are split as decodes' are, or
        are one program's; every row sees the keys up to its own position."""
        q_lens, kv_lens = [1, 2, MOST_QUERIES, 0, 40, 5, 9], [300, 500, 1000, 9, 290, 100, 200]
        options = {"H": 2 * group, "K": 2, "dtype": dtype, "kv": kv, "bs": 32}
        arrays = batch(rng, q_lens, kv_lens, window=window, sinks=True, padding=3, **options)
        arrays["work_list"] = planned(arrays, splits, window, MOST_QUERIES)
        self.check_batch(arrays, Config(64, 4, 3, 64, 32, 4, 3), window=window, soft_cap=2.0)

    @pytest.mark.slow
    def test_few_queries_of_long_contexts(self, rng):
        """Without a work list it is made with all sequences of few queries in it."""
        arrays = batch(rng, [1, 4, 8, 100], [2000, 8192, 5000, 6000], bs=64)
        self.check(arrays, {"scale": SCALE}, limit=limit(arrays))

    @pytest.mark.parametrize("bs", [slow(8), slow(32), 64])
    def test_page_sizes(self, rng, bs):
        self.check_batch(batch(rng, [1, 5, 1], [bs, bs + 3, 3 * bs - 1], bs=bs))

    def test_lengths(self, rng):
        """Every number of keys around the borders of pages and tiles, decoded and as a chunk."""
        lengths = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48]
        self.check_batch(batch(rng, [1] * len(lengths), lengths), max_q_len=1)
        self.check_batch(batch(rng, [min(n, 5) for n in lengths], lengths))

    def test_patterns(self, rng):
        """All of: no query, one, several, for each of four sequences; traced once, the rest is padding."""
        kv_lens, T = [13, 24, 9, 17], 16
        static = {"scale": SCALE, "implementation": self.implementation}
        static["max_q_len"] = 1 if self.decode_only else None
        run = jax.jit(lambda kw: ragged_paged_attention(**kw, **static))
        for q_lens in itertools.product((0, 1) if self.decode_only else (0, 1, 4), repeat=4):
            kv = [n if q or i % 2 else 0 for i, (q, n) in enumerate(zip(q_lens, kv_lens, strict=True))]
            arrays = batch(rng, q_lens, kv, padding=T - sum(q_lens))
            ours = np.asarray(run(arrays), np.float64)
            theirs = self.expect(arrays, {"scale": SCALE})
            assert np.isfinite(ours).all(), q_lens
            assert np.abs(ours - theirs).max() <= limit(arrays) * max(np.abs(theirs).max(), 1e-3), q_lens
            assert (ours[sum(q_lens) :] == 0).all()

    @pytest.mark.parametrize(
        "dtype,kv", [("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn"), ("float32", "float8_e5m2")]
    )
    def test_quantized(self, rng, kv, dtype):
        self.check_batch(batch(rng, [1, 6, 1], [300, 200, 1], K=1, dtype=dtype, kv=kv, Dh=64))

    @pytest.mark.parametrize(
        "kv,magnitude,zeros",
        [
            ("int8", 1e-8, 0.0),
            ("float8_e5m2", 1e-4, 0.2),
            ("float8_e4m3fn", 1e6, 0.2),
            *(slow(kv, 10.0**n, z) for kv in QUANTIZED for n, z in _MAGNITUDES),
        ],
    )
    def test_magnitudes(self, rng, kv, magnitude, zeros):
        """Values and queries far out of float16's range; rows of zeros, whose scale is 1."""
        arrays = batch(rng, [1, 3], [40, 33], kv=kv, magnitude=magnitude, dtype="bfloat16")
        arrays["q"] = (arrays["q"].astype(jnp.float32) / magnitude).astype(jnp.bfloat16)
        for name in ("k", "v"):
            zero = jnp.isfinite(arrays[f"{name}_scale"]) & (rng.random(arrays[f"{name}_scale"].shape) < zeros)
            pages = arrays[f"{name}_pages"]
            arrays[f"{name}_pages"] = jnp.where(zero[..., None], jnp.zeros_like(pages), pages)
            arrays[f"{name}_scale"] = jnp.where(
                zero, jnp.ones_like(arrays[f"{name}_scale"]), arrays[f"{name}_scale"]
            )
        self.check_batch(arrays)

    @pytest.mark.parametrize(
        "queries,kv",
        slow_but(
            [(1, "float8_e4m3fn"), (1, "float8_e5m2"), (2, "int8")], itertools.product((1, 2), QUANTIZED)
        ),
    )
    def test_every_stored_number(self, kv, queries):
        """One key is seen: the output is its value, bit for bit; NaN stays NaN."""
        if self.decode_only and (queries > 1 or kv == "float8_e4m3fn"):
            pytest.skip("neither chunks nor e4m3 here")
        codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256)
        codes = np.pad(codes, ((0, 0), (0, 0), (0, 7), (0, 0)))  # infinity in another row would make NaN
        pages = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.dtype(kv))
        arrays = {
            "q": jnp.zeros((queries, 1, 256), jnp.float32),
            "k_pages": jnp.zeros_like(pages),
            "v_pages": pages,
            "k_scale": jnp.ones((1, 1, 8)),
            "v_scale": jnp.full((1, 1, 8), 0.125),
            "block_table": jnp.zeros((1, 1), jnp.int32),
            "kv_lens": jnp.full((1,), queries, jnp.int32),
            "cu_q_lens": jnp.asarray([0, queries], jnp.int32),
        }
        ours = self.run(arrays, {"scale": 1.0, "window": 1, "max_q_len": queries})
        np.testing.assert_array_equal(np.asarray(ours)[0, 0], np.asarray(pages[0, 0, 0], np.float32) * 0.125)

    @pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float32"]))
    def test_extreme_logits(self, rng, dtype):
        """Logits in the tens of thousands: the softmax picks one key, or sinks take all.

        Small integers times 64: products and their sums are exact, so every implementation sees equal logits.
        """
        arrays = batch(rng, [1, 5], [40, 30], dtype=dtype, sinks=True)
        arrays["q"] = jnp.round(arrays["q"] * jnp.asarray(8, dtype)) * jnp.asarray(64, dtype)
        arrays["k_pages"] = jnp.round(arrays["k_pages"]) * jnp.asarray(64, dtype)
        arrays["sinks"] = jnp.asarray([1e9, -1e9, 0.0, 3e4], jnp.float32)
        self.check_batch(arrays)

    def test_sequences_do_not_mix(self, rng):
        q_lens = [1, 1, 1] if self.decode_only else [1, 4, 1]
        arrays = batch(rng, q_lens, [20, 24, 17])
        arrays["q"] = arrays["q"].at[1].set(jnp.nan)
        out = self.run(arrays, {"scale": SCALE, "max_q_len": max(q_lens)})
        assert jnp.isnan(out).any(axis=(1, 2)).tolist() == [i == 1 for i in range(16)]

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(12))
    def test_random_batches(self, rng, seed):
        """Shapes, lengths and options at random."""
        dtype = str(rng.choice(["bfloat16", "float32"]))
        kv = str(rng.choice([dtype, *QUANTIZED]))
        K, G, S = int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.integers(1, 7))
        q_lens = [int(n) for n in rng.choice([0, 1, 1, 2, 17, 40], size=S)]
        kv_lens = [n + int(rng.integers(0, 300)) for n in q_lens]
        if not sum(q_lens):
            q_lens[0] = kv_lens[0] = 1
        window = int(rng.integers(1, 200)) if rng.random() < 0.5 else None
        options = {"bs": int(rng.choice([8, 16, 64])), "Dh": int(rng.choice([16, 40, 64])), "window": window}
        options |= {"sinks": bool(rng.random() < 0.5), "padding": int(rng.integers(0, 4)), "kv": kv}
        arrays = batch(rng, q_lens, kv_lens, H=K * G, K=K, dtype=dtype, **options)
        self.check_batch(arrays, window=window, soft_cap=2.0 if rng.random() < 0.3 else None)


class TestPallas(AttentionContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize(
        "splits,window", [(1, None), slow(1, 300), slow(2, 300), slow(3, None), (8, 300)]
    )
    def test_splits(self, rng, splits, window):
        """More splits than a context has keys for, and fewer; a window that begins within a tile."""
        arrays = batch(rng, [1, 1, 1, 0], [700, 512, 5, 40], window=window, bs=32, sinks=True)
        arrays["work_list"] = planned(arrays, splits, window)
        self.check_batch(arrays, Config(64, 4, 3, 64, 32, 4, 3), max_q_len=1, window=window)

    @pytest.mark.parametrize("splits", [1, slow(3)])
    def test_a_query_without_keys(self, rng, splits):
        """A padded place before a chunk's tokens has a row, of zeros, whatever its pages hold."""
        arrays = batch(rng, [1, 1, 20], [37, 9, 60], bs=32)
        arrays |= {"kv_lens": arrays["kv_lens"].at[1].set(0)}
        arrays["work_list"] = planned(arrays, splits)
        out = self.check_batch(arrays, Config(64, 4, 3, 16, 16, 4, 3))
        assert (np.asarray(out)[1] == 0).all() and (np.asarray(out)[0] != 0).any()

    @pytest.mark.parametrize("window", [90, slow(17), slow(33)])
    def test_window_edges(self, rng, window):
        """A chunk's tiles before, inside and behind what all of its rows see; and a window within a tile."""
        arrays = batch(rng, [40, 5, 1], [290, 200, 120], window=window, bs=32, sinks=True)
        self.check_batch(arrays, Config(64, 4, 3, 16, 16, 4, 3), window=window)

    @pytest.mark.parametrize("rows,tile,decode_tile", [slow(16, 16, 16), (32, 64, 128), slow(128, 32, 32)])
    def test_configurations(self, rng, rows, tile, decode_tile):
        arrays = batch(rng, [1, 23, 2], [70, 61, 2], H=6, K=2)
        self.check_batch(arrays, Config(decode_tile, 4, 3, rows, tile, 4, 3))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax-triton needs a CUDA device")
class TestTritonJit(AttentionContract):
    implementation, decode_only = "triton_jit", True


def _decodes(tile):
    return Config(tile, 4, 3, 16, 16, 4, 3)


class TestTritonJitInterpreted:
    """The twin's arithmetic without a GPU, many launches in one subprocess of Triton's interpreter."""

    def check(self, cases):
        """cases: (arrays, static, config) of decode-only batches."""
        pytest.importorskip("triton")
        facts, splits, reductions = [], [], []
        for arrays, static, config in cases:
            names = ("window", "soft_cap")
            options = [SCALE, *(static.get(name) for name in names), arrays.get("sinks"), 1]
            arrays.setdefault("work_list", planned(arrays, 2, static.get("window")))
            a = attention(*(arrays[n] for n in ("q", "k_pages", "block_table", "work_list")), *options)
            facts.append(a)
            names = ("q", "k_pages", "v_pages", "block_table", "kv_lens", "cu_q_lens", "work_list")
            names += ("k_scale", "v_scale")
            held = [np.asarray(arrays.get(name, arrays["kv_lens"])) for name in names]
            held[1:3] = [pool.view(np.int8) if a.quantized else pool for pool in held[1:3]]
            shape = (a.S - 1 + a.splits, a.H)
            held += [np.full((*shape, a.Dh), np.nan, np.float32), np.full(shape, np.nan, np.float32)]
            kernel = triton_jit.passes(a, config)[0]
            splits.append(Launch(held, kernel.constants, kernel.grid))
        module = "pallas_kernels.ragged_paged_attention.triton_kernel"
        parts = interpret(f"{module}:paged_decode_kernel", splits)
        for a, part, (arrays, _, config) in zip(facts, parts, cases, strict=True):
            names = ("kv_lens", "cu_q_lens", "work_list", "sinks")
            rest = [np.asarray(arrays.get(name, arrays["kv_lens"])) for name in names]
            held = [*part[-2:], *rest, np.full(arrays["q"].shape, np.nan, arrays["q"].dtype)]
            kernel = triton_jit.passes(a, config)[1]
            reductions.append(Launch(held, kernel.constants, kernel.grid))
        for (arrays, static, _), done in zip(
            cases, interpret(f"{module}:paged_decode_reduce_kernel", reductions), strict=True
        ):
            want = Contract.expect(TestTritonJit(), arrays, {"scale": SCALE, **static})
            assert_close(done[-1].astype(np.float64), want, limit(arrays))

    @pytest.mark.parametrize("every", slow_but([False], [False, True]))
    def test_batches(self, rng, every):
        """In the fast lane the last of each kind."""
        first = None if every else -1
        one, two = _decodes(16), _decodes(32)
        lengths = [1, 8, 9, 16, 17, 33]
        cases = [
            (batch(rng, [1] * len(lengths), lengths, dtype=dtype), {}, one)
            for dtype in ("float32", "float16")[first:]
        ]
        for H, K, Dh in [(3, 3, 80), (20, 1, 24), (6, 2, 8)][first:]:
            cases.append((batch(rng, [1, 0, 1], [21, 9, 30], H=H, K=K, Dh=Dh, padding=3), {}, two))
        for window, soft_cap, sinks in [(1, None, False), (24, None, True), (5, 0.7, True)][first:]:
            arrays = batch(rng, [1, 1, 1], [45, 4, 24], window=window, sinks=sinks)
            cases.append((arrays, {"window": window, "soft_cap": soft_cap}, one))
        for kv in ("float8_e5m2", "int8")[first:]:
            cases.append((batch(rng, [1, 1], [40, 33], kv=kv, Dh=32), {}, two))
        for splits, window in [(3, None), (8, None), (2, 300)][first:]:
            arrays = batch(rng, [1, 0, 1], [700, 40, 257], window=window, bs=32, K=1)
            arrays["work_list"] = planned(arrays, splits, window)
            cases.append((arrays, {"window": window}, _decodes(64)))
        self.check(cases)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="jax-triton works here")
def test_triton_jit_without_cuda(rng):
    """It was asked for by name, so it raises, and says what to install."""
    arguments = {**batch(rng, [1, 1], [9, 12]), "scale": 1.0, "implementation": "triton_jit"}
    with pytest.raises(KernelError, match=r"implementation triton_jit: .*moejax\[cuda12\]"):
        ragged_paged_attention(**arguments, max_q_len=1)
    with pytest.raises(KernelError, match=r"expected max_q_len=1: .* no kernel for prompt chunks"):
        ragged_paged_attention(**arguments)


def test_query_tiles(rng):
    """Every query of every sequence with several, and no part to decode, is in one tile, the last first."""
    run = jax.jit(query_tiles, static_argnums=(2, 3))
    for tile, _ in itertools.product((1, 4, 8), range(examples(20))):
        q_lens = rng.choice([0, 1, 2, 5, 8, 9, 33], size=6)
        cu = jnp.asarray([0, *np.cumsum(q_lens)], jnp.int32)
        # The bound on tiles is tight enough to matter only where T is: as many rows as are used.
        T = next(n for n in range(0, 240, 20) if n >= q_lens.sum()) + 1
        keys = np.where(rng.random(6) < 0.3, q_lens, 0)
        seq, first = (np.asarray(x) for x in run(cu, jnp.asarray(make_work_list(keys, 2)), T, tile))
        found = [(s, f) for s, f in zip(seq.tolist(), first.tolist(), strict=True) if f >= 0]
        assert found == [
            (s, f)
            for s, n in enumerate(q_lens.tolist())
            if n > 1 and not keys[s]
            for f in reversed(range(0, n, tile))
        ]


@pytest.mark.parametrize("spec", OP.specs, ids=lambda spec: spec.name)
def test_specs(spec):
    """The API takes every spec as it is; the heuristic's choice is in the space, which is not too large."""
    static = {**spec.static, "implementation": "reference"}
    out = jax.eval_shape(lambda kw: ragged_paged_attention(**kw, **static), spec.abstract)
    *rows, Dh = spec.abstract["q"].shape
    assert out.shape == (*rows, static.get("value_dim", Dh))
    for kind in OP.implementations.values():
        space = list(kind.space(spec.problem))
        assert kind.heuristic(spec.problem) in space and 10 <= len(space) <= 60
    assert spec.cost.flops > 0 and spec.cost.bytes > 0
