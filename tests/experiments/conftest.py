"""Hydra's logging set-up closes every handler that exists. Absl's (orbax brings it) closes its stream too,
which under pytest is the captured stderr, so it is kept from doing that whatever test ran before."""

import sys

import pytest


@pytest.fixture(autouse=True)
def captured_stderr_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    absl = sys.modules.get("absl.logging")
    if absl is not None:
        monkeypatch.setattr(absl.PythonHandler, "close", lambda self: None)
        monkeypatch.setattr(absl.ABSLHandler, "close", lambda self: None)
