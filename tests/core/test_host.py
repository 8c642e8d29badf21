"""Which processors a run may use."""

import os
import subprocess
import sys

import pytest

from moejax.core.errors import ConfigError
from moejax.core.host import HostConfig, format_cpus, parse_cpus, usable_cpus

USABLE = usable_cpus()


@pytest.mark.parametrize(
    ("given", "text"), [("0-3,8", "0-3,8"), (2, "2"), ([0, 2, 1], "0-2"), ("1, 0", "0-1"), (None, None)]
)
def test_lists_of_processors(given: object, text: str | None) -> None:
    assert HostConfig(cpus=given).cpus == text  # type: ignore[arg-type]
    if text is not None:
        assert format_cpus(parse_cpus("host.cpus", text)) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cpus": "a"}, "host.cpus=a: expected processors as 0-3 or 0,2 or [0,2]"),
        ({"cpus": "3-1"}, "host.cpus=3-1: expected processors"),
        ({"cpus": ""}, "host.cpus=: expected processors"),
        ({"cpus": "0", "numa": 0}, "give one of them"),
        ({"cpus": "99998-99999"}, "processor 99998-99999 is not among this process's"),
        ({"numa": 99999}, "host.numa=99999: no such memory node here"),
        ({"numa": -1}, "host.numa must be an integer of at least 0"),
    ],
)
def test_mistakes_are_one_line(fields: dict, message: str) -> None:
    for take in (HostConfig.chosen, HostConfig.pin):  # a dry run's look, and a run
        with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
            take(HostConfig(**fields))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process")
def test_a_run_is_pinned_before_jax_starts() -> None:
    """In a process of its own: what it computes on, its provenance, and a run without a choice after it."""
    code = (
        "from moejax.core.errors import ConfigError\n"
        "from moejax.core.host import HostConfig, usable_cpus\n"
        "from moejax.tracking.provenance import cpu_info\n"
        f"HostConfig(cpus={USABLE[-1]}).pin(); HostConfig(cpus='{USABLE[-1]}').pin()\n"
        "info = cpu_info(); print(usable_cpus(), info['usable_cores'], info['cpus'])\n"
        "try: HostConfig().pin()\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = [*done.stdout.splitlines(), ""][:2]
    assert first == f"[{USABLE[-1]}] 1 {USABLE[-1]}"
    if len(USABLE) > 1:
        assert f"JAX's threads are on processors {USABLE[-1]} already" in second
