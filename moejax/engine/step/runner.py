"""The protocol by which the loop has steps computed, on devices or by the tests' fake. No JAX here."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from moejax.engine.requests.api import Logprob
from moejax.engine.scheduling.plan import Plan


class StepResult(NamedTuple):
    """The result of a step.

    Attributes:
        tokens: one a row of the plan; of rows that sample nothing it is to be ignored.
        logprobs: one a row, None for rows that did not ask; None if no row did.
        prompt_logprobs: for every token of the plan's chunks in order, of the prompt token that follows it,
            None where that is not asked for; None if it is nowhere.
        padded_tokens: tokens that were computed, padding included.
        mass: float `[rows, blocks]`, the attention that a row's queries gave each block of its sequence,
            where a policy goes by it (`moejax.engine.scheduling.eviction`).
    """

    tokens: list[int]
    logprobs: list[Logprob | None] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    padded_tokens: int = 0
    mass: np.ndarray | None = None


class Runner(Protocol):
    """Runs plans in the order in which they are launched.

    `launch` must take what it needs from the plan's sequences before it returns, since the scheduler goes on
    changing them; it need not wait for the result, `collect` does. Between two of them the newest token of
    a sequence may exist only here: a row whose `computed` position lies past `Sequence.tokens` continues
    from the token that its slot sampled last.
    """

    def launch(self, plan: Plan) -> Any:
        """Starts a step and returns a handle for `collect`."""
        ...

    def ready(self, handle: Any) -> bool:
        """Tells, at once, whether a launched step's tokens are there to be read."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Waits for a launched step."""
        ...

    def save(self, plan: Plan) -> None:
        """Copies a plan's `saves`, all that it has, to the host's store after the steps launched before."""
        ...

    def reset(self) -> None:
        """Forgets all sequences' state, after a failed step. They will be computed anew."""
        ...
