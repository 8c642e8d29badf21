"""The configuration of `experiments.scaling`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from moejax.core.checked import Among, Checked, PositiveInt
from moejax.core.errors import ConfigError
from moejax.core.parallel import PRESETS
from moejax.routing.source import check_trace


@dataclass(frozen=True)
class ScalingSection(Checked, section="scaling"):
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

    layouts: list[Annotated[str, Among(PRESETS, "layout")]] = field(default_factory=lambda: list(PRESETS))
    batch_size: PositiveInt = 64
    context_len: PositiveInt = 1024
    prompt_len: PositiveInt = 1024
    num_prompts: PositiveInt = 32
    measure: Literal["auto", "on", "off"] = "auto"
    devices: PositiveInt = 8
    steps: PositiveInt = 24
    routing: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layouts:
            raise ConfigError(f"scaling.layouts is empty: choose among {', '.join(PRESETS)}")
        if self.routing is not None:
            check_trace("scaling.routing", self.routing)
