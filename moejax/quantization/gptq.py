"""GPTQ: rounding one input after the other, each time moving the error into the inputs still to come.

    result = gptq(w, hessian, parse_format("int4_g64"))      # w [E, D, F], hessian [E, D, D] = Σ x xᵀ
    result.tensor                                            # QTensor of all experts
    damping_note("layers.0.moe.experts.up_proj", result)     # None, or what had to be raised

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv
2210.17323. Row i of the weight, the weights of input i, is rounded, and its error e_i moves the later rows by
-e_i · U_ij / U_ii, where (H + damping)⁻¹ = Uᵀ U with U upper triangular: what keeps the output nearest. Rows
within a block move each other at once, rows behind it by one product when the block is done; `block`
therefore changes the time and not the result. All leading axes (experts) go through the loop together, with
one batched Cholesky factorization.

Order of the inputs, and where scales come from:

    act_order False                by place; a group's scales from its weights as moved so far
    act_order True                 by falling diagonal of H; groups stay where they are, so that no index is
                                   needed: scales from the original weights ("static groups")
    act_order True, fmt.indexed    by falling diagonal; groups of inputs that follow each other in that order,
                                   scales from the moved weights, and `group_index` says who is where

Scales per tensor, channel and block, and those of nvfp4 (whose second scale spans all groups), are those of
the original weights.

Inputs that calibration never saw (diagonal 0) keep their rounded weights. The paper's code sets them to 0;
but an expert that saw few tokens has such inputs by chance, and other text will use them. A Hessian of zeros,
an expert without tokens, thus gives round-to-nearest.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax.core.errors import ConfigError
from moejax.core.quant import Clip
from moejax.quantization.arithmetic import (
    assemble,
    codes_to_values,
    round_to_codes,
    scales_from_range,
    step_and_zero,
)
from moejax.quantization.clipping import ranges
from moejax.quantization.formats import QTensor, WeightFormat
from moejax.quantization.output_error import HIGHEST

LEAST_RAISED = 1e-3
"""Damping that a matrix gets at least once it had to be raised."""
LARGEST_DAMPING = 1e4
"""No raising beyond this share of the mean diagonal: such a Hessian tells nothing about the inputs."""
_SUB_BLOCK = 16
"""Rows that move each other at once; few, because that is bound by memory. Rows of a block beyond them wait
for a product, as those behind the block do."""


class GptqResult(NamedTuple):
    """
    Attributes:
        tensor: the quantized weight, with the leading axes of what was given.
        damping: float32 `[...]`, what was added to the Hessian's diagonal as a share of its mean; inf where
            no damping helped (NaN, or far from positive definite): that matrix is rounded to nearest.
        raised: bool `[...]`, that is more than was asked for: the Hessian was not positive definite.
    """

    tensor: QTensor
    damping: jax.Array
    raised: jax.Array


class _Grid(NamedTuple):
    """Scales by group: as stored, and the float32 step and zero point of a code, `[n, G, O]`."""

    scales: jax.Array
    zeros: jax.Array | None
    step: jax.Array
    zero: jax.Array


@functools.partial(jax.jit, static_argnames=("fmt", "act_order", "block", "clip", "percentile"))
def gptq(
    w: jax.Array,
    hessian: jax.Array,
    fmt: WeightFormat,
    *,
    damping: float | jax.Array = 0.01,
    act_order: bool = True,
    block: int = 128,
    clip: Clip = "minmax",
    percentile: float = 99.9,
    input_scale: jax.Array | None = None,
) -> GptqResult:
    """Quantizes `w` so that its outputs, on the inputs behind `hessian`, change little.

    Args:
        w: `[..., D, F]`, any float dtype.
        hessian: float32 `[..., D, D]`, Σ x xᵀ over tokens, in any scale; leading axes broadcast to those of
            `w`.
        damping: added to the diagonal, as a share of the mean over the inputs seen.
        act_order, fmt.indexed: see the module.
        block: inputs between two updates of the rest.
        clip, percentile: of the scales, see `moejax.quantization.clipping.ranges`.
        input_scale: float32 `[..., 1]`, passed on where the format has static activations.

    Raises:
        ConfigError: the format does not fit the weight, or has static activations and no `input_scale` is
            given.
    """
    *lead, D, F = w.shape
    fmt.check("gptq", D, F)
    check_input_scale("gptq", fmt, input_scale)
    n = math.prod(lead)
    w = w.astype(jnp.float32).reshape(n, D, F)
    hessian = jnp.broadcast_to(hessian.astype(jnp.float32), (*lead, D, D)).reshape(n, D, D)
    order, inverse_order = _order(hessian, act_order)
    factor, used = _inverse_factor(_reorder(hessian, order), jnp.float32(damping))

    moving = fmt.granularity == "group" and not fmt.has_tensor_scale and (fmt.indexed or not act_order)
    grid_of = functools.partial(_static_grid, fmt=fmt, clip=clip, percentile=percentile)
    if moving:  # filled in group by group
        grid, tensor_scale = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(grid_of, w))
    else:
        grid, tensor_scale = grid_of(w)
    member = jnp.broadcast_to(jnp.arange(D)[None, :], (n, D)) if moving else order
    groups = member // fmt.group if fmt.group else jnp.zeros_like(member)
    # Where scales move, groups begin with blocks; elsewhere rows are filled up to whole blocks.
    block = math.gcd(fmt.group, block) if moving else min(block, D)
    sub_block = math.gcd(_SUB_BLOCK, block) if moving else min(_SUB_BLOCK, block)
    loop = _Loop(fmt, D, F, block + -block % sub_block, sub_block, moving, clip, percentile)
    rows = jnp.take_along_axis(w, order[:, :, None], axis=1)
    codes, grid = loop.run(rows, factor, groups, grid)

    codes = jnp.take_along_axis(codes, inverse_order[:, :, None], axis=1)
    group_index = None
    if fmt.indexed:
        group_index = jnp.take_along_axis(groups, inverse_order, axis=1).astype(jnp.int32)
    codes = jnp.swapaxes(codes, 1, 2)
    flat = assemble(codes, grid.scales, grid.zeros, fmt, tensor_scale=tensor_scale, group_index=group_index)
    tensor = jax.tree.map(lambda array: array.reshape(*lead, *array.shape[1:]), flat)
    tensor = dataclasses.replace(tensor, input_scale=input_scale)
    return GptqResult(tensor, used.reshape(lead), (used > damping).reshape(lead))


def check_input_scale(method: str, fmt: WeightFormat, input_scale: jax.Array | None) -> None:
    """Raises `ConfigError` unless a scale is given exactly where the format has static activations."""
    if (fmt.activations == "static") != (input_scale is not None):
        said = "needs an input_scale from calibration" if input_scale is None else "takes no input_scale"
        raise ConfigError(f"{method}: {fmt.name} {said}")


def damping_note(path: str, result: GptqResult) -> str | None:
    """Returns one line on the matrices of `path` whose damping was raised, or None. Waits for them."""
    raised, damping = np.asarray(result.raised), np.asarray(result.damping)
    if not raised.any():
        return None
    total, hopeless = raised.size, int(np.isinf(damping[raised]).sum())
    helped = damping[raised & np.isfinite(damping)]
    note = f"{path}: {int(raised.sum())} of {total} Hessians not positive definite"
    if helped.size:
        note += f"; damping raised to {helped.max():g} of the mean diagonal"
    if hopeless:
        note += f"; {hopeless} rounded to nearest, because no damping helped"
    return note


def _order(hessian: jax.Array, act_order: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the inputs in the order of the loop `[n, D]`, and each input's place in it."""
    diagonal = jnp.diagonal(hessian, axis1=1, axis2=2)
    if not act_order:
        place = jnp.broadcast_to(jnp.arange(diagonal.shape[1])[None, :], diagonal.shape)
        return place, place
    order = jnp.argsort(-diagonal, axis=1, stable=True)
    return order, jnp.argsort(order, axis=1)


def _reorder(hessian: jax.Array, order: jax.Array) -> jax.Array:
    rows = jnp.take_along_axis(hessian, order[:, :, None], axis=1)
    return jnp.take_along_axis(rows, order[:, None, :], axis=2)


def _inverse_factor(hessian: jax.Array, damping: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns upper triangular U, (H + damping · mean diagonal)⁻¹ = Uᵀ U up to a factor, and the damping.

    H mirrored in both axes is L Lᵀ, so H is R Rᵀ with R, the mirror image of L, upper triangular; then
    H⁻¹ = R⁻ᵀ R⁻¹ and U = R⁻¹. One factorization, and no inverse of H is formed.

    Damping is raised tenfold, from `LEAST_RAISED` on, for each matrix whose factor is not finite or has a
    pivot within rounding of zero; up to `LARGEST_DAMPING`, then inf and the identity.
    """
    n, D, _ = hessian.shape
    eye = jnp.eye(D, dtype=jnp.float32)[None]
    diagonal = jnp.diagonal(hessian, axis1=1, axis2=2)
    seen = diagonal > 0
    count = jnp.sum(seen.astype(jnp.float32), axis=1)
    mean = jnp.sum(jnp.where(seen, diagonal, 0.0), axis=1) / jnp.maximum(count, 1.0)
    scaled = hessian / jnp.where(mean > 0, mean, 1.0)[:, None, None]
    scaled += jnp.where(diagonal == 0, 1.0, 0.0)[:, :, None] * eye
    # Rounding errors of a pivot add up like a random walk over the row.
    noise = math.sqrt(D) * float(jnp.finfo(jnp.float32).eps)

    def factor(share: jax.Array) -> tuple[jax.Array, jax.Array]:
        damped = scaled + share[:, None, None] * eye
        lower = jnp.linalg.cholesky(damped[:, ::-1, ::-1])
        pivots = jnp.square(jnp.diagonal(lower, axis1=1, axis2=2)[:, ::-1])
        upper = lax.linalg.triangular_solve(
            lower, jnp.broadcast_to(eye, (n, D, D)), left_side=True, lower=True
        )[:, ::-1, ::-1]
        sound = jnp.all(pivots > noise * jnp.diagonal(damped, axis1=1, axis2=2), axis=1)
        return upper, sound & jnp.all(jnp.isfinite(upper), axis=(1, 2))

    def raise_more(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        share, _, good = state
        share = jnp.where(good, share, jnp.maximum(10 * share, LEAST_RAISED))
        return share, *factor(share)

    def goes_on(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        share, _, good = state
        return jnp.any(~good & (share * 10 <= LARGEST_DAMPING))

    share = jnp.full(n, damping)
    share, upper, good = lax.while_loop(goes_on, raise_more, (share, *factor(share)))
    return jnp.where(good[:, None, None], upper, eye), jnp.where(good, share, jnp.inf)


def _static_grid(
    w: jax.Array, fmt: WeightFormat, clip: Clip, percentile: float
) -> tuple[_Grid, jax.Array | None]:
    """Returns the scales of the weights as they are, and nvfp4's second one."""
    low, high = ranges(w, fmt, clip, percentile)
    scales, zeros, tensor_scale = scales_from_range(low, high, fmt)
    return _Grid(scales, zeros, *step_and_zero(scales, zeros, tensor_scale, fmt)), tensor_scale


class _Loop(NamedTuple):
    """The loop over inputs, in blocks of `block` rows and parts of those of `sub_block` rows.

    `moving`: scales of a group are those of the moved weights.
    """

    fmt: WeightFormat
    D: int
    F: int
    block: int
    sub_block: int
    moving: bool
    clip: Clip
    percentile: float

    def run(
        self, rows: jax.Array, factor: jax.Array, groups: jax.Array, grid: _Grid
    ) -> tuple[jax.Array, _Grid]:
        """Returns codes `[n, D, F]` of `rows` `[n, D, F]`, both in the loop's order, and the scales.

        Args:
            factor: U `[n, D, D]`.
            groups: int32 `[n, D]`, which of `grid`'s scales a row takes.
            grid: filled in group by group where scales move.
        """
        pad = -self.D % self.block
        rows = jnp.pad(rows, ((0, 0), (0, pad), (0, 0)))
        groups = jnp.pad(groups, ((0, 0), (0, pad)))
        # Rows that pad have no influence: their share of U is the identity's.
        factor = jnp.pad(factor, ((0, 0), (0, pad), (0, pad)))
        padding = jnp.pad(jnp.zeros(self.D), (0, pad), constant_values=1.0)
        factor += (padding[:, None] * jnp.eye(self.D + pad))[None]
        code = self.fmt.code_dtype
        codes = jnp.zeros(rows.shape, code)

        def one_block(k: jax.Array, state: tuple) -> tuple:
            rows, codes, grid = state
            start = k * self.block
            if self.moving:
                grid = self._scales_of_group(start, rows, grid)
            inner = lax.dynamic_slice_in_dim(rows, start, self.block, axis=1)
            influence = lax.dynamic_slice_in_dim(factor, start, self.block, axis=1)
            within = lax.dynamic_slice_in_dim(influence, start, self.block, axis=2)
            belongs = lax.dynamic_slice_in_dim(groups, start, self.block, axis=1)
            block_codes, errors = self._block(inner, within, belongs, grid)
            # U is zero left of the block; what this adds to the block itself is not read again.
            rows -= jnp.einsum("nbd,nbf->ndf", influence, errors, precision=HIGHEST)
            return rows, lax.dynamic_update_slice_in_dim(codes, block_codes, start, axis=1), grid

        blocks = (self.D + pad) // self.block
        _, codes, grid = lax.fori_loop(0, blocks, one_block, (rows, codes, grid))
        return codes[:, : self.D], grid

    def _scales_of_group(self, start: jax.Array, rows: jax.Array, grid: _Grid) -> _Grid:
        """Returns the grid with the scales of the group that begins at `start`, if one does."""
        size = self.fmt.group

        def new_grid() -> _Grid:
            members = lax.dynamic_slice_in_dim(rows, start, size, axis=1)
            new, _ = _static_grid(members, self.fmt, self.clip, self.percentile)
            place = start // size
            return jax.tree.map(
                lambda whole, one: lax.dynamic_update_slice_in_dim(whole, one, place, axis=1), grid, new
            )

        if size == self.block:
            return new_grid()
        return lax.cond(start % size == 0, new_grid, lambda: grid)

    def _block(
        self, rows: jax.Array, within: jax.Array, groups: jax.Array, grid: _Grid
    ) -> tuple[jax.Array, jax.Array]:
        """Returns codes of a block's rows `[n, b, F]`, and their errors over U_ii.

        Args:
            within: U's part `[n, b, b]`.
            groups: `[n, b]`.
        """
        size = self.sub_block

        def one_part(k: jax.Array, state: tuple) -> tuple:
            rows, codes, errors = state
            start = k * size
            part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1)
            influence = part(within)
            part_influence = lax.dynamic_slice_in_dim(influence, start, size, axis=2)
            part_codes, error = self._sub_block(part(rows), part_influence, part(groups), grid)
            rows -= jnp.einsum("nbd,nbf->ndf", influence, error, precision=HIGHEST)
            codes = lax.dynamic_update_slice_in_dim(codes, part_codes, start, axis=1)
            return rows, codes, lax.dynamic_update_slice_in_dim(errors, error, start, axis=1)

        state = (rows, jnp.zeros(rows.shape, self.fmt.code_dtype), jnp.zeros_like(rows))
        _, codes, errors = lax.fori_loop(0, self.block // size, one_part, state)
        return codes, errors

    def _sub_block(
        self, rows: jax.Array, within: jax.Array, groups: jax.Array, grid: _Grid
    ) -> tuple[jax.Array, jax.Array]:
        """Quantizes like `_block`, row by row."""
        step, zero = self._by_output(grid.step), self._by_output(grid.zero)

        def one_row(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            row = lax.dynamic_index_in_dim(carry, i, axis=1, keepdims=False)
            influence = lax.dynamic_index_in_dim(within, i, axis=1, keepdims=False)
            diagonal = lax.dynamic_index_in_dim(influence, i, axis=1)
            group = lax.dynamic_index_in_dim(groups, i, axis=1)[:, :, None]
            s = jnp.take_along_axis(step, group, axis=1)[:, 0]
            z = jnp.take_along_axis(zero, group, axis=1)[:, 0]
            code = round_to_codes(row, s, z, self.fmt)
            error = (row - codes_to_values(code, s, z, self.fmt)) / diagonal
            return carry - influence[:, :, None] * error[:, None, :], (code, error)

        _, (codes, errors) = lax.scan(one_row, rows, jnp.arange(rows.shape[1]))
        return jnp.swapaxes(codes, 0, 1), jnp.swapaxes(errors, 0, 1)

    def _by_output(self, grid: jax.Array) -> jax.Array:
        """Returns `[n, G, F]` or `[n, G, 1]` of a grid whose blocks span several outputs."""
        if self.fmt.granularity == "block":
            return jnp.repeat(grid, self.fmt.group, axis=2)[:, :, : self.F]
        return grid
