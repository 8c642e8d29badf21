"""What a measurement's meter puts into its result."""

import json
from typing import Any

import pytest

from moejax.bench.common.telemetry import Meter
from moejax.core.price import Price
from moejax.tracking.telemetry import TelemetryConfig
from tests.tracking.fake_nvml import FakeGpu, on_gpus


def result(*tokens: int) -> dict[str, Any]:
    """Cases of one second each."""
    rows = [
        {
            "case": i,
            "total_output_tokens": n,
            "output_throughput": float(n),
            "total_token_throughput": 2.0 * n,
        }
        for i, n in enumerate(tokens)
    ]
    return {"cases": rows, "metrics": {k: v for k, v in rows[0].items() if k != "case"}}


def test_rows_have_their_own_energy_and_cost_and_the_flat_metrics_those_of_their_cases() -> None:
    meter = Meter(price=Price(3.6))
    meter.telemetry, _, clock = on_gpus(FakeGpu(watts=100))
    for case, seconds in ((0, 1.0), (1, 3.0), (0, 1.0)):
        with meter.part(case):
            clock.now += seconds
        clock.now += 50.0
    found = result(50, 100)
    meter.add_to(found, [0])
    first, second = found["cases"]
    assert first["energy_per_output_token_j"] == pytest.approx(200 / 50, abs=1e-3)
    assert second["energy_per_output_token_j"] == pytest.approx(300 / 100, abs=1e-3)
    # 3.6 an hour are 1e-3 a second.
    assert second["cost_per_million_output_tokens"] == pytest.approx(10.0)
    assert second["cost_per_million_tokens"] == pytest.approx(5.0)
    metrics = found["metrics"]
    assert metrics["energy_j"] == pytest.approx(200, abs=0.01)
    assert metrics["cost_per_million_output_tokens"] == pytest.approx(20.0)
    assert [row["case"] for row in found["telemetry"]["cases"]] == [0, 1]
    assert found["telemetry"]["cases"][1]["energy_j"] == pytest.approx(300, abs=0.01)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("about", "known"),
    [
        ({"kind": "moejax"}, True),
        ({"kind": "hf_transformers", "device": "cpu"}, True),
        ({"kind": "hf_transformers", "device": "cuda:0"}, False),  # JAX has the CPU here
        ({"kind": "openai_endpoint"}, False),
    ],
)
def test_a_peer_elsewhere_has_none_of_this_machines_energy(about: dict[str, Any], known: bool) -> None:
    meter = Meter()
    meter.telemetry, _, clock = on_gpus(FakeGpu(watts=100))
    with meter.part(0):
        clock.now += 1.0
    found = result(50) | {"backends": [{"name": "it", **about}]}
    found["cases"][0]["backend"] = "it"
    meter.add_to(found, [0])
    assert (found["metrics"]["energy_per_output_token_j"] is not None) is known
    assert (found["metrics"]["mean_gpu_power_w"] is not None) is known
    assert ("energy_per_output_token_j" in found["cases"][0]) is known
    assert (found["telemetry"]["cases"][0]["energy_j"] is not None) is known


def test_without_telemetry_and_price_nothing_is_added_but_that_it_was_off() -> None:
    meter, found = Meter(), result(5)
    with meter.part(0):
        pass
    before = json.dumps(found)
    meter.add_to(found)
    assert found.pop("telemetry") == {"enabled": False, "cases": [{"case": 0}]}
    assert json.dumps(found) == before


def test_on_a_cpu_unknown_energy_is_none_and_virtual_devices_are_one_machine() -> None:
    meter = Meter(TelemetryConfig(interval_s=0.5), Price(1.0), num_devices=8)
    meter.telemetry._probes = meter.telemetry._probes[:1]  # a machine that lets us read RAPL has energy
    with meter.part(0):
        pass
    found = result(5)
    meter.add_to(found)
    assert found["metrics"]["energy_per_output_token_j"] is None
    assert "energy_per_output_token_j" not in found["cases"][0]
    assert found["metrics"]["cost_per_million_output_tokens"] == pytest.approx(1e6 / 3600 / 5)


def test_pace_of_the_machine_is_read_around_each_part() -> None:
    meter, found = Meter(TelemetryConfig()), result(5)
    for _ in range(3):
        with meter.part(0):
            pass
    meter._pace[0][:] = [10.0, 20.0, 20.0, 20.0, 20.0, 30.0]
    meter.add_to(found)
    assert found["cases"][0]["cache_read_gb_s"] == found["metrics"]["cache_read_gb_s"] == 20.0
    assert found["metrics"]["cache_read_spread"] == pytest.approx(25.0 / 15.0)
