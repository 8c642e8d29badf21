"""The layer that a checkpoint has after a model's last one to predict the token after the next: multi-token
prediction (DeepSeek-V3, arXiv 2412.19437, §2.2; GLM-4.5, arXiv 2508.06471)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.models.decoder import Decoder
from moejax.nn.linear import Linear
from moejax.nn.norm import norm_of


def mtp_config(model: ModelConfig) -> ModelConfig:
    """Returns the configuration of the layer alone, which is like the model's last one."""
    return model.of_layers([model.num_layers - 1]).replace(mtp_layers=0)


class MtpDecoder(Decoder):
    """A decoder of one layer, whose input is of a token's embedding and of what the model put out, after its
    final norm, for the token before. It is to `share` the model's embedding and output projection, which
    checkpoints store again.

    To go further than one token ahead it takes its own output, after its final norm, for the model's.
    """

    def __init__(self, config: ModelConfig, *, kernels: str = "xla", **options: Any) -> None:
        super().__init__(config, kernels=kernels, **options)
        D, dtype = config.hidden_size, jnp.dtype(config.dtype)
        self.embedding, self.lm_head = nnx.data(None), nnx.data(None)
        self.enorm, self.hnorm = norm_of(config, dtype, kernels), norm_of(config, dtype, kernels)
        self.eh_proj = Linear((2 * D, D), (None, "embed"), dtype, scale=config.initializer_range)

    def share(self, model: Decoder) -> None:
        """Takes over a model's embedding and output projection."""
        self.embedding, self.lm_head = model.embedding, model.lm_head

    def join(self, tokens: jax.Array, hidden: jax.Array) -> jax.Array:
        """Maps tokens int32 `[...]` and what was put out for the ones before them `[..., D]` to the layer's
        input `[..., D]`."""
        return self.eh_proj(jnp.concatenate([self.enorm(self.embed(tokens)), self.hnorm(hidden)], axis=-1))
