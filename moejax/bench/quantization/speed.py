"""Decode speed of a quantized model, in turns with the full-precision one.

Of the machine it runs on: dequantizing costs time on a CPU that a GPU's kernels would hide behind reading
fewer bytes, so the figures are named with their device and stand beside the bound that bytes and FLOPs set.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moejax.bench.common.held_out import Windows
from moejax.bench.common.roofline import percent_of_roof
from moejax.bench.common.step_cost import EngineSteps
from moejax.bench.quantization.config import SpeedSection
from moejax.bench.workload import LatencyCase
from moejax.core.hardware import Hardware
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.perf.operation_costs import OpCost, step_bound
from moejax.results.statistics import interval_fields, paired_ratio


class SpeedMeter:
    """Times decoding of one batch of prompts.

    Args:
        full: the full-precision model, which every other is measured beside.
        windows: of the held-out text, which the prompts begin, because time depends on routing.
    """

    def __init__(self, full: LLM, windows: Windows, speed: SpeedSection) -> None:
        rows = windows.tokens[np.arange(speed.batch_size) % len(windows.tokens)]
        self.full, self.prompts, self.speed = full, rows[:, : speed.prompt_len].tolist(), speed
        self.params = SamplingParams(max_tokens=speed.output_len, temperature=0.0, ignore_eos=True)
        self._full_times: list[float] = []
        self._compile(full)
        # What a step of the full-precision model reads; quantized ones about as much.
        self.visits = self.visited(full)

    def _compile(self, llm: LLM) -> None:
        """Compiles the steps, which count the experts that they visit whether they are asked to or not: what
        is timed and what counts are the same programs."""
        llm.compile_for([(self.prompts, [self.params] * len(self.prompts))], record_routing=True)

    def visited(self, llm: LLM) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct experts and the assignments of a mean decode step of `llm`, float64 `[L]`."""
        routing = llm.routing
        routing.reset()
        llm.generate(self.prompts, self.params, record_routing=True)
        return routing.mean_hits["decode"], routing.counts["decode"].sum(axis=1) / routing.steps["decode"]

    def cost(self, llm: LLM, visits: tuple[np.ndarray, np.ndarray] | None = None) -> dict[str, float]:
        """Row fields: FLOPs and bytes of a mean decode step for what `llm` holds, and visits; None: those of
        the full-precision model."""
        case = LatencyCase(len(self.prompts), self.speed.prompt_len, self.speed.output_len)
        hits, assignments = visits or self.visits
        cost = EngineSteps(llm).decode_bound(case, hits, None, assignments)[0]
        return {"decode_step_flops": cost.flops, "decode_step_bytes": cost.bytes}

    def bound(self, row: Mapping[str, Any], hardware: Hardware | None) -> dict[str, Any]:
        """Row fields: the most output tokens a second that memory and compute allow, which of them sets the
        limit, and how much of it was reached; none where the device's bandwidth is not known."""
        cost = OpCost(0, "", "decode", row["decode_step_flops"], row["decode_step_bytes"])
        dtype, batch = self.full.config.dtype, len(self.prompts)
        if (bound := step_bound(cost, hardware, dtype)) is None:
            return {}
        rates = {"decode_bound_tokens_per_s": batch / bound.seconds, "decode_bound_limit": bound.limit}
        seconds = batch / row["decode_tokens_per_s"]
        return rates | percent_of_roof("decode_percent_of_bound", bound, seconds, hardware, dtype)

    def __call__(self, llm: LLM) -> dict[str, Any]:
        """Row fields: tokens/s of the median run, and its ratio to full precision with its interval.

        The first call of a model is not counted.
        """
        self._compile(llm)
        for model in (self.full, llm):
            self._seconds(model)
        times: list[list[float]] = [[], []]
        for turn in range(self.speed.iterations):
            for index, model in ((0, self.full), (1, llm))[:: 1 if turn % 2 == 0 else -1]:
                times[index].append(self._seconds(model))
        self._full_times += times[0]
        ratio = paired_ratio(times[0], times[1])
        return {**self._rate(times[1]), **interval_fields("decode_ratio", ratio)}

    def full_rate(self) -> dict[str, Any]:
        """Row fields of the full-precision model, over all its turns so far."""
        return self._rate(self._full_times) if self._full_times else {}

    def _rate(self, times: list[float]) -> dict[str, Any]:
        tokens = len(self.prompts) * (self.speed.output_len - 1)
        return {
            "decode_tokens_per_s": tokens / float(np.median(times)),
            "decode_device": jax.devices()[0].platform,
        }

    def _seconds(self, llm: LLM) -> float:
        """From the first output tokens to the last: decode steps only."""
        outputs = llm.generate(list(self.prompts), self.params)
        times = [output.metrics.token_times for output in outputs]
        return max(t[-1] for t in times) - max(t[0] for t in times)
