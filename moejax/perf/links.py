"""The least time that a step's collectives take on NVLink and InfiniBand, and what their latency adds.

Devices are numbered as in `moejax.sharding.mesh`, node by node. Of what a device sends (`wire_bytes`) in a
group of g devices on n nodes, m = g / n on each, this part leaves its node:

    all-gather, reduce-scatter, all-reduce    (n - 1) / (g - 1)    hierarchical ring: between nodes a device
                                                                   speaks to its like only, the rest within
    all-to-all, ragged                        (g - m) / (g - 1)    direct: m of the g are on its node
    collective-permute                        1 where any pair is on two nodes

That goes at the network's rate and the rest at NVLink's, both at once. Collectives follow each other.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.hardware import Hardware
from moejax.core.parallel import ParallelConfig
from moejax.perf.comm import CommTerm

# NCCL's own model (src/graph/tuning.cc, protocol LL), in seconds: what a collective takes at least, and each
# step over NVLink and over the network, for its ring and its tree algorithm.
RING_BASE, RING_LINK, RING_NETWORK = 6.6e-6, 0.6e-6, 2.7e-6
TREE_BASE, TREE_LINK, TREE_NETWORK = 6.8e-6, 0.6e-6, 5.0e-6


@dataclass(frozen=True)
class TermTime:
    """Seconds of all executions of a term in a step. `transfer` is a bound; `latency`, on top of it, is a
    model.

    Attributes:
        within: for the bytes that stay within the node, at NVLink's rate.
        between: for those that leave it, at the network's.
        latency: by NCCL's model; of all-to-all and permute, which it leaves out, one step (an assumption).
    """

    within: float
    between: float
    latency: float

    @property
    def transfer(self) -> float:
        return max(self.within, self.between)


def link_seconds(
    terms: Iterable[CommTerm], hardware: Hardware, parallel: ParallelConfig, model: ModelConfig
) -> list[TermTime] | None:
    """Returns each term's time on its links, one after another; None where the rate of a link that is used is
    not known."""
    times = []
    for term in terms:
        group, nodes = spread(term.role, parallel, model)
        outside = leaving(term.kind, group, nodes)
        within, between = term.total_bytes * (1 - outside), term.total_bytes * outside
        link, network = hardware.link_bandwidth, hardware.network_bandwidth
        if (within and link is None) or (between and network is None):
            return None
        # A data sheet counts both directions of NVLink.
        seconds = within / (link / 2) if within and link else 0.0
        away = between / network if between and network else 0.0
        times.append(TermTime(seconds, away, term.count * latency(term.kind, group, nodes)))
    return times


def leaving(kind: str, group: int, nodes: int) -> float:
    """Returns the part of what a device sends that leaves its node (see above)."""
    if nodes <= 1 or group <= 1:
        return 0.0
    if kind == "collective-permute":
        return 1.0
    if kind in ("all-to-all", "ragged-all-to-all"):
        return (group - group / nodes) / (group - 1)
    return (nodes - 1) / (group - 1)


def latency(kind: str, group: int, nodes: int) -> float:
    """Returns seconds before a collective's bytes count, by NCCL's tuner: the faster of ring and tree for an
    all-reduce, else the ring; one step for what goes straight to its peers."""
    if group <= 1:
        return 0.0
    if kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        return RING_BASE + (RING_NETWORK if nodes > 1 else RING_LINK)
    if kind != "all-reduce":
        return RING_BASE + (group - nodes) * RING_LINK + (nodes - 1) * RING_NETWORK
    crossings = 2 * nodes if nodes > 1 else 0
    ring = RING_BASE + (2 * (group - 1) - crossings) * RING_LINK + crossings * RING_NETWORK
    climb = (group / nodes - 1) * TREE_LINK + math.log2(nodes) * TREE_NETWORK
    return min(ring, TREE_BASE + 2 * climb)


def spread(role: str, parallel: ParallelConfig, model: ModelConfig) -> tuple[int, int]:
    """Returns (devices of a role's groups, nodes that the widest of them spans)."""
    nodes, local = parallel.expert_nodes, parallel.ep // parallel.expert_nodes
    sizes = {"pp": parallel.pp, "dp": parallel.dp, "node": nodes, "local": local, "tp": parallel.tp}
    each = parallel.num_devices // parallel.nodes
    node_of = (np.arange(parallel.num_devices) // each).reshape(tuple(sizes.values()))
    if role == "pipeline":
        return parallel.pp, 2 if (node_of != np.roll(node_of, -1, axis=0)).any() else 1
    tensor, data = ["tp"], ["dp", "node", "local"]
    if parallel.attention == "tensor":
        tensor, data = ["node", "local", "tp"], ["dp"]
    along = {"tensor": tensor, "kv": tensor, "data": data, "exchange": ["node", "local"]}.get(role, [role])
    places = [list(sizes).index(axis) for axis in along]
    groups = np.moveaxis(node_of, places, range(-len(along), 0))
    groups = groups.reshape(-1, math.prod(sizes[axis] for axis in along))
    if role == "kv":
        # The first devices of a tensor group by key/value head, the last by copies.
        heads = parallel.kv_split(model.num_kv_heads)
        groups = groups.reshape(-1, heads, parallel.tensor_size // heads).swapaxes(1, 2).reshape(-1, heads)
    return groups.shape[1], max(len(set(group)) for group in groups.tolist())
