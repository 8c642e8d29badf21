"""Values chosen for "auto" with their reasons, decided once, kept and reported with every result."""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import jax

from moejax.core.checked import Among, check
from moejax.core.config import DTYPES
from moejax.core.errors import DeviceError


class Resolution(NamedTuple):
    """A setting, what it became and why."""

    key: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.reason})"


def resolve_platform(requested: str) -> Resolution:
    """Returns the platform that computation runs on.

    Raises:
        DeviceError: a GPU was asked for and JAX sees none.
    """
    key, present = "engine.platform", jax.default_backend()
    if requested == "auto":
        return Resolution(key, present, "JAX's default backend")
    if requested == present:
        return Resolution(key, present, "asked for")
    try:
        jax.devices(requested)
    except RuntimeError:
        install = "install moejax[cuda12] or [cuda13] on a CUDA machine"
        hint = install if requested == "gpu" else "see JAX_PLATFORMS"
        raise DeviceError(
            f"engine.platform={requested}: JAX sees no such device, only {present}; {hint}"
        ) from None
    raise DeviceError(
        f"engine.platform={requested}: JAX's default backend is {present}; set JAX_PLATFORMS="
        f"{'cuda' if requested == 'gpu' else requested} before starting"
    )


def resolve_dtype(requested: str, stored: str, platform: str) -> Resolution:
    """Returns the dtype of weights, cache and activations."""
    key = "model.dtype"
    if requested != "auto":
        check(key, requested, Annotated[str, Among((*DTYPES, "auto"))])
        return Resolution(key, requested, "asked for")
    if platform == "cpu":
        return Resolution(key, "float32", f"prompts are faster in it on CPU; checkpoint is {stored}")
    return Resolution(key, stored, "as the checkpoint's configuration says")


def as_dict(resolutions: Iterable[Resolution]) -> dict[str, dict[str, str]]:
    """Returns key → value and reason, for a result file."""
    return {r.key: {"value": r.value, "reason": r.reason} for r in resolutions}
