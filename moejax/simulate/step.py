"""Simulated duration of a step: operations of every layer, collectives, and what the host adds.

    step = host work that nothing hides + sum over pipeline stages of (products + attention + experts
           + collectives + small operations)

What depends on the number of tokens alone is computed once for each number; attention anew in each step, of
the sequences' mean length. Experts go by a routing law's hits and by the device with the most rows. Data
groups that exchange tokens wait for the one with the most attention. Host arithmetic.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from moejax.core.checked import Checked, NonNegativeNumber, PositiveNumber
from moejax.core.config import ModelConfig
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.engine.scheduling.plan import Plan, StepPlan
from moejax.moe.exchange_cost import exchange_cost
from moejax.perf.comm import CommTerm, Exchange, step_comm
from moejax.perf.links import spread
from moejax.perf.operation_costs import attribute
from moejax.perf.sizes import attention_sizes, state_bytes
from moejax.simulate.kernels import Estimate, ExpertShape, HeadShape, Kernels
from moejax.simulate.routing import Load, Loads, RoutingLaw
from moejax.simulate.tables import SOURCES

_LAUNCHES, _EXPERT_LAUNCHES = 6, 2
"""Small operations of a layer between its products in a compiled step, and those of a router besides."""

OPERATIONS = ("gemm", "attention", "experts", "collective", "small", "host")
"""Kinds of operations that a step's time is a sum of."""


@dataclass(frozen=True)
class HostCosts(Checked, section="simulate.host"):
    """What an engine adds to its kernels' times, in seconds where nothing else is said.

    Attributes:
        step_s: of each step, that the device waits for.
        row_s: of each sequence in it.
        token_s: of each token of a prompt in it.
        layer_s: of each layer of a step with prompts, whose operations are not launched as one graph.
        request_s: of each request, before its first token is seen (socket, tokenizer).
        factor: on all device time.
    """

    step_s: NonNegativeNumber = 1e-3
    row_s: NonNegativeNumber = 5e-6
    token_s: NonNegativeNumber = 0.0
    layer_s: NonNegativeNumber = 0.0
    request_s: NonNegativeNumber = 0.0
    factor: PositiveNumber = 1.0


class Part(NamedTuple):
    """Seconds of one kind of operation from one source, over all layers."""

    op: str
    source: str
    seconds: float


class StepTime(NamedTuple):
    """A step's simulated duration, and its parts."""

    seconds: float
    parts: tuple[Part, ...]


class GroupWork(NamedTuple):
    """The work of one data-parallel group in a step.

    Attributes:
        decodes, context: sequences that compute one token, and tokens that all of them see together.
        chunks: parts of prompts: (tokens, tokens that the last of them sees).
        sampled: rows whose next token is sampled.
    """

    decodes: int
    context: int
    chunks: tuple[tuple[int, int], ...]
    sampled: int

    @property
    def tokens(self) -> int:
        return self.decodes + sum(count for count, _ in self.chunks)

    @classmethod
    def of(cls, plan: StepPlan) -> "GroupWork":
        """Returns what a group's plan computes."""
        chunks = tuple([(chunk.count, chunk.start + chunk.count) for chunk in plan.chunks])
        context = sum(plan.positions) + len(plan.positions)
        return cls(len(plan.decodes), context, chunks, len(plan.decodes) + sum(c.last for c in plan.chunks))


@dataclass
class StepDurations:
    """Durations of one engine's steps on one device kind.

    Attributes:
        kernels: of the device.
        routing: the law of the experts' loads.
        host: what the engine adds.
        seed: of the law's draws.
        stages: layers of each pipeline stage; None: all in one.
        moe: how experts are executed.
    """

    model: ModelConfig
    parallel: ParallelConfig
    kernels: Kernels
    routing: RoutingLaw
    host: HostCosts = field(default_factory=HostCosts)
    seed: int = 0
    stages: Sequence[Sequence[int]] | None = None
    moe: MoeConfig = field(default_factory=MoeConfig)

    def __post_init__(self) -> None:
        model, parallel, split = self.model, self.parallel, self.parallel.tensor_size
        kv = parallel.kv_split(model.num_kv_heads)
        self.heads = HeadShape(
            model.num_heads // split, model.num_kv_heads // kv, model.key_dim, model.kv_vectors
        )
        physical = model.num_experts + parallel.redundant_experts
        self.experts = ExpertShape(
            model.hidden_size, model.moe_intermediate_size // parallel.tp, physical // parallel.ep
        )
        self.loads = self.routing.loads(
            model.num_experts, model.num_experts_per_tok, parallel.ep, self.seed,
            redundant=parallel.redundant_experts,
        )  # fmt: skip
        self.meeting = parallel.ep if parallel.attention == "data" else 1
        self.parts = self.stages or [range(model.num_layers)]
        self.windows = [
            Counter(model.sliding_windows[layer] for layer in stage if model.paged_layers[layer])
            for stage in self.parts
        ]
        ops = attribute(
            model, new_tokens=[1000], context=[1000], phase="prefill",
            hits=[model.num_experts if sparse else 0 for sparse in model.moe_layers],
        )  # fmt: skip
        between = ("norm", "rope", "kv_write", "router", "embedding")
        self.small_bytes = (
            sum(op.activation_bytes for op in ops if op.operation in between) / 1000 / model.num_layers
        )
        self._of_tokens = lru_cache(maxsize=65536)(self._tokens)

    def time(self, plan: Plan) -> StepTime:
        """Returns the duration of a scheduler's plan."""
        return self.of([GroupWork.of(part) for part in plan.groups])

    def of(self, groups: list[GroupWork], loads: Loads | None = None) -> StepTime:
        """Returns the duration of a step of all groups; `loads` are the experts' where they move."""
        pp, model, pieces = self.parallel.pp, self.model, self.pieces(groups)
        fullest = max(groups, key=lambda group: group.tokens)
        tokens, sampled = -(-fullest.tokens // pieces), -(-fullest.sampled // pieces)
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        slowest = total = 0.0
        for stage in range(pp):
            parts = [*self._of_tokens(stage, tokens, sampled, self.together(groups, pieces), loads)]
            attention = max((self._attention(stage, group) for group in groups), key=_sum)
            parts += [Part(op, source, s / pieces) for op, source, s in attention]
            for op, source, s in parts:
                seconds[op, source] += s
            one = sum(part.seconds for part in parts)
            slowest, total = max(slowest, one), total + one
        factor = self.host.factor * (total + (pieces - 1) * slowest) / total if total else 1.0
        prompts = sum(count for count, _ in fullest.chunks)
        host = self.host.step_s + self.host.row_s * (fullest.decodes + len(fullest.chunks))
        host += self.host.token_s * prompts + (self.host.layer_s * model.num_layers if prompts else 0.0)
        found = [Part(op, source, s * factor) for (op, source), s in seconds.items() if s]
        return StepTime(host + total * factor, (*found, Part("host", "roofline", host)))

    def pieces(self, groups: Sequence[GroupWork]) -> int:
        """Returns the number of microbatches that a step is computed in."""
        pp, most = self.parallel.pp, max(group.tokens for group in groups)
        return min(self.parallel.microbatches or pp, max(1, most)) if pp > 1 else 1

    def together(self, groups: Sequence[GroupWork], pieces: int) -> int:
        """Returns a microbatch's tokens that come together at the experts, of the group with the most."""
        each = self.meeting
        sums = [sum(g.tokens for g in groups[i : i + each]) for i in range(0, len(groups), each)]
        return -(-max(sums) // pieces)

    def _attention(self, stage: int, group: GroupWork) -> list[Part]:
        parts: list[Part] = []
        for window, layers in self.windows[stage].items():
            mean, seen = group.context / group.decodes if group.decodes else 0.0, group.chunks
            if window is not None:
                mean = min(mean, float(window))
                seen = tuple((count, min(end, count + window)) for count, end in seen)
            for estimate in self.kernels.attention(self.heads, group.decodes, mean, seen):
                parts.append(Part("attention", estimate.source, layers * estimate.seconds))
        return parts

    def _tokens(
        self, stage: int, tokens: int, sampled: int, together: int, loads: Loads | None
    ) -> list[Part]:
        """Returns what a stage's step costs besides attention and the host."""
        if not tokens:
            return []
        model, parallel, kernels = self.model, self.parallel, self.kernels
        D, split, layers = model.hidden_size, parallel.tensor_size, self.parts[stage]
        sparse = sum(model.moe_layers[layer] for layer in layers)
        linear = sum(not model.paged_layers[layer] for layer in layers)
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

        def add(op: str, count: float, estimate: Estimate) -> None:
            seconds[op, estimate.source] += count * estimate.seconds

        def mlp(count: int, hidden: int) -> None:
            if count and hidden:
                add("gemm", count, kernels.gemm(tokens, 2 * hidden // split, D))
                add("gemm", count, kernels.gemm(tokens, D, hidden // split))

        for lin, count in ((False, len(layers) - linear), (True, linear)):
            if count:
                sizes = attention_sizes(model, lin)
                add("gemm", count, kernels.gemm(tokens, max(1, sizes.qkv_params // D // split), D))
                add("gemm", count, kernels.gemm(tokens, D, sizes.outputs // split))
        if linear:
            add("small", linear, kernels.small(2 * sampled * state_bytes(model, split), 1))
        mlp(len(layers) - sparse, model.intermediate_size)
        if sparse:
            mlp(sparse, model.shared_expert_intermediate_size)
            add("gemm", sparse, kernels.gemm(tokens, model.num_experts, D))
            load = self._experts(together, loads or self.loads)
            add("experts", sparse, kernels.experts(self.experts, load.hits, load.rows))
        launches = _LAUNCHES * len(layers) + _EXPERT_LAUNCHES * sparse
        add("small", 1, kernels.small(tokens * self.small_bytes * len(layers), launches))
        if stage == parallel.pp - 1:
            vocab = parallel.padded_vocab(model.vocab_size) // split
            add("gemm", 1, kernels.gemm(sampled, vocab, D))
            add("small", 1, kernels.small(8.0 * sampled * vocab, 4))
        for term, estimate in self._comm(stage, tokens, sampled):
            add("collective", term.count, estimate)
        return [Part(op, source, s) for (op, source), s in seconds.items()]

    def _experts(self, tokens: int, loads: Loads) -> Load:
        """Returns the experts' load; with a capacity every place of every expert is computed, and "dense" has
        all experts compute all tokens."""
        if self.moe.execution == "grouped":
            return loads.at(tokens)
        model, size, dense = self.model, self.experts.experts, self.moe.execution == "dense"
        rows = tokens if dense else self.moe.capacity(tokens, model.num_experts_per_tok, model.num_experts)
        return Load(float(size), float(size * rows))

    def _comm(self, stage: int, tokens: int, sampled: int) -> list[tuple[CommTerm, Estimate]]:
        """Returns the collectives of one execution each, by the exchange that is faster."""
        model, parallel = self.model, self.parallel
        exchanged = self.meeting > 1 and any(model.moe_layers)
        choices = []
        for method in ("allgather", "all_to_all") if exchanged else ("none",):
            exchange = exchange_cost(method, model, parallel, tokens) if exchanged else Exchange()
            terms = step_comm(
                model, parallel, tokens=tokens, rows=sampled, exchange=exchange, layers=self.parts[stage]
            )
            timed = []
            for term in terms:
                group, nodes = spread(term.role, parallel, model)
                timed.append((term, self.kernels.collective(term.kind, term.operand_bytes, group, nodes)))
            choices.append(timed)
        return min(choices, key=lambda timed: sum(term.count * one.seconds for term, one in timed))


def _sum(parts: Iterable[Part]) -> float:
    return sum(part.seconds for part in parts)


def time_row(
    seconds: Mapping[tuple[str, str], float], spreads: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Returns what simulated seconds by (kind of operation, source) tell: `from_SOURCE` and `time_OPERATION`,
    shares of all of them, and `relative_spread`, half of the relative width of their 90 % interval, kinds of
    operations independent.

    Args:
        spreads: kind of operation → source → half of its relative width; "engine" → "all" is of the whole.
    """
    shares = dict.fromkeys([*(f"from_{name}" for name in SOURCES), *(f"time_{op}" for op in OPERATIONS)], 0.0)
    by_op: defaultdict[str, float] = defaultdict(float)
    for (op, source), spent in seconds.items():
        share = spent / sum(seconds.values())
        shares[f"from_{source}"] += share
        shares[f"time_{op}"] += share
        by_op[op] += share * spreads.get(op, {}).get(source, 0.5)
    engine = spreads.get("engine", {}).get("all", 0.0)
    return {"relative_spread": math.hypot(engine, *by_op.values()), **shares}
