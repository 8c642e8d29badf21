"""The interface of an engine, ours or a peer, for `experiments.latency` and `.throughput`. No JAX here."""

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moejax.core.errors import MoejaxError, RequestError
from moejax.core.scheduling import SchedulingConfig
from moejax.engine.requests.api import RequestOptions, RequestOutput, SamplingParams
from moejax.engine.stats import StepRecord


class BackendError(MoejaxError, RuntimeError):
    """A backend cannot be had, or has failed. The text names the backend and says what to do."""


class Backend(abc.ABC):
    """An engine with a model, behind the members that a measurement uses.

    All instants are `time.perf_counter()` seconds of this process. Each output token has its own: a backend
    that cannot know them says in `describe` how they were come by.

    Attributes:
        name: what the result's rows call it.
        vocab_size: token ids are below it.
        max_model_len: most tokens of prompt and output together; None where it is not known.
        max_num_seqs: most sequences that it runs at a time; None where it is not known.
        batching: how requests that arrive over time share its steps.
        encode: text → token ids by the model's tokenizer; None without one.
        checkpoint: the model's folder, whose content provenance names; None where there is none.
        seed: of its own random streams; None if it has none.
        on_step: told of every step while requests that arrive over time are served, where there are steps.
    """

    name: str
    vocab_size: int
    max_model_len: int | None
    max_num_seqs: int | None
    batching: str
    encode: Callable[[str], Sequence[int]] | None
    checkpoint: Path | None
    seed: int | None
    on_step: Callable[[StepRecord], None] | None

    @property
    def itl_known(self) -> bool:
        """Whether every token's instant was seen; else latencies between tokens are left out."""
        return True

    @property
    def scheduling(self) -> SchedulingConfig:
        """What classes of requests ask, and tenants weigh."""
        return SchedulingConfig()

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Facts for the result and its provenance: versions, weights, dtype, threads; as JSON's own types."""

    @abc.abstractmethod
    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Completes the prompts together and returns once all have ended.

        Raises:
            BackendError: it died or fell silent.
            RequestError: it cannot do what `params` asks.
        """

    @abc.abstractmethod
    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        """Queues a request and returns its output, which `step` fills. Peers serve all classes and tenants
        alike."""

    @abc.abstractmethod
    def step(self) -> bool:
        """Moves on what was submitted; False if there was nothing to do."""

    @abc.abstractmethod
    def abort(self, request_id: str) -> None:
        """Ends a submitted request with what it has."""

    def check(self, params: SamplingParams) -> None:
        """Raises `RequestError` where `params` asks more than temperature, top_k, top_p, min_p, a seed, a
        length and whether to stop at the end of sequence."""
        for field, value in vars(params).items():
            if field not in _EVERYWHERE and value != getattr(_USUAL, field):
                raise RequestError(f"backend {self.name} has no {field}={value!r}; backend=moejax does")

    def prepare(  # noqa: B027 (nothing to prepare)
        self, *, max_num_seqs: int, max_total_len: int, params: Sequence[SamplingParams]
    ) -> None:
        """Told before the first request of at most how many at once, of how many tokens and of what kind."""

    def stats(self) -> dict[str, Any]:
        """`block_size`, tokens to a cache block (None without blocks), and `failed_steps` since the last
        `reset_stats`."""
        return {"block_size": None, "failed_steps": 0}

    def reset_stats(self) -> None:  # noqa: B027 (nothing is counted)
        """Starts the counts of `stats` afresh."""

    def memory(self) -> dict[str, int | float | None]:
        """Returns what is known of the glossary's "Memory"; nothing is estimated."""
        return {}

    def close(self) -> None:  # noqa: B027 (nothing is held)
        """Ends whatever it runs outside this process. May be called twice."""


# What every peer does; the workloads here ask for no more.
_EVERYWHERE = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
_USUAL = SamplingParams()
