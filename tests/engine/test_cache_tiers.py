"""Blocks of the cache on disk: the tokens of an engine that computes everything, whatever the disk does."""

import dataclasses
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, ParallelConfig, QuantConfig
from moejax.cache import store as disk
from moejax.cache.pool import block_bytes
from moejax.cache.store import BlockStore
from moejax.core.config import PrefixCacheConfig, SpeculationConfig
from moejax.core.errors import ConfigError, OutputError
from moejax.core.tiers import TiersConfig
from moejax.simulate.runner import simulated_engine
from tests.engine.mesh_models import FAMILIES
from tests.engine.test_prefix_cache import ENGINE, GREEDY, computed_whole, dummy, outcome, workload
from tests.engine.test_swap import SCARCE, never_preempted
from tests.engine.test_swap import outcome as swapped_outcome
from tests.engine.tiny import small_config
from tests.examples import slow_but

__all__ = ["computed_whole", "never_preempted"]  # fixtures
KINDS = ("qwen3_moe", "deepseek_v3", "gpt_oss")


def tiered(
    folder: Path, engine: EngineConfig = ENGINE, *, rows: float = 3.5, places: int = 60, size: int = 512,
    load: Any = "always", preemption: Any = "recompute", prefixes: bool = True, **tiers: Any,
) -> EngineConfig:  # fmt: skip
    """So many blocks in the host's memory, and so many on disk."""
    host, below = rows * size / 1e9, places * size / 1e9
    cache = PrefixCacheConfig(
        enabled=prefixes, place="host", host_memory_gb=host, disk_gb=below * 1.001, load=load
    )
    return dataclasses.replace(
        engine, prefix_cache=cache, preemption=preemption, swap_memory_gb=host, swap_disk_gb=below * 1.001,
        tiers=TiersConfig(disk_dir=str(folder), **tiers),
    )  # fmt: skip


def size_of(family: str, dtype: str = "float32") -> int:
    return block_bytes(FAMILIES[family], ENGINE.block_size, dtype)


@pytest.mark.parametrize(
    ("options", "overlap"),
    slow_but(
        [({"load": "auto", "preemption": "swap"}, True)],
        [
            ({"load": load, "preemption": preemption}, overlap)
            for load in ("always", "auto")
            for preemption in ("recompute", "swap", "auto")
            for overlap in (False, True)
        ],
    ),
)
def test_same_tokens(options: Any, overlap: bool, tmp_path: Path, computed_whole: Any) -> None:
    with dummy(small_config())(tiered(tmp_path, **options)) as llm:
        for _ in range(2):
            assert outcome(llm, workload(llm.config.vocab_size)) == computed_whole
        stats = llm.stats()
        assert stats["store_disk_read"] > 0 == stats["store_disk_lost"]
        assert stats["prefix_tokens"]["hit_tokens_disk"] > 0
        assert stats["store_host_bytes"] <= (3 + 3 * (options["preemption"] != "recompute")) * 512
        assert list(tmp_path.iterdir()) == []  # it has no name
        llm.reset_stats()
        assert llm.stats()["store_disk_read"] == 0


@pytest.mark.parametrize(
    ("family", "kv_cache"), slow_but([], [(f, kv) for f in KINDS for kv in ("auto", "int8")])
)
def test_every_kind_of_cache_comes_back_bit_for_bit(
    family: str, kv_cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded is what was saved, though most of it has been on disk meanwhile; tokens are equal."""
    saved: dict[int, list[bytes]] = {}
    put, copy, get = BlockStore.put, BlockStore.copy, BlockStore.get

    def puts(self: BlockStore, slots: Any, blocks: Any) -> None:
        leaves = [np.asarray(leaf) for leaf in blocks]
        saved.update({slot: [leaf[i].tobytes() for leaf in leaves] for i, slot in enumerate(slots)})
        put(self, slots, blocks)

    def copies(self: BlockStore, arrays: Any, block: int, slot: int) -> None:
        saved[slot] = [array[block].tobytes() for array in arrays]
        copy(self, arrays, block, slot)

    def gets(self: BlockStore, slots: Any) -> Any:
        got = get(self, slots)
        for i, slot in enumerate(slots):
            assert [array[i].tobytes() for array in got] == saved[slot]
        return got

    for name, function in (("put", puts), ("copy", copies), ("get", gets)):
        monkeypatch.setattr(BlockStore, name, function)
    quant, size = QuantConfig(kv_cache=kv_cache), size_of(family, "int8" if kv_cache == "int8" else "float32")
    make = dummy(FAMILIES[family], quant)
    plain, swaps = make(ENGINE), make(tiered(tmp_path, SCARCE, preemption="swap", size=size))
    got = swapped_outcome(swaps, sampled=False)
    stats = swaps.stats()
    assert stats["store_disk_read"] > 0 == stats["store_disk_lost"]
    assert stats["store_host_bytes"] <= 6 * size
    want = swapped_outcome(
        make(dataclasses.replace(ENGINE, num_blocks=64, block_buckets=[64])), sampled=False
    )
    same = [a == b for a, b in zip(got, want, strict=True)]
    assert all(same) if kv_cache == "auto" else np.mean(same) > 0.8
    for llm in (plain, swaps):
        llm.close()


def _failing(number: int) -> Any:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def _spoil(llm: LLM, how: str) -> None:
    """Damages the file of an idle engine."""
    file = llm.runner.store.file._file
    size = os.fstat(file).st_size
    if how == "cut":
        os.truncate(file, size // 3)
    for at in range(0, size if how == "changed" else 0, 256):
        byte = os.pread(file, 1, at + 7)
        os.pwrite(file, bytes([byte[0] ^ 1]), at + 7)


@pytest.mark.parametrize("fault", slow_but(["full"], ["changed", "cut", "unreadable", "full", "slow"]))
def test_faults_cost_time_and_nothing_else(
    fault: str, tmp_path: Path, computed_whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread
    with dummy(small_config())(tiered(tmp_path, preemption="swap")) as llm:
        rounds = workload(llm.config.vocab_size)
        assert outcome(llm, rounds) == computed_whole
        if fault == "unreadable":
            monkeypatch.setattr(disk.os, "pread", _failing(errno.EIO))
        elif fault == "full":
            monkeypatch.setattr(disk.os, "pwrite", _failing(errno.ENOSPC))
        elif fault == "slow":
            monkeypatch.setattr(disk.os, "pread", lambda *given: (time.sleep(0.005), read(*given))[1])
        else:
            _spoil(llm, fault)
        llm.reset_stats()
        assert outcome(llm, rounds) == computed_whole
        stats = llm.stats()
        assert stats["failed_steps"] == 0
        assert (stats["store_disk_lost"] > 0) == (fault != "slow")
        assert (stats["store_disk_refused"] > 0) == (fault == "full")
        monkeypatch.undo()
        assert outcome(llm, rounds) == computed_whole


@pytest.mark.slow
def test_what_is_lost_of_a_swapped_sequence_is_computed_again(
    tmp_path: Path, never_preempted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.os, "pread", _failing(errno.EIO))
    engine = tiered(tmp_path, SCARCE, prefixes=False, preemption="swap", rows=1.5)
    with dummy(small_config())(engine) as llm:
        assert swapped_outcome(llm) == never_preempted
        stats = llm.stats()
        assert stats["swaps_given_up"] > 0 < stats["store_disk_lost"] and stats["recomputed_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_budgets_policies_and_faults(
    seed: int, tmp_path: Path, computed_whole: Any, never_preempted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails now and then, in each way; slots, rows and places are checked between the rounds."""
    rng = np.random.default_rng(seed)
    write, read = os.pwrite, os.pread

    def writes(file: int, data: Any, at: int) -> int:
        if rng.random() < 0.02:
            raise OSError(errno.ENOSPC, "No space left on device")
        if rng.random() < 0.1:
            data = bytes(data)[:-1] + b"?"
        return write(file, data, at)

    def reads(file: int, size: int, at: int) -> bytes:
        draw = rng.random()
        if draw < 0.05:
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.002 * (draw > 0.9))
        return read(file, size // (2 if 0.05 < draw < 0.1 else 1), at)

    monkeypatch.setattr(disk.os, "pwrite", writes)
    monkeypatch.setattr(disk.os, "pread", reads)
    choose = lambda *options: options[int(rng.integers(len(options)))]  # noqa: E731
    engine = tiered(
        tmp_path, ENGINE, rows=1.2 + 8 * rng.random(), places=int(rng.integers(1, 40)),
        load=choose("always", "auto"), preemption=choose("swap", "auto", "recompute"),
        queue_depth=int(rng.integers(1, 5)),
    )  # fmt: skip
    cache = dataclasses.replace(
        engine.prefix_cache,
        policy=choose("lru", "lfu", "slru", "fifo", "size"),
        match=choose("tokens", "blocks"),
    )
    engine = dataclasses.replace(engine, prefix_cache=cache, overlap=choose(True, False))
    with dummy(small_config())(engine) as llm:
        for _ in range(3):
            assert outcome(llm, workload(llm.config.vocab_size)) == computed_whole
        assert llm.stats()["failed_steps"] == 0
        assert llm.stats()["store_host_bytes"] <= llm.runner.store.rows * 512
    few = dataclasses.replace(engine, num_blocks=SCARCE.num_blocks, block_buckets=SCARCE.block_buckets)
    with dummy(small_config())(few) as llm:
        assert swapped_outcome(llm) == never_preempted


@pytest.mark.slow
def test_what_takes_longer_to_load_is_computed(
    tmp_path: Path, computed_whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread
    monkeypatch.setattr(disk.os, "pread", lambda *given: (time.sleep(0.5), read(*given))[1])
    prompt = list(range(2, 40))
    with dummy(small_config())(tiered(tmp_path, load="auto", rows=1.5)) as llm:
        first = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
        llm.generate(prompt[::-1], GREEDY)
        for _ in range(4):
            assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == first
            llm.generate(prompt[::-1], GREEDY)
        assert llm.stats()["prefix_tokens"]["not_loaded_tokens"] > 0


@pytest.mark.slow
def test_a_process_killed_leaves_nothing(tmp_path: Path) -> None:
    """Neither in a write nor in a transfer."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.engine.test_cache_tiers import dummy, outcome, small_config, tiered, workload\n"
        "calls = [0]\n"
        "def die(*given, of=getattr(os, sys.argv[2])):\n"
        "    calls[0] += 1\n"
        "    if calls[0] == 5:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return of(*given)\n"
        "setattr(os, sys.argv[2], die)\n"
        "llm = dummy(small_config())(tiered(Path(sys.argv[1])))\n"
        "outcome(llm, workload(llm.config.vocab_size))\n"
    )
    for name in ("pwrite", "pread"):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path), name], check=False)
        assert done.returncode == -9
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "engine", "message"),
    [
        ({"parallel": ParallelConfig(tp=2)}, {}, r"disk_gb does not go with several devices"),
        ({}, {"place": "device"}, r"disk_gb does not go with engine\.prefix_cache\.place=device"),
        (
            {},
            {"speculation": SpeculationConfig(method="draft", draft="tiny")},
            r"disk_gb does not go with engine\.speculation\.method=draft",
        ),
        ({}, {"disk_gb": 1e-7}, r"prefix_cache\.disk_gb=1e-07 does not hold one block"),
    ],
)
def test_mistakes(options: Any, engine: dict[str, Any], message: str, tmp_path: Path) -> None:
    asked = tiered(tmp_path)
    cache = {name: engine.pop(name) for name in ("place", "disk_gb") if name in engine}
    asked = dataclasses.replace(
        asked, prefix_cache=dataclasses.replace(asked.prefix_cache, **cache), **engine
    )
    with pytest.raises(ConfigError, match=message) as error:
        LLM(small_config(), load_format="dummy", engine=asked, **options)
    assert "\n" not in str(error.value)


def test_a_simulated_engine_has_no_disk() -> None:
    with pytest.raises(
        ConfigError, match=r"^a simulated engine does not go with .*swap_disk_gb; leave them 0$"
    ):
        simulated_engine(EngineConfig(swap_disk_gb=1.0, preemption="swap"), lambda plan: None, 9)  # type: ignore


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"^engine\.tiers\.disk_dir: cannot write .*file: File exists"):
        dummy(small_config())(tiered(tmp_path / "file"))
