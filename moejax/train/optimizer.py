"""The optimiser: AdamW with warm-up and cosine decay, and clipping by global norm."""

from typing import Any

import jax
import optax

from moejax.train.config import TrainConfig


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Steps done → learning rate of the next one.

    Linear, reaching the peak in step `warmup_steps`, then half a cosine that reaches `min_lr_ratio` of the
    peak in step `steps`, steps counted from 1 (SGDR, Loshchilov and Hutter, arXiv 1608.03983).
    """
    curve = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.min_lr_ratio,
    )
    # optax counts from 0, where the rate is 0: that step would do nothing.
    return lambda count: curve(count + 1)


def decayed(params: Any) -> Any:
    """Marks the parameters that decay: matrices and stacks of them, but no norm scales (they are near 1)."""
    return jax.tree.map(lambda value: value.ndim > 1, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov and Hutter, arXiv 1711.05101) on gradients clipped to norm `grad_clip`."""
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
