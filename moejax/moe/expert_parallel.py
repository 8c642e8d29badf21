"""Expert parallelism, per device inside `shard_map`: tokens to their experts, the experts, results back.

An expert rank holds `num_local` whole experts (their hidden dimension split over tp). Where the ranks have
different tokens (`axes.exchange` is not empty) these travel, in one of the ways of `METHODS`; the payload
moves as unsigned words of the width of x's elements (`exchange_pack`). With R ranks, N tokens a device, k
experts a token, D = hidden size, b bytes an element and W = D + 8·k/b words a row, the collectives are:

    none          none; the caller sums over the expert axes
    allgather     all-gather of words `[N, W]`; reduce-scatter of x's dtype `[R·N, D]`
    all_to_all    all-reduce (max) of one int32, unless there is one choice of C only;
                  all-to-all of words `[R, C, W]`; of words `[R, C, D]` back
    ragged        all-gather of int32 `[1, R]`; ragged-all-to-all of words `[min(k, R)·N, W]` into `[R·N, W]`;
                  of words `[R·N, D]` into `[min(k, R)·N, D]` back
    hierarchical  (G nodes of L ranks) all-reduce over nodes of int32 `[microbatches, G·L]` and all-reduce
                  (max) of one int32, unless there is one choice of C only; all-to-all between nodes of words
                  `[G, C1, W]`, within of `[L, C2, W]`; back within `[L, C2, D]`, between `[G, C1, D]`

All but the all-reduces once a microbatch, of which allgather has one. With a capacity there are no
all-reduces, and hierarchical's last all-to-all has 4/b words more a row: the assignments dropped on the
second hop, for the source to count.
Where there are several choices of C the all-to-alls stand in a conditional with a branch for each.
Inference only: payloads are bits, which have no gradient.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, unknown
from moejax.core.parallel import ParallelConfig
from moejax.core.resolve import Resolution
from moejax.moe.exchange_hops import Part, Run, exchange_hops, make_hops
from moejax.moe.exchange_pack import pack, unpack
from moejax.moe.exchange_ragged import exchange_ragged
from moejax.moe.exchange_size import HopSize, capacity_buckets, exchanged_bytes
from moejax.ops.dispatch import choose
from moejax.sharding.axes import Axes, all_gather, index, reduce_scatter

KEY = "parallel.exchange"
METHODS = ("allgather", "all_to_all", "ragged", "hierarchical")

# What sending more must at least save, in bytes a device, to be worth the collectives and the plan that an
# all-to-all needs beyond an all-gather: about 10 µs, at 200 GB/s within a node and 25 GB/s between nodes.
WORTH_BYTES = 2_000_000
WORTH_BYTES_NODES = 250_000


def dispatch_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    run: Run,
    *,
    num_local: int,
    axes: Axes,
    method: str,
    capacity: float | None = None,
    microbatches: int = 1,
    shared: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the routed experts of this device's tokens. Called by every device of the exchange axes alike.

    Args:
        x: `[N, D]`.
        ids: int32 `[N, k]`, physical experts in [0, P), P = num_local · expert ranks; P for none.
        weights: float32 `[N, k]`, 0 where none.
        run: (rows `[M, D]`, ids int32 `[M, k]` in [0, num_local], num_local for none, weights `[M, k]`) →
            `[M, D]`, the weighted sum over this device's experts; 0 where a row has none. Traced repeatedly.
        method: one of `METHODS`. Where `axes.exchange` is empty there is no exchange whatever it says ("none"
            will do), and the result is a part of the sum over `axes.expert`.
        capacity: c times the mean rows between a pair of ranks under "all_to_all" and on each hop of
            "hierarchical"; what does not fit is dropped, the last tokens first, and counted. None: nothing is
            dropped. The other methods take everything.
        microbatches: parts of the tokens whose exchanges and products do not depend on each other. XLA joins
            the all-gathers of such parts, so that "allgather" has one.
        shared: what else each token needs, (x `[n, D]`) → `[n, D]`, added to the sum: it stands beside the
            exchange, inside its branches, and neither waits for the other.

    Returns:
        `[N, D]`, this device's tokens: the weighted sum over all their experts (a part of it, over tp); and
        int32, the assignments of this device's tokens beyond the capacity, 0 without a capacity.

    Raises:
        ConfigError: there is no such method.
    """
    if method not in METHODS and (axes.exchange or method != "none"):
        raise ConfigError(f"parallel.exchange: {unknown('exchange', method, METHODS)}")
    none = jnp.zeros((), jnp.int32)
    overlapped = None if shared is None else lambda part: shared(part.x)
    if not axes.exchange:
        part = Part(x, *_own(ids, weights, index(axes.expert), num_local))
        out = run(*part)
        return out if shared is None else out + shared(x), none
    parts = _split(Part(x, ids, weights), microbatches if method != "allgather" else 1)
    dropped = none
    if method == "allgather":
        outs = [_gathered(parts[0], num_local, axes, run, overlapped)]
    elif method == "ragged":
        (hop,) = make_hops(axes, num_local, nodes_first=False)
        outs = [exchange_ragged(part, hop, run, overlapped) for part in parts]
    else:
        hops = make_hops(axes, num_local, nodes_first=method == "hierarchical")
        outs, dropped = exchange_hops(parts, hops, run, overlapped, capacity)
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs), dropped


def _split(part: Part, count: int) -> list[Part]:
    """Returns `count` parts of nearly the same number of tokens, the first ones longer; none is empty."""
    N = part.x.shape[0]
    count = min(count, N)
    ends = [(N * number + count - 1) // count for number in range(count + 1)]
    return [Part(*(a[begin:end] for a in part)) for begin, end in itertools.pairwise(ends)]


def _own(ids: jax.Array, weights: jax.Array, rank: jax.Array, num_local: int) -> tuple[jax.Array, jax.Array]:
    """Returns ids of a rank's own numbering, `num_local` for all others'; weights 0 there."""
    local = ids - rank * num_local
    mine = (local >= 0) & (local < num_local)
    return jnp.where(mine, local, num_local), jnp.where(mine, weights, 0.0)


def _gathered(
    part: Part, num_local: int, axes: Axes, run: Run, overlapped: Callable[[Part], jax.Array] | None
) -> jax.Array:
    """Sends all tokens to all ranks; adds up each rank's part of a token's sum where the token is at home."""
    D, k = part.x.shape[1], part.ids.shape[1]
    words = all_gather(pack(*part), axes.exchange)
    x, ids, weights = unpack(words, (D, part.x.dtype), (k, jnp.int32), (k, jnp.float32))
    rows = run(x, *_own(ids, weights, index(axes.exchange), num_local))
    out = reduce_scatter(rows, axes.exchange)
    return out if overlapped is None else out + overlapped(part)


def model_exchange(
    model: ModelConfig, parallel: ParallelConfig, tokens: int, axes: Axes, platform: str
) -> Resolution:
    """Returns what `choose_exchange` chooses for the layers of a model, and raises what it does."""
    return choose_exchange(
        parallel.exchange,
        tokens=tokens,
        hidden=model.hidden_size,
        itemsize=jnp.dtype(model.dtype).itemsize,
        top_k=model.num_experts_per_tok,
        axes=axes,
        platform=platform,
        num_local=(model.num_experts + parallel.redundant_experts) // parallel.ep,
    )


def choose_exchange(
    requested: str,
    *,
    tokens: int,
    hidden: int,
    itemsize: int,
    top_k: int,
    axes: Axes,
    platform: str,
    num_local: int | None = None,
) -> Resolution:
    """Chooses how a step of `tokens` tokens a device exchanges them; "none" where all ranks see all of them.

    "auto" compares the bytes that a device sends: an all-to-all (on several nodes the two-hop one, by what
    crosses between them) must save `WORTH_BYTES` over an all-gather, which needs no plan, if choices are
    spread evenly.

    Args:
        hidden, itemsize: elements of a token's row, and their bytes.
        num_local: experts on each rank; None: many.

    Raises:
        ConfigError: what was asked for cannot run here.
    """
    if not axes.exchange:
        if requested not in ("auto", "none", *METHODS):
            choose(requested, METHODS, Resolution(KEY, "none", ""))
        if requested in METHODS:
            raise ConfigError(
                f"parallel.exchange={requested}: no tokens are exchanged, all expert ranks see the same ones "
                "(parallel.attention=tensor, or ep=1); use parallel.exchange=auto"
            )
        return Resolution(KEY, "none", "all expert ranks see all tokens")
    chosen = choose(requested, METHODS, _auto(tokens, hidden, itemsize, top_k, axes, num_local))
    if chosen.value == "ragged" and platform not in ("gpu", "cuda", "rocm"):
        raise ConfigError(
            f"parallel.exchange=ragged: XLA has no ragged all-to-all on {platform}, only on gpu; "
            "use auto, allgather, all_to_all or hierarchical"
        )
    if chosen.value == "hierarchical" and not axes.node:
        raise ConfigError(
            f"parallel.exchange=hierarchical: the {axes.size(axes.exchange)} expert ranks are on one node "
            "(parallel.nodes); use auto, allgather, all_to_all or ragged"
        )
    return chosen


def _auto(
    tokens: int, hidden: int, itemsize: int, top_k: int, axes: Axes, num_local: int | None
) -> Resolution:
    ranks, nodes = axes.size(axes.exchange), axes.size(axes.node)
    experts = num_local or 1 << 10
    row = (hidden, itemsize, top_k)
    if nodes > 1:
        local = ranks // nodes
        hops = [HopSize(nodes, local * experts), HopSize(local, experts)]
        first, what, worth = "hierarchical", "between nodes", WORTH_BYTES_NODES
        gathered = exchanged_bytes(tokens, ranks, *row) - exchanged_bytes(tokens, local, *row)
    else:
        hops = [HopSize(ranks, experts)]
        first, what, worth = "all_to_all", "a device", WORTH_BYTES
        gathered = exchanged_bytes(tokens, ranks, *row)
    buckets = capacity_buckets(tokens, top_k, hops)
    even, worst = (exchanged_bytes(rows, hops[0].size, *row) for rows in (buckets[0][0], buckets[-1][0]))
    numbers = f"{tokens} tokens: {gathered:,} bytes {what} gathered, {even:,} (at worst {worst:,}) by {first}"
    if gathered - even < worth:
        return Resolution(KEY, "allgather", f"{numbers}, which saves less than {worth:,}")
    return Resolution(KEY, first, f"{numbers}, which saves at least {worth:,}")
