"""Whole prompts and captured runs as sums of steps, see `moejax.perf.operation_costs`."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.perf.operation_costs import OpCost, Phase, attribute, summed
from moejax.perf.sizes import HeldWeights
from moejax.routing.capture import RoutingCapture, count_experts


def prefill_steps(lengths: Sequence[int], token_budget: int) -> list[tuple[list[int], list[int], int]]:
    """Cuts prompts that arrive together into steps: first come, first served, each step full.

    What rows that decode already take of the budget is not counted, so that there are never more steps here
    than in an engine.

    Returns:
        For each step (new tokens of its rows, their contexts, rows whose prompt ends).
    """
    if token_budget < 1:
        raise ConfigError(f"a step must hold at least one token, got {token_budget}")
    steps: list[tuple[list[int], list[int], int]] = []
    new: list[int] = []
    context: list[int] = []
    ended = left = 0
    for length in lengths:
        computed = 0
        while computed < length:
            if not left:
                if new:
                    steps.append((new, context, ended))
                new, context, ended, left = [], [], 0, token_budget
            part = min(length - computed, left)
            computed, left = computed + part, left - part
            new.append(part)
            context.append(computed)
            ended += computed == length
    return [*steps, (new, context, ended)] if new else steps


def prefill(
    config: ModelConfig,
    lengths: Sequence[int],
    token_budget: int,
    *,
    hits: Sequence[float] | np.ndarray,
    kv_dtype: str | None = None,
    weights: HeldWeights | None = None,
) -> list[OpCost]:
    """Costs whole prompts in as many steps as the budget of tokens makes of them, see `prefill_steps`; a step
    after the first reads the weights, and a prompt's earlier chunks from the cache, again.

    Args:
        hits: `[L]`, mean number of experts that a step visits.
    """
    ops = [
        op
        for new, context, ended in prefill_steps(lengths, token_budget)
        for op in attribute(
            config, new_tokens=new, context=context, phase="prefill", hits=hits, logits=ended,
            kv_dtype=kv_dtype, weights=weights,
        )
    ]  # fmt: skip
    return summed(ops)


def captured_steps(
    config: ModelConfig,
    capture: RoutingCapture,
    *,
    kv_dtype: str | None = None,
    weights: HeldWeights | None = None,
) -> Iterator[tuple[int, list[OpCost]]]:
    """Counts the work of each step of a routing trace, with the trace's rows, lengths and visited experts.

    Yields:
        (step number, operations) in order. A step that computes parts of prompts and decodes is "mixed".

    Raises:
        ConfigError: the trace is another model's.
    """
    capture.check_fits(config)
    capture = capture.computed()
    ends = np.array([request.prompt_len for request in capture.requests])
    bounds = [*capture.step_starts.tolist(), capture.num_rows]
    for first, last in itertools.pairwise(bounds):
        rows = slice(first, last)
        prefill = capture.prefill[rows]
        phase: Phase = "prefill" if prefill.all() else "mixed" if prefill.any() else "decode"
        request, position = capture.request[rows], capture.position[rows]
        sequence = np.stack([request, capture.sample[rows]], axis=1)
        rows_of, index, new = np.unique(sequence, axis=0, return_inverse=True, return_counts=True)
        context = np.zeros(len(new))
        np.maximum.at(context, index.reshape(-1), position + 1)
        hits, ran = np.zeros(config.num_layers), np.zeros(config.num_layers)
        counts = count_experts(capture.ids[rows], capture.num_experts)
        hits[list(capture.layers)] = np.count_nonzero(counts, axis=1)
        ran[list(capture.layers)] = counts.sum(axis=1)
        # A part of a prompt that is not its last gives no token; what is computed again gives one in all.
        sampled = int(np.count_nonzero(context >= ends[rows_of[:, 0]]))
        ops = attribute(
            config, new_tokens=new, context=context, phase=phase, hits=hits, logits=sampled,
            assignments=ran, kv_dtype=kv_dtype, weights=weights,
        )  # fmt: skip
        yield int(capture.step[first]), ops
