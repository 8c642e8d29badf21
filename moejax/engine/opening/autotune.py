"""Chooses by time how a host runs expert products; `experiments.kernels mode=tune` does it for GPU kernels.

Which product is fastest depends on the machine: slow memory wants every weight read once, slow matrix units
no padding. `measure` times each layout's products for steps of several sizes, on random weights of the
model's widths; the choice is an input of a run and is reported with both times.
"""

import importlib.metadata
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import first_processor, processor_family
from moejax.core.host import usable_cpus
from moejax.core.moe import LAYOUTS, ExpertLayout, MoeConfig, Product, TunedMoe
from moejax.core.resolve import Resolution
from moejax.moe.experts import Experts
from moejax.moe.router import Routing
from moejax.nn.param import initialize
from moejax.ops.dispatch import batched_rows_for
from pallas_kernels.errors import KernelError
from pallas_kernels.tuned import Entry, add_entries, measured_tables, read_table

KEY, OP = "engine.autotune", "moe_experts"

GAIN = 1.03
"""What a choice must gain over the rules' to replace it, as the median of interleaved rounds; and in three of
four rounds it must be no slower."""

ROUNDS = 9
# Weights that are gone through before the first are met again: more than caches hold.
_COLD_BYTES = 1 << 28
# Exponent of Zipf's law by which rows visit experts while products are timed: trained routers are not even.
_SKEW = 0.5


class Timed(NamedTuple):
    """The best product of a layout for steps of so many tokens; microseconds a layer, and the rules'."""

    layout: str
    product: Product
    us: float
    rules_us: float


def choose_products(
    model: ModelConfig, moe: MoeConfig, engine: EngineConfig, refusal: str | None
) -> tuple[MoeConfig, Resolution]:
    """Returns the experts' configuration with the products that `engine.autotune` stands for, and the reason.

    Args:
        moe: with the layout that the rules choose.
        refusal: why nothing can be tuned for this engine; None if something can.

    Raises:
        ConfigError: `engine.autotune_choices` is no run, or one without choices; the stored table is damaged.
    """
    rules = Resolution(KEY, "rules", refusal or "asked for")
    if engine.autotune_choices is not None:
        return _pinned(engine.autotune_choices, moe, refusal)
    if engine.autotune == "rules" or refusal is not None:
        return moe, rules
    steps = step_sizes(engine)
    timed = _stored(model, steps)
    missing = [n for n in steps if n not in {each.product.tokens for each in timed}]
    if engine.autotune == "measure" and missing:
        fresh = measure(model, missing, engine.autotune_budget_s)
        _store(model, fresh)
        timed += fresh
    if not timed:
        why = f"no times of this shape on this machine; {KEY}=measure takes them"
        return moe, rules._replace(reason=why)
    return _chosen(moe, timed)


def step_sizes(engine: EngineConfig) -> list[int]:
    """Returns the numbers of tokens that are timed, in order of worth."""
    rows, tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    return list(dict.fromkeys(n for n in (1, 8, 128, rows, 512, 32, 2048) if n <= tokens))


def candidates(tokens: int, model: ModelConfig, layout: ExpertLayout) -> Iterator[Product]:
    """Yields the products that are timed for steps of `tokens` tokens, the rules' first."""
    yield Product(tokens, "auto", None)
    yield Product(tokens, "blocks_uniform", None)
    if layout == "edf":  # over transposed stacks a product of all experts takes twice as long (docs/log.md)
        rows = batched_rows_for(tokens * model.num_experts_per_tok, model.num_experts)
        for each in (rows, 2 * rows):
            if each <= tokens:
                yield Product(tokens, "batched", each)


def measure(
    model: ModelConfig,
    steps: Sequence[int],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """Times products for each number of tokens in turn, as many as the budget allows, compilation included.

    Returns:
        The best of each layout; none for a number of tokens that the budget did not reach.
    """
    end = clock() + budget_s
    dtype = jnp.dtype(model.dtype)
    each = 3 * model.num_experts * model.hidden_size * model.moe_intermediate_size * dtype.itemsize
    count = max(1, min(sum(model.moe_layers), math.ceil(_COLD_BYTES / each)))
    layers = {layout: [_experts(model, layout, seed) for seed in range(count)] for layout in LAYOUTS}
    timed: list[Timed] = []
    for tokens in steps:
        x = jax.random.normal(jax.random.key(0), (tokens, model.hidden_size), dtype)
        routings = [_routing(model, tokens, seed) for seed in range(count)]
        runs: dict[tuple[str, Product], Callable[[], None]] = {}
        for layout in LAYOUTS:
            for product in candidates(tokens, model, layout):
                if clock() > end:
                    return timed
                runs[layout, product] = _timed_run(layers[layout], x, routings, product)
        seconds: dict[tuple[str, Product], list[float]] = {key: [] for key in runs}
        for _ in range(ROUNDS):
            for key, run in runs.items():
                start = clock()
                run()
                seconds[key].append(clock() - start)
        for layout in LAYOUTS:
            times = {key[1]: np.array(spent) for key, spent in seconds.items() if key[0] == layout}
            product, us, rules_us = best(times)
            timed.append(Timed(layout, product, us / count, rules_us / count))
    return timed


def best(seconds: dict[Product, np.ndarray]) -> tuple[Product, float, float]:
    """Returns the fastest product that beats the first, the rules', beyond noise; microseconds of both."""
    rules = next(iter(seconds))
    median = {product: float(np.median(each)) for product, each in seconds.items()}
    gains = {product: seconds[rules] / each for product, each in seconds.items()}
    sure = [p for p, gain in gains.items() if np.median(gain) >= GAIN and np.quantile(gain, 0.25) >= 1]
    fastest = min([rules, *sure], key=lambda product: median[product])
    return fastest, 1e6 * median[fastest], 1e6 * median[rules]


def _experts(model: ModelConfig, layout: ExpertLayout, seed: int) -> tuple[Any, Any]:
    """Returns a layer of random experts, as graph and state."""
    experts = Experts(model, layout, jnp.dtype(model.dtype))
    initialize(experts, seed=seed)
    return nnx.split(experts)


def _routing(model: ModelConfig, tokens: int, seed: int) -> Routing:
    """Draws experts by Zipf's law, each layer's favourites its own (Gumbel top-k)."""
    rng = np.random.default_rng(seed)
    E, k = model.num_experts, model.num_experts_per_tok
    rates = -_SKEW * np.log(1 + rng.permutation(E))
    ids = np.argsort(-(rates + rng.gumbel(size=(tokens, E))), axis=1)[:, :k].astype(np.int32)
    weights = jnp.full((tokens, k), 1 / k, jnp.float32)
    return Routing(jnp.asarray(ids), weights, jnp.zeros((tokens, 0), jnp.float32))


def _timed_run(
    layers: Sequence[tuple[Any, Any]], x: jax.Array, routings: Sequence[Routing], product: Product
) -> Callable[[], None]:
    """Returns what runs a product over all layers and waits for it; compiled and run once."""
    moe, graph = MoeConfig(grouped_matmul=product.implementation, block_rows=product.rows), layers[0][0]
    one = jax.jit(lambda state, x, routing: nnx.merge(graph, state)(x, routing, moe).out)

    def run() -> None:
        jax.block_until_ready([one(state, x, at) for (_, state), at in zip(layers, routings, strict=True)])

    run()
    return run


def _chosen(moe: MoeConfig, timed: Sequence[Timed]) -> tuple[MoeConfig, Resolution]:
    """Returns the rules' layout with its products, or the other one's where that gains by the geometric mean
    over steps and loses at no size: a run's tokens are nearly all of small steps, however much it gains at
    prompts."""
    usual = layout = moe.expert_layout
    times = {name: {t.product.tokens: t.us for t in timed if t.layout == name} for name in LAYOUTS}
    for name in LAYOUTS:
        logs = [math.log(times[usual][tokens] / us) for tokens, us in times[name].items()]
        if np.mean(logs) >= math.log(GAIN) and min(logs) >= -math.log(GAIN):
            layout = name
    before = {t.product.tokens: t.rules_us for t in timed if t.layout == usual}
    mine = sorted((t for t in timed if t.layout == layout), key=lambda t: t.product.tokens)
    tuned = TunedMoe.of(moe, layout, [t.product for t in mine])
    each = ", ".join(f"{t.product.tokens}: {before[t.product.tokens]:,.0f} -> {t.us:,.0f}" for t in mine)
    gain = math.exp(np.mean([math.log(before[t.product.tokens] / t.us) for t in mine]))
    why = f"measured on {_machine()}: {gain:.2f} of the rules' speed; us a layer by tokens of a step: {each}"
    return tuned, Resolution(KEY, tuned.choices, why)


def _pinned(run: str, moe: MoeConfig, refusal: str | None) -> tuple[MoeConfig, Resolution]:
    """Returns the choices of another run, from its result.json."""
    key, path = "engine.autotune_choices", Path(run) / "result.json"
    if refusal is not None:
        raise ConfigError(f"{key}={run}: nothing is tuned here: {refusal}")
    try:
        value = str(json.loads(path.read_text())["resolved"][KEY]["value"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{key}={run}: {path} is no result with choices ({KEY}); name a run's folder"
        ) from None
    why = f"those of {run}"
    if value == "rules":
        return moe, Resolution(KEY, value, why)
    return TunedMoe.parse(moe, value, key), Resolution(KEY, value, why)


def _machine() -> str:
    name = (first_processor().get("model name"), processor_family())
    return f"{' '.join(filter(None, name)) or 'CPU'}, {len(usable_cpus())} cores"


def _table() -> tuple[Path, str]:
    return measured_tables(), re.sub(r"\W+", "_", _machine().lower())


def _problem(model: ModelConfig, tokens: int) -> dict[str, int | str]:
    return {
        "tokens": tokens, "k": model.num_experts_per_tok, "E": model.num_experts, "D": model.hidden_size,
        "F": model.moe_intermediate_size, "layers": sum(model.moe_layers), "dtype": model.dtype,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }  # fmt: skip


def _stored(model: ModelConfig, steps: Sequence[int]) -> list[Timed]:
    """Returns what was measured before, of this shape with this jaxlib on this machine."""
    try:
        entries = read_table(*_table(), OP)
    except KernelError as error:
        raise ConfigError(f"{KEY}: {error}") from None
    timed = []
    for entry in entries:
        tokens = int(entry.problem["tokens"])
        if tokens in steps and entry.problem == _problem(model, tokens):
            product = Product(tokens, entry.config["product"], entry.config["rows"])
            timed.append(Timed(entry.implementation, product, entry.microseconds, entry.config["rules_us"]))
    return timed


def _store(model: ModelConfig, timed: Sequence[Timed]) -> None:
    entries = []
    for layout, product, us, rules_us in timed:
        config = {"product": product.implementation, "rows": product.rows, "rules_us": rules_us}
        entries.append(Entry(layout, _problem(model, product.tokens), config, us))
    add_entries(*_table(), OP, entries)
