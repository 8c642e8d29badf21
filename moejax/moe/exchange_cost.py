"""Sizes of an exchange for `moejax.perf.comm`, by the arithmetic that the exchange uses."""

from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.moe.exchange_size import HopSize, capacity_buckets, fixed_capacities, mean_rows
from moejax.perf.comm import Exchange


def exchange_hops(method: str, model: ModelConfig, parallel: ParallelConfig) -> list[HopSize]:
    """Returns the all-to-alls that a token goes through on its way to its experts."""
    experts = (model.num_experts + parallel.redundant_experts) // parallel.ep
    nodes = parallel.expert_nodes
    local = parallel.ep // nodes
    if method == "hierarchical" and nodes > 1 and local > 1:
        return [HopSize(nodes, local * experts), HopSize(local, experts)]
    return [HopSize(parallel.ep, experts)]


def exchange_cost(method: str, model: ModelConfig, parallel: ParallelConfig, tokens: int) -> Exchange:
    """Returns the cost of exchanging `tokens` tokens a device, as large as it gets under an even routing.

    Args:
        method: as `moejax.moe.expert_parallel.choose_exchange` resolved it.
    """
    if method in ("none", "allgather"):
        return Exchange(method)
    microbatches = min(parallel.dispatch_microbatches, tokens)
    hops, top_k = exchange_hops(method, model, parallel), model.num_experts_per_tok
    part = -(-tokens // microbatches)
    if method == "ragged":
        return Exchange(method, (mean_rows(part, top_k, hops)[0],), microbatches=microbatches)
    if parallel.exchange_capacity is not None:
        capacities = fixed_capacities(part, top_k, hops, parallel.exchange_capacity)
        return Exchange(method, capacities, microbatches=microbatches, lossy=True)
    buckets = capacity_buckets(part, top_k, hops)
    return Exchange(method, buckets[0], len(buckets), microbatches)
