"""The stacked experts and the ways of running them.

`dense` runs every expert on every token: the oracle. `grouped` sorts tokens by expert and runs each block
of rows with one expert's weights: dropless, the default. `capacity` gives every expert a fixed number of
rows (GShard, Lepikhin et al., arXiv 2006.16668): static shapes and cheap gradients, at the price of
assignments that overflow, which are dropped or rerouted and always counted.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import ExpertLayout, MoeConfig
from moejax.moe.permute import combine, plan_blocks, sort_by_expert
from moejax.moe.router import Router, Routing
from moejax.nn.activation import KERNEL_NAMES, gated
from moejax.nn.lora import StackLora, TokenSlots
from moejax.nn.param import ParamSpec, declare
from moejax.nn.quantized import QuantizedWeight, Weight, arrays_of
from moejax.ops import dispatch
from moejax.ops.expert_stack import Stack
from moejax.ops.grouped_matmul import grouped_swiglu_blocks, grouped_swiglu_ragged
from moejax.ops.row_sums import RowSums
from moejax.quantization.formats import QTensor
from moejax.quantization.kernel_formats import to_kernel, why_no_kernel
from moejax.sharding.axes import Names, index

if TYPE_CHECKING:
    from pallas_kernels.qformats import QuantizedTensor


class ExpertsOutput(NamedTuple):
    """Output `[N, D]`, the assignments that were made, and how many overflowed."""

    out: Any
    routing: Routing
    dropped: jax.Array
    rerouted: jax.Array


class Experts(nnx.Module):
    """E gated MLPs stacked: gate and up `[E, D, F]`, down `[E, F, D]`; in layout "efd" each transposed.
    Biases are `[E, F]` and `[E, D]`.

    `physical` is E where some experts have replicas. On a mesh a device holds some of the E, and of F, which
    is split over the axes `split`. Each of the three may be quantized (`moejax.nn.quantized`), in a format of
    its own; codes lie transposed whatever the layout. `leaves_sums`: the GPU kernels' outputs are `RowSums`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: ExpertLayout,
        dtype: Any,
        physical: int | None = None,
        split: Names = (),
        leaves_sums: bool = False,
    ) -> None:
        E, D, F = physical or config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.transposed = layout == "efd"
        self.total_experts = E

        def stack(rows: int, columns: int, axes: tuple[str, str]) -> Weight:
            shape = (E, columns, rows) if self.transposed else (E, rows, columns)
            names = ("expert", *(axes[::-1] if self.transposed else axes))
            scale = config.initializer_range
            return declare(ParamSpec(shape, names, dtype, "normal", scale, transposed=self.transposed))

        self.gate_proj = stack(D, F, ("embed", "expert_mlp"))
        self.up_proj = stack(D, F, ("embed", "expert_mlp"))
        self.down_proj = stack(F, D, ("expert_mlp", "embed"))

        def bias(size: int, axis: str) -> nnx.Param | None:
            spec = ParamSpec((E, size), ("expert", axis), dtype, "zeros")
            return declare(spec) if config.expert_bias else None

        hidden = F, "expert_mlp"
        self.gate_bias, self.up_bias, self.down_bias = bias(*hidden), bias(*hidden), bias(D, "embed")
        self.lora: nnx.Dict[StackLora] | None = nnx.data(None)
        self.tokens: TokenSlots | None = nnx.data(None)
        self.act, self.swiglu = config.hidden_act, config.expert_swiglu
        self.split = split
        self.leaves_sums = leaves_sums

    @property
    def num_experts(self) -> int:
        """E; on a mesh those of this device."""
        return int(self.arrays()[0][...].shape[0])

    def weights(self) -> tuple[Weight, Weight, Weight]:
        """Returns gate, up and down."""
        return self.gate_proj, self.up_proj, self.down_proj

    def arrays(self) -> list[nnx.Param]:
        """Returns all parameters, each with E first."""
        biases = [bias for bias in (self.gate_bias, self.up_bias, self.down_bias) if bias is not None]
        return [array for weight in self.weights() for array in arrays_of(weight)] + biases

    def stacks(self) -> tuple[Stack, Stack, Stack]:
        """Returns gate, up and down as they are stored, for products expert by expert; `_biases` has down's
        bias, because a device that holds a part of F gives a part of the product."""
        gate, up = self._stack("gate_proj", self.gate_bias), self._stack("up_proj", self.up_bias)
        return gate, up, self._stack("down_proj")

    def _stack(self, name: str, bias: nnx.Param | None = None) -> Stack:
        weight, added = getattr(self, name), None if bias is None else bias[...]
        lora = None if self.lora is None else (self.lora[name].a[...], self.lora[name].b[...])
        if isinstance(weight, QuantizedWeight):
            return Stack(weight.tensor(), weight.implementation, bias=added, lora=lora)
        return Stack(weight[...], transposed=self.transposed, bias=added, lora=lora)

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Maps gate and up `[..., F]` to the hidden numbers `[..., F]`."""
        return gated(self.act, self.swiglu)(gate, up)

    @jax.named_scope("experts_dispatch")
    def __call__(
        self, x: jax.Array, routing: Routing, config: MoeConfig, router: Router | None = None
    ) -> ExpertsOutput:
        """Runs the experts on x `[N, D]` by the execution that `config` names; `router` reroutes overflow."""
        zero = jnp.zeros((), jnp.int32)
        if config.execution == "grouped" and config.product(x.shape[0])[1] == "pallas_triton":
            return ExpertsOutput(self._kernels(x, routing), routing, zero, zero)
        if config.execution == "capacity":
            output = self._capacity(x, routing, config, router)
        else:
            run = self._dense if config.execution == "dense" else self._grouped
            output = ExpertsOutput(run(x, routing, config), routing, zero, zero)
        if self.down_bias is None:
            return output
        return output._replace(out=output.out + self._biases(self.down_bias[...], output.routing, x.dtype))

    def _biases(self, bias: jax.Array, routing: Routing, dtype: Any) -> jax.Array:
        """Returns each token's weighted sum of biases `[E, D]`, `[N, D]`; of the devices that F is split over
        the first has it."""
        ran = (routing.ids < self.num_experts) & (index(self.split) == 0)
        weights = jnp.where(ran, routing.weights, 0.0).astype(dtype)
        return jnp.sum(bias[jnp.minimum(routing.ids, self.num_experts - 1)] * weights[..., None], axis=1)

    def _dense(self, x: jax.Array, routing: Routing, config: MoeConfig) -> jax.Array:
        """Runs every expert on every token, weighted by 0 where the router did not choose it."""
        table = jnp.zeros((x.shape[0], self.num_experts + 1), routing.weights.dtype)
        table = table.at[jnp.arange(x.shape[0])[:, None], routing.ids].add(routing.weights)

        stacks = self.stacks()
        gate, up, down = stacks

        def one(total: jax.Array, expert: tuple[Any, ...]) -> tuple[jax.Array, None]:
            g, u, d, weight = expert
            with jax.named_scope("experts_gate_up"):
                hidden = self.hidden(gate.one(x, g), up.one(x, u))
            with jax.named_scope("experts_down"):
                y = down.one(hidden, d, self.split)
            return total + y * weight[:, None].astype(x.dtype), None

        stacked = (*((stack.weight, stack.bias) for stack in stacks), table.T[: self.num_experts])
        total, _ = jax.lax.scan(one, jnp.zeros_like(x), stacked)
        return total

    def _grouped(self, x: jax.Array, routing: Routing, config: MoeConfig) -> jax.Array:
        """Runs rows sorted by expert, in blocks of one expert each; nothing is dropped."""
        N, k = routing.ids.shape
        E, stacks = self.num_experts, self.stacks()
        transposed = all(stack.by_rows for stack in stacks)
        options: dict[str, Any] = {"act": self.hidden, "split": self.split}
        _, asked, height = config.product(N)
        chosen = dispatch.choose_grouped_matmul(asked, block_rows=height).value
        if chosen == "ragged_dot":
            plan = plan_blocks(routing.ids, E, 0, ())
            options["slots"] = self._slots(plan.order // k)
            out = grouped_swiglu_ragged(x[plan.order // k], *stacks, plan.counts, **options)
            return combine(out, plan, routing.weights)
        if chosen == "batched":
            return self._batched(x, routing, height)
        if chosen == "blocks_mixed":
            singles, heights = dispatch.mixed_block_heights(N, transposed)
        else:  # of one height
            rows = height or dispatch.block_rows_for(N * k, E, transposed)
            singles, heights = (N, ()) if rows == 1 else (0, (rows,))
        plan = plan_blocks(routing.ids, E, singles, heights)
        options["slots"] = self._slots(plan.order // k)
        out = grouped_swiglu_blocks(
            x[plan.order // k], *stacks, plan.single, plan.blocks, heights=heights, **options
        )
        return combine(out, plan, routing.weights)

    def _slots(self, tokens: jax.Array) -> jax.Array | None:
        """Returns the slots of these tokens' adapters."""
        return None if self.tokens is None else self.tokens[...][tokens]

    def _batched(self, x: jax.Array, routing: Routing, rows: int | None) -> jax.Array:
        """Runs each expert's first C rows in products over all experts, `[E, C, D]`, the others in blocks.

        No expert is copied out of its stack, but all are read and each has C rows: for steps that visit
        nearly all of them about alike.

        Args:
            rows: C; None: by the mean rows an expert gets.
        """
        N, k = routing.ids.shape
        E, (gate, up, down) = self.num_experts, self.stacks()
        C = min(N, rows or dispatch.batched_rows_for(N * k, E))
        block = min(N, dispatch.block_rows_for(N * k, E))
        plan = plan_blocks(routing.ids, E, 0, (block,), skip=C)
        place = jnp.minimum(plan.first[:, None] + jnp.arange(C, dtype=jnp.int32)[None], N * k - 1)
        buffer = x[plan.order[place] // k]
        with jax.named_scope("experts_gate_up"):
            hidden = self.hidden(gate.each(buffer), up.each(buffer))
        with jax.named_scope("experts_down"):
            out = down.each(hidden, self.split).reshape(E * C, -1)
        ids = routing.ids.reshape(-1)
        slot = plan.row_of - plan.first[jnp.minimum(ids, E - 1)]
        at = jnp.minimum(ids * C + slot, E * C - 1)
        if C < N:
            rest = jax.lax.cond(
                jnp.any(plan.counts > C),
                lambda: grouped_swiglu_blocks(
                    x[plan.order // k], gate, up, down, plan.single, plan.blocks, heights=(block,),
                    act=self.hidden, split=self.split,
                )[: N * k],
                lambda: jnp.zeros((N * k, out.shape[1]), out.dtype),
            )  # fmt: skip
            out = jnp.concatenate([out, rest])
            at = jnp.where(slot < C, at, E * C + plan.row_of)
        return combine(out, plan._replace(row_of=at), routing.weights)

    def _kernels(self, x: jax.Array, routing: Routing) -> jax.Array | RowSums:
        """Runs the GPU kernels, which add the biases; ids equal to E are no expert's, and get no rows."""
        from pallas_kernels.groups import ClampedSwiglu
        from pallas_kernels.moe_mlp import moe_mlp

        clamped = None if self.swiglu is None else ClampedSwiglu(self.swiglu.limit, self.swiglu.alpha)
        options: dict[str, Any] = {"activation": clamped or KERNEL_NAMES[self.act]}
        stacks = dict(zip(("gate", "up", "down"), self.stacks(), strict=True))
        if self.down_bias is not None:
            # Of the devices that F is split over the first has down's.
            down = jnp.where(index(self.split) == 0, self.down_bias[...], 0)
            options["biases"] = {"gate": stacks["gate"].bias, "up": stacks["up"].bias, "down": down}
        operands = [kernel_operand(stack, x.dtype) for stack in stacks.values()]
        rounding = {
            name: kernel_rounding(stack, operand, self.split if name == "down" else ())
            for (name, stack), operand in zip(stacks.items(), operands, strict=True)
            if stack.quantizes_rows
        }
        options |= {"rounding": rounding, "total_experts": self.total_experts}
        options["summed"] = not self.leaves_sums
        out = moe_mlp(x, routing.ids, routing.weights, *operands, **options)
        return RowSums(*out) if self.leaves_sums else out

    def _capacity(
        self, x: jax.Array, routing: Routing, config: MoeConfig, router: Router | None
    ) -> ExpertsOutput:
        """Gives each expert at most C rows; buffers `[E, C, D]`, so gradients are batched products."""
        N, k = routing.ids.shape
        E = self.num_experts
        C = config.capacity(N, k, E)
        chosen = routing.ids
        if config.overflow == "reroute":
            assert router is not None, "a router says who is next"
            placed, slots, rerouted = reroute(routing, router, C)
        else:
            slots = slot_in_expert(chosen, E)
            kept = (slots < C) & (chosen < E)
            placed = Routing(
                jnp.where(kept, chosen, E), jnp.where(kept, routing.weights, 0.0), routing.logits
            )
            rerouted = jnp.zeros((), jnp.int32)
        dropped = jnp.sum(chosen < E, dtype=jnp.int32) - jnp.sum(placed.ids < E, dtype=jnp.int32)

        # Row E·C is a bin for what is not assigned.
        target = jnp.where(placed.ids < E, placed.ids * C + slots, E * C).reshape(-1)
        token = jnp.arange(N * k, dtype=jnp.int32) // k
        buffer = jnp.zeros((E * C + 1, x.shape[1]), x.dtype).at[target].set(x[token])
        buffer = buffer[: E * C].reshape(E, C, -1)
        gate, up, down = self.stacks()
        with jax.named_scope("experts_gate_up"):
            hidden = self.hidden(gate.each(buffer), up.each(buffer))
        with jax.named_scope("experts_down"):
            out = down.each(hidden, self.split).reshape(E * C, -1)
        out = jnp.concatenate([out, jnp.zeros((1, x.shape[1]), out.dtype)])
        picked = out[target].reshape(N, k, -1)
        summed = jnp.sum(picked * placed.weights[..., None].astype(x.dtype), axis=1)
        return ExpertsOutput(summed, placed, dropped, rerouted)


def kernel_operand(stack: Stack, dtype: Any) -> "jax.Array | QuantizedTensor":
    """Returns a stack as the GPU kernels take it: codes where they are to run on them, else floats."""
    if isinstance(stack.weight, QTensor) and stack.implementation == "pallas_triton":
        operand = to_kernel(stack.weight)
        if operand is None:
            why = why_no_kernel(stack.weight.format, stack.weight.shape[-2])
            raise ConfigError(f"quant.implementation=pallas_triton: {why}")
        return operand
    return stack.matrix(dtype)


def kernel_rounding(stack: Stack, operand: Any, split: Names) -> Any:
    """Returns `pallas_kernels.moe_mlp`'s rounding of rows; None where the kernels' own will do."""
    assert isinstance(stack.weight, QTensor)
    floats = isinstance(operand, jax.Array)
    if not floats and not split and stack.weight.format.activations == "dynamic":
        return None

    def to_codes(rows: jax.Array, expert: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if floats:
            return stack.rounded(rows, expert, split), None
        codes, scale = stack.codes_of(rows, expert, split)
        return codes, scale[:, 0]

    return to_codes


def slot_in_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 `[N, k]`: an assignment's place in its expert's queue.

    First choices come before second choices, then token order, so that overflow hits the least wanted.
    """
    by_choice = ids.T.reshape(-1)
    _, row_of, counts = sort_by_expert(by_choice, num_experts)
    first = jnp.append(jnp.cumsum(counts) - counts, 0)
    return (row_of - first[by_choice]).reshape(ids.T.shape).T


def reroute(routing: Routing, router: Router, limit: int) -> tuple[Routing, jax.Array, jax.Array]:
    """Sends assignments that overflow to the token's next best expert that still has room.

    In rounds: pending assignments ask for an expert; an expert accepts, first choices first and then in
    token order, as many as fit; the refused ask for the next expert of their token's ranking. It ends when
    none is pending or a token has asked all experts; what is left then is dropped.

    Returns:
        The assignments made, with weights from the experts that really run (renormalised if the model does
        so); each one's slot in its expert, int32 `[N, k]`; and the number that were rerouted.
    """
    N, k = routing.ids.shape
    E, ranking = router.num_experts, router.ranking(routing.logits)
    real = routing.ids < E

    def some_pending(state: Any) -> jax.Array:
        pending, _, _, _, tried = state
        return jnp.any(pending & (tried < E)[:, None])

    def one_round(state: Any) -> Any:
        pending, ids, slots, used, tried = state
        # A token's pending assignments ask for consecutive places of its ranking.
        asking = pending.astype(jnp.int32)
        place = tried[:, None] + jnp.cumsum(asking, axis=1) - asking
        next_best = jnp.take_along_axis(ranking, jnp.minimum(place, E - 1), axis=1)
        next_best = jnp.where(pending & (place < E), next_best, E)
        slot = slot_in_expert(next_best, E) + jnp.append(used, 0)[next_best]
        accepted = (next_best < E) & (slot < limit)
        ids, slots = jnp.where(accepted, next_best, ids), jnp.where(accepted, slot, slots)
        used = used + jnp.zeros(E + 1, jnp.int32).at[jnp.where(accepted, next_best, E)].add(1)[:E]
        tried = jnp.minimum(tried + jnp.sum(asking, axis=1), E)
        return pending & ~accepted, ids, slots, used, tried

    start = (
        real,
        jnp.full((N, k), E, jnp.int32),
        jnp.zeros((N, k), jnp.int32),
        jnp.zeros(E, jnp.int32),
        jnp.zeros(N, jnp.int32),
    )
    _, ids, slots, _, _ = jax.lax.while_loop(some_pending, one_round, start)
    rerouted = jnp.sum((ids < E) & (ids != routing.ids), dtype=jnp.int32)
    return Routing(ids, router.weights_of(routing.logits, ids), routing.logits), slots, rerouted
