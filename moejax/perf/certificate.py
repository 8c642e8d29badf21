"""What each device must hold for a run, part by part, against what it has; and what would make it fit."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.words import byte_words
from moejax.perf.memory import StageMemory
from moejax.perf.sizes import DTYPE_BYTES, KV_CODE_BYTES, PLAIN_KEYS, attention_params, state_bytes

STEP_ERROR = 0.3
"""Share that the formula's steps may be off by (docs/log.md); nothing is refused for less."""
_WIDE = 4
"""Bytes of a number that XLA:CPU computes with, whatever it is stored in."""
_TILE, _PLAIN_QUERIES = 32, 128
"""Queries that a loop over a prompt's chunk takes at a time, and in latent attention's plain form."""
_BLOCK_ROWS, _KERNEL_ROWS = 128, 16
"""Rows past the end of those sorted by expert; rows that the GPU kernels' tiles add to an expert's."""
_GREEDY, _SAMPLED = 3, 8
"""Float32 arrays `[rows, V]` alive at one time to sample greedily, and in any mode."""
_CODES = 1 << 18
"""Keys' or values' codes that are wide at one time; a segment widens 1 << 16 at a time."""

Change = Mapping[str, Any]
"""Settings by their keys on the command line."""


@dataclass(frozen=True)
class Certificate:
    """Bytes on each device of the fullest pipeline stage.

    Attributes:
        held: weights and cache.
        step: what the largest step needs beside these, by XLA's own analysis if `compiled`, else by formula.
        beside: counts of tokens for penalties; weights and cache of a model that drafts; the host's stores of
            blocks, where devices are the host's.
        limit: what the device has for all of it; None: not known.
    """

    held: StageMemory
    step: float
    beside: float = 0.0
    limit: float | None = None
    compiled: bool = False

    @property
    def total(self) -> float:
        """Returns the bytes of all parts."""
        return self.held.total + self.step + self.beside

    @property
    def fits(self) -> bool:
        """Tells whether the parts fit, or might, as far as the formula is off; True without a limit."""
        return self._within(-STEP_ERROR)

    @property
    def certain(self) -> bool:
        """Tells whether the parts fit however far the formula is off."""
        return self._within(STEP_ERROR)

    def _within(self, error: float) -> bool:
        off = 0.0 if self.compiled else error * self.step
        return self.limit is None or self.total + off <= self.limit

    def parts(self) -> str:
        """Writes `weights 2.1 GB (experts 1.9 GB, …), cache 1.0 GB, largest step 0.1 GB (formula)`."""
        held = self.held
        rest = held.other_weights - held.attention_weights - held.embedding_weights
        weights = {"experts": held.expert_weights, "attention": held.attention_weights,
                   "embeddings": held.embedding_weights, "other": rest}  # fmt: skip
        cache = {"windows": held.window_cache, "states": held.states}
        told = f"weights {_with(held.weights, weights)}, cache {_with(held.cache, cache)}, largest step "
        told += f"{byte_words(self.step)} ({'compiled' if self.compiled else 'formula'})"
        return told + (f", beside them {byte_words(self.beside)}" if self.beside else "")

    def line(self) -> str:
        """Writes the sum, the limit and the parts on one line."""
        limit = "" if self.limit is None else f" of {byte_words(self.limit)}"
        return f"memory of a device: {byte_words(self.total)}{limit}: {self.parts()}"

    def row(self) -> dict[str, Any]:
        """Returns what the glossary has of a device's memory."""
        return {
            "device_weight_bytes": self.held.weights,
            "device_expert_weight_bytes": self.held.expert_weights,
            "device_cache_bytes": self.held.cache,
            "device_step_bytes": self.step,
            "device_memory_bytes": self.total,
        }

    def refusal(
        self,
        fits: Callable[[Change], bool],
        limits: Mapping[str, tuple[int, int]],
        weights: Sequence[Change],
        layouts: Sequence[Change],
    ) -> str:
        """Says that it does not fit, and the least changes of each kind that make it: of one setting, else of
        weights and another, else of all.

        Args:
            fits: tells whether it fits with some settings changed.
            limits: the engine's limits, each with the least and the largest value that are tried.
            weights: other formats, by falling size.
            layouts: by rising number of devices.
        """

        def lowered(base: Change) -> Iterator[Change]:
            for key, (low, high) in limits.items():
                if low <= high and fits({**base, key: low}):
                    while low < high:
                        middle = (low + high + 1) // 2
                        low, high = (middle, high) if fits({**base, key: middle}) else (low, middle - 1)
                    yield {**base, key: low}

        def first(changes: Iterator[Change] | Sequence[Change]) -> list[Change]:
            return list(itertools.islice(filter(fits, changes), 1))

        both = [{**one, **other} for one in layouts for other in weights]
        found = [*lowered({}), *first(weights), *first(layouts)]
        found = found or [*(change for one in weights[-1:] for change in lowered(one)), *first(both)]
        found = found or next((some for one in both if (some := list(lowered(one)))), [])
        ways = ", or ".join(" with ".join(f"{key}={value}" for key, value in each.items()) for each in found)
        remedy = f"what makes it fit: {ways}" if ways else "no limit, format or layout is sure to"
        return f"{self.line()} do not fit; {remedy}"


def _with(size: float, parts: Mapping[str, float]) -> str:
    """Writes a size and those of its parts that are not 0."""
    told = ", ".join(f"{name} {byte_words(part)}" for name, part in parts.items() if part)
    return byte_words(size) + (f" ({told})" if told else "")


def step_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    rows: int,
    tokens: int,
    *,
    blocks: int = 0,
    block_size: int = 0,
    kv_dtype: str | None = None,
    sampled: bool = True,
    quantized: bool = False,
    kernels: bool = False,
) -> float:
    """Returns the bytes of the largest set of arrays that a device needs at one time within a step.

    A step has alive the residual stream and what one of attention, experts, a dense MLP or the sampler needs.
    Plain XLA has loops, whose results' first values are there from the step's beginning, for every layer.
    Left out are log-probabilities of prompts; experts count as executed in blocks of rows ("grouped").

    Args:
        rows, tokens: sequences that decode, and prompt tokens beside them, of a data-parallel group; of a
            pipeline's stage those of a microbatch.
        blocks, block_size: cache blocks that plain attention of decoding rows goes over, and tokens in each.
        kv_dtype: of the cache; None: the model's.
        sampled: the sampler does all that requests can ask for; False: greedy rows only.
        quantized: weights are held as codes.
        kernels: attention and experts run on the GPU kernels.
    """
    N, D, b, k = rows + tokens, model.hidden_size, DTYPE_BYTES[model.dtype], model.num_experts_per_tok
    tensor, F = parallel.tensor_size, model.moe_intermediate_size // parallel.tp
    layers, sparse = (-(-count // parallel.pp) for count in (model.num_layers, sum(model.moe_layers)))
    spread = parallel.attention == "data" and parallel.ep > 1
    # Tokens that a device's experts see.
    seen = -(-N * (parallel.ep if spread else 1) // (parallel.dispatch_microbatches if tokens else 1))
    assigned = k * seen
    logits, first = rows * parallel.padded_vocab(model.vocab_size), 0
    if kernels:
        H, latent = model.num_heads // tensor, model.latent
        # Queries (also as latents), keys and values, and float32 outputs.
        wide = H * (model.head_dim + (model.key_dim if latent else 0)) + _stored(model, parallel)
        attention = N * (wide * b + H * (latent.kv_rank if latent else model.head_dim) * 4)
        sampler = logits * ((4 * _SAMPLED if sampled else b) + b * (tensor > 1))
        padded = assigned + min(assigned, _KERNEL_ROWS * model.num_experts // parallel.ep)
        products = padded * (F * b + D * 4)
    else:
        each, attention = _plain_attention(model, parallel, rows, tokens, blocks, block_size, kv_dtype)
        attention += attention_params(model) // tensor * _WIDE * quantized  # codes of a layer, widened
        sampler = logits * _WIDE * (_SAMPLED if sampled else _GREEDY)
        by_expert = (assigned + min(_BLOCK_ROWS, assigned)) * D
        first = (layers - 1) * each + max(sparse - 1, 0) * by_expert * b
        attention += each + by_expert * b * (sparse > 0)
        # The rows sorted by expert and their results; what biases are gathered for.
        products = (2 * by_expert + (k + 1) * seen * D * model.expert_bias) * _WIDE
    shared = 3 * N * model.shared_expert_intermediate_size // tensor * b
    experts = (shared + 2 * seen * D * b * spread + products) * (sparse > 0)
    dense = 3 * N * model.intermediate_size // tensor * b * (not all(model.moe_layers))
    return float(N * D * b + first + max(sampler, attention, experts, dense))


def _stored(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Returns the numbers of a token in one layer's cache, on one device."""
    return model.kv_vectors * model.num_kv_heads // parallel.kv_split(model.num_kv_heads) * model.key_dim


def _plain_attention(
    model: ModelConfig, parallel: ParallelConfig, rows: int, tokens: int, blocks: int, block_size: int,
    kv_dtype: str | None,
) -> tuple[int, int]:  # fmt: skip
    """Returns bytes of plain XLA attention: its loop's first value of each layer, and what a layer needs."""
    b, H, Dh = DTYPE_BYTES[model.dtype], model.num_heads // parallel.tensor_size, model.head_dim
    N, latent, stored = rows + tokens, model.latent, _stored(model, parallel)
    width = Dh if latent is None else latent.kv_rank
    each = needs = 0
    if tokens and latent is None:
        each = (tokens + _TILE) * H * width * b
        needs = N * (3 * H * Dh + model.hidden_size + 2 * stored) * _WIDE
    elif tokens and latent is not None:
        # Both forms' results, running sums, and a turn of the plain form: its scores, its keys and values.
        needs = N * (H * (Dh + model.key_dim) + model.hidden_size + 2 * stored) * _WIDE
        needs += (2 * tokens + _TILE) * H * width * b
        needs += (tokens + _PLAIN_QUERIES) * H * (latent.value_dim + 2) * 4
        turn = 2 * min(tokens, _PLAIN_QUERIES) + latent.nope_dim + latent.value_dim
        needs += PLAIN_KEYS * H * turn * _WIDE
    if any(model.linear_layers):
        # Queries, keys, values and gates, padded and not; states before and after.
        states = 2 * rows * state_bytes(model, parallel.tensor_size)
        needs = max(needs, N * (9 * H * Dh + model.hidden_size) * _WIDE + states)
    # Queries and results of every block; blocks of latents are turned, codes and 16 bits widened.
    met = blocks * H * (max(2 * width, model.key_dim + 2 * block_size) + rows) * _WIDE
    met += blocks * block_size * width * _WIDE if latent else 0
    if kv_dtype in KV_CODE_BYTES or (b < _WIDE and not latent):
        most = model.kv_vectors * _CODES if kv_dtype in KV_CODE_BYTES else blocks * block_size * stored
        met += min(blocks * block_size * stored, most) * _WIDE
    return each, max(needs, met)
