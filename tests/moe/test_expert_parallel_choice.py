"""Room, bytes and the choice between exchanges: plain numbers."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.moe.exchange_pack import pack, unpack
from moejax.moe.exchange_ragged import plan_ragged
from moejax.moe.exchange_size import (
    BLOCK_ROWS,
    MOST_BUCKETS,
    HopSize,
    capacity_buckets,
    exchanged_bytes,
    mean_rows,
    most_rows,
    share,
)
from moejax.moe.expert_parallel import choose_exchange
from moejax.sharding.mesh import make_axes

ONE = [HopSize(8, 16)]
TWO = [HopSize(4, 64), HopSize(8, 8)]


def test_share():
    """Against all choices of 3 of 6 experts."""
    chosen = list(itertools.combinations(range(6), 3))
    for span in (1, 2, 4, 6):
        assert share(3, span, 6) == pytest.approx(np.mean([min(c) < span for c in chosen]))


def test_mean_rows():
    """Two hops: rows arrive from all nodes, and go on to a rank as often as tokens have experts there."""
    (one,) = mean_rows(100, 8, ONE)
    assert one == pytest.approx(100 * share(8, 16, 128))
    node, rank = mean_rows(100, 8, TWO)
    assert (node, rank) == pytest.approx((100 * share(8, 64, 256), 4 * 100 * share(8, 8, 256)))


@pytest.mark.parametrize("hops", [ONE, TWO, [HopSize(2, 64)], [HopSize(32, 1)]])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_room_ladder(hops, top_k):
    for tokens in (1, 7, 8, 9, 64, 100, 1000, 8192):
        buckets, most = capacity_buckets(tokens, top_k, hops), most_rows(tokens, hops)
        assert 1 <= len(buckets) <= MOST_BUCKETS and buckets[-1] == tuple(most)
        for capacities in buckets:
            assert all(
                room % BLOCK_ROWS == 0 or room == top for room, top in zip(capacities, most, strict=True)
            )
            assert all(
                b <= hop.size * a for (a, b), hop in zip(itertools.pairwise(capacities), hops, strict=False)
            )
        for low, high in itertools.pairwise(buckets):
            assert low != high and all(a <= b for a, b in zip(low, high, strict=True))
        means = mean_rows(tokens, top_k, hops)
        assert all(room >= mean - 1e-9 for room, mean in zip(buckets[0], means, strict=True))
    assert len(capacity_buckets(BLOCK_ROWS, top_k, hops[:1])) == 1


def test_bytes():
    """32 tokens a device of 2048 bfloat16 with 8 experts: a row is 4096 + 64 bytes there and 4096 back."""
    row = 2 * 4096 + 64
    assert exchanged_bytes(32, 8, 2048, 2, 8) == 7 * 32 * row
    assert exchanged_bytes(40, 4, 2048, 2, 8) == 3 * 40 * row


def axes(**parallel):
    return make_axes(ParallelConfig(**parallel), num_kv_heads=1)


def choice(asked="auto", tokens=4096, platform="gpu", parallel=None):
    layout = axes(**({"ep": 8, "attention": "data"} if parallel is None else parallel))
    how = {"hidden": 2048, "itemsize": 2, "top_k": 8, "axes": layout, "platform": platform, "num_local": 16}
    return choose_exchange(asked, tokens=tokens, **how)


def test_auto_by_payload():
    """Decode gathers, prefill sends; the reason has the numbers."""
    few, many = choice(tokens=16), choice(tokens=4096)
    assert few.value == "allgather" and f"{exchanged_bytes(16, 8, 2048, 2, 8):,} bytes" in few.reason
    assert many.value == "all_to_all"
    low, *_, high = capacity_buckets(4096, 8, ONE)
    for (room,) in (low, high):
        assert f"{exchanged_bytes(room, 8, 2048, 2, 8):,}" in many.reason
    assert len(many.reason.splitlines()) == 1


def test_auto_on_nodes():
    """By what crosses between nodes."""
    cluster = {"ep": 32, "nodes": 4, "attention": "data"}
    assert choice(tokens=1, parallel=cluster).value == "allgather"
    many = choice(tokens=4096, parallel=cluster)
    assert many.value == "hierarchical" and "between nodes" in many.reason


def test_no_exchange():
    for parallel in ({"ep": 8, "attention": "tensor"}, {"ep": 1, "tp": 8, "attention": "data"}, {}):
        assert choice(parallel=parallel).value == "none"
        with pytest.raises(ConfigError, match=r"parallel\.exchange=all_to_all: no tokens are exchanged"):
            choice("all_to_all", parallel=parallel)
        with pytest.raises(ConfigError, match="unknown"):
            choice("all2all", parallel=parallel)


def test_asked_for():
    for method in ("allgather", "all_to_all", "ragged"):
        assert choice(method) == ("parallel.exchange", method, "asked for")
    assert choice("hierarchical", parallel={"ep": 8, "nodes": 2, "attention": "data"}).value == "hierarchical"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("ragged", r"parallel\.exchange=ragged: XLA has no ragged all-to-all on cpu, only on gpu; use auto"),
        ("hierarchical", r"parallel\.exchange=hierarchical: the 8 expert ranks are on one node .*; use auto"),
        (
            "all2all",
            r"parallel\.exchange: unknown implementation 'all2all'; did you mean .*\(known: all_to_all",
        ),
    ],
)
def test_cannot_run(asked, message):
    with pytest.raises(ConfigError, match=message) as error:
        choice(asked, platform="cpu")
    assert "\n" not in str(error.value)


def test_ragged_plan():
    """Every slice lies where the other end expects it: a replay of the operation, device by device."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 4, (4, 4)).astype(np.int32)
    plans = [plan_ragged(jnp.asarray(sizes), jnp.asarray(me)) for me in range(4)]
    for way, flows in ((0, sizes), (1, sizes.T)):
        sent = [[f"{s}>{d}.{i}" for d in range(4) for i in range(flows[s, d])] for s in range(4)]
        for d in range(4):
            got = [""] * sum(flows[:, d])
            for s in range(4):
                at, size, to, _ = (int(field[d]) for field in plans[s][way])
                assert size == flows[s, d] == plans[d][way].recv_sizes[s]
                got[to : to + size] = sent[s][at : at + size]
            assert got == [f"{s}>{d}.{i}" for s in range(4) for i in range(flows[s, d])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_pack(dtype):
    """Bits come back as they went, whatever they stand for."""
    rng = np.random.default_rng(0)
    itemsize = jnp.dtype(dtype).itemsize
    bits = rng.integers(0, 256, (2, 3, 5 * itemsize)).astype(np.uint8)
    x = jnp.asarray(bits.view(jnp.dtype(dtype)))
    ids, weights = (
        jnp.arange(24, dtype=jnp.int32).reshape(2, 3, 4),
        jnp.asarray(rng.random((2, 3, 2)), jnp.float32),
    )
    words = pack(x, ids, weights)
    assert words.shape == (2, 3, 5 + 6 * 4 // itemsize) and words.dtype.itemsize == itemsize
    back = unpack(words, (5, x.dtype), (4, jnp.int32), (2, jnp.float32))
    assert np.asarray(back[0]).tobytes() == bits.tobytes()
    np.testing.assert_array_equal(back[1], ids)
    np.testing.assert_array_equal(back[2], weights)


def test_pack_of_parts_of_words():
    with pytest.raises(ValueError, match="elements of bfloat16 are not whole words of uint32"):
        pack(jnp.zeros((1, 2), jnp.float32), jnp.zeros((1, 3), jnp.bfloat16))
