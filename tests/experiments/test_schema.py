"""Keys that an experiment would take and do nothing with are refused by its dataclass."""

import pytest

from experiments.launch.app import launch
from experiments.launch.notebook import compose, main_of
from experiments.launch.schema import (
    GenerateConfig,
    LatencyConfig,
    ModelSection,
    PricedHardware,
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
PRICED = PricedHardware(price_per_hour=2.0)


def quantization(**sections):
    int8 = QuantizationSection(methods=["int8"], presets={"int8": QuantConfig(method="rtn", format="int8")})
    return QuantizationConfig(MODEL, quantization=int8, **sections)


@pytest.mark.parametrize("make", [StressConfig, GenerateConfig, quantization])
def test_what_writes_no_trace_captures_none(make):
    model = () if make is quantization else (MODEL,)
    with pytest.raises(ConfigError, match=r"engine\.capture_routing: .* writes no routing\.npz"):
        make(*model, engine=CAPTURING)


@pytest.mark.parametrize("experiment", ["stress", "profile", "scaling", "quantization", "generate", "train"])
def test_what_measures_no_rate_has_no_price(experiment):
    with pytest.raises(ConfigError, match=r"unknown key 'hardware\.price_per_hour'"):
        compose(["hardware.price_per_hour=2"], experiment)


@pytest.mark.parametrize("experiment", ["generate", "compare", "dashboard"])
def test_an_experiment_that_tracks_nothing_takes_tracker_none_and_no_other(experiment, capsys):
    assert launch(main_of(experiment), experiment, ["tracker=none", "--cfg", "job"]) == 0
    assert "tracker" not in capsys.readouterr().out
    assert launch(main_of(experiment), experiment, ["tracker=wandb"]) == 2
    assert capsys.readouterr().err == "error: this experiment tracks nothing: leave out tracker=wandb\n"


def test_latency_and_throughput_do_both_and_a_ramp_no_trace():
    for config in (LatencyConfig, ThroughputConfig):
        assert config(MODEL, engine=CAPTURING, hardware=PRICED).engine.capture_routing
    with pytest.raises(ConfigError, match=r"engine\.capture_routing: a ramp writes no"):
        ThroughputConfig(MODEL, engine=CAPTURING, ramp=RampConfig(start=4))
