"""Runs a `@triton.jit` kernel on numpy arrays, on CPU, without torch, through Triton's own interpreter.

Triton decides when it is imported whether `@triton.jit` compiles or interprets, so this happens in a
subprocess with TRITON_INTERPRET=1. The interpreter reads memory by address and asks its arguments for a few
methods of a torch tensor, which `_Array` has. bfloat16 is no type of numpy's own: test in float32, float16.
"""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp
import numpy as np

from pallas_kernels.op import TritonSource

ROOT = Path(__file__).parents[2]


class Launch(NamedTuple):
    """A kernel's launch: `arrays` in the order of its pointers (outputs among them), `constants` by name."""

    arrays: Sequence[np.ndarray]
    constants: dict[str, Any]
    grid: tuple[int, ...]


def interpret(kernel: str, launches: Sequence[Launch]) -> list[list[np.ndarray]]:
    """The arrays of each launch as they are afterwards.

    Args:
        kernel: "module:name" of it; the module imports triton.

    Raises:
        RuntimeError: the interpreter failed; the message is its stderr.
    """
    job = pickle.dumps((kernel, [tuple(launch) for launch in launches]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.triton_interpreter"]
    done = subprocess.run(command, input=job, capture_output=True, env=env, cwd=ROOT, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    return pickle.loads(done.stdout)


def run_twins(module: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that launch one kernel each by `module.triton_call`; outputs are NaN before.

    They are called twice: for their launches, which are interpreted together, and with the results.
    """
    launches: dict[str, list[Launch]] = {}

    def record(
        op: str, kernel: TritonSource, arguments: Any, *, out_shape: Any, in_place: Any = (), **_: Any
    ):
        arrays = [np.array(array) for array in (*arguments, *in_place)]
        arrays.append(np.full(out_shape.shape, np.nan, out_shape.dtype))
        place = f"{kernel.module}:{kernel.name}"
        launches.setdefault(place, []).append(Launch(arrays, kernel.constants, kernel.grid))
        out = jnp.zeros(out_shape.shape, out_shape.dtype)
        return [out, *in_place] if in_place else out

    def replay(op: str, kernel: TritonSource, arguments: Any, *, in_place: Any = (), **_: Any):
        *written, out = next(results)[len(arguments) :]
        return [out, *map(jnp.asarray, written)] if in_place else out

    with mock.patch.object(module, "triton_call", record):
        for call in calls:
            call()
    ((kernel, recorded),) = launches.items()
    results = iter(interpret(kernel, recorded))
    with mock.patch.object(module, "triton_call", replay):
        return [call() for call in calls]


class _Array:
    """A numpy array with what Triton's launcher asks of a torch tensor; memory is shared, never copied."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.dtype = str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Array":
        return self

    def cpu(self) -> "_Array":
        return self

    def new_empty(self, size: int, device: str) -> "_Array":
        return _Array(np.empty(0, self.array.dtype))

    def set_(self, storage: "_Array", offset: int, size: Any, stride: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, other: "_Array") -> None:
        assert other.array is self.array  # the kernel has written it in place


def _serve() -> None:
    place, launches = pickle.loads(sys.stdin.buffer.read())
    module, _, name = place.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    results = []
    for arrays, constants, grid in launches:
        held = [_Array(array) for array in arrays]
        kernel[grid](*held, **constants)
        results.append([one.array for one in held])
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    _serve()
