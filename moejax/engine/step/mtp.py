"""Drafts by a model's MTP layer (`moejax.models.mtp`), which has a cache of its own.

    model's step          tokens     …  p-1   p         hidden states h, and what each row samples
    then the layer's      h of       …  p-1   p
                          beside     …   p   p+1        a draft of p + 2 beside each row, kept in a ring
    the next step         the layer continues its own output from there: p + 3, …; then the model verifies

What the layer keeps for a position depends on the token after it. In blocks that several sequences share,
that of the last position is of the one which computed them: others' drafts may be a little worse, no token
changes.
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.step.batch import unpack
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.step.limits import FOLLOWS, Limits, StepKey
from moejax.engine.step.program import (
    DeviceState,
    PagedFunctions,
    PagedOutput,
    finish,
    flat_tokens,
    known_tokens,
)
from moejax.models.mtp import MtpDecoder
from moejax.sharding.spmd import SingleDevice


class MtpFunctions(PagedFunctions):
    """The layer's steps: after the model's (`FOLLOWS`), and those that draft further."""

    def step(
        self,
        leaves: Sequence[jax.Array],
        state: DeviceState,
        buffer: jax.Array,
        given: Any = None,
        *,
        key: StepKey,
        limits: Limits,
        place: SingleDevice,
    ) -> tuple[DeviceState, PagedOutput]:
        """Computes the layer for a batch, and drafts one token of each row.

        Args:
            given: after the model's step what that put out, `[S + T, D]` and sampled int32 `[S]`; else None.
        """
        batch, model = unpack(buffer, key, limits), cast(MtpDecoder, self.merge(leaves))
        kept = state.hidden
        assert kept is not None
        if key.draft == FOLLOWS:
            hidden, sampled = given
            tokens = known_tokens(flat_tokens(batch, batch.token), sampled)
        else:  # the place of a draft is that of what was put out beside it
            hidden, tokens = kept[jnp.maximum(-1 - batch.token, 0)], known_tokens(batch.token, state.last)
        x, state, *_ = self.compute(model, model.join(tokens, hidden), batch, state, None, limits)
        state, *_ = finish(model, x, batch, tokens[: key.rows], state, key)
        places = jnp.where(batch.sample != 0, batch.slot, limits.places)
        kept = kept.at[places].set(x[batch.logit, 0], mode="drop")
        return state._replace(hidden=kept), PagedOutput(None, None, None, None)


class MtpRunner(DeviceRunner):
    """Runs the layer beside its leader, the model's runner."""

    def reset(self) -> None:
        super().reset()
        self.hidden = jnp.zeros(*self._hidden(self.limits.places))

    def _hidden(self, rows: int) -> tuple[tuple[int, int], Any]:
        config = self.functions.config
        return (rows, config.hidden_size), jnp.dtype(config.dtype)

    def _run(self, key: StepKey, buffer: np.ndarray, *given: Any) -> PagedOutput:
        if key.draft == FOLLOWS and not given:  # a rehearsal
            x, sampled = self._given(key)[0]
            given = ((jnp.zeros(x.shape, x.dtype), jnp.zeros(sampled.shape, sampled.dtype)),)
        return super()._run(key, buffer, *given)

    def _given(self, key: StepKey) -> tuple[Any, ...]:
        if key.draft != FOLLOWS:
            return ()
        x = jax.ShapeDtypeStruct(*self._hidden(key.rows + key.tokens))
        return ((x, jax.ShapeDtypeStruct((key.rows,), jnp.int32)),)

    def _shapes(self, key: StepKey) -> tuple[Any, ...]:
        leaves, state, buffer = super()._shapes(key)
        hidden = jax.ShapeDtypeStruct(*self._hidden(self.limits.places))
        return leaves, state._replace(hidden=hidden), buffer, *self._given(key)
