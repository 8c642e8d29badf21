"""The configuration of LoRA adapters beside a model's weights."""

from dataclasses import dataclass, field
from typing import Literal

from moejax.core.checked import Checked, NonNegativeInt, PositiveInt

AdaptedMatrices = Literal["attention", "mlp", "router", "experts"]


@dataclass(frozen=True)
class AdaptersConfig(Checked, section="engine.adapters"):
    """LoRA adapters, which requests choose, beside the model's weights, see `moejax.engine.adapters`.

    Attributes:
        slots: adapters that are there at a time; 0: none can be loaded.
        rank: the largest of an adapter.
        targets: matrices with slots: of attention, of dense layers and shared experts ("mlp"), of routers
            and of routed experts. Each costs memory and time for all requests; adapters with others are
            refused.
    """

    slots: NonNegativeInt = 0
    rank: PositiveInt = 16
    targets: list[AdaptedMatrices] = field(default_factory=lambda: ["attention", "mlp", "router", "experts"])

    @property
    def experts(self) -> bool:
        """Whether routed experts have slots."""
        return self.slots > 0 and "experts" in self.targets
