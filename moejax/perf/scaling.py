"""Modelled time of a step on a mesh: each stage's roofline on its device, then its collectives.

    stage = max(bytes / bandwidth, FLOPs / peak) + link time          (nothing overlaps)
    step  = sum of the stages + (microbatches - 1) · the slowest      (GPipe, arXiv 1811.06965)

Routing is taken as even, `imbalance` apart: of T tokens with k of E experts each, a device's expert is hit
with probability 1 - (1 - k/E)^T. Host arithmetic.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moejax.core.config import ModelConfig
from moejax.core.hardware import Hardware
from moejax.core.parallel import ParallelConfig
from moejax.perf.comm import Exchange, step_comm
from moejax.perf.links import link_seconds
from moejax.perf.memory import StageMemory
from moejax.perf.sizes import DTYPE_BYTES, attention_sizes, expert_params, state_bytes


@dataclass(frozen=True)
class Phase:
    """A step of one data-parallel group.

    Attributes:
        name: "decode" or "prefill".
        tokens: of the step; in decoding one a sequence.
        rows: sequences that sample.
        context: tokens that a token attends to in the mean.
        sequences: whose cache is read, once each.
    """

    name: str
    tokens: int
    rows: int
    context: float
    sequences: int


@dataclass(frozen=True)
class StepModel:
    """A step's modelled time and what a device sends in it.

    Attributes:
        seconds: of the step.
        memory, compute, transfer, latency: of the slowest stage's microbatch: reading weights and cache,
            arithmetic (the stage takes the longer of the two), moving bytes, and starting collectives. The
            last two are 0 where the links' rates are not known.
        bubble: share of the step that a stage waits in the mean.
        comm_bytes: role of the axes → bytes that a device of the stage that sends most sends in the step.
    """

    seconds: float
    memory: float
    compute: float
    transfer: float
    latency: float
    bubble: float
    comm_bytes: dict[str, float]


def model_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    hardware: Hardware,
    stages: Sequence[StageMemory],
    phase: Phase,
    exchange: Exchange,
    *,
    microbatches: int = 1,
    split_latents: bool = False,
    imbalance: float = 1.0,
) -> StepModel:
    """Returns the step of a phase on a device kind.

    Args:
        stages: what each stage's devices hold (`moejax.perf.memory.device_memory`).
        exchange: of a microbatch's tokens.
        microbatches: parts that the step goes through the pipeline in.
        split_latents: see `step_comm`; `stages` have a device's part of them.
        imbalance: the experts' rows of the device that the others wait for, over the mean.
    """
    # The largest of equal parts of the step.
    sizes = {name: math.ceil(getattr(phase, name) / microbatches) for name in ("tokens", "rows", "sequences")}
    part = replace(phase, **sizes)
    stage_times: list[tuple[float, float, float, float]] = []
    per_role: list[dict[str, float]] = []
    for stage in stages:
        sent = step_comm(
            model,
            parallel,
            tokens=part.tokens,
            rows=part.rows,
            exchange=exchange,
            layers=stage.layers,
            split_latents=split_latents,
        )
        split = parallel.tensor_size if split_latents else parallel.kv_split(model.num_kv_heads)
        memory, compute = _roofline(model, parallel, hardware, stage, part, split, imbalance)
        links = link_seconds(sent, hardware, parallel, model) or ()
        transfer, latency = sum(link.transfer for link in links), sum(link.latency for link in links)
        stage_times.append((memory, compute, transfer, latency))
        roles: dict[str, float] = defaultdict(float)
        for term in sent:
            roles[term.role] += microbatches * term.total_bytes
        per_role.append(dict(roles))
    times = [max(memory, compute) + transfer + latency for memory, compute, transfer, latency in stage_times]
    slowest = max(range(len(times)), key=lambda i: times[i])
    seconds = sum(times) + (microbatches - 1) * times[slowest]
    busy = microbatches * sum(times) / len(times)
    most = max(per_role, key=lambda roles: sum(roles.values()))
    return StepModel(seconds, *stage_times[slowest], 1.0 - busy / seconds, most)


def _roofline(
    model: ModelConfig,
    parallel: ParallelConfig,
    hardware: Hardware,
    stage: StageMemory,
    phase: Phase,
    split: int,
    imbalance: float,
) -> tuple[float, float]:
    """Returns seconds of reading and of arithmetic on a device, one of `split` that share a cache."""
    itemsize = DTYPE_BYTES[model.dtype]
    sparse = sum(model.moe_layers[layer] for layer in stage.layers)
    # Tokens that come together at the experts: all data groups' that exchange.
    meeting = phase.tokens * (parallel.ep if parallel.attention == "data" else 1)
    E, k = model.num_experts, model.num_experts_per_tok
    hit = 1.0 - (1.0 - k / E) ** meeting
    dense_params = stage.other_weights / itemsize - _table(model, parallel, stage)
    sizes, linear = attention_sizes(model), attention_sizes(model, linear=True)
    seen = [
        phase.context if model.sliding_windows[layer] is None
        else min(phase.context, float(model.sliding_windows[layer] or 0))
        for layer in stage.layers if model.paged_layers[layer]
    ]  # fmt: skip
    states = len(stage.layers) - len(seen)
    cached = phase.sequences * sum(seen) * sizes.stored / split
    read = (dense_params + cached) * itemsize + hit * stage.expert_weights
    # States are read and written whole.
    read += 2 * phase.sequences * states * state_bytes(model, parallel.tensor_size)
    assignments = meeting * k / parallel.ep * imbalance
    flops = 2.0 * phase.tokens * dense_params
    flops += 2.0 * sparse * assignments * expert_params(model) / parallel.tp
    attended = sum(seen) * sizes.pair_flops + states * linear.token_flops
    flops += phase.tokens * attended / parallel.tensor_size
    peak = hardware.flops.get(model.dtype)
    assert hardware.bandwidth is not None
    return read / hardware.bandwidth, flops / peak if peak else 0.0


def _table(model: ModelConfig, parallel: ParallelConfig, stage: StageMemory) -> float:
    """Weights of the embedding on the first stage, of which a step reads only its tokens' rows. As output
    projection of tied embeddings it is read whole, and not left out."""
    last = stage.layers[-1] == model.num_layers - 1
    if stage.layers[0] != 0 or (model.tie_word_embeddings and last):
        return 0.0
    return parallel.padded_vocab(model.vocab_size) * model.hidden_size / parallel.tensor_size
