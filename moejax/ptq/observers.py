"""Observers: modules that stand in another's place, see what it reads, and hand everything on.

An observed layer exists only while a program is traced: the compiled function takes the layer apart and puts
it together anew with observers in it, so that the model itself never changes and an observer costs nothing
where its statistics are not asked for. Statistics are summed over all tokens that are real; an expert's over
the tokens that are routed to it, whichever way the layer then runs its experts.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.decoder import DecoderLayer
from moejax.moe.experts import Experts
from moejax.moe.permute import plan_blocks
from moejax.moe.router import Routing
from moejax.nn.rope import rope_tables
from moejax.ptq.sites import EXPERTS_HIDDEN, EXPERTS_IN, Head
from moejax.quantization.calibration import Statistics, add_at, of_rows

BLOCK_ROWS = 256
"""Rows of one expert whose products are added at a time."""

Stats = dict[str, Statistics]


class Observer(nnx.Module):
    """Calls `see` with the arguments of `inner`, then `inner`."""

    def __init__(self, inner: nnx.Module, see: Callable[..., None]) -> None:
        self.inner, self.see = inner, see

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.see(*args, **kwargs)
        return self.inner(*args, **kwargs)


def observe_at(module: nnx.Module, path: str, see: Callable[..., None]) -> None:
    """Puts an observer in the place of the module at a dotted path below `module`."""
    *parents, name = path.split(".")
    for parent in parents:
        module = getattr(module, parent)
    setattr(module, name, Observer(getattr(module, name), see))


def run_stage(
    module: nnx.Module, x: jax.Array, valid: jax.Array, share: jax.Array | None = None
) -> jax.Array:
    """Runs a layer or the head on whole sequences: x `[B, T, D]`, valid bool `[B, T]`; share of a `Stage`."""
    if isinstance(module, Head):
        return module(x)
    assert isinstance(module, DecoderLayer)
    config = module.attention.config
    B, T, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rope = rope_tables(config, positions, jnp.full(B, T, jnp.int32))
    x, out, *_ = module(x, None, rope if share is None else share, positions, valid, None)
    return x + out


@functools.partial(jax.jit, static_argnames=("graph",))
def advance(graph: Any, state: Any, x: jax.Array, valid: jax.Array, share: jax.Array | None) -> jax.Array:
    """Calls `run_stage` of a module taken apart by `nnx.split`."""
    return run_stage(nnx.merge(graph, state), x, valid, share)


@functools.partial(jax.jit, static_argnames=("graph", "observers"), donate_argnames=("stats",))
def collect(
    graph: Any,
    state: Any,
    stats: Stats,
    x: jax.Array,
    valid: jax.Array,
    share: jax.Array | None,
    first: jax.Array,
    *,
    observers: tuple[tuple[str, str], ...],
) -> Stats:
    """Adds what one batch shows to `stats`.

    Args:
        graph, state: the stage, by `nnx.split`.
        stats: what to collect, by name; those of experts are of as many experts as they have room for.
        x: `[B, T, D]`, the stage's input. valid: bool `[B, T]`, False for padding. share: as in `Stage`.
        first: int32, the first of these experts.
        observers: name of statistics without an expert axis → module to observe.
    """
    module, seen = nnx.merge(graph, state), dict(stats)
    mask = valid.reshape(-1)

    def watch(name: str, path: str) -> None:
        def see(x: jax.Array, *_: Any, **__: Any) -> None:
            seen[name] = seen[name].plus(of_rows(x.reshape(-1, x.shape[-1]), mask))

        observe_at(module, path, see)

    for name, path in observers:
        watch(name, path)
    if EXPERTS_IN in stats or EXPERTS_HIDDEN in stats:
        experts = module.moe.experts

        def see_experts(x: jax.Array, routing: Routing, *_: Any, **__: Any) -> None:
            seen.update(_add_routed(experts, seen, x, routing.ids, first))

        observe_at(module, "moe.experts", see_experts)
    run_stage(module, x, valid, share)
    return seen


@functools.partial(jax.jit, static_argnames=("graph", "stride"), donate_argnames=("stats",))
def collect_unrouted(
    graph: Any,
    state: Any,
    stats: Stats,
    x: jax.Array,
    valid: jax.Array,
    share: jax.Array | None,
    experts_to_run: jax.Array,
    num: jax.Array,
    first: jax.Array,
    *,
    stride: int,
) -> Stats:
    """Adds to the experts' `stats` what some of them make of tokens whether they are routed there or not.

    Args:
        experts_to_run: int32 `[C]`, of which the first `num` count; numbers from `first` on.
        stride: every so many-th token is taken.
        The rest as in `collect`.
    """
    module, seen = nnx.merge(graph, state), dict(stats)
    experts, mask = module.moe.experts, valid.reshape(-1)[::stride]

    def see(x: jax.Array, *_: Any, **__: Any) -> None:
        rows = x[::stride]
        read = of_rows(rows, mask)

        def one(i: jax.Array, stats: Stats) -> Stats:
            e = experts_to_run[i]
            return _add_expert(experts, stats, first + e, e, rows, mask, read)

        seen.update(jax.lax.fori_loop(0, num, one, dict(seen)))

    observe_at(module, "moe.experts", see)
    run_stage(module, x, valid, share)
    return seen


def _add_routed(experts: Experts, stats: Stats, x: jax.Array, ids: jax.Array, first: jax.Array) -> Stats:
    """Adds statistics of x `[N, D]`, ids `[N, k]`, sorted by expert and cut into blocks of one expert."""
    room = next(iter(of_experts(stats).values())).count.shape[0]
    mine = (ids >= first) & (ids < first + room)
    local = jnp.where(mine, ids - first, room)
    k, rows = ids.shape[1], min(BLOCK_ROWS, ids.size)
    plan = plan_blocks(local, room, 0, (rows,))
    (blocks,) = plan.blocks

    def one(i: jax.Array, stats: Stats) -> Stats:
        e, place = blocks.expert[i], blocks.start[i] + jnp.arange(rows, dtype=jnp.int32)
        token = jnp.take(plan.order, place, mode="clip") // k
        return _add_expert(experts, stats, first + e, e, x[token], place < blocks.end[i], None)

    return jax.lax.fori_loop(0, blocks.num, one, of_experts(stats))


def _add_expert(
    experts: Experts,
    stats: Stats,
    expert: jax.Array,
    entry: jax.Array,
    x: jax.Array,
    mask: jax.Array,
    read: Statistics | None,
) -> Stats:
    """Adds rows x `[R, D]` that `expert` sees to entry `entry`; `read` is `of_rows(x, mask)` where known."""
    added = dict(stats)
    if EXPERTS_IN in stats:
        added[EXPERTS_IN] = add_at(stats[EXPERTS_IN], entry, read or of_rows(x, mask))
    if EXPERTS_HIDDEN in stats:
        gate, up, _ = experts.stacks()
        hidden = experts.hidden(gate.times(x, expert), up.times(x, expert))
        added[EXPERTS_HIDDEN] = add_at(stats[EXPERTS_HIDDEN], entry, of_rows(hidden, mask))
    return added


def of_experts(by_statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of the statistics that have an expert axis."""
    return {name: by_statistics[name] for name in (EXPERTS_IN, EXPERTS_HIDDEN) if name in by_statistics}
