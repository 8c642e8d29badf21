"""Tests that need XLA's GPU compiler (`make gpu-compiler`, 570 MB): `make gate` runs them."""

import pytest

from moejax.bench.program.compiler import plugin_folder
from moejax.core.errors import ConfigError


def _why_not() -> str | None:
    try:
        plugin_folder()
    except ConfigError as error:
        return str(error)
    return None


needs_gpu_compiler = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
