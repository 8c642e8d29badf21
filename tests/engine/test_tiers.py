"""Experts in tiers: the tokens of the engine that has them all, within budgets, whatever is asked for."""

import dataclasses
import errno
import os
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import (
    LLM,
    EngineConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    PrefixCacheConfig,
    QuantConfig,
    SamplingParams,
)
from moejax.core.errors import ConfigError, StepError
from moejax.core.moe import RoutingPolicy
from moejax.core.scheduling import KvPolicyConfig, SpeculationConfig
from moejax.core.tiers import ExpertsConfig, TiersConfig
from moejax.engine.tiers.pinned import PinnedStore
from moejax.engine.tiers.store import DiskStore
from moejax.routing.residency import ReplayOptions, recorded_visits, replay
from tests.examples import slow_but
from tests.model_shapes import LATENT, SINKS, TWO_LAYERS
from tests.numerics import assert_close, tolerance

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[8], block_buckets=[12], max_model_len=40,
    max_num_seqs=4, block_size=4, max_num_batched_tokens=8, autotune="rules", capture_routing=True,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPTS = [[7, 11 + i, 13, 17, 19 + i, 23, 29, 31, 37] for i in range(3)]
DEEP = TWO_LAYERS.replace(num_layers=4, moe_layers=(True,) * 4, sliding_windows=(None,) * 4)
FAMILIES = {
    "gqa": DEEP,
    "latents": DEEP.replace(**LATENT),
    "windows_with_sinks": DEEP.replace(**SINKS, sliding_windows=(5, None, 5, None)),
    "some_dense": DEEP.replace(moe_layers=(False, True, False, True)),
}


def opened(config: ModelConfig, tmp_path: Path | None = None, **options: Any) -> LLM:
    """An engine; `experts` and `tiers` are its sections' fields, a path is the disk's folder."""
    folder = None if tmp_path is None else str(tmp_path)
    tiers = TiersConfig(disk_dir=folder, **options.pop("tiers", {}))
    experts = ExpertsConfig(**options.pop("experts", {}))
    outside = {name: options.pop(name) for name in ("quant", "parallel") if name in options}
    engine = dataclasses.replace(ENGINE, experts=experts, tiers=tiers, **options)
    return LLM(config, load_format="dummy", seed=0, engine=engine, **outside)


def slots_of(llm: LLM) -> Any:
    return llm.engine.tiers


def checked(llm: LLM) -> LLM:
    """Has the engine check at every step that no slot is lost, shared or overwritten."""
    tiers, require = slots_of(llm), slots_of(llm).require

    def checking(place: int, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        table = require(place, ids, weights)
        tiers.check_integrity()
        E = tiers.num_experts
        for expert in np.unique(ids[ids < E]).tolist():
            assert table[expert] < tiers.slots
            record = tiers.store.fetch(place * E + expert).result()
            for array, leaf in zip(tiers.arrays, tiers.records.arrays(record), strict=True):
                held = np.asarray(array[int(table[expert])])
                assert held.tobytes() == leaf.tobytes(), "a slot holds another expert"
        return table

    tiers.require = checking
    return llm


def same_run(mine: LLM, plain: LLM, params: SamplingParams = GREEDY) -> None:
    """Tokens, log-probabilities and routing of both."""
    tol, captures = tolerance(32, 32, 32), mine.engine_config.capture_routing
    for llm in (mine, plain) if captures else ():
        llm.reset_capture()
    outputs, wanted = mine.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    for one, other in zip(outputs, wanted, strict=True):
        for sample, twin in zip(one.outputs, other.outputs, strict=True):
            assert sample.token_ids == twin.token_ids
            told, other_told = ([x.logprob for x in each.logprobs or ()] for each in (sample, twin))
            assert_close(told, other_told, tol)
    if captures:
        trace, twin_trace = mine.routing_capture(), plain.routing_capture()
        assert np.array_equal(trace.ids, twin_trace.ids)
        assert_close(trace.weights, twin_trace.weights, tol)


@pytest.mark.parametrize(
    ("family", "experts"),
    slow_but(
        [
            ("gqa", {"resident": 0.5}),
        ],
        [
            (family, experts)
            for family in FAMILIES
            for experts in (
                {"resident": 0.5},
                {"resident": 0.5, "policy": "s3_fifo", "prefetch": "next_router"},
                {"resident": 0.3, "tier": "disk", "prefetch": "next_router"},
            )
        ],
    ),
)
def test_tokens_are_those_of_the_engine_that_has_all(
    family: str, experts: dict[str, Any], tmp_path: Path
) -> None:
    if family == "some_dense" and experts["resident"] < 0.5:
        experts = {**experts, "resident": 0.5}
    with opened(FAMILIES[family]) as plain, opened(FAMILIES[family], tmp_path, experts=experts) as mine:
        same_run(checked(mine), plain)
        stats = mine.stats()
        assert 0 < stats["experts_misses"] and 0 < stats["experts_hits"]
        tiers = slots_of(mine)
        assert tiers.nbytes <= experts["resident"] * tiers.records.count * tiers.records.held
        if experts.get("tier") == "disk":
            checks = stats["experts_hits"] + stats["experts_misses"]  # of `checked`, which reads all again
            wasted = stats["experts_foreseen"] - stats["experts_foreseen_used"]
            reads = stats["experts_misses"] + wasted + checks
            assert stats["experts_read_bytes"] == reads * tiers.records.stride


OPTIONS: dict[str, dict[str, Any]] = {
    "plain_loop": {"overlap": False},
    "int8": {"quant": QuantConfig(method="rtn", format="int8")},
    "int4": {"quant": QuantConfig(method="rtn", format="int4_g16")},
    "float8": {"quant": QuantConfig(method="rtn", format="fp8_e4m3")},
    "prefix": {"prefix_cache": PrefixCacheConfig(enabled=True)},
    "ngram": {"speculation": SpeculationConfig(method="ngram", k=2), "max_num_batched_tokens": 16},
    "preempted": {"num_blocks": 8},
    "swapped": {"num_blocks": 8, "preemption": "swap"},
    "window": {"kv_policy": KvPolicyConfig(method="window", sinks=4, recent=8), "capture_routing": False},
    "snapkv": {
        "block_size": 2,
        "num_blocks": 64,
        "kv_policy": KvPolicyConfig(method="snapkv", sinks=1, recent=2, budget=8, observe=4),
        "capture_routing": False,
    },
    "tiles": {"deterministic": "tiles", "tile_tokens": 4},
    "static": {"batching": "static"},
    "by_batch": {"moe": MoeConfig(routing=RoutingPolicy("batch"))},
    "kernels": {"kernels": "pallas_triton", "block_size": 8, "num_blocks": 16},
    "efd": {"moe": MoeConfig(expert_layout="efd")},
    "int8_cache": {"quant": QuantConfig(kv_cache="int8")},
}


@pytest.mark.parametrize("name", slow_but([], OPTIONS))
def test_with_the_engine_s_other_options(name: str) -> None:
    options, params = OPTIONS[name], dataclasses.replace(GREEDY, n=2, seed=3, temperature=0.8)
    with opened(DEEP, **options) as plain, opened(DEEP, experts={"resident": 0.4}, **options) as mine:
        checked(mine)
        same_run(mine, plain)
        if name not in ("ngram", "preempted", "static"):
            same_run(mine, plain, params)
        assert mine.stats()["experts_misses"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["lru", "lfu", "layer_lru", "arc", "s3_fifo", "least_stale", "static", "a2cr", "a2cr_adaptive"]
)
def test_every_policy(policy: str) -> None:
    with opened(DEEP) as plain, opened(DEEP, experts={"resident": 0.3, "policy": policy}) as mine:
        same_run(checked(mine), plain)


def test_all_of_them_resident_is_the_plain_engine() -> None:
    """No part of a step waits for the host where nothing can be absent."""
    everywhere: list[dict[str, Any]] = [{"experts": {"resident": 1.0}}, {"tiers": {"device_gb": 1.0}}]
    for options in everywhere:
        with opened(TWO_LAYERS, **options) as mine:
            assert type(mine.runner).__name__ == "DeviceRunner" and mine.engine.tiers is None


@pytest.mark.slow
def test_slots_written_by_a_program_hold_what_memory_would() -> None:
    """From pageable memory, from pinned, and with popular experts that stay."""
    with opened(DEEP, experts={"resident": 0.5}) as mine:
        tiers = slots_of(checked(mine))
        assert tiers.in_place  # on a CPU
        wanted = mine.generate(PROMPTS, GREEDY)

        def again() -> None:
            tiers.clear()
            mine.reset_capture()
            mine.reset_stats()
            outputs = mine.generate(PROMPTS, GREEDY)
            assert [x.outputs[0].token_ids for x in outputs] == [x.outputs[0].token_ids for x in wanted]
            assert mine.stats()["experts_misses"] > 0

        tiers.in_place = False
        again()
        pageable, tiers.store = tiers.store, PinnedStore(tiers.records)
        for key in range(tiers.records.count):
            for leaf, array in enumerate(tiers.records.arrays(pageable.fetch(key).result())):
                tiers.store.write(key, leaf, array)
        assert tiers.store.describe() == pageable.describe()
        tiers._pinned = True
        again()
        counts = mine.routing_capture().counts()
        tiers.config = dataclasses.replace(tiers.config, policy="static", popularity_steps=3)
        for popularity in (None, counts):
            tiers._popularity = popularity
            again()
            visits = recorded_visits(mine.routing_capture())
            options = ReplayOptions(popularity=popularity, popularity_steps=3)
            absent = replay("static", visits, [tiers.slots], options)[0, 0] & visits.needed[0]
            assert mine.stats()["experts_misses"] == absent.sum()


def every_slot(mine: LLM) -> None:
    """Each expert-parallel rank has as many slots, copies over the others."""
    tiers, parallel = slots_of(mine), mine.parallel_config
    for array in tiers.arrays:
        of_each = {part.data.shape[0] for part in array.addressable_shards}
        assert (
            of_each == {tiers.slots // parallel.ep} and len(array.addressable_shards) == parallel.num_devices
        )
    spread = parallel.num_devices // (parallel.ep * parallel.tp)
    held = sum(part.data.nbytes for array in tiers.arrays for part in array.addressable_shards)
    assert held == spread * tiers.nbytes


MESHES: dict[str, tuple[ModelConfig, ParallelConfig, dict[str, Any]]] = {
    "ep2": (TWO_LAYERS, ParallelConfig(ep=2), {}),
    "tp2": (TWO_LAYERS, ParallelConfig(tp=2), {}),
    "ep2_tp2": (TWO_LAYERS, ParallelConfig(ep=2, tp=2), {"overlap": False}),
    "data": (TWO_LAYERS, ParallelConfig(ep=2, attention="data"), {}),
    "all_to_all": (TWO_LAYERS, ParallelConfig(ep=4, attention="data", exchange="all_to_all"), {}),
    "dp2_ep2_tp2": (TWO_LAYERS, ParallelConfig(dp=2, ep=2, tp=2, attention="data"), {}),
    "int8": (TWO_LAYERS, ParallelConfig(ep=2), {"quant": QuantConfig(method="rtn", format="int8")}),
    "latents": (TWO_LAYERS.replace(**LATENT), ParallelConfig(ep=2), {}),
    "windows_with_sinks": (
        TWO_LAYERS.replace(**SINKS, sliding_windows=(5, None)), ParallelConfig(ep=2, attention="data"), {},
    ),
    "swapped": (TWO_LAYERS, ParallelConfig(ep=2), {"num_blocks": 8, "preemption": "swap"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_slots_of_several_devices(name: str, tmp_path: Path) -> None:
    config, parallel, options = MESHES[name]
    experts = {"resident": 0.6, "tier": "disk", "prefetch": "next_router"}
    with (
        opened(config, parallel=parallel, **options) as plain,
        opened(config, tmp_path, parallel=parallel, experts=experts, **options) as mine,
    ):
        every_slot(checked(mine))
        assert slots_of(mine).slots == 9 // parallel.ep * parallel.ep
        same_run(mine, plain)
        assert mine.stats()["experts_misses"] > 0
        before = plain.memory.held.expert_weights
        assert mine.memory.held.expert_weights == before * slots_of(mine).slots / slots_of(mine).records.count
        slots_of(mine).in_place = False  # as on a GPU
        same_run(mine, plain)
        every_slot(mine)


@pytest.mark.slow
@pytest.mark.parametrize("quant", [QuantConfig(), QuantConfig(method="rtn", format="int4_g16")])
def test_checkpoints_in_tiers(quant: QuantConfig, tmp_path: Path) -> None:
    """Read from files, in floating point or as stored codes; the experts' file is found again."""
    folder = tmp_path / "model"
    with opened(DEEP, quant=quant) as made:
        made.save_pretrained(folder)
    engine = dataclasses.replace(
        ENGINE,
        experts=ExpertsConfig(resident=0.5, tier="disk"),
        tiers=TiersConfig(disk_dir=str(tmp_path / "experts")),
    )
    with LLM(folder, engine=ENGINE) as plain:
        for _ in range(2):
            with LLM(folder, engine=engine) as mine:
                same_run(checked(mine), plain)
            (file,) = (tmp_path / "experts").iterdir()
            when = file.stat().st_mtime_ns
    with LLM(folder, engine=engine):
        assert file.stat().st_mtime_ns == when


@pytest.mark.slow
def test_a_variant_has_the_same_slots() -> None:
    with opened(DEEP, experts={"resident": 0.5}) as mine:
        other = mine.variant(dataclasses.replace(mine.engine_config, overlap=False))
        wanted = mine.generate(PROMPTS, GREEDY)
        assert slots_of(other) is slots_of(mine)
        again = checked(other).generate(PROMPTS, GREEDY)
        assert [x.outputs[0].token_ids for x in again] == [x.outputs[0].token_ids for x in wanted]
        # In two threads, each of whose steps may evict what the other's next one needs.
        results = dict[str, Any]()
        engines = {"mine": mine, "other": other}
        threads = [
            threading.Thread(
                target=lambda name, llm: results.update(
                    {name: [llm.generate(PROMPTS, GREEDY) for _ in range(3)]}
                ),
                args=pair,
            )
            for pair in engines.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for outputs in [each for name in engines for each in results[name]]:
            assert [x.outputs[0].token_ids for x in outputs] == [x.outputs[0].token_ids for x in wanted]
        other.close()
        assert mine.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids


@pytest.mark.slow
def test_replay_and_capture_are_the_engine_s(tmp_path: Path) -> None:
    with opened(DEEP) as plain:
        plain.generate(PROMPTS, dataclasses.replace(GREEDY, temperature=1.0, seed=1))
        path = plain.routing_capture().save(tmp_path / "routing.npz")
    with (
        opened(DEEP, replay_routing=str(path)) as plain,
        opened(DEEP, experts={"resident": 0.3}, replay_routing=str(path)) as mine,
    ):
        params = dataclasses.replace(GREEDY, temperature=1.0, seed=1)
        same_run(checked(mine), plain, params)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "few_slots": ({"experts": {"resident": 0.2}}, r"engine\.experts\.resident: 6 slots .* do not hold the 8"),
    "few_bytes": ({"tiers": {"device_gb": 1e-6}}, r"engine\.tiers\.device_gb: 0 slots"),
    "both": ({"experts": {"resident": 0.5}, "tiers": {"device_gb": 1.0}}, "both say how many"),
    "host": (
        {"experts": {"resident": 0.5}, "tiers": {"host_gb": 1e-5}},
        r"engine\.tiers\.host_gb=1e-05 does not hold the 0\.000\d+ GB that are to be",
    ),
    "codes": (
        {
            "experts": {"resident": 0.5},
            "tiers": {"codes": "q8_k"},
            "quant": QuantConfig(method="rtn", format="int8"),
        },
        r"engine\.tiers\.codes: the experts are quantized",
    ),
    "popularity": (
        {"experts": {"resident": 0.5, "policy": "static", "popularity": "nowhere"}},
        r"engine\.experts\.popularity=nowhere: there is no such file",
    ),
    "pinned": (
        {
            "experts": {"resident": 0.6},
            "tiers": {"host_memory": "pinned"},
            "parallel": ParallelConfig(ep=2),
        },
        r"engine\.tiers\.host_memory=pinned: pinned arrays are one device's; take pageable, or auto",
    ),
    "stages": ({"experts": {"resident": 0.5}, "parallel": ParallelConfig(pp=2)}, "are no stages"),
    "replicas": (
        {"experts": {"resident": 0.5}, "parallel": ParallelConfig(ep=2, redundant_experts=2)}, "of their own",
    ),
    "by_rank": (
        {"tiers": {"device_gb": 2e-5}, "parallel": ParallelConfig(ep=2)},
        r"engine\.tiers\.device_gb: 6 slots .* do not hold the 8",
    ),
    "host_of_several": (
        {"experts": {"resident": 0.5, "miss": "host"}, "parallel": ParallelConfig(ep=2)},
        "miss=host on several devices",
    ),
    "capacity": (
        {"experts": {"resident": 0.5}, "moe": MoeConfig(execution="capacity")}, "which runs all experts",
    ),
    "calibrated": (
        {"experts": {"resident": 0.5}, "quant": QuantConfig(method="gptq", format="int4_g16")}, "calibrates",
    ),
    "drafts": (
        {"experts": {"resident": 0.5}, "speculation": SpeculationConfig(method="self_experts")},
        "drafts in steps of its own",
    ),
    "h2o": (
        {"experts": {"resident": 0.5}, "kv_policy": KvPolicyConfig(method="h2o", budget=16)}, "weighs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as caught:
        opened(DEEP, **options)
    assert "\n" not in str(caught.value)


def test_what_needs_the_whole_model_says_so() -> None:
    with opened(DEEP, experts={"resident": 0.5}) as mine:
        with pytest.raises(ConfigError, match="there is no whole model"):
            _ = mine.model
        with pytest.raises(ConfigError, match="update_weights"):
            mine.update_weights({"norm.scale": np.ones(32, np.float32)})
    with pytest.raises(ConfigError, match=r"without experts|no experts"):
        opened(
            TWO_LAYERS.replace(moe_layers=(False, False)), experts={"resident": 0.5}, capture_routing=False
        )


def test_memory_counts_slots_and_what_lies_below() -> None:
    with opened(DEEP) as plain, opened(DEEP, experts={"resident": 0.5}) as mine:
        whole, records = plain.memory.held.expert_weights, slots_of(mine).records
        assert mine.memory.held.expert_weights == whole / 2 == slots_of(mine).nbytes
        below = records.count * records.nbytes * (jax.default_backend() == "cpu")
        assert mine.memory.beside == plain.memory.beside + below


def test_faults_of_the_disk_end_their_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed byte: one line, and the engine goes on. An error that passes: computed again."""
    options: dict[str, Any] = {"experts": {"resident": 0.5, "tier": "disk"}, "overlap": True, "retries": 1}
    with opened(DEEP, tmp_path, **options) as mine:
        wanted = mine.generate(PROMPTS, GREEDY)
        tiers = slots_of(checked(mine))
        store, read, left = tiers.store, os.preadv, [20]

        def failing(*given: Any) -> int:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, "Input/output error")
            return read(*given)

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", failing)
            again = mine.generate(PROMPTS, GREEDY)
        assert left[0] < 0 and mine.stats()["failed_steps"] == 1
        assert [x.outputs[0].token_ids for x in again] == [x.outputs[0].token_ids for x in wanted]
        whole = store.path.read_bytes()
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[store._first :: store.records.stride] ^= 1  # of every expert
        store.path.write_bytes(damaged.tobytes())
        tiers.clear()
        with pytest.raises(StepError, match=r"experts: record \d+ was changed; remove the file") as caught:
            mine.generate(PROMPTS, GREEDY)
        assert "\n" not in str(caught.value)
        tiers.check_integrity()
        store.path.write_bytes(whole)
        again = mine.generate(PROMPTS, GREEDY)
        assert [x.outputs[0].token_ids for x in again] == [x.outputs[0].token_ids for x in wanted]


def test_a_step_that_fails_with_the_slots_makes_them_anew() -> None:
    with opened(DEEP, experts={"resident": 0.5}) as mine:
        wanted = mine.generate(PROMPTS[0], GREEDY)
        for array in slots_of(mine).arrays:
            array.delete()
        with pytest.raises(StepError, match="deleted"):
            mine.generate(PROMPTS[0], GREEDY)
        again = checked(mine).generate(PROMPTS[0], GREEDY)
        assert again[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids


def test_an_interrupt_while_slots_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves half done is forgotten: no expert is taken for resident that has no slot."""
    with opened(DEEP, experts={"resident": 0.5}) as mine:
        wanted, tiers = mine.generate(PROMPTS[0], GREEDY), slots_of(mine)
        tiers.clear()
        put, left = tiers._put, [5]

        def interrupted(*given: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            put(*given)

        monkeypatch.setattr(tiers, "_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.generate(PROMPTS[0], GREEDY)
        tiers.check_integrity()
        again = checked(mine).generate(PROMPTS[0], GREEDY)
        assert again[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up(tmp_path: Path) -> None:
    experts = {"resident": 0.5, "tier": "disk", "prefetch": "next_router"}
    with opened(DEEP, tmp_path, experts=experts, strict_compile=True) as mine:
        mine.warmup(max_total_len=24, sampling_params=[GREEDY])
        mine.generate(PROMPTS, GREEDY)
        assert mine.stats()["recompiles_after_warmup"] == 0


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_budget_policy_and_fault(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Exact tokens or one clear error; slots conserved and never above the budget, at every step."""
    draw = data.draw
    experts = {
        "resident": draw(st.sampled_from([0.25, 0.5, 0.9])),
        "policy": draw(st.sampled_from(["lru", "layer_lru", "arc", "s3_fifo", "a2cr_adaptive"])),
        "tier": draw(st.sampled_from(["host", "disk"])),
        "prefetch": draw(st.sampled_from(["none", "next_router"])),
    }
    tiers: dict[str, Any] = {"queue_depth": draw(st.integers(1, 4)), "direct": draw(st.booleans())}
    if experts["tier"] == "disk":
        tiers["host_gb"] = draw(st.sampled_from([None, 2e-5, 1e-4]))
    share = draw(st.sampled_from([0.0, 0.01]))
    rng, read = np.random.default_rng(draw(st.integers(0, 2**20))), os.preadv

    def failing(*given: Any) -> int:
        if rng.random() < share:
            raise OSError(errno.EIO, "Input/output error")
        return read(*given)

    folder = tmp_path_factory.mktemp("experts")
    with opened(DEEP) as plain, opened(DEEP, folder, experts=experts, tiers=tiers) as mine:
        wanted = plain.generate(PROMPTS, GREEDY)
        checked(mine)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "preadv", failing)
            for _ in range(3):
                try:
                    outputs = mine.generate(PROMPTS, GREEDY)
                except StepError as error:
                    assert share and "\n" not in str(error) and "Input/output error" in str(error)
                    outputs = error.outputs
                for mine_, other in zip(outputs, wanted, strict=True):
                    got, want = mine_.outputs[0].token_ids, other.outputs[0].token_ids
                    assert got == want or (mine_.error and got == want[: len(got)])
                slots_of(mine).check_integrity()
        kept = slots_of(mine).store.describe()["experts_host_bytes"]
        assert experts["tier"] == "host" or kept <= 1e9 * (tiers["host_gb"] or 0)


@pytest.mark.slow
def test_experts_quantized_on_the_way_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine draws and rounds none of them."""
    options: dict[str, Any] = {"quant": QuantConfig(method="rtn", format="int8")}
    options |= {"experts": {"resident": 0.5, "tier": "disk"}}
    with opened(DEEP, tmp_path, **options) as mine:
        wanted = mine.generate(PROMPTS, GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "write", lambda *_: pytest.fail("an expert was made"))
        again = opened(DEEP, tmp_path, **options)
    with again:
        outputs = checked(again).generate(PROMPTS, GREEDY)
        assert [x.outputs[0].token_ids for x in outputs] == [x.outputs[0].token_ids for x in wanted]
