"""Choice of an implementation by name, with the reason, decided once and recorded.

A name that was asked for runs or raises; only "auto" chooses.
"""

from typing import NamedTuple

import jax

from moejax.core.errors import ConfigError, unknown


class Choice(NamedTuple):
    """A resolved choice and why it was made."""

    value: str
    reason: str


GROUPED_MATMUL = ("loop", "ragged_dot")


def choose(key: str, asked: str, known: tuple[str, ...], auto: Choice) -> Choice:
    """`auto`'s choice for "auto", else the name that was asked for.

    Raises:
        ConfigError: if the name is not known.
    """
    if asked == "auto":
        return auto
    if asked not in known:
        raise ConfigError(f"{key}: {unknown('implementation', asked, (*known, 'auto'))}")
    return Choice(asked, "asked for")


def choose_grouped_matmul(asked: str = "auto", platform: str | None = None) -> Choice:
    """Implementation of the grouped expert products on a platform ("cpu", "gpu")."""
    platform = platform or jax.default_backend()
    if platform == "cpu":
        auto = Choice("loop", "on CPU ragged_dot computes all experts; the loop only those that are hit")
    else:
        auto = Choice("ragged_dot", f"XLA's grouped product on {platform}")
    return choose("engine.moe.grouped_matmul", asked, GROUPED_MATMUL, auto)


def block_rows_for(assignments: int, num_experts: int, transposed: bool = False) -> int:
    """Rows per block for the loop on CPU, from the mean rows an expert gets.

    Short blocks waste little on experts with few tokens; tall ones amortise reading an expert's weights.
    The steps are where the measured times cross (docs/log.md, 2026-11-21).
    """
    mean = assignments / num_experts
    if assignments <= 8 or (transposed and mean <= 3):
        return 1
    for rows, up_to in ((8, 6), (16, 12), (32, 40)) if transposed else ((4, 3), (16, 12), (32, 40)):
        if mean <= up_to:
            return rows
    return 64


def choose_expert_layout(asked: str, platform: str) -> Choice:
    """How an engine's experts lie in memory, see `moejax.core.config.MoeConfig`."""
    if platform == "cpu":
        auto = Choice("efd", "on CPU a single row's product reads transposed experts without a copy")
    else:
        auto = Choice("edf", f"the products' own order on {platform}")
    return choose("engine.moe.expert_layout", asked, ("edf", "efd"), auto)
