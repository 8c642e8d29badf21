"""`moe_combine` against its contract."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.moe_combine import OP, moe_combine
from pallas_kernels.moe_combine.pallas_triton import Config
from tests.examples import in_turns
from tests.kernels.contract import Contract, limit_for, normal
from tests.kernels.groups import lay_out


class MoeCombineContract(Contract):
    op, api = OP, staticmethod(moe_combine)

    def inputs(self, rng, T, k, P, D, dtype):
        slots = rng.integers(0, P + 1, (T, k)).astype(np.int32)
        return {"y": normal(rng, (P, D), dtype), "slot_of": jnp.asarray(slots)}

    @pytest.mark.parametrize(
        "T,k,P,D,dtype",
        in_turns(
            [(1, 1, 1, 1), (3, 2, 16, 64), (5, 8, 40, 100), (33, 2, 80, 300)],
            ["bfloat16", "float16", "float32"],
        ),
    )
    def test_shapes(self, rng, T, k, P, D, dtype):
        self.check(self.inputs(rng, T, k, P, D, dtype), {}, limit=limit_for(dtype, k))

    def test_padding_does_not_leak(self, rng):
        """NaN in slots that nobody points to, and behind assignments that are not here."""
        groups = lay_out(rng.integers(-1, 6, (9, 3)).astype(np.int32), 5, 16)
        P = len(groups.row_assignment)
        y = np.where((groups.row_assignment < 27)[:, None], rng.normal(size=(P, 40)), np.nan)
        arrays = {"y": jnp.asarray(y, jnp.float32), "slot_of": jnp.asarray(groups.slot_of)}
        self.check(arrays, {}, limit=limit_for("float32", 3))

    def test_no_slot_at_all(self, rng):
        arrays = {"y": normal(rng, (16, 24), "float32"), "slot_of": jnp.full((4, 2), 16, jnp.int32)}
        for slot in (16, -1, 1 << 30):
            out = self.run(arrays | {"slot_of": jnp.full((4, 2), slot, jnp.int32)}, {})
            assert (np.asarray(out) == 0).all()

    def test_order_is_fixed(self, rng):
        """(big + -big) + small keeps the small one; any other order would lose it."""
        y = jnp.asarray([[2.0**30], [-(2.0**30)], [1.0]]) * jnp.ones((1, 8))
        out = self.run({"y": y, "slot_of": jnp.asarray([[0, 1, 2], [0, 2, 1]], jnp.int32)}, {})
        assert np.asarray(out)[:, 0].tolist() == [1.0, 0.0]


class TestPallas(MoeCombineContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("rows,cols", [(1, 32), (2, 64), (4, 16)])
    def test_configurations(self, rng, rows, cols):
        arrays = self.inputs(rng, 7, 3, 20, 90, "float32")
        self.check(arrays, {}, limit=limit_for("float32", 3), config=Config(rows, cols, num_warps=1))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"slot_of": jnp.zeros((0, 2), jnp.int32)}, "slot_of: .*at least one element along T"),
        ({"slot_of": jnp.zeros((4, 2))}, "slot_of: got float32, expected int32"),
        ({"y": jnp.zeros((16,))}, "y: .*expected 2 dimensions"),
        ({"y": jnp.zeros((16, 8), jnp.int8)}, "y: got int8"),
    ],
)
def test_bad_input(change, message):
    arrays = {"y": jnp.zeros((16, 8)), "slot_of": jnp.zeros((4, 2), jnp.int32)} | change
    with pytest.raises(KernelError, match=message):
        moe_combine(**arrays)
