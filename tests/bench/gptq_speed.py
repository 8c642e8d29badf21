"""GPTQ's core beside qwix's: seconds for a stack of experts, and the output error of what comes out.

    python -m tests.bench.gptq_speed      # a table on stderr, one line of JSON on stdout

Both get the same weights, Hessians, damping, block and groups. qwix's `contrib.gptq_core` takes a matrix, so
it is called for one expert after the other, as its own `contrib.gptq` calls it (not compiled as a whole).
Variants take turns; compiling is in `first_call_s` and nowhere else. qwix is no dependency: where it is
missing only our core is timed, and that is said.
"""

import argparse
import importlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moejax.core.errors import ConfigError
from moejax.quantization.arithmetic import dequantize
from moejax.quantization.formats import WeightFormat, parse_format
from moejax.quantization.gptq import gptq
from moejax.quantization.output_error import output_error
from moejax.quantization.rtn import round_to_nearest
from moejax.report.tables import rows_table, stderr_console
from tests.bench.turns import timed_rows

DAMPING = 0.01


def experts(E: int, D: int, F: int, tokens: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Random weights `[E, D, F]`, and Gram matrices `[E, D, D]` of inputs that hang together.

    A quarter of D directions carry most of the inputs, whose magnitudes differ, as activations' do.
    """
    keys = jax.random.split(jax.random.key(seed), 5)
    w = jax.random.normal(keys[0], (E, D, F)) / D**0.5
    x = jax.random.normal(keys[1], (E, tokens, D // 4)) @ jax.random.normal(keys[2], (E, D // 4, D))
    x += jax.random.normal(keys[3], x.shape)
    x *= jnp.exp(0.5 * jax.random.normal(keys[4], (E, 1, D)))
    return w, jnp.einsum("etc,etd->ecd", x, x)


def qwix_core(w: jax.Array, gram: jax.Array, fmt: WeightFormat, block: int) -> Callable[[], list[Any]] | None:
    """A call of qwix's core for each expert, whose results are its `QArray`s; None where qwix is missing."""
    try:
        core = importlib.import_module("qwix.contrib.gptq_core")
        qarray = importlib.import_module("qwix._src.core.qarray")
    except ModuleNotFoundError:
        return None
    settings = qarray.HowToQuantize(
        qtype=jnp.dtype(fmt.numbers), channelwise_axes=[0], tiled_axes={1: fmt.group} if fmt.group else {}
    )
    matrices = [jnp.asarray(one.T) for one in w]
    return lambda: [
        core.quantize_weight(one, h, settings, blocksize=block, percdamp=DAMPING)[0]
        for one, h in zip(matrices, gram, strict=True)
    ]


def compare(
    E: int, D: int, F: int, fmt: WeightFormat, *, block: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """Times and output errors of our core with and without activation order, of qwix's, and of rounding.

    Returns:
        `rows` (name, median_s, min_s, first_call_s, times_ours, and output_error over that of
        round-to-nearest), `ratio`, `ratio_low` and `ratio_high` (qwix's time over ours by place, absent
        without qwix), `load`.
    """
    w, gram = jax.block_until_ready(experts(E, D, F, tokens))
    ours = {
        "moejax, by place": lambda: gptq(w, gram, fmt, damping=DAMPING, act_order=False, block=block).tensor,
        "moejax, act order": lambda: gptq(w, gram, fmt, damping=DAMPING, act_order=True, block=block).tensor,
    }
    theirs = qwix_core(w, gram, fmt, block)
    variants: dict[str, Callable[[], Any]] = dict(ours)
    if theirs is not None:
        variants["qwix gptq_core"] = theirs
    rows, ratios = timed_rows(variants, repeats, "times_ours")
    nearest = float(output_error(dequantize(round_to_nearest(w, fmt)) - w, gram).sum())
    errors = {name: float(output_error(dequantize(call()) - w, gram).sum()) for name, call in ours.items()}
    if theirs is not None:
        dequantized = importlib.import_module("qwix._src.core.qarray").dequantize
        weights = jnp.stack([dequantized(one).T for one in theirs()])
        errors["qwix gptq_core"] = float(output_error(weights - w, gram).sum())
    result: dict[str, Any] = {
        "rows": [row | {"output_error": errors[row["name"]] / nearest} for row in rows],
        "load": os.getloadavg()[0],
        "device": jax.devices()[0].device_kind,
    }
    if theirs is not None:
        ratio = ratios["qwix gptq_core"]
        result |= {"ratio": ratio.estimate, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's header."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gptq_speed", description="Times GPTQ's core beside qwix's."
    )
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--inputs", type=int, default=256)
    parser.add_argument("--outputs", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="behind each Hessian")
    parser.add_argument("--format", default="int4_g64", help="a symmetric integer one, per channel or group")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    try:
        for name in ("experts", "inputs", "outputs", "tokens", "block", "repeats"):
            if getattr(options, name) < 1:
                raise ConfigError(f"--{name}: must be at least 1, got {getattr(options, name)}")
        fmt = parse_format(options.format)
        if not (fmt.numbers.startswith("int") and fmt.symmetric and fmt.granularity in ("channel", "group")):
            raise ConfigError(f"--format: {fmt.name} is not one that both have; use int4, int8 or int4_g64")
        fmt.check("--inputs", options.inputs, options.outputs)
    except ConfigError as error:
        parser.error(str(error))
    compared = compare(
        options.experts, options.inputs, options.outputs, fmt,
        block=options.block, tokens=options.tokens, repeats=options.repeats,
    )  # fmt: skip
    console = stderr_console()
    shape = f"{options.experts} experts of {options.inputs} x {options.outputs}"
    console.print(rows_table(compared["rows"], f"GPTQ, {shape}, {fmt.name} (error: round-to-nearest is 1)"))
    if "ratio" not in compared:
        console.print("qwix is not installed, so there is nothing to compare with: pip install qwix==0.1.8")
    print(json.dumps({**vars(options), **compared}))


if __name__ == "__main__":
    main()
