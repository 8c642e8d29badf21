"""One method: open the model with it, compare, time, and put it all into a row."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from moejax.bench.common.held_out import Windows
from moejax.bench.quantization import rows
from moejax.bench.quantization.config import QuantizationSection
from moejax.bench.quantization.evaluate import Evaluator
from moejax.bench.quantization.metrics import WindowBootstrap, popularity_errors
from moejax.bench.quantization.rows import FULL, detail, loss_fields, routing_fields, split_fields
from moejax.bench.quantization.sizes import model_sizes
from moejax.bench.quantization.speed import SpeedMeter
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.perf.sizes import kv_vector_bytes

_COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


@dataclass
class Bench:
    """The measurements that all methods share; `base_nats` `[W]` are the full-precision model's losses,
    `loads` `[L, E]` a routing trace's, where one says how popular experts are."""

    open_model: Callable[[QuantConfig | None], LLM]
    full: LLM
    windows: Windows
    evaluator: Evaluator
    boot: WindowBootstrap
    base_nats: np.ndarray
    speed: SpeedMeter | None
    section: QuantizationSection
    loads: np.ndarray | None = None


@contextmanager
def compiling() -> Iterator[list[float]]:
    """Yields the seconds of what JAX lowers and compiles in the body, in any thread."""
    spent: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in _COMPILING:
            spent.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield spent
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def full_row(bench: Bench) -> dict[str, Any]:
    """The full-precision model's row."""
    return {
        "name": FULL,
        "method": "none",
        "format": bench.full.config.dtype,
        "kv_cache": "auto",
        "error": None,
        "changes_weights": False,
        "perplexity": float(np.exp(bench.boot.means(bench.base_nats)[0])),
        "bits_per_byte": float(bench.boot.means(bench.base_nats)[0] / np.log(2))
        / bench.windows.bytes_per_token,
        **_size_fields(bench, bench.full),
    }


def measure_method(
    bench: Bench, name: str, quant: QuantConfig, advance: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
    """Returns a row of the result, what is too long for one, and the losses `[W]` for comparisons with
    others. Raises whatever opening, comparing or timing raises. `advance` is called `num_batches + 2` times
    at most."""
    with compiling() as compiled:
        began = time.perf_counter()
        llm = bench.open_model(quant)
        opened = time.perf_counter() - began
    advance()
    report = llm.quant_report
    row: dict[str, Any] = {
        "name": name,
        "method": quant.what,
        "format": quant.format or llm.config.dtype,
        "kv_cache": quant.kv_cache,
        "error": None,
        "changes_weights": report is not None,
        **_size_fields(bench, llm),
        "open_seconds": opened,
        "quantize_seconds": None if report is None else report.seconds,
        "quantize_compile_seconds": None if report is None else sum(compiled),
        "cold_experts": None if report is None else report.fallbacks,
        "damping_raised": None if report is None else report.damping_raised,
    }
    details: dict[str, Any] = {"report": None if report is None else report.to_dict()}
    began = time.perf_counter()
    fewer = [stage for stage in report.stages if stage.stand_ins] if report is not None else []
    places = {int(stage.name.split()[1]): np.array(stage.stand_ins) for stage in fewer}
    sums = bench.evaluator(llm.model, quant.kv_cache, advance, stand_ins=places)
    row["evaluate_seconds"] = time.perf_counter() - began
    popularity = popularity_errors(
        sums.squared_error, sums.squared_norm, sums.counts[0], bench.section.popularity_bins, bench.loads
    )
    row |= split_fields(bench.boot, sums)
    row |= routing_fields(sums, llm.config.moe_layers, popularity if report is not None else None)
    details |= detail(sums, llm.config.moe_layers, popularity)
    details["documents"], worst = rows.by_document(sums, bench.windows.documents, bench.boot)
    row |= worst
    nats = sums.nats[1]
    if quant.kv_cache != "auto":
        # The cache itself is read in the engine only: its loss is the one that counts, and how far the
        # decoder's rounding of keys and values, which the other figures come from, is off is in the row.
        nats = engine_losses(llm, bench.windows)
        row["engine_nats_difference"] = float(np.abs(nats - sums.nats[1]).sum() / sums.tokens)
    row |= loss_fields(bench.boot, nats, bench.base_nats, bench.windows.bytes_per_token)
    row |= speed_fields(bench, llm)
    advance()
    llm.close()  # two large models must not be held at a time
    return row, details, nats


def engine_losses(llm: LLM, windows: Windows) -> np.ndarray:
    """float64 `[W]`: losses in nats summed over each window, scored by the engine with its own cache."""
    lengths = windows.scored.sum(axis=1)
    rows = [[int(t) for t in row[: n + 1]] for row, n in zip(windows.tokens, lengths, strict=True)]
    return np.array([-scores.astype(np.float64).sum() for scores in llm.score(rows)])


def _size_fields(bench: Bench, llm: LLM) -> dict[str, Any]:
    numbers = llm.config.key_dim
    # Bits of a key's or value's number, scales included.
    return {
        **model_sizes(llm.model, bench.full.model),
        "cache_bits": 8 * kv_vector_bytes(numbers, llm.kv_cache_dtype) / numbers,
    }


def speed_fields(bench: Bench, llm: LLM) -> dict[str, Any]:
    """Decode speed and the step's cost; of the full-precision model what its turns have shown so far."""
    if bench.speed is None:
        return {}
    row = bench.speed.full_rate() if llm is bench.full else bench.speed(llm)
    return row | bench.speed.cost(llm) if row else {}
