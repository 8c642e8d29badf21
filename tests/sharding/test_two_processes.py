"""The engine in two processes of four devices each gives what it gives in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.mesh_models import FAMILIES, checkpoint
from tests.sharding.processes import run_processes

pytestmark = pytest.mark.multidevice

SCRIPT = Path(__file__).parent / "two_process_engine.py"


def outcomes(directory: Path, parallel: dict[str, Any], count: int) -> list[dict[str, Any]]:
    args = [str(directory), json.dumps(parallel)]
    printed = run_processes(SCRIPT, count, 8 // count, args=args, timeout=600.0)
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(
            {"ep": 8, "nodes": 2, "attention": "data", "exchange": "hierarchical"}, marks=pytest.mark.slow
        ),
        pytest.param({"ep": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "ep": 4}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_give_what_one_gives(parallel: dict[str, Any], tmp_path: Path) -> None:
    directory = checkpoint(FAMILIES["qwen3_moe"], tmp_path)
    (alone,) = outcomes(directory, parallel, 1)
    first, second = outcomes(directory, parallel, 2)
    assert (first.pop("index"), second.pop("index"), alone.pop("index")) == (0, 1, 0)
    assert first == second
    assert first["tokens"] == alone["tokens"] and first["counts"] == alone["counts"] > 0
    # The experts of every token that was computed, also where another process computed them.
    assert len(first["routing"]) > 100 and first["routing"] == alone["routing"]
    # The same program on the same number of devices; Gloo adds in another order than XLA's own collectives.
    assert first["scores"] == pytest.approx(alone["scores"], rel=1e-5)
