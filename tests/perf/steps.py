"""The whole cost of a decode step, for tests of what it consists of."""

from typing import Any

import numpy as np

from moejax.core.config import ModelConfig
from moejax.perf.operation_costs import OpCost, attribute, total


def decode_step_cost(
    config: ModelConfig, batch: int, context: float, hits: np.ndarray, **held: Any
) -> OpCost:
    """Returns the sum over operations of a step of `batch` rows that see `context` tokens each."""
    rows = {"new_tokens": np.ones(batch), "context": np.full(batch, context)}
    return total(attribute(config, **rows, phase="decode", hits=hits, **held))
