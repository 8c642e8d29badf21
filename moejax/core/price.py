"""What tokens cost, from a device's hourly price and a measured throughput. No JAX here."""

import math
from dataclasses import dataclass

from moejax.core.errors import ConfigError

_MOST_PER_HOUR = 1e6


@dataclass(frozen=True)
class Price:
    """What one device costs: `per_hour` in units of `currency`. The key is `hardware.price_per_hour`."""

    per_hour: float
    currency: str = "USD"

    def __post_init__(self) -> None:
        value = self.per_hour
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 < value <= _MOST_PER_HOUR:
            raise ConfigError(
                f"hardware.price_per_hour must be a device's price for an hour, above 0 and at most"
                f" {_MOST_PER_HOUR:,.0f}, got {value!r}; null asks for no cost"
            )
        if not isinstance(self.currency, str) or not self.currency.strip() or len(self.currency) > 8:
            raise ConfigError(f"hardware.currency must be a short word such as USD, got {self.currency!r}")

    def per_million(self, devices: int, tokens_per_s: float | None) -> float:
        """The cost of a million tokens that `devices` devices together make at `tokens_per_s`.

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
        """`cost_per_million_output_tokens` and `cost_per_million_tokens` (input and output); None where
        nothing was completed. Each holds the whole price: the two are not to be added."""
        rates = {
            "cost_per_million_output_tokens": output_throughput,
            "cost_per_million_tokens": total_throughput,
        }
        return {name: self.per_million(devices, rate) if rate else None for name, rate in rates.items()}
