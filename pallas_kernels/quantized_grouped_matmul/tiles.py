"""Tiles of a quantized weight inside a kernel, decoded in registers; and the reduction over them.

A step of the reduction covers `block_k` inputs. It is cut into groups that share a scale: their product with
x is summed apart and scaled as it joins the accumulator, so that a weight costs a few integer operations and
one subtraction, and no multiplication. Codes are exact in 16-bit floats (integers below 257, e4m3 numbers),
so nothing is rounded before the scale. Powers of two scale the weights themselves, which is exact, too: it
takes fewer registers and instructions than sums apart of 32 inputs each.

The compiler prefetches (with `cp.async`) only what feeds a matrix product. Scales do not, so the loop carries
those of the next step along.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._compat import both, dot, load
from pallas_kernels.qformats import PACK, Format, scale_values
from pallas_kernels.quantized_grouped_matmul.decode import (
    E2M1_UNIT,
    decode_fp4,
    decode_fp8,
    decode_int8,
    decode_nibbles,
)

HALF = PACK // 2

POWER = 2.0**-64
"""What weights are small by that are multiplied by their scales: a scale with all of the correction by
`E2M1_UNIT` would be no number. Scales may come to 2^65, and sums are as exact as others down to 2^-62."""


class Piece(NamedTuple):
    """`size` inputs from `offset` of a step on; of nibbles, their first byte and which half they are."""

    offset: int
    size: int
    byte: int = 0
    high: bool = False


def pieces(fmt: Format, block_k: int) -> list[list[Piece]]:
    """Returns a step's pieces, by groups that share a scale."""
    if fmt.packed:
        halves = [
            Piece(PACK * u + HALF * high, HALF, HALF * u, bool(high))
            for u in range(block_k // PACK)
            for high in range(2)
        ]
        per_group = min(fmt.group, block_k) // HALF
        return [halves[i : i + per_group] for i in range(0, len(halves), per_group)]
    count = min(fmt.group or block_k, block_k)
    return [[Piece(offset, count)] for offset in range(0, block_k, count)]


@dataclass(frozen=True)
class Weight:
    """`block_n` outputs of one matrix.

    Attributes:
        values, scales, zeros: references to the arrays.
        lead: indices of the matrix in them, `(expert,)` or `()`.
        first: the first output; with `fmt.scale_columns` the tile lies in one block of these.
        D, F: of the matrix.
        ptx: compiled, not interpreted: see `decode`.
    """

    fmt: Format
    values: Any
    scales: Any
    zeros: Any
    lead: tuple[Any, ...]
    first: Any
    block_n: int
    block_k: int
    D: int
    F: int
    ptx: bool

    def outputs(self) -> tuple[jax.Array, jax.Array | None]:
        """Indices of the outputs, and which of them exist (None: all)."""
        at = self.first + jnp.arange(self.block_n)
        return at, at < self.F if self.F % self.block_n else None

    def codes(self, first: Any, count: int, width: int) -> jax.Array:
        """Returns `[block_n, count]` of the stored bytes, `width` of which an output has; 0 outside."""
        at, (out, inside) = first + jnp.arange(count), self.outputs()
        existing = None if inside is None else inside[:, None]
        mask = both((at < width)[None, :] if self.D % self.block_k else None, existing)
        return load(self.values.at[(*self.lead, out[:, None], at[None, :])], mask=mask, other=0)

    def packed(self, step: Any, byte: int) -> jax.Array:
        """Returns `[block_n, 32]`, a step's half block of nibbles from `byte` of an output on; 0 outside."""
        if self.values.ndim == self.scales.ndim:
            # step * (block_k / 2), not k / 2: of a quotient the compiler does not know what divides it.
            return self.codes(step * (self.block_k // 2) + byte, HALF, self.D // 2)
        block = step * (self.block_k // PACK) + byte // HALF
        return replace(self, lead=(*self.lead, block)).codes(0, HALF, self.D // 2 - block * HALF)

    def of_group(self, ref: Any, row: Any) -> jax.Array:
        """Returns a row of scales or zeros, `[block_n]`; with `scale_columns` one number."""
        if self.fmt.scale_columns > 1:
            return load(ref.at[(*self.lead, row, self.first // self.fmt.scale_columns)])
        out, inside = self.outputs()
        return load(ref.at[(*self.lead, row, out)], mask=inside, other=0)

    def scale(self, k: Any) -> jax.Array:
        """Scales for input k, of the last group if there is none such; float32 `[1, block_n]` or a number."""
        row = jnp.minimum(k // self.fmt.group, self.scales.shape[-2] - 1) if self.fmt.group else 0
        scale = scale_values(self.of_group(self.scales, row))
        return scale[None, :] if scale.ndim else scale

    def tile(
        self, step: Any, piece: Piece, kept: dict[int, jax.Array], dtype: Any, power: Any = None
    ) -> jax.Array:
        """Decodes codes `[block_n, count]` of a step's piece. `kept` has the bytes that two pieces share.

        Args:
            power: of `mxfp4`, scales `[1, block_n]` that the weights are multiplied by.
        """
        k = step * self.block_k + piece.offset
        if self.fmt.kind == "w8a8":
            return self.codes(k, piece.size, self.D)
        if self.fmt.kind == "fp8":
            return decode_fp8(self.codes(k, piece.size, self.D), dtype, self.ptx)
        if self.fmt.kind == "w8a16":
            return decode_int8(self.codes(k, piece.size, self.D), dtype, self.ptx)
        if piece.byte not in kept:
            kept[piece.byte] = self.packed(step, piece.byte)
        if self.fmt.kind == "mxfp4":
            number = decode_fp4(kept[piece.byte], piece.high, dtype, self.ptx, raw=power is not None)
            if power is None:
                return number
            unit = E2M1_UNIT["bfloat16"] if self.ptx else 1.0
            return number * (power[0] * (POWER / unit))[:, None].astype(dtype)
        zero = None
        if self.fmt.zeros:
            row = jnp.minimum(k // self.fmt.group, self.scales.shape[-2] - 1)
            zero = self.of_group(self.zeros, row)[:, None]
        return decode_nibbles(kept[piece.byte], piece.high, zero, dtype, self.ptx)


def reduce_tiles(
    x_tile: Callable[[Any, int], jax.Array],
    weights: Sequence[Weight],
    first: Any,
    steps: Any,
    block_m: int,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Sums `x @ w` for every weight, float32 `[block_m, block_n]`, over `steps` steps from step `first`.

    Args:
        x_tile: (k, count) → x's inputs from k on, `[block_m, count]`, zero past the end; int8 for `w8a8`.
        dtype: x's.
    """
    fmt, block_k, block_n = weights[0].fmt, weights[0].block_k, weights[0].block_n
    groups = pieces(fmt, block_k)
    powers = fmt.kind == "mxfp4" and dtype != jnp.float16  # which has fewer exponents

    def scales(step: Any) -> tuple[tuple[jax.Array, ...], ...]:
        if not fmt.group:
            return tuple(() for _ in weights)
        return tuple(tuple(w.scale(step * block_k + group[0].offset) for group in groups) for w in weights)

    def body(i: jax.Array, carry: Any) -> Any:
        sums, scale = carry
        sums, step = list(sums), first + i
        following = scales(step + 1)
        kept: list[dict[int, jax.Array]] = [{} for _ in weights]
        for g, group in enumerate(groups):
            parts: list[Any] = [None] * len(weights)
            for piece in group:
                x = x_tile(step * block_k + piece.offset, piece.size)
                for j, w in enumerate(weights):
                    tile = w.tile(step, piece, kept[j], x.dtype, scale[j][g] if powers else None)
                    product = dot(x, tile, trans_b=True)
                    parts[j] = product if parts[j] is None else parts[j] + product
            for j, part in enumerate(parts):
                sums[j] = sums[j] + (part * scale[j][g] if fmt.group and not powers else part)
        return tuple(sums), following

    kind = jnp.int32 if fmt.kind == "w8a8" else jnp.float32
    zero = tuple(jnp.zeros((block_m, block_n), kind) for _ in weights)
    sums, _ = jax.lax.fori_loop(0, steps, body, (zero, scales(first)))
    if powers:
        return tuple(s * (1 / POWER) for s in sums)
    if fmt.group:
        return sums
    return tuple(s.astype(jnp.float32) * w.scale(0) for s, w in zip(sums, weights, strict=True))
