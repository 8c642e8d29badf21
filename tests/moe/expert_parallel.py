"""A small mixture of experts, spread over virtual devices by `dispatch_experts`, and the same by NumPy."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moejax.core.parallel import ParallelConfig
from moejax.moe.expert_parallel import dispatch_experts
from moejax.sharding.axes import psum
from moejax.sharding.mesh import MeshPlan, make_mesh
from tests.moe.ragged_twin import emulated_ragged_all_to_all
from tests.numerics import tolerance

HIDDEN, INNER, PER_RANK = 16, 8, 2

LAYOUTS = {
    "ep8": ParallelConfig(ep=8, attention="data"),
    "nodes2": ParallelConfig(ep=8, nodes=2, attention="data"),
    "nodes4": ParallelConfig(ep=8, nodes=4, attention="data"),
    "nodes2_tp2": ParallelConfig(ep=4, tp=2, nodes=2, attention="data"),
    "ep4_tp2": ParallelConfig(ep=4, tp=2, attention="data"),
    "dp2_ep4": ParallelConfig(dp=2, ep=4, attention="data"),
    "ep2": ParallelConfig(ep=2, attention="data"),
    "tensor": ParallelConfig(ep=4, tp=2, attention="tensor"),
    "single": ParallelConfig(),
}
FLAT = ("allgather", "all_to_all", "ragged_emulated")
# Every method on every layout that it is for.
CASES = [
    *((layout, method) for layout in ("ep8", "ep4_tp2", "dp2_ep4", "ep2") for method in FLAT),
    *((layout, "hierarchical") for layout in ("nodes2", "nodes4", "nodes2_tp2")),
    *(("nodes2", method) for method in FLAT),
]


def limit(top_k: int) -> float:
    """Relative, for two orders of summation of a token's output."""
    return tolerance(HIDDEN, INNER, top_k)


class Inputs(NamedTuple):
    """x `[A, D]`, ids and weights `[A, k]`, A tokens of all data groups one after another."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


class Weights(NamedTuple):
    """up `[P, D, F]`, down `[P, F, D]`."""

    up: np.ndarray
    down: np.ndarray


def num_experts(layout: str) -> int:
    return PER_RANK * LAYOUTS[layout].ep


def groups(layout: str) -> int:
    return LAYOUTS[layout].data_groups


@functools.cache
def expert_weights(count: int) -> Weights:
    rng = np.random.default_rng(count)
    up, down = rng.normal(size=(count, HIDDEN, INNER)), rng.normal(size=(count, INNER, HIDDEN))
    return Weights(up.astype(np.float32), down.astype(np.float32))


def inputs(layout: str, ids: np.ndarray, seed: int = 0) -> Inputs:
    """Random tokens and weights for given ids `[A, k]`; P marks none."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ids.shape[0], HIDDEN)).astype(np.float32)
    weights = np.where(ids < num_experts(layout), rng.uniform(0.1, 1.0, ids.shape), 0.0)
    return Inputs(x, ids.astype(np.int32), weights.astype(np.float32))


def routing(kind: str, layout: str, tokens: int, top_k: int, seed: int = 0) -> np.ndarray:
    """ids `[groups · tokens, k]`, different experts for a token."""
    rng, P, G = np.random.default_rng(seed), num_experts(layout), groups(layout)
    A = G * tokens
    ids = np.stack([rng.permutation(P)[:top_k] for _ in range(A)])
    if kind == "balanced":
        ids = (np.arange(A)[:, None] * top_k + np.arange(top_k)) % P
    elif kind == "one_expert":
        ids[:, 0], ids[:, 1:] = P // 2, P
    elif kind == "one_rank":
        ids = np.where(np.arange(top_k) < PER_RANK, P - 1 - np.arange(top_k), P) + np.zeros((A, 1), int)
    elif kind == "empty":
        ids[:] = P
    elif kind == "some_empty":
        ids.reshape(G, tokens, top_k)[::2] = P
    elif kind == "one_token":
        ids[: A // 2], ids[A // 2 + 1 :] = P, P
    elif kind == "one_sender":
        ids[: A - tokens] = P
        ids[A - tokens :, 0], ids[A - tokens :, 1:] = 0, P
    else:
        assert kind == "random"
    return ids


def reference(data: Inputs, weights: Weights, kept: np.ndarray | None = None) -> np.ndarray:
    """Dense, in float64: every expert on every token. `kept` bool `[A, k]` leaves out dropped assignments."""
    x, up, down = (np.asarray(a, np.float64) for a in (data.x, *weights))
    P = up.shape[0]
    table = np.zeros((x.shape[0], P + 1))
    made = data.weights.astype(np.float64) * (1 if kept is None else kept)
    for token, (ids, row) in enumerate(zip(data.ids, made, strict=True)):
        np.add.at(table[token], ids, row)
    each = np.einsum("epd,pdf->epf", np.broadcast_to(x[:, None], (x.shape[0], P, HIDDEN)), up)
    return np.einsum("epf,pfd,ep->ed", np.tanh(each), down, table[:, :P])


def run_dense(
    rows: jax.Array, ids: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Every local expert on every row."""
    count = up.shape[0]
    chosen = jax.nn.one_hot(ids, count + 1, dtype=weights.dtype) * weights[:, :, None]
    table = jnp.sum(chosen, axis=1)[:, :count].astype(rows.dtype)
    hidden = jnp.tanh(jnp.einsum("nd,edf->enf", rows, up))
    return jnp.einsum("enf,efd,ne->nd", hidden, down, table)


@functools.cache
def mesh_of(layout: str) -> MeshPlan:
    return make_mesh(LAYOUTS[layout], num_kv_heads=1)


def sharded(layout: str, method: str, run: Callable[..., jax.Array] = run_dense, **options: Any) -> Any:
    """Jitted (x, ids, weights, up, down), whole → (out `[A, D]`, dropped int32 `[groups]`)."""
    (mesh,), axes = mesh_of(layout)

    def device(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
        def local(rows: Any, local_ids: Any, local_weights: Any) -> Any:
            return run(rows, local_ids, local_weights, up, down)

        how = {"num_local": PER_RANK, "axes": axes, "method": method.removesuffix("_emulated")} | options
        emulated = mock.patch.object(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
        with emulated if method == "ragged_emulated" else contextlib.nullcontext():
            out, dropped = dispatch_experts(x, ids, weights, local, **how)
        # What the caller does: sum what tp splits, and without an exchange what the expert ranks have.
        return psum(out, axes.tp if axes.exchange else axes.expert + axes.tp), dropped[None]

    data, expert = axes.data or None, axes.expert or None
    token = PartitionSpec(data)
    specs = (token, token, token, PartitionSpec(expert, None, axes.tp), PartitionSpec(expert, axes.tp))
    outs = (token, PartitionSpec(data))
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False))


@functools.cache
def compiled(layout: str, method: str, tokens: int, top_k: int, **options: Any) -> Any:
    """The same, compiled for `tokens` a data group."""
    return lowered(layout, method, tokens, top_k, **options).compile()


def lowered(layout: str, method: str, tokens: int, top_k: int, platforms: Any = None, **options: Any) -> Any:
    traced = sharded(layout, method, **options).trace(*shapes(layout, tokens, top_k))
    return traced.lower() if platforms is None else traced.lower(lowering_platforms=platforms)


def shapes(layout: str, tokens: int, top_k: int, dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    A, P = groups(layout) * tokens, num_experts(layout)
    return [
        jax.ShapeDtypeStruct((A, HIDDEN), dtype),
        jax.ShapeDtypeStruct((A, top_k), jnp.int32),
        jax.ShapeDtypeStruct((A, top_k), jnp.float32),
        jax.ShapeDtypeStruct((P, HIDDEN, INNER), dtype),
        jax.ShapeDtypeStruct((P, INNER, HIDDEN), dtype),
    ]


def outputs(layout: str, method: str, data: Inputs, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out `[A, D]`, dropped `[groups]`)."""
    tokens, top_k = data.x.shape[0] // groups(layout), data.ids.shape[1]
    program = compiled(layout, method, tokens, top_k, **options)
    out, dropped = program(*data, *expert_weights(num_experts(layout)))
    return np.asarray(out), np.asarray(dropped)
