"""A model four times larger than what its process may hold decodes from disk; loaded whole, it dies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT = 600_000_000
LAYERS = 4 * LIMIT // (16 * 1_572_864) + 1
RUN = """
import json, resource, sys
limit, resident, layers, folder = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from moejax import LLM, EngineConfig, SamplingParams
from moejax.core.tiers import ExpertsConfig, TiersConfig
from tests.model_shapes import TWO_LAYERS
model = TWO_LAYERS.replace(
    hidden_size=256, num_layers=layers, num_experts=16, moe_intermediate_size=512,
    moe_layers=(True,) * layers, sliding_windows=(None,) * layers,
)
engine = EngineConfig(
    seq_buckets=[1], token_buckets=[8], block_buckets=[4], max_model_len=32, max_num_seqs=1, block_size=8,
    max_num_batched_tokens=8, autotune="rules", experts=ExpertsConfig(resident=resident, tier="disk"),
    tiers=TiersConfig(disk_dir=folder),
)
llm = LLM(model, load_format="dummy", engine=engine)
out = llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
stats, tiers = llm.stats(), llm.engine.tiers
if tiers is not None:
    names = ("misses", "hits", "read_bytes", "direct_reads", "slot_bytes")
    told = {name: stats[f"experts_{name}"] for name in names}
    io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    blocks = int(io["read_bytes"])
    records = tiers.records
    told |= {"stride": records.stride, "bytes": records.count * records.nbytes, "blocks": blocks}
    print(json.dumps(told | {"tokens": out[0].outputs[0].token_ids}))
"""


def run(folder: Path, limit: int, resident: float, layers: int) -> subprocess.CompletedProcess[str]:
    # Compiled programs come from where the first run leaves them: a compiler would take most of the memory.
    env = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    env |= {"MOEJAX_CACHE_DIR": str(folder / "cache"), "MALLOC_ARENA_MAX": "2"}
    given = [sys.executable, "-c", RUN, str(limit), str(resident), str(layers), str(folder)]
    return subprocess.run(given, env=env, capture_output=True, text=True, timeout=600, check=False)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and counts are Linux's")
def test_four_times_what_the_process_may_hold(tmp_path: Path) -> None:
    for layers in (2, 4):  # as many slots as below, and the same programs
        told(run(tmp_path, 0, 1 / layers, layers))
    mine = told(run(tmp_path, LIMIT, 1 / LAYERS, LAYERS))
    assert mine["bytes"] > 4 * LIMIT and len(mine["tokens"]) == 8
    assert mine["slot_bytes"] == 16 * mine["bytes"] // (16 * LAYERS)
    assert mine["read_bytes"] == mine["misses"] * mine["stride"] and mine["misses"] > 8 * LAYERS
    if mine["direct_reads"]:  # the kernel has counted the same, and little beside
        assert 0 <= mine["blocks"] - mine["read_bytes"] < 0.05 * mine["read_bytes"] + 5e7
    whole = run(tmp_path, LIMIT, 1.0, LAYERS)
    assert whole.returncode != 0 and "tokens" not in whole.stdout
