"""Uses of JAX that depend on its version or on private parts: Pallas calls, interpretation, cross-lowering.

Tried with JAX 0.10.2, 0.11.2 and 0.12.0. Differences met:
- 0.10.2 lowers a `pallas_call` without Triton parameters through Mosaic, so parameters are always passed;
  without a GPU it lowers as for compute capability 9.0.
- From 0.11 on, lowering without a GPU needs an abstract device, and warns that the backend is deprecated.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.errors import KernelError
from pallas_kernels.op import TritonSource

# The whole package stands on this backend; docs/decisions.md says what replaces it.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

cdiv = pl.cdiv
next_power_of_2 = pl.next_power_of_2
program_id = pl.program_id
store = plgpu.store
when = pl.when

_DEVICES = {80: "NVIDIA A100-SXM4-80GB", 90: "NVIDIA H100 80GB HBM3"}


def load(ref: Any, *, mask: jax.Array | None = None, other: Any = None) -> jax.Array:
    """Loads a tile: `other` where the mask, which is broadcast, does not hold; all of it without a mask."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else other)


def both(first: jax.Array | None, second: jax.Array | None) -> jax.Array | None:
    """Returns where both masks hold; None is a mask that holds everywhere."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """Multiplies tiles on the tensor cores: float32 out, int32 for int8; float32 in full precision.

    a `[m, k]`, b `[k, n]` (`[n, k]` with `trans_b`), of one dtype; all of m, n, k
    at least 16 (k 32 for int8).
    """
    dims = (((1,), (1 if trans_b else 0,)), ((), ()))
    out = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    # By default Triton would round float32 operands to tf32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)


def inline_ptx(ptx: str, x: jax.Array, *, constraints: str, pack: int, dtype: Any) -> jax.Array:
    """Computes an elementwise function of x in PTX, `pack` elements at a time; compiled kernels only.

    Interpretation knows nothing of PTX: callers have the same function in jnp beside it.
    """
    shape = jax.ShapeDtypeStruct(x.shape, dtype)
    out = plgpu.elementwise_inline_asm(
        ptx, args=[x], constraints=constraints, pack=pack, result_shape_dtypes=[shape]
    )
    return out[0]


def should_interpret(interpret: bool | None) -> bool:
    """Returns whether to interpret; None interprets on CPU and compiles elsewhere."""
    return jax.default_backend() == "cpu" if interpret is None else interpret


def pallas_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Sequence[int],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool | None = None,
    input_output_aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """Calls `pl.pallas_call` lowered to Triton. Interpreted on CPU unless `interpret` says otherwise.

    Every program sees whole arrays: a kernel finds its part of them itself.

    Interpretation allocates outputs poisoned (NaN, or the least integer), so that a kernel which leaves some
    of its output unwritten shows.
    """
    kernel = _named(kernel, name)
    return pl.pallas_call(
        kernel,
        grid=tuple(int(n) for n in grid),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=should_interpret(interpret),
        input_output_aliases=input_output_aliases or {},
        name=name,
    )


def triton_call(
    op: str,
    kernel: TritonSource,
    arguments: Sequence[jax.Array],
    *,
    out_shape: Any,
    interpret: bool | None,
    in_place: Sequence[jax.Array] = (),
) -> Any:
    """Calls a `@triton.jit` kernel through jax-triton, whose output follows its `arguments` and `in_place`.

    Tried with jax-triton 0.3.1 and, on Python 3.12 and JAX from 0.11 on, 0.4.1.

    Args:
        interpret: None: on a GPU only. False: lowers for one that need not be here.
        in_place: arrays that the kernel writes, copied first if the caller's jit does not donate them; a
            list of the output and of them is returned then. It takes jax-triton 0.4.

    Raises:
        KernelError: there is no GPU, jax-triton is missing or too old, or interpretation is asked for.
    """
    name, remedy = "implementation triton_jit", "pip install 'moejax[cuda12]' (or [cuda13])"
    if interpret:
        raise KernelError(op, name, "interpret=True", "None or False: only Pallas kernels are interpreted")
    if should_interpret(interpret):
        raise KernelError(op, name, "no GPU", f"one, and jax-triton: {remedy}")
    try:
        import jax_triton  # 0.3 raises this on a jaxlib without CUDA, too
    except ImportError as error:
        why = " ".join(str(error).split())[:100]
        raise KernelError(op, name, f"{type(error).__name__}: {why}", f"jax-triton: {remedy}") from error
    options: dict[str, Any] = {"out_shape": out_shape}
    refs: list[Any] = []
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        _adapt_dead_code_rule(jax_triton.triton_lib.triton_kernel_call_p)
        # As JAX's own Triton does; from 3.10 on the wheel's default would be not to fuse.
        options = {"out_type": out_shape, "backend_options": {"enable_fp_fusion": True}}
        refs = [jax.new_ref(array) for array in in_place]
    elif in_place:
        raise KernelError(op, name, "jax-triton older than 0.4", "0.4, which writes in place: Python 3.12")
    out = jax_triton.triton_call(
        *arguments,
        *refs,
        kernel=kernel.function(),
        grid=tuple(int(n) for n in kernel.grid),
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        **options,
        **kernel.constants,
    )
    return [out, *map(jax.freeze, refs)] if refs else out


def _adapt_dead_code_rule(primitive: Any) -> None:
    """Gives jax-triton 0.4.1's rule the argument that JAX 0.12 has added: which inputs are alive."""
    from jax._src.interpreters import partial_eval

    rules: dict[Any, Any] = partial_eval.dce_rules
    rule = rules[primitive]
    if jax.__version_info__ >= (0, 12) and len(inspect.signature(rule).parameters) == 2:
        rules[primitive] = lambda used, alive, equation: rule(used, equation)


def _named(kernel: Callable[..., None], name: str) -> Callable[..., None]:
    """Names a kernel's function, as profilers and compilers show it."""

    def named(*refs: Any) -> None:
        kernel(*refs)

    named.__name__ = named.__qualname__ = name
    return named


class Lowered(NamedTuple):
    """One kernel as JAX hands it to Triton."""

    name: str
    ttir: str


def lower_for_cuda(function: Callable[..., Any], arguments: Any, capability: int) -> list[Lowered]:
    """Returns the Triton kernels in `function(**arguments)`, in order, without a GPU.

    Args:
        function: calls Pallas with `interpret=False`.
        arguments: dictionary of `jax.ShapeDtypeStruct`.
        capability: 80 or 90. JAX 0.10.2 lowers as for 90 all the same: what a kernel makes dependent on it
            must not come from JAX.
    """
    with abstract_device(capability), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = jax.jit(lambda kwargs: function(**kwargs)).trace(arguments)
        return kernels_of(traced.lower(lowering_platforms=("cuda",)))


def kernels_of(lowered: Any) -> list[Lowered]:
    """Returns the Triton kernels in a program lowered for CUDA, a `jax.stages.Lowered`, in order."""
    calls: list[Any] = []
    _collect(lowered.compiler_ir("stablehlo").operation, calls)
    return [_read(op) for op in calls]


@contextlib.contextmanager
def abstract_device(capability: int) -> Iterator[None]:
    """Lowers kernels, within its body, for a device of that capability that is not here: 80 or 90."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = jax.sharding.AbstractDevice(_DEVICES[capability], None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _collect(operation: Any, calls: list[Any]) -> None:
    for region in operation.regions:
        for block in region:
            for op in block:
                op = op.operation
                target = op.attributes["call_target_name"] if op.name == "stablehlo.custom_call" else None
                if target is not None and "triton" in str(target):
                    calls.append(op)
                _collect(op, calls)


def _read(op: Any) -> Lowered:
    from jax._src.interpreters import mlir
    from jaxlib import triton
    from jaxlib.mlir import ir

    config = op.attributes["mhlo.backend_config"]
    with mlir.make_ir_context() as context:
        triton.dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
        text = str(module.operation.get_asm(enable_debug_info=False))
    return Lowered(ir.StringAttr(config["name"]).value, text)
