"""Errors of a kernel on bad input, raised when it is traced."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


class KernelError(ValueError):
    """Bad input to an operation: one line that names operation, argument, what came and what was expected."""

    def __init__(self, op: str, argument: str, got: Any, expected: Any) -> None:
        super().__init__(f"{op}: {argument}: got {got}, expected {expected}")
        self.op, self.argument = op, argument


def bind_shapes(op: str, arguments: Mapping[str, tuple[jax.Array, str]], **known: int) -> dict[str, int]:
    """Reads dimension names off arguments and checks that they agree.

    `bind_shapes("f", {"x": (x, "T D"), "w": (w, "D F")})` → `{"T": …, "D": …, "F": …}`. A number in the text
    is a fixed size. `known` binds names beforehand.

    Raises:
        KernelError: a wrong number of dimensions, sizes that disagree, or a dimension of zero.
    """
    sizes, source = dict(known), dict.fromkeys(known, "the parameters")
    for name, (array, text) in arguments.items():
        dims = text.split()
        shape = tuple(array.shape)
        if len(shape) != len(dims):
            raise KernelError(op, name, f"shape {list(shape)}", f"{len(dims)} dimensions [{', '.join(dims)}]")
        for dim, size in zip(dims, shape, strict=True):
            if size == 0:
                raise KernelError(op, name, f"shape {list(shape)}", f"at least one element along {dim}")
            want = int(dim) if dim.isdecimal() else sizes.setdefault(dim, size)
            source.setdefault(dim, name)
            if size != want:
                by = "" if dim.isdecimal() else f" ({dim} is {want} in {source[dim]})"
                raise KernelError(
                    op, name, f"shape {list(shape)}", f"[{', '.join(dims)}] with {dim}={want}{by}"
                )
    return sizes


def check_dtype(op: str, argument: str, array: jax.Array, allowed: Sequence[Any]) -> None:
    """Raises KernelError if the array's dtype is not among `allowed`."""
    if not any(array.dtype == jnp.dtype(dtype) for dtype in allowed):
        raise KernelError(op, argument, str(array.dtype), " or ".join(str(jnp.dtype(d)) for d in allowed))


def check_arrays(
    op: str, arguments: Mapping[str, tuple[jax.Array | None, str, Sequence[Any]]], **known: int
) -> dict[str, int]:
    """Checks arrays given with their dimensions and the dtypes allowed; one that is None is not looked at.

    Returns:
        The sizes, as of `bind_shapes`.

    Raises:
        KernelError: see `bind_shapes` and `check_dtype`.
    """
    shapes = {name: (array, dims) for name, (array, dims, _) in arguments.items() if array is not None}
    sizes = bind_shapes(op, shapes, **known)
    for name, (array, _) in shapes.items():
        check_dtype(op, name, array, arguments[name][2])
    return sizes


def arrays_of(arguments: Mapping[str, tuple[jax.Array | None, str, Sequence[Any]]]) -> dict[str, Any]:
    """Returns the arrays of what `check_arrays` checks, by name."""
    return {name: array for name, (array, *_) in arguments.items()}


MAX_HEAD_DIM = 256


def check_heads(op: str, H: int, K: int, Dh: int) -> None:
    """Raises KernelError unless attention kernels take such heads: in whole groups, of such a dimension."""
    check_that(op, "q", H % K == 0, f"{H} heads", f"a multiple of the {K} KV heads")
    fits = Dh % 8 == 0 and Dh <= MAX_HEAD_DIM
    check_that(op, "q", fits, f"head dimension {Dh}", f"a multiple of 8 up to {MAX_HEAD_DIM}")


MAX_LATENT = 512


def check_latent(op: str, K: int, Dh: int, value_dim: int | None) -> None:
    """Raises KernelError unless attention kernels take keys of such dimensions that hold their values."""
    check_that(op, "k_pages", K == 1, f"{K} KV heads", "1 where a key holds its value")
    width = value_dim or 0
    fits = width % 8 == 0 and 0 < width <= MAX_LATENT
    check_that(op, "value_dim", fits, value_dim, f"a multiple of 8 up to {MAX_LATENT} where v_pages is None")
    fits = Dh % 8 == 0 and 0 < Dh - width <= MAX_HEAD_DIM
    expected = f"value_dim={width} and a multiple of 8 up to {MAX_HEAD_DIM} before"
    check_that(op, "q", fits, f"head dimension {Dh}", expected)


def check_that(op: str, argument: str, holds: bool, got: Any, expected: Any) -> None:
    """Raises KernelError unless `holds`."""
    if not holds:
        raise KernelError(op, argument, got, expected)
