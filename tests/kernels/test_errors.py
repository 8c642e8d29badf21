"""What `bind_shapes` and its like say."""

import jax.numpy as jnp
import pytest

from pallas_kernels.errors import KernelError, bind_shapes, check_dtype, check_that


def shapes(**arrays):
    return {name: (jnp.zeros(shape), text) for name, (shape, text) in arrays.items()}


def test_binds_dimensions():
    found = bind_shapes("f", shapes(x=((4, 8), "T D"), w=((8, 3), "D F"), two=((2, 4), "2 T")), K=7)
    assert found == {"T": 4, "D": 8, "F": 3, "K": 7}


@pytest.mark.parametrize(
    "arrays,known,text",
    [
        (
            {"x": ((4, 8), "T D"), "w": ((9, 3), "D F")},
            {},
            r"f: w: got shape \[9, 3\], expected .*D=8 \(D is 8 in x",
        ),
        ({"x": ((4,), "T D")}, {}, r"f: x: got shape \[4\], expected 2 dimensions \[T, D\]"),
        ({"x": ((4, 0), "T D")}, {}, r"f: x: got shape \[4, 0\], expected at least one element along D"),
        ({"x": ((4, 8), "T 9")}, {}, r"f: x: got shape \[4, 8\], expected \[T, 9\] with 9=9"),
        ({"x": ((4, 8), "T D")}, {"D": 6}, r"with D=6 \(D is 6 in the parameters\)"),
    ],
)
def test_names_the_argument(arrays, known, text):
    with pytest.raises(KernelError, match=text):
        bind_shapes("f", shapes(**arrays), **known)


def test_other_checks():
    with pytest.raises(KernelError, match="f: x: got int32, expected bfloat16 or float32"):
        check_dtype("f", "x", jnp.zeros(1, jnp.int32), (jnp.bfloat16, jnp.float32))
    check_dtype("f", "x", jnp.zeros(1, jnp.float32), ("float32",))
    with pytest.raises(KernelError, match="f: k: got 9, expected at most 8"):
        check_that("f", "k", False, 9, "at most 8")
    check_that("f", "k", True, 9, "at most 8")
