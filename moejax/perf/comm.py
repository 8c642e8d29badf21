"""Bytes that a device sends in one step of the engine, by operation and group of devices. Host arithmetic.

Groups are named by role, as in `moejax.sharding.axes.Axes`: "tensor", "kv", "data", "exchange", "node" and
"local"; "pipeline" is from one stage to the next. The formulas mirror the collectives in nn, moe, models and
engine; tests/sharding/test_accounting.py holds them against the compiled programs.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, unknown
from moejax.core.parallel import ParallelConfig
from moejax.perf.sizes import DTYPE_BYTES

EXCHANGES = ("none", "allgather", "all_to_all", "ragged", "hierarchical")
COLLECTIVES: dict[str, Callable[[int], float]] = {
    "all-gather": lambda g: g - 1.0,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "ragged-all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1.0,
    "collective-broadcast": lambda g: 1.0,
}
"""HLO's kinds of collectives, and how many times its operand a device of g sends (`wire_bytes`)."""
_INT = _FLOAT = 4


def wire_bytes(kind: str, operand: float, group: int) -> float:
    """Returns the bytes that each device of a group sends, by ring and direct algorithms, which send the
    least possible (Thakur, Rabenseifner and Gropp, 2005, section 4). With g devices, each with an operand:

        all-gather           (g - 1) · operand
        reduce-scatter       (g - 1) / g · operand
        all-reduce           2 (g - 1) / g · operand       (reduce-scatter, then all-gather)
        all-to-all           (g - 1) / g · operand         (also ragged, in the mean over even routing)
        collective-permute   operand                       (also broadcast)
    """
    if group <= 1:
        return 0.0
    if kind not in COLLECTIVES:
        raise ValueError(unknown("collective", kind, COLLECTIVES))
    return COLLECTIVES[kind](group) * operand


@dataclass(frozen=True)
class CommTerm:
    """Equal collectives of one operation.

    Attributes:
        operation: "embedding", "attention", "qk_norm", "output_norm", "dispatch", "combine", "experts",
            "mlp", "logits", "sampling" or "pipeline".
        kind: HLO's name of the collective.
        role: the devices that take part.
        group: how many they are.
        count: executions in a step, on each device.
        operand_bytes: what a device puts in, each time. Exact, but for "ragged" (whose rows are data).
    """

    operation: str
    kind: str
    role: str
    group: int
    count: int
    operand_bytes: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one execution."""
        return wire_bytes(self.kind, self.operand_bytes, self.group)

    @property
    def total_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return self.count * self.wire_bytes


@dataclass(frozen=True)
class Exchange:
    """Exchange of tokens (`moejax.moe.expert_parallel`), as far as bytes depend on it.

    Attributes:
        method: one of `EXCHANGES`; "none" where all expert ranks see all tokens.
        capacities: rows that a pair of devices can exchange, on each hop: a bucket of
            `exchange_size.capacity_buckets`, of which the first holds an even routing and the last the worst
            case; with a capacity `fixed_capacities`. For "ragged" one number, the rows that a device sends to
            another in the mean, itself included.
        choices: number of those buckets. With more than one a step first agrees on one.
        microbatches: parts that a step's tokens are exchanged in.
        lossy: there is a capacity, and what was dropped is counted.
    """

    method: str = "none"
    capacities: tuple[float, ...] = ()
    choices: int = 1
    microbatches: int = 1
    lossy: bool = False

    def __post_init__(self) -> None:
        if self.method not in EXCHANGES:
            raise ConfigError(f"parallel.exchange: {unknown('exchange', self.method, EXCHANGES)}")


def role_sizes(model: ModelConfig, parallel: ParallelConfig) -> dict[str, int]:
    """Devices in a group of each role."""
    exchange = parallel.ep if parallel.attention == "data" else 1
    return {
        "tensor": parallel.tensor_size,
        "kv": parallel.kv_split(model.num_kv_heads),
        "data": parallel.data_groups,
        "exchange": exchange,
        "node": parallel.expert_nodes,
        "local": parallel.ep // parallel.expert_nodes,
        "pipeline": parallel.pp,
    }


def step_comm(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    tokens: int,
    rows: int,
    exchange: Exchange | None = None,
    layers: Sequence[int] | None = None,
    split_latents: bool = False,
) -> list[CommTerm]:
    """Returns the collectives of one pass of the engine's step, of each device of a pipeline stage: rows are
    sampled, without log-probabilities, and no routing is recorded.

    Args:
        tokens: N, of one data group: rows and chunk tokens, padding included.
        rows: S, sampled rows of one data group.
        exchange: how tokens travel; needed where `parallel.attention` is "data" and ep > 1.
        layers: the stage's layers; None: all, in one stage.
        split_latents: tensor-parallel devices hold the latents of some tokens each, not all of them (context
            parallelism, which no engine here runs): all heads' queries come to every device, and what each
            has attended to, with the logarithm of its sum, goes to the heads' own.

    Raises:
        ConfigError: an exchange is needed and not given, or given where there is none.
    """
    stage_layers = range(model.num_layers) if layers is None else layers
    sizes = role_sizes(model, parallel)
    terms: list[CommTerm] = []
    itemsize = DTYPE_BYTES[model.dtype]
    hidden = tokens * model.hidden_size * itemsize
    sparse = sum(model.moe_layers[layer] for layer in stage_layers)
    first, last = stage_layers[0] == 0, stage_layers[-1] == model.num_layers - 1
    exchange = exchange or Exchange()
    if sparse and (sizes["exchange"] > 1) != (exchange.method != "none"):
        raise ConfigError(
            f"parallel.exchange={exchange.method}: {sizes['exchange']} groups of tokens are exchanged "
            f"(parallel.attention={parallel.attention}, ep={parallel.ep})"
        )

    def add(operation: str, kind: str, role: str, operand_bytes: float, count: int = 1) -> None:
        if sizes[role] > 1 and count:
            terms.append(CommTerm(operation, kind, role, sizes[role], count, operand_bytes))

    if first:
        add("embedding", "all-reduce", "tensor", hidden)
    paged = sum(model.paged_layers[layer] for layer in stage_layers)
    # The mean square of the whole projection, or of all heads' linear attention, float32 [N, 1].
    if model.qk_norm == "projection":
        add("qk_norm", "all-reduce", "tensor", tokens * _FLOAT, paged)
        add("qk_norm", "all-reduce", "kv", tokens * _FLOAT, paged)
    add("output_norm", "all-reduce", "tensor", tokens * _FLOAT, len(stage_layers) - paged)
    if split_latents and model.latent is not None:
        heads = tokens * model.num_heads
        queries = heads // sizes["tensor"] * model.key_dim * itemsize
        add("latents", "all-gather", "tensor", queries, len(stage_layers))
        parts = heads * (model.latent.kv_rank * itemsize + _FLOAT)
        add("latents", "reduce-scatter", "tensor", parts, len(stage_layers))
    add("attention", "all-reduce", "tensor", hidden, len(stage_layers))
    if sparse:
        row = model.hidden_size * itemsize
        for term in exchange_terms(exchange, parallel, tokens, row, model.num_experts_per_tok):
            add(*term, count=sparse)
    add("experts", "all-reduce", "tensor", hidden, sparse)
    add("mlp", "all-reduce", "tensor", hidden, len(stage_layers) - sparse)
    if last:
        logits = parallel.padded_vocab(model.vocab_size) // sizes["tensor"] * itemsize
        add("logits", "all-gather", "tensor", rows * logits)
        add("sampling", "all-gather", "data", rows * _INT)
    else:
        add("pipeline", "collective-permute", "pipeline", hidden)
    return terms


def exchange_terms(
    exchange: Exchange, parallel: ParallelConfig, tokens: int, row: int, top_k: int
) -> Iterator[tuple[str, str, str, float]]:
    """Yields (operation, kind, role, operand bytes) of each collective of one layer's exchange.

    Args:
        tokens: of a device.
        row: bytes of a token's hidden state, which takes its k ids and weights along to the experts.
    """
    there, back = row + 2 * _INT * top_k, row
    ranks, nodes = parallel.ep, parallel.expert_nodes
    count = min(exchange.microbatches, tokens)
    ends = [(tokens * number + count - 1) // count for number in range(count + 1)]
    parts = [end - begin for begin, end in itertools.pairwise(ends)]
    two_hops = exchange.method == "hierarchical" and nodes > 1 and ranks > nodes
    if exchange.method == "allgather":
        yield "dispatch", "all-gather", "exchange", tokens * there
        yield "combine", "reduce-scatter", "exchange", ranks * tokens * back
    elif exchange.method == "ragged":
        for _ in parts:
            yield "dispatch", "all-gather", "exchange", ranks * _INT
            yield "dispatch", "ragged-all-to-all", "exchange", ranks * exchange.capacities[0] * there
            yield "combine", "ragged-all-to-all", "exchange", ranks * exchange.capacities[0] * back
    elif exchange.method in ("all_to_all", "hierarchical"):
        hops = [("node", nodes), ("local", ranks // nodes)] if two_hops else [("exchange", ranks)]
        if len(exchange.capacities) != len(hops):
            raise ConfigError(
                f"exchange {exchange.method}: {len(hops)} capacities are needed, got {exchange.capacities}"
            )
        if exchange.choices > 1 and not exchange.lossy:
            if two_hops:
                yield "dispatch", "all-reduce", "node", len(parts) * ranks * _INT
            yield "dispatch", "all-reduce", "exchange", _INT
        # What the second hop dropped goes home with the first hop's results.
        lost = _INT if two_hops and exchange.lossy else 0
        for _ in parts:
            for number, ((role, size), capacity) in enumerate(zip(hops, exchange.capacities, strict=True)):
                yield "dispatch", "all-to-all", role, size * capacity * there
                yield "combine", "all-to-all", role, size * capacity * (back + (lost if number == 0 else 0))
