"""`rms_norm` against its contract."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.moe_combine import moe_combine
from pallas_kernels.rms_norm import OP, rms_norm
from pallas_kernels.rms_norm.pallas_triton import Config
from tests.examples import in_turns, slow_but
from tests.kernels.contract import Contract, limit_for, normal


class RmsNormContract(Contract):
    op, api = OP, staticmethod(rms_norm)

    @pytest.mark.parametrize(
        "T,D,dtype,add",
        in_turns(
            [(1, 1), (3, 64), (17, 100), (5, 2048), (33, 129)],
            [
                ("float32", False),
                ("bfloat16", True),
                ("float16", False),
                ("float32", True),
                ("bfloat16", False),
                ("float16", True),
            ],
        ),
    )
    def test_shapes(self, rng, T, D, dtype, add):
        arrays = {"x": normal(rng, (T, D), dtype), "weight": normal(rng, (D,), dtype)}
        if add:
            arrays["residual"] = normal(rng, (T, D), dtype)
        # The quotient is rounded to the dtype before the weight, and x + residual before all.
        limit = limit_for(dtype, D) + (2 if add else 1) * limit_for(dtype, 1)
        self.check(arrays, {"eps": 1e-6}, limit=limit)

    @pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e4, 1e18])
    def test_magnitudes(self, rng, scale):
        """The squares of float32 numbers up to 1e18 do not overflow; of tiny ones eps remains."""
        arrays = {"x": normal(rng, (4, 256), "float32", scale), "weight": normal(rng, (256,), "float32")}
        self.check(arrays, {"eps": 1e-6}, limit=limit_for("float32", 256) + limit_for("float32", 1))

    def test_rows_do_not_mix(self, rng):
        x = normal(rng, (8, 96), "float32").at[3].set(jnp.nan)
        out, _ = self.run({"x": x, "weight": normal(rng, (96,), "float32")}, {"eps": 1e-6})
        assert jnp.isnan(out).any(axis=1).tolist() == [i == 3 for i in range(8)]

    @pytest.mark.parametrize(
        "T,k,D,parts,dtype",
        in_turns(
            [(1, 8, 64), (5, 3, 100)],
            [
                ("bfloat16", "bfloat16"),
                ("float32", "float32"),
                ("bfloat16", "float32"),
                ("float32", "bfloat16"),
            ],
        ),
    )
    def test_sums(self, rng, T, k, D, parts, dtype):
        """Rows that all want, rows past either end, and NaN in those that nobody wants."""
        P = 4 * k
        slots = np.minimum(rng.integers(-1, P, (T, k)), rng.integers(0, P + 2, (T, k))).astype(np.int32)
        rows = np.where(np.isin(np.arange(P), slots)[:, None], rng.normal(size=(P, D)), np.nan)
        arrays = {"x": normal(rng, (T, D), dtype), "weight": normal(rng, (D,), dtype)}
        arrays |= {"residual": jnp.asarray(rows, parts), "slot_of": jnp.asarray(slots)}
        limit = limit_for(dtype, D, k) + 2 * limit_for(dtype, 1)
        _, total = self.check(arrays, {"eps": 1e-6}, limit=limit + limit_for(parts, 1))
        summed = moe_combine(arrays["residual"].astype("float32"), arrays.pop("slot_of")).astype(dtype)
        apart = self.run(arrays | {"residual": summed}, {"eps": 1e-6})
        np.testing.assert_array_equal(total, apart[1])

    def test_parts(self, rng):
        arrays = {"x": normal(rng, (5, 96), "bfloat16"), "weight": normal(rng, (96,), "bfloat16")}
        arrays["residual"] = normal(rng, (4, 5, 96), "float32")
        self.check(arrays, {"eps": 1e-6}, limit=limit_for("float32", 96, 4) + 3 * limit_for("bfloat16", 1))

    @pytest.mark.parametrize(
        "T,D,dtype,kind,bias,add",
        in_turns(
            [(1, 2, "float32"), (17, 100, "float16"), (33, 129, "bfloat16")],
            [("rms_unit_offset", False, True), ("layer", True, False), ("layer", False, True)],
        ),
    )
    def test_kinds(self, rng, T, D, dtype, kind, bias, add):
        """Rounded once, after the weight; a mean far from zero is taken off before squares are."""
        arrays = {"x": normal(rng, (T, D), dtype) + 8, "weight": normal(rng, (D,), dtype)}
        arrays |= {"bias": normal(rng, (D,), dtype)} if bias else {}
        arrays |= {"residual": normal(rng, (T, D), dtype)} if add else {}
        limit = limit_for(dtype, D) + 32 * limit_for("float32", 1) + add * limit_for(dtype, 1)
        self.check(arrays, {"eps": 1e-5, "kind": kind}, limit=limit)

    @pytest.mark.parametrize("kind", slow_but(["layer"], ["rms_unit_offset", "layer"]))
    def test_sums_of_other_kinds(self, rng, kind):
        """The bias comes after the rows of a sum and their slots."""
        slots = rng.permutation(12).astype(np.int32).reshape(4, 3)
        arrays = {"x": normal(rng, (4, 80), "bfloat16"), "weight": normal(rng, (80,), "bfloat16")}
        arrays |= {"residual": normal(rng, (12, 80), "bfloat16"), "slot_of": jnp.asarray(slots)}
        arrays |= {"bias": normal(rng, (80,), "float32")} if kind == "layer" else {}
        limit = limit_for("bfloat16", 80, 3) + 3 * limit_for("bfloat16", 1)
        self.check(arrays, {"eps": 1e-5, "kind": kind}, limit=limit)


class TestPallas(RmsNormContract):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("rows", [1, 2, 8])
    def test_configurations(self, rng, rows):
        arrays = {"x": normal(rng, (11, 80), "float32"), "weight": normal(rng, (80,), "float32")}
        self.check(arrays, {"eps": 1e-5}, limit=limit_for("float32", 80, 1), config=Config(rows, num_warps=2))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"weight": (65,)}, r"rms_norm: weight: got shape \[65\], expected \[D\] with D=64 \(D is 64 in x\)"),
        ({"x": (4, 2, 64)}, "rms_norm: x: got shape .*, expected 2 dimensions"),
        ({"x": (0, 64)}, "at least one element along T"),
        ({"residual": (4, 32)}, "rms_norm: residual"),
        ({"residual": (2, 3, 64)}, r"rms_norm: residual: got shape \[2, 3, 64\], expected \[k, T, D\]"),
        ({"residual": (9, 64), "slot_of": (3, 2)}, "rms_norm: slot_of: .*T=4"),
    ],
)
def test_bad_shapes(change, message):
    shapes = {"x": (4, 64), "weight": (64,)} | change
    arrays = {n: jnp.zeros(shape, "int32" if n == "slot_of" else "float32") for n, shape in shapes.items()}
    with pytest.raises(KernelError, match=message):
        rms_norm(**arrays, eps=1e-6)


def test_bad_choices():
    x, w = jnp.zeros((4, 64)), jnp.zeros(64)
    with pytest.raises(KernelError, match="rms_norm: x: got int32, expected bfloat16 or float16 or float32"):
        rms_norm(x.astype(jnp.int32), w, eps=1e-6)
    with pytest.raises(KernelError, match="got 'mosaic', expected one of reference, pallas_triton"):
        rms_norm(x, w, eps=1e-6, implementation="mosaic")
    with pytest.raises(KernelError, match="eps"):
        rms_norm(x, w, eps=0.0)
    with pytest.raises(TypeError, match="config is a dict; pallas_triton takes Config"):
        rms_norm(x, w, eps=1e-6, config={})
    with pytest.raises(KernelError, match="kind: got 'group', expected rms or rms_unit_offset or layer"):
        rms_norm(x, w, eps=1e-6, kind="group")
    with pytest.raises(KernelError, match="bias: got an array with kind 'rms', expected None"):
        rms_norm(x, w, bias=w, eps=1e-6)
