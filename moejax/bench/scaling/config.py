"""What `experiments.scaling` can be asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moejax.core.config import check_choice, check_positive
from moejax.core.errors import ConfigError, unknown
from moejax.core.parallel import PRESETS
from moejax.routing.source import check_trace

Measure = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class ScalingSection:
    """Which layouts, and for what load.

    Attributes:
        layouts: names of presets (`moejax.core.parallel.PRESETS`, `configs/parallel/`).
        batch_size: sequences that decode together, over all data-parallel groups.
        context_len: tokens that each of them has in its cache.
        prompt_len, num_prompts: of the prefill step, over all groups.
        measure: run the layouts on virtual CPU devices: "on", "off", or "auto", which does for models of at
            most 1 GB of float32 weights.
        devices: virtual devices there; a layout of more is measured as the part of it that fits.
        steps: decode steps that are timed of each layout; the median counts.
        routing: a routing trace or a run's folder with one: what its steps send, and how they load the
            experts' devices, beside an even routing; None: none.
    """

    layouts: list[str] = field(default_factory=lambda: list(PRESETS))
    batch_size: int = 64
    context_len: int = 1024
    prompt_len: int = 1024
    num_prompts: int = 32
    measure: Measure = "auto"
    devices: int = 8
    steps: int = 24
    routing: str | None = None

    def __post_init__(self) -> None:
        value: Sequence[str] | str = self.layouts
        object.__setattr__(self, "layouts", [value] if isinstance(value, str) else list(value))
        if not self.layouts:
            raise ConfigError(f"scaling.layouts is empty: choose among {', '.join(PRESETS)}")
        for name in self.layouts:
            if name not in PRESETS:
                raise ConfigError(f"scaling.layouts: {unknown('layout', name, PRESETS)}")
        for name in ("batch_size", "context_len", "prompt_len", "num_prompts", "devices", "steps"):
            check_positive(f"scaling.{name}", getattr(self, name))
        check_choice("scaling.measure", self.measure, ("auto", "on", "off"))
        if self.routing is not None:
            check_trace("scaling.routing", self.routing)
