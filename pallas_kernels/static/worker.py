"""The subprocess that compiles: one JSON job a line on stdin, one JSON result a line on stdout.

A job is Triton IR (`ttir`) or a `@triton.jit` function (`source`), with `capability`, `num_warps` and
`num_stages`. A result has the figures of `measure`, or `error`. If the compiler aborts, the process is
gone, and whoever reads from it sees the end of the stream.
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

# Triton prints ptxas's resource report to stdout; its own cache would suppress that.
os.environ.update(TRITON_DUMP_PTXAS_LOG="1", TRITON_ALWAYS_COMPILE="1")
# JAX's Triton fuses multiply-adds; from 3.10 on the wheel's default would be not to.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def main() -> None:
    """Serves jobs until stdin ends."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a compiler prints must not mix with the results
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for line in sys.stdin:
            job = json.loads(line)
            try:
                result = compile_job(job, Path(folder))
            except Exception as error:
                text = " ".join(str(error).split())
                result = {"error": f"{type(error).__name__}: {text[:400]}"}
            print(json.dumps(result), file=results)


def compile_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compiles one kernel and counts."""
    import triton
    from triton.backends.compiler import GPUTarget

    source: Any
    if "ttir" in job:
        source = str(folder / "kernel.ttir")
        Path(source).write_text(job["ttir"])
    else:
        source = _ast_source(job["source"])
    target = GPUTarget("cuda", job["capability"], 32)
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
    if "ttir" in job:
        Path(source).write_text(_optimised(source, target, options))
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=target, options=options)
    return measure(compiled.asm["ptx"], compiled.asm["ttgir"], log.getvalue(), compiled.metadata.shared)


def _optimised(path: str, target: Any, options: dict[str, int]) -> str:
    """Returns the IR after Triton's first passes, which `triton.compile` skips for IR read from a file.

    XLA runs them, too (compilation_pipeline_cuda.cc, MakeTTIR): one folds `acc + dot(a, b)` into one product.
    """
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(path, context)
    module.context = context
    return str(backend.make_ttir(module, {}, backend.parse_options(options), target.arch))


def _ast_source(source: dict[str, Any]) -> Any:
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(source["module"]), source["function"])
    names = function.arg_names
    constants = {(names.index(k),): v for k, v in source["constants"].items()}
    # An argument divisible by 16 lets the compiler use vector loads, as a launcher would tell it.
    attrs = {(names.index(k),): [["tt.divisibility", 16]] for k in source["divisible"]}
    signature = {name: source["signature"].get(name, "constexpr") for name in names}
    return ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)


def measure(ptx: str, ttgir: str, log: str, shared: int) -> dict[str, Any]:
    """Figures of one compiled kernel.

    Raises:
        ValueError: no resource report in the log.
    """
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise ValueError("ptxas gave no resource report")
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack = re.search(r"(\d+) bytes stack frame", log)
    products = [line for line in ttgir.splitlines() if re.search(r"\btt\.dot\b|warp_group_dot\b", line)]
    products = [line for line in products if "warp_group_dot_wait" not in line]
    loads = re.findall(r"^\s*(?:@\S+\s+)?ld\.global[^\s]*", ptx, re.MULTILINE)
    stores = re.findall(r"^\s*(?:@\S+\s+)?st\.global[^\s]*", ptx, re.MULTILINE)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*;", ptx)
    return {
        "registers": int(registers.group(1)),
        "spill_stores": int(spills.group(1)) if spills else 0,
        "spill_loads": int(spills.group(2)) if spills else 0,
        "stack": int(stack.group(1)) if stack else 0,
        "shared": shared,
        "products": len(products),
        # A product left in a blocked layout is done by multiply-adds, one element at a time.
        "products_missed": sum("#blocked" in line.rpartition("->")[2] for line in products),
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


if __name__ == "__main__":
    main()
