"""How far what samples is from what is trained: the `mismatch` table of an A/B run of fixed batches.

Reinforcement learning takes tokens from an engine and their log-probabilities' gradient from a training
forward, which computes the same weights by other programs, often in another precision; in a mixture of
experts their routers then differ, too. Replaying the engine's routing in training takes that part away
("routing replay"; Zheng et al., arXiv 2507.18071; Ma et al., arXiv 2510.11370).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.bench.ab.determinism import Answers, answer, largest_batch, rows_of
from moejax.bench.ab.measure import BatchLoad, Load
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import engine_of
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.moe.router import Replay

_TOGETHER = 8  # sequences of a training forward


def check_mismatch(arms: Sequence[Arm], load: Load) -> None:
    """Raises `ConfigError` unless the first variant's weights can be called as training calls them."""
    llm = engine_of(arms[0].backend)
    if not isinstance(load, BatchLoad):
        raise ConfigError("ab.mismatch needs fixed batches: experiments.latency")
    if llm is None or llm.parallel_config.num_devices > 1 or llm.quant_report is not None:
        raise ConfigError(
            f"ab.mismatch: a training forward takes the first variant's weights, and {arms[0].name} is"
            " a peer's, on several devices or quantized; put one before it that is not"
        )


def mismatch_rows(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns a row for each of our own engines and batch size: how far the log-probabilities of the tokens
    that it samples are from those of a training forward of the first variant's weights."""
    assert isinstance(load, BatchLoad)
    _, prompts, params = largest_batch(load)
    trainer = engine_of(arms[0].backend)
    assert isinstance(trainer, LLM)
    forward = TrainingForward(trainer)
    rows = []
    for arm in arms:
        llm = engine_of(arm.backend)
        if llm is None or arm.name == CONTROL:
            continue
        sizes = sorted({case.batch_size for case, _ in load.plan})
        for size, given in zip(sizes, answer(llm, prompts, params, sizes), strict=True):
            head = {"variant": arm.name, "dtype": llm.config.dtype, "batched": f"{size} at once"}
            rows.append({**head, **_beside(forward, prompts, given)})
    return rows


class TrainingForward:
    """Whole sequences at once, as `moejax.train` computes them; compiles at the first call of a shape."""

    def __init__(self, llm: LLM) -> None:
        graph, self._state = nnx.split(llm.model)
        self.layers = [number for number, sparse in enumerate(llm.config.moe_layers) if sparse]
        self.num_experts = llm.config.num_experts

        @jax.jit
        def run(state: Any, tokens: jax.Array, targets: jax.Array, valid: jax.Array, ids: Any) -> Any:
            given = dict(zip(self.layers, jnp.moveaxis(ids, 2, 0), strict=True)) if ids is not None else {}
            replay = [
                Replay(given[i], None) if i in given else None for i in range(len(llm.config.moe_layers))
            ]
            logits, traces = nnx.merge(graph, state)(tokens, valid=valid, routing=replay, return_routing=True)
            told = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)
            return told[..., 0], jnp.stack([traces[i].ids for i in self.layers], 2) if self.layers else None

        self._run = run

    def __call__(
        self, sequences: list[list[int]], ids: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns float32 `[B, T]`, each token's log-probability after the one before, and int
        `[B, T, L, k]`, the experts of the expert layers; T is one less than the longest sequence.

        Args:
            ids: the same, to be visited instead, with the router's own weights for them.
        """
        longest = max(map(len, sequences))
        padded = np.asarray([tokens + [0] * (longest - len(tokens)) for tokens in sequences], np.int32)
        valid = np.arange(longest - 1) < np.asarray([len(tokens) for tokens in sequences])[:, None] - 1
        parts = []
        for first in range(0, len(sequences), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            told = None if ids is None else ids[some]
            parts.append(self._run(self._state, padded[some, :-1], padded[some, 1:], valid[some], told))
        logprobs, chosen = zip(*jax.device_get(parts), strict=True)
        return np.concatenate(logprobs), np.concatenate(chosen) if self.layers else None


def _beside(forward: TrainingForward, prompts: list[list[int]], given: Answers) -> dict[str, Any]:
    """Returns how far the training forward is from the engine, with its own routing and with the engine's."""
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, given.tokens, strict=True)]
    engine = np.concatenate(given.logprobs).astype(np.float64)

    def compare(logprobs: np.ndarray) -> dict[str, float]:
        """The differences of sampled tokens; KL(engine || training) by the estimator k3 (Schulman, 2020)."""
        told = [
            row[len(prompt) - 1 :][: len(mine)]
            for row, prompt, mine in zip(logprobs, prompts, given.tokens, strict=True)
        ]
        ratio = np.concatenate(told) - engine
        return {
            "logprob_difference": float(np.abs(ratio).mean()),
            "largest_logprob_difference": float(np.abs(ratio).max()),
            "sampled_kl": float((np.expm1(ratio) - ratio).mean()),
        }

    logprobs, chosen = forward(sequences)
    row: dict[str, Any] = {"compared_tokens": len(engine), **compare(logprobs), "router_flips": None}
    if chosen is None or given.routing is None:
        return row
    visited, capture = np.full(chosen.shape, forward.num_experts, np.int32), given.routing
    known = capture.position < chosen.shape[1]  # a token past the end may have been computed
    visited[rows_of(capture, prompts)[known], capture.position[known]] = capture.ids[known]
    real = np.arange(chosen.shape[1]) < np.asarray([len(tokens) for tokens in sequences])[:, None] - 1
    flipped = (np.sort(chosen, -1) != np.sort(visited, -1)).any(-1)
    row["router_flips"] = float(flipped[real].mean())
    replayed, _ = forward(sequences, visited)
    return row | {f"replayed_{name}": value for name, value in compare(replayed).items()}
