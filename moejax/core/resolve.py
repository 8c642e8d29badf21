"""From "auto" to a value and the reason for it, decided once, kept and reported with every result."""

from collections.abc import Iterable
from typing import NamedTuple

import jax

from moejax.core.config import DTYPES, check_choice
from moejax.core.errors import DeviceError


class Resolution(NamedTuple):
    """A setting, what it became and why."""

    key: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.reason})"


def resolve_platform(asked: str) -> Resolution:
    """The platform that computation runs on.

    Raises:
        DeviceError: a GPU was asked for and JAX sees none.
    """
    key, present = "engine.platform", jax.default_backend()
    if asked == "auto":
        return Resolution(key, present, "JAX's default backend")
    if asked == present:
        return Resolution(key, present, "asked for")
    try:
        jax.devices(asked)
    except RuntimeError:
        hint = (
            "install moejax[cuda12] or [cuda13] on a CUDA machine" if asked == "gpu" else "see JAX_PLATFORMS"
        )
        raise DeviceError(
            f"engine.platform={asked}: JAX sees no such device, only {present}; {hint}"
        ) from None
    raise DeviceError(
        f"engine.platform={asked}: JAX's default backend is {present}; set JAX_PLATFORMS="
        f"{'cuda' if asked == 'gpu' else asked} before starting"
    )


def resolve_dtype(asked: str, stored: str, platform: str) -> Resolution:
    """The dtype of weights, cache and activations."""
    key = "model.dtype"
    if asked != "auto":
        check_choice(key, asked, (*DTYPES, "auto"))
        return Resolution(key, asked, "asked for")
    if platform == "cpu":
        return Resolution(key, "float32", f"bfloat16 products are slow on CPU; checkpoint is {stored}")
    return Resolution(key, stored, "as the checkpoint's configuration says")


def as_dict(resolutions: Iterable[Resolution]) -> dict[str, dict[str, str]]:
    """key → value and reason, for a result file."""
    return {r.key: {"value": r.value, "reason": r.reason} for r in resolutions}
