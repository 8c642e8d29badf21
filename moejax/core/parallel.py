"""Layout of a model over devices: plain values, no JAX."""

import math
from dataclasses import dataclass
from typing import Literal

from moejax.core.checked import Checked, NonNegativeInt, PositiveInt, PositiveNumber
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.scheduling import RebalanceConfig

AttentionSplit = Literal["tensor", "data"]
Exchange = Literal["auto", "allgather", "all_to_all", "ragged", "hierarchical"]


@dataclass(frozen=True)
class ParallelConfig(Checked, section="parallel"):
    """Degrees of parallelism. A run needs `dp · pp · ep · tp` devices, numbered in this order, tp fastest.

    Attributes:
        dp: replicas of the whole model; each has its own requests and cache.
        pp: pipeline stages, each with its part of the layers.
        ep: parts that the experts of a layer are dealt out to.
        tp: parts that heads, vocabulary and hidden dimensions are split into.
        nodes: machines that the devices are on. Where experts are spread over several, the expert axis is
            split into node and local rank.
        attention: what the ep ranks do outside the experts. "tensor": heads, vocabulary and dense hidden
            dimensions are split over ep · tp devices, which all see the same tokens. "data": each ep rank
            has its own requests and cache (data-parallel attention), and tokens travel to their experts.
        exchange: how they travel (`moejax.moe.expert_parallel`); "auto" goes by payload.
        exchange_capacity: c times the mean number of rows that a pair of ranks exchanges; what does
            not fit is dropped and counted. None: sized from the true maximum, so that nothing is lost.
        redundant_experts: physical experts beyond the model's own, for replicas of hot ones.
        overlap_shared: the first exchange and the shared expert do not wait for each other.
        dispatch_microbatches: parts of a prefill step whose exchanges and products may overlap: 1 or 2. An
            all-gather, with which decoding exchanges, is not cut.
        microbatches: parts of a step that follow each other through the pipeline; None: as many as stages.
        stage_layers: layers of each stage; None: balanced by cost.
        first_device: number of its first device, so that two engines can lie side by side.
        auto: devices over which an experiment is to choose the layout (`parallel=auto`); 0: it is said.
    """

    dp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1
    tp: PositiveInt = 1
    nodes: PositiveInt = 1
    attention: AttentionSplit = "tensor"
    exchange: Exchange = "auto"
    exchange_capacity: PositiveNumber | None = None
    redundant_experts: NonNegativeInt = 0
    overlap_shared: bool = True
    dispatch_microbatches: Literal[1, 2] = 1
    microbatches: PositiveInt | None = None
    stage_layers: tuple[PositiveInt, ...] | None = None
    first_device: NonNegativeInt = 0
    auto: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.auto and self.num_devices > 1:
            raise ConfigError(f"parallel.auto={self.auto} chooses the degrees: leave out dp, pp, ep and tp")
        if self.stage_layers is not None and len(self.stage_layers) != self.pp:
            raise ConfigError(
                f"parallel.stage_layers must name pp={self.pp} numbers of layers, got"
                f" {list(self.stage_layers)}"
            )
        if self.num_devices % self.nodes:
            raise ConfigError(
                f"parallel.nodes={self.nodes} does not divide the {self._product} devices evenly"
            )
        if self.nodes > 1:
            self._check_nodes()

    def _check_nodes(self) -> None:
        each, group = self.num_devices // self.nodes, self.ep * self.tp
        if each % self.tp:
            raise ConfigError(
                f"parallel.tp={self.tp} does not fit into nodes of {each} devices evenly; a tensor-parallel "
                "group must lie within a node"
            )
        if group % each and each % group:
            raise ConfigError(
                f"ep·tp={group} devices are neither whole nodes nor an even part of a node of {each} devices"
            )

    @property
    def num_devices(self) -> int:
        return self.dp * self.pp * self.ep * self.tp

    @property
    def _product(self) -> str:
        return f"dp·pp·ep·tp = {self.dp}·{self.pp}·{self.ep}·{self.tp} = {self.num_devices}"

    @property
    def expert_nodes(self) -> int:
        """Nodes that one expert-parallel group spans."""
        return max(1, self.ep * self.tp * self.nodes // self.num_devices)

    @property
    def tensor_size(self) -> int:
        """Devices that heads, vocabulary and dense hidden dimensions are split over."""
        return self.tp * (self.ep if self.attention == "tensor" else 1)

    @property
    def data_groups(self) -> int:
        """Groups with requests and a cache of their own."""
        return self.dp * (self.ep if self.attention == "data" else 1)

    @property
    def is_single(self) -> bool:
        return self.num_devices == 1 and not (self.redundant_experts or self.first_device)

    def padded_vocab(self, vocab_size: int) -> int:
        """Counts the rows of embedding and output projection with the zeros that let them divide."""
        return vocab_size + -vocab_size % self.tensor_size

    def kv_split(self, num_kv_heads: int) -> int:
        """Counts the parts that key/value heads are split into; a tensor group beyond that holds copies."""
        return math.gcd(self.tensor_size, num_kv_heads)


def check_parallel(parallel: ParallelConfig, model: ModelConfig, devices: int) -> None:
    """Raises `ConfigError` unless the model can be spread so over that many devices.

    Every misfit is named, with its numbers.
    """
    faults = []
    if parallel.auto:
        faults.append("auto is for experiments: moejax.bench.simulate.plan.choose_layout returns a layout")
    needed = parallel.first_device + parallel.num_devices
    if needed > devices:
        after = f" after the first {parallel.first_device}" if parallel.first_device else ""
        faults.append(
            f"{parallel._product} devices{after} are needed and {devices} are there (without GPUs, XLA_FLAGS="
            f"--xla_force_host_platform_device_count={needed} makes virtual ones)"
        )
    tensor, tp, ep = parallel.tensor_size, parallel.tp, parallel.ep
    split = f"tp={tp}" if tensor == tp else f"ep·tp={tensor} (parallel.attention=tensor)"

    def divides(name: str, size: int, parts: int, what: str) -> None:
        if size % parts:
            faults.append(f"{name} {size} % {what} = {size % parts}")

    divides("num_attention_heads", model.num_heads, tensor, split)
    kv = model.num_kv_heads
    if kv % tensor and tensor % kv:
        faults.append(f"num_key_value_heads {kv} neither divides {split} nor is a multiple of it")
    if any(model.moe_layers):
        physical = model.num_experts + parallel.redundant_experts
        what = "num_experts" if not parallel.redundant_experts else "num_experts + parallel.redundant_experts"
        divides(what, physical, ep, f"ep={ep}")
        divides("moe_intermediate_size", model.moe_intermediate_size, tp, f"tp={tp}")
        divides("shared_expert_intermediate_size", model.shared_expert_intermediate_size, tensor, split)
    elif parallel.redundant_experts:
        faults.append(f"redundant_experts={parallel.redundant_experts} of a model without experts")
    if not all(model.moe_layers):
        divides("intermediate_size", model.intermediate_size, tensor, split)
    if parallel.pp > model.num_layers:
        faults.append(f"num_hidden_layers {model.num_layers} are fewer than pp={parallel.pp}")
    if parallel.stage_layers is not None and sum(parallel.stage_layers) != model.num_layers:
        layers = list(parallel.stage_layers)
        faults.append(f"parallel.stage_layers {layers} add up to {sum(layers)} of {model.num_layers} layers")
    if faults:
        hint = ""
        if any("parallel.attention=tensor" in fault for fault in faults):
            hint = (
                f"; with parallel.attention=data only tp={tp} splits heads, vocabulary and hidden dimensions"
            )
        raise ConfigError(f"parallel: the model cannot be spread so: {'; '.join(faults)}{hint}")


def check_rebalance(
    rebalance: RebalanceConfig, parallel: ParallelConfig, model: ModelConfig, processes: int
) -> None:
    """Raises `ConfigError` where experts are to move by themselves and cannot, or outputs would change."""
    refusals = {
        "a model without experts": not any(model.moe_layers),
        "experts on one device: parallel.ep=1": parallel.ep == 1,
        "parallel.redundant_experts=0: replicas need slots": not parallel.redundant_experts,
        "parallel.exchange_capacity: what is dropped depends on where experts are": (
            parallel.exchange_capacity is not None
        ),
        f"parallel.nodes={parallel.nodes}: it would part groups; LLM.rebalance does not": (
            parallel.expert_nodes > 1
        ),
        f"{processes} processes: use LLM.rebalance": processes > 1,
    }
    for reason, holds in refusals.items():
        if rebalance.every_steps and holds:
            steps = rebalance.every_steps
            raise ConfigError(f"engine.rebalance.every_steps={steps} does not go with {reason}")


PRESETS: dict[str, ParallelConfig] = {
    "single": ParallelConfig(),
    "tp8": ParallelConfig(tp=8),
    "ep8": ParallelConfig(ep=8),
    "ep4_tp2": ParallelConfig(ep=4, tp=2),
    "dp_attention_ep8": ParallelConfig(ep=8, attention="data"),
    "pp2_ep4": ParallelConfig(pp=2, ep=4),
    "cluster_4x8": ParallelConfig(ep=32, nodes=4, attention="data", exchange="hierarchical"),
}
"""The layouts of `configs/parallel/`, by name."""
