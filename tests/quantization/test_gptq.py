"""GPTQ against the paper's algorithm in numpy, and what it promises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.quantization.arithmetic import dequantize, unpack
from moejax.quantization.formats import QTensor, WeightFormat, parse_format
from moejax.quantization.gptq import LARGEST_DAMPING, LEAST_RAISED, _inverse_factor, damping_note, gptq
from moejax.quantization.rtn import round_to_nearest
from tests.examples import in_turns, slow_but
from tests.quantization.calibrated import FORMATS, calibrated, error_of, weight_error


def indexed(name: str) -> WeightFormat:
    return dataclasses.replace(parse_format(name), indexed=True)


def codes_of(tensor: QTensor) -> np.ndarray:
    """Unpacked `[..., F, D]`."""
    return np.asarray(unpack(tensor.values, tensor.pack) if tensor.format.packed else tensor.values)


def one(tree, e: int):
    return jax.tree.map(lambda a: a[e], tree)


def reference(
    w: np.ndarray, h: np.ndarray, *, levels: int, group: int, damping: float, act_order: bool, indexed: bool
) -> tuple[np.ndarray, float]:
    """The paper's algorithm for symmetric integers, column by column in float64, with an explicit inverse.

    Returns the dequantized weight `[D, F]` and how near to a tie any rounding was, in steps.
    """
    w, h = w.astype(np.float64), h.astype(np.float64)
    D = w.shape[0]
    order = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(D)
    original, w, h = w, w[order], h[order][:, order]
    h = h + damping * np.mean(np.diag(h)) * np.eye(D)
    u = np.linalg.cholesky(np.linalg.inv(h)).T
    out, nearest = np.zeros_like(w), np.inf

    def scale_of(members: np.ndarray) -> np.ndarray:
        return np.abs(members).max(0).astype(np.float32).astype(np.float64) / levels

    for i in range(D):
        if indexed or not act_order:
            if i % group == 0:
                scale = scale_of(w[i : i + group])
        else:
            start = order[i] // group * group
            scale = scale_of(original[start : start + group])
        ratio = w[i] / scale
        code = np.clip(np.round(ratio), -levels, levels)
        nearest = min(nearest, np.abs(np.abs(ratio - np.round(ratio)) - 0.5).min())
        out[i] = code * scale
        w[i + 1 :] -= np.outer(u[i, i + 1 :], (w[i] - out[i]) / u[i, i])
    result = np.zeros_like(out)
    result[order] = out
    return result, nearest


@pytest.mark.parametrize(
    ("name", "act_order"),
    in_turns([("int4",), ("int4_g16",), ("int8",), ("int4_g16 indexed",)], [False, True]),
)
def test_gives_the_papers_codes(name: str, act_order: bool) -> None:
    case = calibrated((2,), D=32, F=12, seed=3)
    base, _, is_indexed = name.partition(" ")
    # Scales are kept in float32, so that float64 has the same.
    fmt = dataclasses.replace(parse_format(base), scale_dtype="float32", indexed=bool(is_indexed))
    result = gptq(case.w, case.gram, fmt, act_order=act_order, block=24)
    for e in range(2):
        want, nearest = reference(
            np.asarray(case.w[e]), np.asarray(case.gram[e]), levels=2 ** (fmt.bits - 1) - 1,
            group=fmt.group or 32, damping=0.01, act_order=act_order, indexed=bool(is_indexed),
        )  # fmt: skip
        # No rounding is so near a tie that float32 could decide it the other way: then codes are the same,
        # and values differ by the rounding of scales alone.
        assert nearest > 1e-5
        np.testing.assert_allclose(np.asarray(dequantize(result.tensor)[e]), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_loses_on_the_weights_and_wins_on_the_output(name: str) -> None:
    case, fmt = calibrated(), parse_format(name)
    nearest = round_to_nearest(case.w, fmt)
    for act_order in (False, True):
        found = gptq(case.w, case.gram, fmt, act_order=act_order).tensor
        assert found.format == fmt and found.shape == case.w.shape
        assert (weight_error(found, case) > weight_error(nearest, case)).all()
        assert (error_of(found, case) < 0.7 * error_of(nearest, case)).all()


def test_every_expert_has_its_own_hessian() -> None:
    """The stack gives what the experts give one by one, and another expert's Hessian gives more error."""
    case, fmt = calibrated(), parse_format("int4_g16_asym")
    together = gptq(case.w, case.gram, fmt)
    for e in range(3):
        alone = gptq(case.w[e], case.gram[e], fmt)
        jax.tree.map(np.testing.assert_array_equal, one(together.tensor, e), alone.tensor)
    swapped = gptq(case.w, jnp.roll(case.gram, 1, axis=0), fmt)
    assert (error_of(swapped.tensor, case) > error_of(together.tensor, case)).all()


def test_a_hessian_may_be_shared_and_axes_may_be_more() -> None:
    case, fmt = calibrated((1, 3)), parse_format("int4_g16")
    found = gptq(case.w, case.gram, fmt)
    flat = gptq(case.w[0], case.gram[0], fmt)
    assert found.damping.shape == (1, 3)
    np.testing.assert_array_equal(codes_of(found.tensor)[0], codes_of(flat.tensor))
    shared = gptq(case.w, case.gram[0, 0], fmt)
    np.testing.assert_array_equal(codes_of(shared.tensor)[0, 0], codes_of(found.tensor)[0, 0])


@pytest.mark.parametrize(("name", "act_order"), [("int4_g32", False), ("int4", True)])
def test_the_block_changes_nothing(name: str, act_order: bool) -> None:
    """Also one that divides neither D nor the group."""
    case, fmt = calibrated(), parse_format(name)
    whole = gptq(case.w, case.gram, fmt, act_order=act_order, block=64).tensor
    for block in (24, 500):
        found = gptq(case.w, case.gram, fmt, act_order=act_order, block=block).tensor
        # Sums in another order may decide a near tie; what follows it then differs too.
        same = np.mean(codes_of(found) == codes_of(whole))
        assert same > 0.99, (block, same)
        np.testing.assert_allclose(error_of(found, case), error_of(whole, case), rtol=0.05)


def test_the_hessians_scale_changes_nothing() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    found = [gptq(case.w, case.gram * scale, fmt).tensor for scale in (1.0, 2.0**-40, 2.0**40)]
    for other in found[1:]:
        np.testing.assert_array_equal(codes_of(found[0]), codes_of(other))


def test_activation_order_serves_the_largest_inputs() -> None:
    """The error of the outputs falls, in sum over the experts, by index and with groups in place."""
    case = calibrated()
    by_place = error_of(gptq(case.w, case.gram, parse_format("int4_g16"), act_order=False).tensor, case)
    static = error_of(gptq(case.w, case.gram, parse_format("int4_g16")).tensor, case)
    by_index = error_of(gptq(case.w, case.gram, indexed("int4_g16")).tensor, case)
    assert static.sum() < by_place.sum() and by_index.sum() < by_place.sum()


def test_the_group_index_follows_the_diagonal() -> None:
    case = calibrated()
    found = gptq(case.w, case.gram, indexed("int4_g16")).tensor
    order = np.argsort(-np.asarray(jnp.diagonal(case.gram, axis1=1, axis2=2)), axis=1, kind="stable")
    for e in range(3):
        index = np.asarray(found.group_index)[e]
        np.testing.assert_array_equal(index[order[e]], np.arange(64) // 16)
    by_place = gptq(case.w, case.gram, indexed("int4_g16"), act_order=False).tensor
    np.testing.assert_array_equal(by_place.group_index, np.tile(np.arange(64) // 16, (3, 1)))


def test_the_factor_is_that_of_the_inverse() -> None:
    case = calibrated()
    diagonal = jnp.diagonal(case.gram, axis1=1, axis2=2)
    u, used = _inverse_factor(case.gram, jnp.float32(0.01))
    np.testing.assert_array_equal(used, np.float32(0.01))
    np.testing.assert_array_equal(u, jnp.triu(u))
    mean = np.asarray(diagonal.mean(1), np.float64)[:, None, None]
    h = np.asarray(case.gram, np.float64) / mean + 0.01 * np.eye(64)
    product = np.swapaxes(np.asarray(u, np.float64), 1, 2) @ np.asarray(u, np.float64) @ h
    # Backward stable: errors of D roundings, times the condition number.
    bound = 64 * np.finfo(np.float32).eps * np.linalg.cond(h).max()
    assert np.abs(product - np.eye(64)).max() < bound


def test_a_hessian_that_is_not_positive_definite_gets_more_damping() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    mean = float(jnp.diagonal(case.gram[1]).mean())
    # Its least eigenvalue is now about -0.3 of the mean diagonal: 1e-3 … 0.1 do not help, 1 does.
    values, vectors = np.linalg.eigh(np.asarray(case.gram[1], np.float64))
    values[0] = -0.3 * mean
    broken = jnp.asarray((vectors * values) @ vectors.T, jnp.float32)
    result = gptq(case.w, case.gram.at[1].set(broken), fmt)
    np.testing.assert_array_equal(result.raised, [False, True, False])
    np.testing.assert_allclose(result.damping, [0.01, 1.0, 0.01], rtol=1e-6)
    note = damping_note("layers.0.moe.experts.up_proj", result)
    assert note is not None and "\n" not in note
    assert note == (
        "layers.0.moe.experts.up_proj: 1 of 3 Hessians not positive definite; damping raised to 1 of the "
        "mean diagonal"
    )
    whole = gptq(case.w, case.gram, fmt)
    assert damping_note("w", whole) is None
    for e in (0, 2):
        np.testing.assert_array_equal(codes_of(result.tensor)[e], codes_of(whole.tensor)[e])
    assert jnp.isfinite(dequantize(result.tensor)).all()


def test_too_few_tokens_without_damping() -> None:
    """A Gram matrix of 5 tokens has rank 5 of 64: damping starts from nothing."""
    case, fmt = calibrated(T=5), parse_format("int4_g16")
    result = gptq(case.w, case.gram, fmt, damping=0.0)
    assert result.raised.all() and (result.damping >= LEAST_RAISED).all() and (result.damping <= 0.1).all()
    assert (error_of(result.tensor, case) < error_of(round_to_nearest(case.w, fmt), case)).all()
    # The usual damping is enough.
    assert not gptq(case.w, case.gram, fmt).raised.any()


@pytest.mark.parametrize("broken", [np.nan, -1e9], ids=["nan", "negative"])
def test_a_hessian_beyond_repair_means_round_to_nearest_and_is_said(broken: float) -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    gram = case.gram.at[2, 3, 3].set(broken)
    result = gptq(case.w, gram, fmt, act_order=False)
    np.testing.assert_array_equal(result.raised, [False, False, True])
    assert np.isinf(result.damping[2]) and LARGEST_DAMPING < np.inf
    np.testing.assert_array_equal(codes_of(result.tensor)[2], codes_of(round_to_nearest(case.w[2], fmt)))
    note = damping_note("w", result)
    assert note == "w: 1 of 3 Hessians not positive definite; 1 rounded to nearest, because no damping helped"


@pytest.mark.parametrize("name", FORMATS)
def test_an_expert_without_tokens_is_rounded_to_nearest(name: str) -> None:
    case, fmt = calibrated(), parse_format(name)
    result = gptq(case.w, case.gram.at[1].set(0.0), fmt)
    jax.tree.map(np.testing.assert_array_equal, one(result.tensor, 1), round_to_nearest(case.w[1], fmt))
    assert not result.raised.any()


def test_inputs_never_seen_keep_their_rounded_weights() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    dead = np.array([0, 7, 63])
    gram = case.gram.at[:, dead, :].set(0.0).at[:, :, dead].set(0.0)
    result = gptq(case.w, gram, fmt)
    nearest = codes_of(round_to_nearest(case.w, fmt))
    np.testing.assert_array_equal(codes_of(result.tensor)[..., dead], nearest[..., dead])
    assert not result.raised.any()
    assert (codes_of(result.tensor) != nearest).any()


@pytest.mark.parametrize("clip", slow_but(["percentile", "entropy"], ["percentile", "mse", "entropy"]))
def test_clipped_ranges_are_taken(clip: str) -> None:
    case, fmt = calibrated(F=24), parse_format("int4_g32")
    for act_order in (False, True):
        plain = gptq(case.w, case.gram, fmt, act_order=act_order)
        found = gptq(case.w, case.gram, fmt, act_order=act_order, clip=clip, percentile=95.0)
        assert (found.tensor.scales != plain.tensor.scales).any()
        nearest = round_to_nearest(case.w, fmt, clip=clip, percentile=95.0)
        assert (error_of(found.tensor, case) < error_of(nearest, case)).all()


def test_half_precision_weights_are_computed_in_float32() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    half = case.w.astype(jnp.bfloat16)
    found = gptq(half, case.gram, fmt).tensor
    want = gptq(half.astype(jnp.float32), case.gram, fmt).tensor
    np.testing.assert_array_equal(found.values, want.values)


def test_static_activations_need_their_scale() -> None:
    case = calibrated()
    scale = jnp.full((3, 1), 0.5, jnp.float32)
    found = gptq(case.w, case.gram, parse_format("w8a8_static"), input_scale=scale).tensor
    np.testing.assert_array_equal(found.input_scale, scale)
    with pytest.raises(ConfigError, match="gptq: int8_a8static needs an input_scale"):
        gptq(case.w, case.gram, parse_format("w8a8_static"))
    with pytest.raises(ConfigError, match="gptq: int8 takes no input_scale"):
        gptq(case.w, case.gram, parse_format("int8"), input_scale=scale)


def test_a_group_that_does_not_divide() -> None:
    case = calibrated()
    with pytest.raises(ConfigError, match="groups of 48 do not divide its 64 inputs; use 64 or 32 or 16"):
        gptq(case.w, case.gram, parse_format("int4_g48"))


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g32"])
def test_output_error_is_not_above_qwix(name: str) -> None:
    core = pytest.importorskip("qwix.contrib.gptq_core", reason="qwix is not installed")
    qarray = pytest.importorskip("qwix._src.core.qarray", reason="qwix is not installed")
    case, fmt = calibrated(D=64, F=24), parse_format(name)
    how = qarray.HowToQuantize(
        qtype=jnp.dtype(fmt.numbers), channelwise_axes=[0], tiled_axes={1: fmt.group} if fmt.group else {}
    )
    theirs = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for e in range(3):
            found, _ = core.quantize_weight(case.w[e].T, case.gram[e], how)
            theirs.append(jnp.sum(jnp.square(case.x[e] @ (qarray.dequantize(found).T - case.w[e]))))
    ours = error_of(gptq(case.w, case.gram, fmt).tensor, case)
    assert ours.sum() <= jnp.stack(theirs).sum()
