"""The configuration of `experiments.quantization`."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from moejax.bench.common.held_out import HeldOutText
from moejax.core.checked import Checked, NonNegativeInt, PositiveInt, at_least
from moejax.core.errors import ConfigError, unknown
from moejax.core.quant import CalibrationConfig, QuantConfig
from moejax.routing.source import check_trace


@dataclass(frozen=True)
class SpeedSection(Checked, section="quantization.speed"):
    """The decode-speed measurement: one fixed batch, in turns with the full-precision model.

    Attributes:
        batch_size: sequences that decode together.
        prompt_len, output_len: tokens of each.
        iterations: timed repetitions; 0 leaves the measurement out.
    """

    batch_size: PositiveInt = 8
    prompt_len: PositiveInt = 16
    output_len: Annotated[int, at_least(2, "the first token is no decode step")] = 16
    iterations: NonNegativeInt = 5


@dataclass(frozen=True)
class QuantizationSection(HeldOutText, section="quantization"):
    """Which methods, measured on which text.

    Attributes:
        methods: names among `presets`, in the table's order.
        presets: name → its configuration. On the command line the files of `configs/quant/`.
        calibration: replaces every preset's own, so that all methods see the same tokens; None leaves them.
        batch_size: windows that run at a time.
        popularity_bins: groups of a layer's experts by popularity, with as nearly the same number of each.
        routing_trace: a routing trace or a run's folder with one: experts' popularity, by which their errors
            are grouped and weighted, is its load; None: that of the held-out text.
        speed: of the decode measurement.
    """

    methods: list[str] = field(default_factory=list)
    presets: dict[str, QuantConfig] = field(default_factory=dict)
    calibration: CalibrationConfig | None = None
    batch_size: PositiveInt = 16
    popularity_bins: PositiveInt = 4
    routing_trace: str | None = None
    speed: SpeedSection = field(default_factory=SpeedSection)

    def quant(self, method: str) -> QuantConfig:
        """The configuration of a method."""
        preset = self.presets[method]
        return preset if self.calibration is None else replace(preset, calibration=self.calibration)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = sorted(self.presets)
        if not self.methods:
            raise ConfigError(f"quantization.methods is empty: choose among {', '.join(known)}")
        for name in self.methods:
            if name not in self.presets:
                raise ConfigError(f"quantization.methods: {unknown('method', str(name), known)}")
            if self.presets[name].is_none:
                raise ConfigError(
                    f"quantization.methods: {name!r} changes nothing; the full-precision model is measured in"
                    " any case"
                )
        if len(set(self.methods)) < len(self.methods):
            twice = next(name for name in self.methods if self.methods.count(name) > 1)
            raise ConfigError(f"quantization.methods: {twice!r} stands there twice")
        if self.routing_trace is not None:
            check_trace("quantization.routing_trace", self.routing_trace)
