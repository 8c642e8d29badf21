"""Cost of tokens, from a device's hourly price and a measured throughput. No JAX here."""

from dataclasses import dataclass
from typing import Annotated

from moejax.core.checked import Must, check

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

    def metrics(
        self, devices: int, output_throughput: float | None, total_throughput: float | None
    ) -> dict[str, float | None]:
        """Returns the cost of a million tokens that `devices` devices together make at these tokens/s:
        `cost_per_million_output_tokens` and `cost_per_million_tokens` (input and output); None where nothing
        was completed. Each holds the whole price: the two are not to be added."""
        rates = {
            "cost_per_million_output_tokens": output_throughput,
            "cost_per_million_tokens": total_throughput,
        }
        per_second = self.per_hour * devices / 3600
        return {name: per_second / rate * 1e6 if rate else None for name, rate in rates.items()}
