"""Layers that are copied to the device while the one before them runs: the same tokens, in less memory."""

import errno
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moejax import ParallelConfig
from moejax.core.errors import ConfigError, StepError
from moejax.core.quant import QuantConfig
from moejax.engine.tiers.store import DiskStore
from tests.engine.test_tiers import DEEP, FAMILIES, GREEDY, PROMPTS, opened, same_run, slots_of
from tests.examples import slow_but


@pytest.mark.parametrize(
    ("family", "options"),
    slow_but(
        [("gqa", {"experts": {"resident": 0.5, "tier": "disk"}})],
        [
            *((family, {"experts": {"resident": 0.5, "tier": "disk"}}) for family in FAMILIES),
            *((family, {}) for family in FAMILIES),
            ("gqa", {"experts": {"resident": 0.5, "tier": "disk", "prefetch": "next_router"}}),
            ("gqa", {"experts": {"resident": 0.5, "miss": "host"}}),
            ("gqa", {"quant": QuantConfig(method="rtn", format="int4_g16")}),
            ("gqa", {"kernels": "pallas_triton", "block_size": 8, "num_blocks": 16}),
            ("gqa", {"deterministic": "tiles", "tile_tokens": 4}),
        ],
    ),
)
@pytest.mark.parametrize("resident", slow_but([0], [0, 2]))
def test_tokens_are_those_of_the_engine_that_has_all(
    family: str, options: dict[str, Any], resident: int, tmp_path: Path
) -> None:
    outside = {name: value for name, value in options.items() if name != "experts"}
    with opened(FAMILIES[family], **outside) as plain:
        tiers = {"resident_layers": resident}
        with opened(FAMILIES[family], tmp_path, tiers=tiers, **options) as mine:
            same_run(mine, plain)
            mine.reset_stats()
            same_run(mine, plain)
            streamed, stats = slots_of(mine).streamed, mine.stats()
            assert stats["layers_in_tiers"] == 4 - resident
            # One after another, whatever they are, each once a pass; a step in tiles has several.
            passes = len(slots_of(mine).history)
            assert stats["layers_moved_bytes"] == passes * streamed.nbytes
            assert (passes == stats["steps"]) == ("deterministic" not in options)
            # Three at a time: the one whose experts a part begins with, its own, and the next part's; four
            # where a part asks the next router.
            gone = max(0, 1 - resident - slots_of(mine).foresees)
            kept = mine.memory.held.other_weights + gone * streamed.records[0].held
            assert kept == plain.memory.held.other_weights or len(streamed.records) > 1
            read = options.get("experts", {}).get("tier") == "disk"
            strides = sum(records.stride * records.count for records in streamed.records)
            assert stats["layers_read_bytes"] == read * passes * strides


def test_the_device_never_has_more_of_them_than_it_says() -> None:
    with opened(DEEP, tiers={"resident_layers": 1}) as mine:
        mine.generate(PROMPTS, GREEDY)
        streamed, seen = slots_of(mine).streamed, list[int]()
        copy = streamed.copy

        def counting() -> None:
            copy()
            seen.append(sum(array.nbytes for arrays in streamed._here.values() for array in arrays))

        streamed.copy = counting
        mine.generate(PROMPTS, GREEDY)
        one = streamed.records[0].held
        assert max(seen) == 2 * one and streamed.most == 3 * one  # beside the part that runs
        assert not any(isinstance(leaf, jax.Array) for leaf in mine.runner.functions.layers[1].leaves)


@pytest.mark.slow
def test_faults_end_their_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, tiers = {"resident": 0.5, "tier": "disk"}, {"resident_layers": 0, "direct": False}
    with opened(DEEP, tmp_path, experts=experts, tiers=tiers) as mine:
        wanted = [x.outputs[0].token_ids for x in mine.generate(PROMPTS, GREEDY)]
        (store,) = slots_of(mine).streamed.stores
        assert isinstance(store, DiskStore)
        preadv, left = os.preadv, [5]

        def failing(file: int, *rest: Any) -> int:
            left[0] -= file == store._file
            if file == store._file and not left[0]:
                raise OSError(errno.EIO, "Input/output error")
            return preadv(file, *rest)

        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(StepError, match=r"cannot read .*\.experts: record [0-3]: .*Input/output error"):
            mine.generate(PROMPTS, GREEDY)
        assert [x.outputs[0].token_ids for x in mine.generate(PROMPTS, GREEDY)] == wanted
        path = store.path
    with path.open("r+b") as file:
        file.seek(store._first + 10)
        file.write(np.uint8(255).tobytes() * 4)
    with opened(DEEP, tmp_path, experts=experts, tiers=tiers) as again:
        with pytest.raises(StepError, match=r"record 0 was changed; remove the file"):
            again.generate(PROMPTS, GREEDY)
    path.unlink()
    with opened(DEEP, tmp_path, experts=experts, tiers=tiers) as again:
        assert [x.outputs[0].token_ids for x in again.generate(PROMPTS, GREEDY)] == wanted


@pytest.mark.slow
def test_each_file_is_written_where_it_is_missing(tmp_path: Path) -> None:
    """Of layers of two kinds one file is gone; and experts were there before any layer was to come and go."""
    quant = QuantConfig(method="rtn", format="int4_g16")
    for config, outside in ((FAMILIES["some_dense"], {}), (DEEP, {"quant": quant})):
        folder = tmp_path / str(len(outside))
        options: dict[str, Any] = {"experts": {"resident": 0.5, "tier": "disk"}, **outside}
        with opened(config, folder, **options) as first:
            wanted = [x.outputs[0].token_ids for x in first.generate(PROMPTS, GREEDY)]
            had = set(folder.iterdir())
        for _ in range(2):
            with opened(config, folder, tiers={"resident_layers": 0}, **options) as mine:
                assert [x.outputs[0].token_ids for x in mine.generate(PROMPTS, GREEDY)] == wanted
                stores = slots_of(mine).streamed.stores
                assert set(folder.iterdir()) == {*had, *(store.path for store in stores)}
            stores[-1].path.unlink()
        assert len(stores) == 2 - len(outside)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.tiers\.resident_layers does not go with parallel"):
        opened(DEEP, tiers={"resident_layers": 1}, parallel=ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match=r"engine\.tiers\.resident_layers=4: the model has 4 layers"):
        opened(DEEP, tiers={"resident_layers": 4})
    with pytest.raises(ConfigError, match=r"engine\.tiers\.resident_layers must be .*-1"):
        opened(DEEP, tiers={"resident_layers": -1})
