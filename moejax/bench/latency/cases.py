"""The plan of a latency experiment, and what is measured of each of its parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import check_length, engine_of
from moejax.bench.backends.registry import encoder
from moejax.bench.workload import COPIES, LatencyCase, WorkloadConfig, case_prompts, latency_cases
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.results.metrics import RequestRecord
from moejax.routing.capture import RoutingCapture


@dataclass
class CaseData:
    """One case on one backend, which is one row of the result.

    Attributes:
        prompts: token ids; the same for all backends.
        records: requests of all iterations, `batch_size` after `batch_size`.
        durations: seconds of each iteration.
        tokens: output token ids of the first iteration's requests.
        counts, hits, overflow: recorded routing (ours only): assignments [L, E] by phase, experts visited in
            a mean step [L] by phase, dropped and rerouted assignments.
        trace: of the recording pass, where the engine captures routing.
        step_costs: FLOPs and bytes of its phases, from `moejax.bench.common.roofline.cost_breakdown`.
    """

    case: LatencyCase
    backend: Backend
    prompts: list[list[int]]
    records: list[RequestRecord] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    hits: dict[str, np.ndarray] = field(default_factory=dict)
    overflow: dict[str, int] = field(default_factory=dict)
    trace: RoutingCapture | None = None
    step_costs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def iterations(self) -> list[tuple[list[RequestRecord], float]]:
        """Each iteration's requests and seconds."""
        size = self.case.batch_size
        return [
            (self.records[i * size : (i + 1) * size], seconds) for i, seconds in enumerate(self.durations)
        ]


def plan_batches(
    backends: Sequence[Backend], workload: WorkloadConfig
) -> list[tuple[LatencyCase, list[list[int]]]]:
    """Returns every case with its prompts, the same for all backends.

    Raises:
        ConfigError: a case longer than a model or our cache allows, or token ids that a model does not have.
        RequestError: a backend cannot sample as the workload asks.
    """
    vocab_size, encode = min(backend.vocab_size for backend in backends), encoder(backends)
    if workload.text == "own" and _first_engine(backends) is None:
        raise ConfigError("workload.text=own needs an engine of moejax to answer: add backend=moejax")
    plan = []
    for case in latency_cases(workload):
        for backend in backends:
            check_length(backend, f"case {case.name}", case.prompt_len, case.output_len)
            backend.check(workload.sampling(case.output_len))
        plan.append((case, case_prompts(workload, case, vocab_size, encode=encode)))
    return plan


def answer_prompts(
    plan: Sequence[tuple[LatencyCase, list[list[int]]]], backends: Sequence[Backend], workload: WorkloadConfig
) -> None:
    """With `text=own` puts the first of our engines' greedy answer behind the first part of each prompt,
    in place of the rest."""
    llm = _first_engine(backends)
    for case, prompts in plan if llm is not None and workload.text == "own" else ():
        assert llm is not None
        start = -(-case.prompt_len // COPIES)
        if tokens := case.prompt_len - start:
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            answers = llm.generate([prompt[:start] for prompt in prompts], params)
            for prompt, answer in zip(prompts, answers, strict=True):
                prompt[start:] = answer.outputs[0].token_ids


def _first_engine(backends: Sequence[Backend]) -> LLM | None:
    return next((llm for backend in backends if (llm := engine_of(backend)) is not None), None)


def run_case(
    backend: Backend, case: LatencyCase, prompts: list[list[int]], workload: WorkloadConfig, **options: Any
) -> list[RequestOutput]:
    """Runs a batch once; `options` are those of our own backend. With `text=seen` it was run just before."""
    params = workload.batch_sampling(case)
    if workload.text == "seen":
        backend.generate(prompts, params)
        if engine_of(backend) is not None:
            options["forget"] = False
    return backend.generate(prompts, params, **options)


def prepare_peer(backend: Backend, workload: WorkloadConfig, cases: Sequence[LatencyCase]) -> None:
    """Tells a peer the largest batch before its first, since some size their cache by it."""
    backend.prepare(
        max_num_seqs=max(case.batch_size for case in cases),
        max_total_len=max(case.total_len for case in cases),
        params=[workload.sampling(cases[0].output_len)],
    )
