"""`moe_permute` against its contract, which numpy states a second time (`lay_out`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.groups import block_m_for, check_groups, padded_rows
from pallas_kernels.moe_permute import OP, moe_permute
from pallas_kernels.moe_permute.pallas_triton import Config
from tests.examples import in_turns, slow_but
from tests.kernels.contract import Contract
from tests.kernels.groups import lay_out, one_hot, patterns


def same(ours, theirs):
    for name, a, b in zip(theirs._fields, ours, theirs, strict=False):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


class MoePermuteContract(Contract):
    op, api = OP, staticmethod(moe_permute)

    def expect(self, arrays, static):
        """Compiled: its many small operations take longer one by one."""
        return jax.jit(lambda kw: self.op.reference(**kw, **static))(arrays)

    def check_ids(self, ids, E, block_m, config=None):
        static = {"num_experts": E, "block_m": block_m}
        # Weights that differ, so that one in another's slot shows.
        weights = jnp.arange(1, ids.size + 1, dtype=jnp.float32).reshape(ids.shape)
        ours = self.check({"ids": jnp.asarray(ids), "weights": weights}, static, limit=0.0, config=config)
        same(ours[:5], lay_out(ids, E, block_m))
        assert all(array.dtype == jnp.int32 for array in ours[:-1])
        # No two assignments in one slot, none in two slots, and what travels along is the assignment's own.
        here, assignment = np.asarray(ours.slot_of).ravel(), np.asarray(ours.row_assignment)
        P, A = len(assignment), ids.size
        here, filled = here[here < P], assignment < A
        assert len(set(here)) == len(here) == filled.sum() == len(set(assignment[filled]))
        np.testing.assert_array_equal(ours.tokens, assignment // ids.shape[1])
        np.testing.assert_array_equal(ours.slots, np.where(filled, np.arange(P), P))
        np.testing.assert_array_equal(ours.weights, np.where(filled, assignment + 1, 0))

    @pytest.mark.parametrize(
        "T,k,E,block_m",
        slow_but(
            [(1, 1, 1, 16), (3, 2, 5, 16), (64, 8, 128, 16), (65, 2, 7, 32)],
            [
                (1, 1, 1, 16),
                (1, 8, 128, 16),
                (3, 2, 5, 16),
                (64, 8, 128, 16),
                (65, 2, 7, 32),
                (17, 4, 60, 64),
            ],
        ),
    )
    def test_decode(self, rng, T, k, E, block_m):
        self.check_ids(rng.integers(-1, E + 1, (T, k)).astype(np.int32), E, block_m)

    @pytest.mark.parametrize(
        "T,k,E,block_m",
        slow_but(
            [(513, 8, 64, 32), (1025, 1, 256, 128)], [(600, 2, 8, 64), (513, 8, 64, 32), (1025, 1, 256, 128)]
        ),
    )
    def test_prefill(self, rng, T, k, E, block_m):
        """Above 1024 assignments the counts come from a launch of their own."""
        self.check_ids(rng.integers(0, E, (T, k)).astype(np.int32), E, block_m)

    @pytest.mark.parametrize(
        "T,k,E,block_m",
        slow_but([(130, 9, 1500, 32)], [(3, 5, 513, 16), (130, 9, 1500, 32), (40, 2, 4096, 16)]),
    )
    def test_tiles_of_experts(self, rng, T, k, E, block_m):
        """More experts than a program compares with: tiles with few hits or none, ids of no expert."""
        ids = rng.integers(-1, E + 1, (T, k))
        ids[T // 2 :] = rng.integers(0, E, 3)[rng.integers(0, 3, (T - T // 2, k))]
        self.check_ids(ids.astype(np.int32), E, block_m)
        self.check_ids(np.full((T, k), E - 1, np.int32), E, block_m)

    @pytest.mark.parametrize("id,T", in_turns([(-5,), (3,), (7,), (1 << 20,)], [24, 700]))
    def test_one_group(self, T, id):
        """All to one expert, or to none of these."""
        self.check_ids(one_hot(T, 2, id), 8, 16)

    @pytest.mark.parametrize("T,E", [(40, 128), pytest.param(700, 64, marks=pytest.mark.slow)])
    def test_skewed(self, rng, T, E):
        """Zipf's law: one expert has several blocks, most have a row or none."""
        ids = np.argsort(np.log(np.arange(1, E + 1)) - 2 * rng.gumbel(size=(T, E)), axis=1)[:, :8]
        ids[:, 0] = np.where((ids[:, 1:] == 7).any(axis=1), ids[:, 0], 7)  # and all tokens want expert 7
        self.check_ids(ids.astype(np.int32), E, 16)

    @pytest.mark.parametrize("T,block_m", [(24, 16), (700, 32)])
    def test_patterns(self, rng, T, block_m):
        """Every subset of 8 experts non-empty."""
        fn = jax.jit(
            lambda ids: self.api(ids, num_experts=8, block_m=block_m, implementation=self.implementation)
        )
        for i, ids in enumerate(patterns(rng, T, 2)):
            if T == 24 or i % 16 == 0:
                same(fn(jnp.asarray(ids))[:5], lay_out(ids, 8, block_m))


class TestPallas(MoePermuteContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("tile,sub,T", in_turns([(8, 8), (64, 16), (512, 64)], [30, 400]))
    def test_configurations(self, rng, T, tile, sub):
        ids = rng.integers(0, 9, (T, 3)).astype(np.int32)
        self.check_ids(ids, 9, 16, config=Config(tile, sub, num_warps=4))

    @pytest.mark.slow
    def test_longest(self, rng):
        """The largest step: 16k tokens of 8 choices among 256 experts."""
        self.check_ids(rng.integers(0, 256, (16384, 8)).astype(np.int32), 256, 64)


def test_padded_rows(rng):
    """The bound holds, and some routing reaches it."""
    for A, E, block_m in [(1, 1, 16), (5, 3, 16), (40, 8, 16), (300, 4, 32)]:
        bound = padded_rows(A, E, block_m)
        assert bound % block_m == 0
        most = 0
        for _ in range(300):
            cuts = np.sort(rng.integers(0, A + 1, E - 1))
            counts = np.diff(np.concatenate([[0], cuts, [A]]))
            most = max(most, int((-(-counts // block_m) * block_m).sum()))
        assert most <= bound
        hit = min(E, A)
        worst = np.array([1] * (hit - 1) + [A - hit + 1])
        assert int((-(-worst // block_m)).sum()) * block_m <= bound
    assert padded_rows(3, 8, 16) == 48 and padded_rows(33, 1, 16) == 48


def test_block_heights():
    assert [block_m_for(A, 8) for A in (2, 80, 128, 512, 8192)] == [16, 16, 32, 64, 128]


def test_table_check(rng):
    groups = lay_out(rng.integers(0, 4, (6, 2)).astype(np.int32), 4, 16)
    arrays = [groups.row_assignment, groups.block_expert, groups.num_blocks]
    check_groups("grouped_swiglu", *arrays, num_experts=4, block_m=16)
    used = int(groups.num_blocks[0])
    bad = groups.block_expert.copy()
    bad[used - 1] = 4
    with pytest.raises(
        KernelError, match=f"grouped_swiglu: block_expert: got 4 at block {used - 1}, expected 0 to 3"
    ):
        check_groups("grouped_swiglu", arrays[0], bad, arrays[2], num_experts=4, block_m=16)
    with pytest.raises(KernelError, match="num_blocks: got 99"):
        check_groups("grouped_swiglu", *arrays[:2], np.array([99]), num_experts=4, block_m=16)
    with pytest.raises(KernelError, match="rows: got"):
        check_groups("grouped_swiglu", *arrays, num_experts=4, block_m=32)


@pytest.mark.parametrize(
    "ids,static,message",
    [
        (
            jnp.zeros((0, 2), jnp.int32),
            {},
            "moe_permute: ids: got shape .*, expected at least one element along T",
        ),
        (jnp.zeros((4,), jnp.int32), {}, "moe_permute: ids: .*expected 2 dimensions"),
        (jnp.zeros((4, 2), jnp.float32), {}, "ids: got float32, expected int32"),
        (jnp.zeros((4, 2), jnp.int32), {"block_m": 8}, "block_m: got 8, expected a power of two, 16 to 128"),
        (jnp.zeros((4, 2), jnp.int32), {"block_m": 24}, "block_m: got 24"),
        (jnp.zeros((4, 2), jnp.int32), {"num_experts": 0}, "num_experts: got 0, expected 1 to 4096"),
        (jnp.zeros((4, 2), jnp.int32), {"num_experts": 4097}, "num_experts: got 4097"),
        (jnp.zeros((4, 2), jnp.int32), {"implementation": "sort"}, "got 'sort', expected one of reference"),
    ],
)
def test_bad_input(ids, static, message):
    with pytest.raises(KernelError, match=message):
        moe_permute(ids, **({"num_experts": 8, "block_m": 16} | static))
