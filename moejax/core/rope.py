"""The configuration of rotary position embedding."""

import math
from dataclasses import dataclass
from typing import Literal

from moejax.core.checked import PositiveNumber, check
from moejax.core.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its context extension.

    Sources: RoFormer (arXiv 2104.09864); linear position interpolation (arXiv 2306.15595); dynamic NTK;
    YaRN (arXiv 2309.00071); the Llama 3.1 model card's piecewise scaling; LongRoPE (arXiv 2402.13753), whose
    sequences above the original length have frequencies, and a factor on cos and sin, of their own. Field
    names follow Hugging Face's `rope_parameters`. `partial_rotary_factor` is the share of a head's dimensions
    that are rotated, the first R of Dh. `interleaved` pairs dimension 2i with 2i + 1, not i with i + R/2.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None
    partial_rotary_factor: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        check("rope_type", self.kind, RopeKind)
        check("rope_theta", self.theta, PositiveNumber)
        if self.kind != "default":
            check("rope factor", self.factor, PositiveNumber)
        if self.kind in ("yarn", "llama3", "longrope") and not self.original_max_position_embeddings:
            raise ConfigError(f"rope_type {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                factors = getattr(self, name)
                numbers = isinstance(factors, tuple) and all(isinstance(f, (int, float)) for f in factors)
                if not numbers or not factors or min(factors) <= 0:
                    raise ConfigError(
                        f"rope_type 'longrope' needs a {name} of positive numbers, got {factors!r}"
                    )
            if len(self.short_factor) != len(self.long_factor):
                raise ConfigError("short_factor and long_factor are not of the same length")

    @property
    def by_length(self) -> bool:
        """Whether a token's angles depend on its sequence's length."""
        return self.kind in ("dynamic", "longrope")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns the factor that YaRN gives to queries and keys of a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
