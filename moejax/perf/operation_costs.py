"""Floating-point operations and bytes of a step, by layer and by operation.

From the configuration, the lengths and the experts that were really visited; numbers only, no JAX. The names
of the operations are also the `jax.named_scope`s of the model, by which a profile is held against this
account (`moejax.bench.profile`).

What is counted, for a step that computes `new[r]` tokens of row r, whose cache then holds `context[r]`:

    flops             products of matrices, multiply-adds times two: with weights (the experts that a token is
                      routed to), and in attention with each key and value that a query sees
    weight_bytes      matrices, as they are held, once a step: of the experts those that were visited
    cache_bytes       keys and values: those of the step written, the earlier ones in sight read, once a row;
                      states of linear attention written once a row, and read where there are earlier tokens
    activation_bytes  an estimate of the rest: what operations hand each other, embeddings that are looked up,
                      norms and biases; each read and written once

Latent attention counts in the form that each row takes in XLA's programs (`moejax.perf.sizes.
takes_plain_form`). GPU kernels stay with the absorbed form, and compute more.

The first three are the least that any program must do, and bounds are made of them alone. The fourth is what
a good program keeps in caches or fuses away, so that no bound may count it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moejax.core.checked import check
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import Hardware
from moejax.perf.sizes import (
    DTYPE_BYTES,
    HeldWeights,
    attention_sizes,
    kv_token_bytes,
    state_bytes,
    takes_plain_form,
)

Phase = Literal["prefill", "decode", "mixed"]

OPERATIONS: dict[str, str] = {
    "inputs": "unpacking the batch, positions, masks",
    "embedding": "tokens to vectors",
    "rope": "rotary embedding: its tables, and turning queries and keys",
    "norm": "RMS norms with the residual's addition",
    "qkv_projection": "queries, keys and values",
    "kv_write": "new keys and values into the cache, or into states",
    "attention": "scores, softmax and sums of values over the cache, or products with states",
    "output_projection": "attention's output",
    "router": "the router's product, softmax and top k",
    "experts_dispatch": "tokens sorted by expert, and their outputs put together again",
    "experts_gate_up": "the routed experts' gate and up products",
    "experts_down": "the routed experts' down product",
    "shared_expert": "the expert that every token visits, and its gate",
    "mlp": "the feed-forward of a dense layer",
    "lm_head": "logits",
    "sampling": "logits to tokens",
    "other": "weights that belong to none of these",
}
"""Name → what it is, in the order in which a step runs them."""


@dataclass(frozen=True)
class OpCost:
    """Work of one operation of one layer (None: outside of the layers) in a step; see the module."""

    layer: int | None
    operation: str
    phase: str
    flops: float = 0.0
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """The least that has to be moved: weights and cache."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte; None where no byte has to be moved."""
        return self.flops / self.bytes if self.bytes else None


def attribute(
    config: ModelConfig,
    *,
    new_tokens: Sequence[float] | np.ndarray,
    context: Sequence[float] | np.ndarray,
    phase: Phase,
    hits: Sequence[float] | np.ndarray,
    logits: float | None = None,
    assignments: Sequence[float] | np.ndarray | None = None,
    kv_dtype: str | None = None,
    weights: HeldWeights | None = None,
) -> list[OpCost]:
    """Counts the work of one step, or of a mean one.

    Args:
        new_tokens: `[R]`, tokens that the step computes of each row; 1 in decode.
        context: `[R]`, tokens in the row's cache at the step's end, the new ones included; means will do.
        phase: what the rows are, for the record.
        hits: `[L]`, distinct experts that the step visits in each layer (0 in a dense one).
        logits: rows whose next token is sampled; None: each row's.
        assignments: `[L]`, (token, expert) pairs that ran, where a capacity has dropped some; None: all.
        kv_dtype: of the cache; None: the configuration's dtype.
        weights: weights as they are held (`moejax.perf.memory.held_weights`); None: all in the
            configuration's dtype.

    Raises:
        ConfigError: lengths that are none, or hits for another number of layers.
    """
    new, seen = np.asarray(new_tokens, np.float64), np.asarray(context, np.float64)
    visited = np.asarray(hits, np.float64)
    check("phase", phase, Phase)
    if new.shape != seen.shape or new.ndim != 1 or not new.size or (new <= 0).any() or (seen < new).any():
        raise ConfigError(
            f"a step's rows need new tokens above 0 and a context that holds them, got {new} and {seen}"
        )
    if visited.shape != (config.num_layers,):
        raise ConfigError(
            f"expert hits of shape {visited.shape} for {config.num_layers} layers; give one each"
        )
    count = _Counter(config, kv_dtype or config.dtype, weights, phase)
    sampled = float(new.size if logits is None else logits)
    tokens = float(new.sum())
    ops = [count.embedding(tokens), count.rope(tokens)]
    for layer in range(config.num_layers):
        ran = tokens * config.num_experts_per_tok if assignments is None else float(assignments[layer])
        ops += [
            *count.attention(layer, new, seen),
            *count.feed_forward(layer, tokens, float(visited[layer]), ran),
        ]
    return [*ops, *count.head(tokens, sampled)]


class _Counter:
    """The formulas of one model."""

    def __init__(self, config: ModelConfig, kv_dtype: str, weights: HeldWeights | None, phase: str) -> None:
        self.config, self.held_weights, self.phase = config, weights, phase
        self.size = DTYPE_BYTES[config.dtype]
        self.kv_bytes = kv_token_bytes(config, kv_dtype)

    def weights(self, layer: int | None, operation: str, params: float) -> float:
        """Returns the bytes of an operation's matrices; of one expert where it is the experts'."""
        if self.held_weights is None:
            return params * self.size
        return self.held_weights.get((layer, operation), 0.0)

    def op(
        self, layer: int | None, operation: str, *, flops: float = 0.0, weights: float = 0.0,
        cache: float = 0.0, elements: float = 0.0,
    ) -> OpCost:  # fmt: skip
        """Returns an operation's cost; `elements` are read or written between operations."""
        return OpCost(layer, operation, self.phase, flops, weights, cache, elements * self.size)

    def product(
        self, layer: int | None, operation: str, rows: float, params: float, width: float, hits: float = 1.0
    ) -> OpCost:
        """Costs rows times matrices of `params` numbers (of which those of `hits` experts are read); each row
        reads and writes `width` numbers in all."""
        weights = hits * self.weights(layer, operation, params) if rows else 0.0
        return self.op(layer, operation, flops=2 * rows * params, weights=weights, elements=rows * width)

    def embedding(self, tokens: float) -> OpCost:
        return self.op(None, "embedding", elements=2 * tokens * self.config.hidden_size)

    def rope(self, tokens: float) -> OpCost:
        turned = (self.config.num_heads + self.config.num_kv_heads) * self.config.rotary_dim
        return self.op(None, "rope", elements=2 * tokens * turned * sum(self.config.paged_layers))

    def attention(self, layer: int, new: np.ndarray, seen: np.ndarray) -> list[OpCost]:
        config, tokens = self.config, float(new.sum())
        linear = not config.paged_layers[layer]
        D, sizes = config.hidden_size, attention_sizes(config, linear)
        normed = sizes.queries + sizes.stored // 2
        if linear:
            normed = sizes.outputs
        elif config.latent is not None:
            normed = (config.latent.q_rank or 0) + config.latent.kv_rank
        elif config.qk_norm == "none":
            normed = 0
        normed += D * (1 + config.post_norms)
        window = config.sliding_windows[layer]
        pairs, plain = query_key_pairs(new, seen, window), np.zeros(len(new), bool)
        if config.latent is not None and self.phase != "decode":
            plain = takes_plain_form(config.latent, new, seen)
        flops = float((pairs * np.where(plain, sizes.plain_pair_flops, sizes.pair_flops)).sum())
        # Keys and values are made of each latent in sight, not of the new ones alone.
        made = 2 * float((seen - new)[plain].sum()) * sizes.made_params
        projected = self.product(
            layer, "qkv_projection", tokens, sizes.qkv_params, D + sizes.queries + sizes.stored
        )
        earlier = seen - new if window is None else np.minimum(seen - new, window - 1)
        written, read = tokens * self.kv_bytes, float(earlier.sum()) * self.kv_bytes
        if linear:
            state = state_bytes(config)
            written, read = new.size * state, float((earlier > 0).sum()) * state
        return [
            self.norm(layer, tokens, normed),
            replace(projected, flops=projected.flops + made),
            self.op(layer, "kv_write", cache=written, elements=tokens * sizes.stored),
            self.op(
                layer, "attention", flops=flops + tokens * sizes.token_flops, cache=read,
                elements=tokens * (sizes.queries + sizes.outputs),
            ),
            self.product(layer, "output_projection", tokens, sizes.outputs * D, sizes.outputs + D),
        ]  # fmt: skip

    def norm(self, layer: int | None, tokens: float, width: int) -> OpCost:
        """Costs reading sum and residual, writing sum and result."""
        return self.op(layer, "norm", elements=4 * tokens * width + width)

    def feed_forward(self, layer: int, tokens: float, hits: float, assignments: float) -> list[OpCost]:
        config = self.config
        D, F, E = config.hidden_size, config.moe_intermediate_size, config.num_experts
        norm = self.norm(layer, tokens, D * (1 + config.post_norms))
        if not config.moe_layers[layer]:
            hidden = config.intermediate_size
            return [norm, self.product(layer, "mlp", tokens, 3 * D * hidden, 2 * D + 4 * hidden)]
        router, gates = config.router, config.router.groups if config.router.group_gate else 0
        # A few tokens' groups are read alone.
        share = tokens * router.top_groups / gates if 4 * tokens * router.top_groups <= gates else 1.0
        ops = [
            norm,
            self.product(layer, "router", tokens, D * (E + gates), D + 2 * E, share),
            # Rows are gathered by expert, and come back weighted.
            self.op(layer, "experts_dispatch", elements=2 * assignments * D + tokens * D + assignments * D),
            self.product(layer, "experts_gate_up", assignments, 2 * D * F, D + 2 * F, hits),
            self.product(layer, "experts_down", assignments, F * D, F + D, hits),
        ]
        if shared := config.shared_expert_intermediate_size:
            # Its gate, of D numbers, is left out of the formula, but not of weights as held.
            ops.append(self.product(layer, "shared_expert", tokens, 3 * D * shared, 2 * D + 4 * shared))
        other = 0.0 if self.held_weights is None else self.held_weights.get((layer, "other"), 0.0)
        return [*ops, self.op(layer, "other", weights=other)] if other else ops

    def head(self, tokens: float, sampled: float) -> list[OpCost]:
        D, V = self.config.hidden_size, self.config.vocab_size
        ops = [
            self.norm(None, tokens, D),
            self.product(None, "lm_head", sampled, D * V, D + V),
            self.op(None, "sampling", elements=sampled * V),
        ]
        other = 0.0 if self.held_weights is None else self.held_weights.get((None, "other"), 0.0)
        return [*ops, self.op(None, "other", weights=other)] if other else ops


def query_key_pairs(new: np.ndarray, seen: np.ndarray, window: int | None) -> np.ndarray:
    """Returns `[R]`: keys that a row's new queries see together, each itself and earlier ones in its window.

    The last of n new tokens sees min(c, w) of c; the one before it min(c - 1, w), and so on.
    """
    if window is None:
        return new * seen - new * (new - 1) / 2
    first = seen - new
    # Those of the new queries that see less than a whole window: their keys rise by one each.
    short = np.clip(np.floor(window - first), 0, new)
    return short * first + short * (short + 1) / 2 + (new - short) * window


def by_operation(ops: Iterable[OpCost]) -> list[OpCost]:
    """Sums over the layers, in the order of `OPERATIONS`; their layer is None."""
    sums = summed(replace(op, layer=None) for op in ops)
    order = list(OPERATIONS)
    return sorted(sums, key=lambda op: (op.phase, order.index(op.operation)))


def total(ops: Iterable[OpCost]) -> OpCost:
    """Returns the sum over everything, as operation and phase "all"."""
    sums = summed(replace(op, layer=None, operation="all", phase="all") for op in ops)
    return sums[0] if sums else OpCost(None, "all", "all")


SUMS = ("flops", "weight_bytes", "cache_bytes", "activation_bytes")


def summed(ops: Iterable[OpCost]) -> list[OpCost]:
    """Returns one sum for each layer, operation and phase."""
    groups: dict[object, list[OpCost]] = {}
    for op in ops:
        groups.setdefault((op.layer, op.operation, op.phase), []).append(op)
    return [
        replace(group[0], **{name: sum(getattr(op, name) for op in group) for name in SUMS})
        for group in groups.values()
    ]


@dataclass(frozen=True)
class Bound:
    """The least time in seconds that bytes and FLOPs allow, and what sets it, "memory" or "compute"."""

    seconds: float
    limit: str


def bound(flops: float, bytes_: float, peak: float, bandwidth: float) -> Bound:
    """Returns the bound of the roofline (Williams, Waterman and Patterson, 2009), given FLOPs, bytes, FLOP/s
    and bytes/s."""
    memory, compute = bytes_ / bandwidth, flops / peak
    return Bound(max(memory, compute), "memory" if memory >= compute else "compute")


def step_bound(cost: OpCost, hardware: Hardware | None, dtype: str) -> Bound | None:
    """Returns a step's bound; None without a known bandwidth. Compute counts where its peak is known."""
    if hardware is None or hardware.bandwidth is None:
        return None
    return bound(cost.flops, cost.bytes, hardware.flops.get(dtype, float("inf")), hardware.bandwidth)


@dataclass(frozen=True)
class Bounds:
    """The least time of some operations on one device.

    Attributes:
        each: of every operation by itself, in their order.
        whole: if all could overlap, as one roofline: no program is faster.
        in_turn: seconds if none overlaps another, and each is as fast as it can be.
    """

    each: tuple[Bound, ...]
    whole: Bound
    in_turn: float


def bounds(ops: Sequence[OpCost], hardware: Hardware, dtype: str) -> Bounds:
    """Returns time bounds by the roofline, of all `ops` together and one by one. Activations do not count.

    Args:
        ops: one step's, or any number of steps' (`attribute`, or sums of it).
        dtype: what products are computed in.

    Raises:
        ConfigError: the device's bandwidth, or its peak for that dtype, is not known.
    """
    peak, bandwidth = hardware.flops.get(dtype), hardware.bandwidth
    if not peak:
        known = ", ".join(sorted(hardware.flops)) or "none"
        raise ConfigError(
            f"hardware {hardware.kind!r} has no known peak for {dtype} (known: {known}; model.dtype chooses)"
        )
    if not bandwidth:
        raise ConfigError(f"hardware {hardware.kind!r} has no known bandwidth on this machine")
    each = tuple(bound(op.flops, op.bytes, peak, bandwidth) for op in ops)
    whole = bound(sum(op.flops for op in ops), sum(op.bytes for op in ops), peak, bandwidth)
    return Bounds(each, whole, sum(one.seconds for one in each))


@dataclass(frozen=True)
class Utilisation:
    """Used fractions of a device's peaks. None: no known peak, or one that cannot be believed for the reason
    `doubt` (`Hardware.believed`).

    `mfu` is model FLOP utilisation (PaLM, Chowdhery et al., arXiv 2204.02311, appendix B): the FLOPs that the
    model's products need, per second, over the peak. What a program computes besides (padding, experts that
    no token chose, what it computes again) raises its time and not its FLOPs.

    `mbu` is model bandwidth utilisation (Databricks, "LLM inference performance engineering: best practices",
    2023): bytes of weights and of cache that a step has to move, per second, over the peak bandwidth. Of the
    experts only those that were visited count.
    """

    mfu: float | None
    mbu: float | None
    doubt: str | None = None


def utilisation(ops: Iterable[OpCost], seconds: float, hardware: Hardware | None, dtype: str) -> Utilisation:
    """Returns the fractions of a device's peaks that `ops` used in `seconds`.

    Raises:
        ValueError: no time at all.
    """
    if not seconds > 0:
        raise ValueError(f"utilisation over {seconds} seconds")
    if hardware is None:
        return Utilisation(None, None)
    work, peak, bandwidth = total(ops), hardware.flops.get(dtype), hardware.bandwidth
    flops, moved = work.flops / seconds, work.bytes / seconds
    mfu, slow = hardware.believed("compute", dtype, flops / peak if peak else None)
    mbu, doubt = hardware.believed("memory", dtype, moved / bandwidth if bandwidth else None)
    return Utilisation(mfu, mbu, doubt or slow)
