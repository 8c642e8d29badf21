"""Costs worked out by hand, and prices that make no sense."""

import math

import pytest

from moejax.core.errors import ConfigError
from moejax.core.price import Price


def test_cost_is_price_over_throughput() -> None:
    """Eight devices at 2 an hour are 16 an hour; 1000 tokens/s are 3.6 million an hour."""
    price = Price(2.0, "EUR")
    found = price.metrics(8, 1000.0, 4000.0)
    assert found["cost_per_million_output_tokens"] == pytest.approx(16 / 3.6)
    assert found["cost_per_million_output_tokens"] == pytest.approx(4 * found["cost_per_million_tokens"])
    assert price.metrics(1, None, 0.0) == {
        "cost_per_million_output_tokens": None, "cost_per_million_tokens": None,
    }  # fmt: skip


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, 1e9, True, "2"])
def test_a_price_that_makes_no_sense_is_one_clear_line(value) -> None:
    with pytest.raises(ConfigError, match=r"hardware\.price_per_hour must be a device's price for an hour"):
        Price(value)


def test_a_nameless_currency_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"hardware\.currency"):
        Price(1.0, "")
