"""Experts in the host's pinned memory, and popular ones that stay: what whole engines make of both."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from moejax import QuantConfig
from moejax.core.errors import ConfigError
from moejax.core.tiers import TiersConfig
from moejax.engine.tiers.pinned import choose_host_memory
from moejax.routing.residency import ReplayOptions, recorded_visits, replay
from tests.engine.test_tiers import DEEP, GREEDY, PROMPTS, checked, opened, same_run, slots_of
from tests.model_shapes import TWO_LAYERS

PINNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": ({"resident": 0.5}, {}),
    "int8": ({"resident": 0.5}, {"quant": QuantConfig(method="rtn", format="int8")}),
    "layers": ({"resident": 0.5}, {"tiers": {"resident_layers": 1}}),
    "low_bits": ({"resident": 0.5, "miss": "low_bits", "low_bits_below": 0.0}, {}),
    "on_host": ({"resident": 0.5, "miss": "host"}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PINNED)
def test_pinned_memory(name: str) -> None:
    """Slots are written by the device, from arrays in JAX's pinned memory, which a CPU has as well."""
    experts, options = PINNED[name]
    tiers = {"host_memory": "pinned"} | options.get("tiers", {})
    plain_options = {key: value for key, value in options.items() if key != "tiers"}
    with (
        opened(DEEP, **plain_options) as plain,
        opened(DEEP, experts=experts, **options | {"tiers": tiers}) as mine,
    ):
        same_run(checked(mine), plain)
        held, stats = slots_of(mine), mine.stats()
        kinds = {x.sharding.memory_kind for x in held.store.fetch(0).result()}
        assert kinds == {"pinned_host"} and not held.in_place
        assert {x.sharding.memory_kind for x in held.arrays} == {"device"}
        assert stats["experts_misses"] > 0
        assert stats["experts_host_bytes"] >= held.records.count * held.records.nbytes
        told = {one.key: one.value for one in mine.resolutions}
        assert told["engine.tiers.host_memory"] == "pinned"


def test_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pageable on a CPU; on a GPU pinned, as far as XLA's limit goes and nothing is decoded."""

    def chosen(nbytes: float = 1e9, several: bool = False, **options: Any) -> Any:
        return choose_host_memory(TiersConfig(**options), nbytes, several)

    assert chosen().value == "pageable" and "CPU" in chosen().reason
    device = SimpleNamespace(platform="gpu", addressable_memories=jax.devices()[0].addressable_memories)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert chosen().value == "pinned" and chosen(host_memory="pageable").value == "pageable"
    limits: list[tuple[dict[str, Any], str]] = [
        ({"nbytes": 7e10}, "68.7 GB, not 70.0 GB; raise XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
        ({"several": True}, "one device's"),
        ({"codes": "q8_k"}, "engine.tiers.codes=q8_k"),
    ]
    for options, why in limits:
        assert chosen(**options).value == "pageable" and why in chosen(**options).reason
        with pytest.raises(
            ConfigError, match=r"engine\.tiers\.host_memory=pinned: .*; take pageable, or auto"
        ):
            chosen(host_memory="pinned", **options)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "512")
    assert chosen(nbytes=7e10).value == "pinned"
    device.addressable_memories = list
    assert chosen().value == "pageable"


@pytest.mark.slow
def test_popular_experts_of_a_trace(tmp_path: Path) -> None:
    """What a trace visits most stays, by the replay's own policy; a trace that does not fit is refused."""
    with opened(DEEP) as plain:
        plain.generate(PROMPTS, GREEDY)
        trace = plain.routing_capture()
        path = str(trace.save(tmp_path / "routing.npz"))
        experts = {"resident": 0.5, "policy": "static", "popularity": path}
        with opened(DEEP, experts=experts) as mine:
            same_run(checked(mine), plain)
            visits, slots = recorded_visits(mine.routing_capture()), slots_of(mine).slots
            options = ReplayOptions(popularity=trace.counts())
            absent = replay("static", visits, [slots], options)[0, 0] & visits.needed[0]
            assert mine.stats()["experts_misses"] == absent.sum() > 0
    with pytest.raises(ConfigError, match=r"engine\.experts\.popularity=.*: it has 4 MoE layers"):
        opened(TWO_LAYERS, experts=experts | {"resident": 0.9})
