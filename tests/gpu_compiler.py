"""Tests that need XLA's GPU compiler (`make gpu-compiler`, 570 MB): `make gate` runs them."""

from collections.abc import Callable
from typing import Any

import pytest

from moejax.bench.program.compiler import plugin_folder
from moejax.core.errors import ConfigError


def _why_not() -> str | None:
    try:
        plugin_folder()
    except ConfigError as error:
        return str(error)
    return None


WHY_NOT = _why_not()


def needs_gpu_compiler(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test of `make gate`, which is skipped where there is no such compiler."""
    marked: Callable[..., Any] = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))(test)
    return pytest.mark.gate(marked)
