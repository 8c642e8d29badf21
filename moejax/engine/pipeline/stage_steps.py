"""The compiled step of one pipeline stage: its layers, before them the embedding, after them the sampling."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from moejax.engine.step.batch import Limits, StepKey, unpack
from moejax.engine.step.functions import ModelFunctions, routing_counts
from moejax.engine.step.program import (
    Captured,
    DeviceState,
    capture,
    decoded_tokens,
    finish,
    flat_tokens,
    run_layers,
)
from moejax.engine.step.sampler import Sampled
from moejax.models.decoder import Decoder
from moejax.sharding.pipeline import stage_config
from moejax.sharding.spmd import SingleDevice


class StageOutput(NamedTuple):
    """What a stage's step gives.

    Attributes:
        x: `[S + T, D]`, what the next stage takes, by group; None from the last one.
        counts, overflow: int32 `[l, E]`, of the stage's own layers, and `[2]`, where routing is recorded.
        sampled, prompt_logprobs: of the last stage, see `moejax.engine.step.program.PagedOutput`.
        captured: of the stage's own layers; None also where none of them has experts.
    """

    x: jax.Array | None
    counts: jax.Array | None
    overflow: jax.Array | None
    sampled: Sampled | None
    prompt_logprobs: jax.Array | None
    captured: Captured | None


class StageFunctions(ModelFunctions):
    """A stage's layers split into weight leaves and the step. `config` is that of these layers alone, `whole`
    the model's."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.whole = model.config
        self.config = stage_config(model.config, model.stage)
        self.is_first, self.is_last = model.is_first, model.is_last

    def step(
        self,
        leaves: Sequence[jax.Array],
        state: DeviceState,
        buffer: jax.Array,
        given: jax.Array,
        *,
        key: StepKey,
        limits: Limits,
        place: SingleDevice,
    ) -> tuple[DeviceState, StageOutput]:
        """This stage's part of one device's part of a step (`step.program.PagedFunctions.step`).

        Args:
            state: the last stage's is whole; the others' has pages only, None for the rest.
            given: what the stage before gave, `[S + T, D]`; the first stage's is `last`, int32 `[slots + 1]`,
                as the last stage has it after the steps that this one's rows depend on.
        """
        batch = unpack(buffer, key, limits)
        model = self.merge(leaves)
        if self.is_first:
            x = model.embed(flat_tokens(batch, decoded_tokens(batch, given)))
        else:
            x = given
        x, pages, traces = run_layers(model, x[:, None], batch, state.pages, limits)
        state = state._replace(pages=pages)
        counts = overflow = None
        if key.record:
            counts, overflow = (place.sum_groups(x) for x in routing_counts(traces, self.config.num_experts))
        captured = None
        if limits.capture:
            captured = place.gather_groups(capture(traces, self.config.num_experts))
        if not self.is_last:
            return state, StageOutput(x[:, 0], counts, overflow, None, None, captured)
        token = decoded_tokens(batch, state.last)
        state, sampled, scores = finish(model, x, batch, token, state, key)
        sampled, scores = place.gather_groups((sampled, scores))
        return state, StageOutput(None, counts, overflow, sampled, scores, captured)
