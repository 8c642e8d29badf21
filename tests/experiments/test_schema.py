"""Keys that an experiment would take and do nothing with are refused by its dataclass."""

import pytest

from experiments.launch.schema import (
    GenerateConfig,
    HardwareSection,
    LatencyConfig,
    ModelSection,
    QuantizationConfig,
    StressConfig,
    ThroughputConfig,
)
from moejax.bench.quantization.config import QuantizationSection
from moejax.bench.ramp.config import RampConfig
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig

MODEL = ModelSection("tiny")
CAPTURING = EngineConfig(capture_routing=True)
PRICED = HardwareSection(price_per_hour=2.0)


def quantization(**sections):
    int8 = QuantizationSection(methods=["int8"], presets={"int8": QuantConfig(method="rtn", format="int8")})
    return QuantizationConfig(MODEL, int8, **sections)


@pytest.mark.parametrize("make", [StressConfig, GenerateConfig, quantization])
def test_what_writes_no_trace_captures_none_and_what_measures_no_rate_has_no_price(make):
    model = () if make is quantization else (MODEL,)
    with pytest.raises(ConfigError, match=r"engine\.capture_routing: .* writes no routing\.npz"):
        make(*model, engine=CAPTURING)
    with pytest.raises(ConfigError, match=r"hardware\.price_per_hour: .* measures no tokens/s"):
        make(*model, hardware=PRICED)


def test_latency_and_throughput_do_both_and_a_ramp_no_trace():
    for config in (LatencyConfig, ThroughputConfig):
        assert config(MODEL, engine=CAPTURING, hardware=PRICED).engine.capture_routing
    with pytest.raises(ConfigError, match=r"engine\.capture_routing: a ramp writes no"):
        ThroughputConfig(MODEL, engine=CAPTURING, ramp=RampConfig(start=4))
