"""An operation small enough to time and to tune on a CPU: y = x · factor."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moejax.bench.kernels.select import Selected
from pallas_kernels._compat import load, pallas_call, program_id, store
from pallas_kernels.op import Cost, Implementation, Op, Spec


@dataclass(frozen=True)
class Config:
    rows: int
    num_warps: int = 1
    num_stages: int = 1


def _kernel(x_ref: Any, y_ref: Any, *, rows: int, factor: float) -> None:
    at = (program_id(0) * rows + jnp.arange(rows))[:, None], jnp.arange(y_ref.shape[1])[None, :]
    store(y_ref.at[at], load(x_ref.at[at]) * factor)


def run(x: jax.Array, *, factor: float, config: Config, interpret: bool | None = None) -> jax.Array:
    return pallas_call(
        lambda x_ref, y_ref: _kernel(x_ref, y_ref, rows=config.rows, factor=factor),
        name="toy",
        grid=(x.shape[0] // config.rows,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(x)


def _refuses(**arguments: Any) -> jax.Array:
    raise NotImplementedError("not on this device")


def spec(rows: int) -> Spec:
    return Spec(
        name=f"toy_{rows}",
        make=lambda key: {"x": jax.random.normal(key, (rows, 64), jnp.float32)},
        static={"factor": 3.0},
        problem={"T": rows, "dtype": "float32"},
        cost=Cost(flops=64.0 * rows, bytes=2 * 4 * 64.0 * rows, unit="float32"),
    )


def toy(**implementations: Implementation) -> Op:
    kinds = {"pallas_triton": Implementation(run, Config, heuristic, space), **implementations}
    return Op("toy", lambda x, factor: x * factor, kinds, (spec(16), spec(64)), sizes=("T",))


def heuristic(problem: Any) -> Config:
    return Config(4)


def space(problem: Any) -> list[Config]:
    return [Config(rows, warps) for rows in (1, 2, 4, 8, 16) for warps in (1, 2, 4)]


def selected(op: Op) -> Selected:
    return Selected(op, tuple(op.implementations), op.specs)


REFUSES = Implementation(_refuses, Config, heuristic, space)
ELSEWHERE = Implementation(run, Config, heuristic, space, supports=lambda problem: "T of at most 8")
