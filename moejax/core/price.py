"""Cost of tokens, from a device's hourly price and a measured throughput. No JAX here."""

import math
from dataclasses import dataclass
from typing import Annotated

from moejax.core.checked import Must, check
from moejax.core.errors import ConfigError

_PerHour = Annotated[
    float,
    Must(
        lambda price: 0 < price <= 1e6,
        "a device's price for an hour, above 0 and at most 1,000,000 (null asks for no cost)",
    ),
]
_Currency = Annotated[str, Must(lambda word: word.strip() and len(word) <= 8, "a short word such as USD")]


@dataclass(frozen=True)
class Price:
    """Price of one device: `per_hour` in units of `currency`. The key is `hardware.price_per_hour`."""

    per_hour: float
    currency: str = "USD"

    def __post_init__(self) -> None:
        check("hardware.price_per_hour", self.per_hour, _PerHour)
        check("hardware.currency", self.currency, _Currency)

    def per_million(self, devices: int, tokens_per_s: float | None) -> float:
        """Returns the cost of a million tokens that `devices` devices together make at `tokens_per_s`.

        Raises:
            ConfigError: no devices, or no throughput: a price without it says nothing of tokens.
        """
        if devices < 1:
            raise ConfigError(
                f"hardware.price_per_hour: the price is for each of at least one device, got {devices}"
            )
        if tokens_per_s is None or not math.isfinite(tokens_per_s) or tokens_per_s <= 0:
            raise ConfigError(
                f"hardware.price_per_hour={self.per_hour:g} gives no cost per token without a measured"
                f" throughput (tokens/s: {tokens_per_s!r})"
            )
        return self.per_hour * devices / 3600 / tokens_per_s * 1e6

    def metrics(
        self, devices: int, output_throughput: float | None, total_throughput: float | None
    ) -> dict[str, float | None]:
        """Returns `cost_per_million_output_tokens` and `cost_per_million_tokens` (input and output); None
        where nothing was completed. Each holds the whole price: the two are not to be added."""
        rates = {
            "cost_per_million_output_tokens": output_throughput,
            "cost_per_million_tokens": total_throughput,
        }
        return {name: self.per_million(devices, rate) if rate else None for name, rate in rates.items()}
