"""In the process that compiles kernels: the rows of each spec that is asked for.

What XLA lowers it compiles here as on a GPU machine, with its own Triton and the ptxas that is found. A
`@triton.jit` twin is compiled by the Triton wheel, as jax-triton does.
"""

import contextlib
import functools
import importlib.metadata
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from moejax.bench.kernels.occupancy import TARGETS, occupancy
from moejax.bench.kernels.row import Row
from moejax.bench.program.compiler import compile_into
from moejax.bench.program.dump import KERNEL, assembled, kernel_bodies
from moejax.core.words import cut, one_line
from pallas_kernels._compat import abstract_device, kernels_of
from pallas_kernels.op import Op, TritonSource
from pallas_kernels.tuned import DATA, configure


class Asked(NamedTuple):
    """A spec of an operation, by its name, to be compiled for a target.

    Attributes:
        load: returns the operation; a function of a module, or a `functools.partial` of one.
        config: the configuration; None: the default one.
    """

    load: Callable[[], Op]
    implementation: str
    spec: str
    target: str
    config: Any = None


def answer(asked: Sequence[Asked]) -> Iterator[list[Row]]:
    """Yields an empty list once it is ready, then the rows of each, one a kernel."""
    yield []
    for one in asked:
        yield list(_rows(one))


def _rows(asked: Asked) -> Iterator[Row]:
    op, target = asked.load(), TARGETS[asked.target]
    kind = op.implementations[asked.implementation]
    spec = next(spec for spec in op.specs if spec.name == asked.spec)
    name, device = asked.implementation, target.device
    # What is shipped: the gate does not depend on what its user has measured.
    config, reason = configure(op, name, spec.problem, config=asked.config, device=device, data=DATA)
    run = functools.partial(kind.run, **spec.static, config=config, interpret=False)
    kernels: Sequence[Mapping[str, Any]]
    try:
        if kind.sources is None:
            kernels = list(_by_xla(run, spec.abstract, target.capability))
        else:
            kernels = [_by_the_wheel(source, target.capability) for source in kind.sources(spec, config)]
    except Exception as error:  # a compiler refuses: a finding like any other
        kernels = [{"error": cut(f"{type(error).__name__}: {one_line(error)}", 400)}]
    for kernel in kernels:
        figures = dict(kernel)
        if figures.get("registers") is not None:
            fits = occupancy(target, figures["registers"], figures["shared"], figures["num_warps"])
            figures |= {"blocks_per_sm": fits.blocks, "occupancy": fits.share, "limiter": fits.limiter}
        yield Row(
            op.name, name, spec.name, asked.target, config=asdict(config), config_reason=reason,
            **asdict(spec.cost), **figures,
        )  # fmt: skip


def _by_xla(run: Callable[..., Any], arguments: Any, capability: int) -> Iterator[dict[str, Any]]:
    """Yields the figures of the kernels that `run(**arguments)` calls, without XLA's own beside them."""
    alone = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), arguments)
    with tempfile.TemporaryDirectory() as name, abstract_device(capability):
        lowered = jax.jit(lambda kw: run(**kw)).trace(shapes).lower(lowering_platforms=("cuda",))
        _, log = compile_into(folder := Path(name), lowered)
        (thunks,) = folder.glob("*thunk_sequence.txt")
        launches = KERNEL.findall(thunks.read_text())
        bodies = kernel_bodies("".join(path.read_text() for path in folder.glob("*.ptx")))
    products = {kernel.name: kernel.ttir.count("tt.dot ") for kernel in kernels_of(lowered)}
    said, compiler = assembled(log), f"jaxlib {importlib.metadata.version('jaxlib')}"
    for name, x, y, z, threads, shared in launches:
        # XLA numbers kernels of one name.
        own = name if name in products else re.sub(r"_\d+$", "", name)
        if own in products:
            yield {
                "kernel": own, "compiler": compiler, "grid": (int(x), int(y), int(z)),
                "num_warps": int(threads) // 32, "shared": int(shared), "products": products[own],
                **said.get(name, {}), **count_instructions(bodies[name]),
            }  # fmt: skip


def _by_the_wheel(source: TritonSource, capability: int) -> dict[str, Any]:
    # Triton prints ptxas's report; its own cache would suppress that. JAX's Triton fuses multiply-adds; from
    # 3.10 on the wheel's default would be not to.
    os.environ.update(TRITON_DUMP_PTXAS_LOG="1", TRITON_ALWAYS_COMPILE="1", TRITON_DEFAULT_FP_FUSION="1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = source.function()
    names, pointers = function.arg_names, source.signature
    # An argument divisible by 16 lets the compiler use vector loads, as a launcher would tell it.
    ast = ASTSource(
        fn=function,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in source.constants.items()},
        attrs={(names.index(k),): [["tt.divisibility", 16]] for k, v in pointers.items() if v[0] == "*"},
    )
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as log:
        os.environ["TRITON_CACHE_DIR"] = folder
        compiled = triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": source.name, "compiler": f"triton {triton.__version__}", "grid": source.grid,
        "num_warps": source.num_warps, "shared": compiled.metadata.shared,
        "products": compiled.asm["ttir"].count("tt.dot "), **assembled(log.getvalue())[source.name],
        **count_instructions(compiled.asm["ptx"]),
    }  # fmt: skip


def count_instructions(ptx: str) -> dict[str, int]:
    """Returns the counts of `Row` in a kernel's PTX."""
    loads = re.findall(r"\bld\.global\S*", ptx)
    stores = re.findall(r"\bst\.global\S*", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*;", ptx)
    return {
        "mma_sync": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "cp_async": len(copies),
        "cp_async_16": sum(re.search(r",\s*(?:0x10|16)\b", copy) is not None for copy in copies),
        "loads": len(loads),
        "vector_loads": sum(_bytes(name) >= 8 for name in loads),
        "stores": len(stores),
        "vector_stores": sum(_bytes(name) >= 8 for name in stores),
    }


def _bytes(instruction: str) -> int:
    """Returns the bytes per thread of `ld.global.v4.b32` and its like."""
    vector = re.search(r"\.v(\d)", instruction)
    width = re.search(r"\.[bufs](\d+)$", instruction)
    return (int(vector.group(1)) if vector else 1) * (int(width.group(1)) if width else 32) // 8
