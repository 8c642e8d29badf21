"""Held-out perplexity and expert load of a state, measured without dropping anything."""

import math
from dataclasses import dataclass

import jax
import numpy as np

from moejax.train.config import TrainConfig
from moejax.train.data import held_out_batches
from moejax.train.step import Params, make_eval_step, model_config


@dataclass(frozen=True)
class HeldOut:
    """An evaluation.

    Attributes:
        loss: nats per token, the mean over `tokens` of them.
        tokens: how many were scored.
        counts: int64 `[L, E]`, assignments of each layer's experts.
    """

    loss: float
    tokens: int
    counts: np.ndarray

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class Evaluator:
    """Evaluates states of one run; compiles at the first call."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._model = config, model_config(config)
        self._step = make_eval_step(self._model)

    def __call__(self, params: Params, stream: np.ndarray) -> HeldOut:
        """Scores every token of `stream` (int32 `[n]`) but the first, in windows of `seq_len` tokens."""
        config = self._config
        nats, tokens = 0.0, 0
        counts = np.zeros((sum(self._model.moe_layers), self._model.num_experts), np.int64)
        for batch, scored in held_out_batches(stream, batch_size=config.batch_size, seq_len=config.seq_len):
            sums = jax.device_get(self._step(params, batch, scored))
            nats += float(sums.nats)
            tokens += int(sums.tokens)
            counts += sums.counts
        return HeldOut(nats / tokens, tokens, counts)
