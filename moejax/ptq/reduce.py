"""Fewer experts in each layer: calibration text says which ones stay; the others are left out or merged.

The text goes once through the float model as it is. Routers keep the rows and biases of the experts that
stay; the papers on merging keep all rows, in a model of another kind. All layers keep as many, since
`config.json` has one number, and all of a router's groups.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.optimize import linear_sum_assignment

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, refuse
from moejax.core.quant import Criterion, ExpertReduction, QuantConfig
from moejax.models.decoder import Decoder
from moejax.moe.layer import MoELayer
from moejax.moe.router import Routing
from moejax.nn.param import iter_params
from moejax.ops.row_sums import summed
from moejax.ptq.apply import Progress, checked_tokens, embedded
from moejax.ptq.fold import canonical, store
from moejax.ptq.observers import observe_at, run_stage
from moejax.ptq.report import StageReport
from moejax.ptq.sites import stages_of


def reduced_config(config: ModelConfig, experts: ExpertReduction) -> ModelConfig:
    """Returns the configuration of the model with fewer experts; `config` itself where all stay.

    Raises:
        ConfigError: it has none to leave out, too few would stay, or groups would not be equal.
    """
    if experts.method == "none":
        return config
    two_levels = experts.method == "merge" and config.router.group_gate
    refusals = {"a model without experts": not any(config.moe_layers), "a router of two levels": two_levels}
    refuse(f"quant.experts.method={experts.method}", True, refusals)
    E, groups, key = config.num_experts, config.router.groups, f"quant.experts.keep={experts.keep:g}"
    if experts.keep >= 1 and experts.keep % groups:
        raise ConfigError(f"{key}: give a share below 1 or a number that its {groups} groups divide")
    count = int(experts.keep) if experts.keep >= 1 else groups * round(experts.keep * E / groups)
    if not 0 < count < E:
        raise ConfigError(f"{key} keeps {count} of {E} experts; keep fewer than all and more than none")
    try:
        return config.replace(num_experts=count)
    except ConfigError as error:
        raise ConfigError(f"{key} leaves too few of {E} experts: {error}; keep more") from None


def expert_outputs(layer: MoELayer, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns each chosen expert's output for a token: rows `[N, D]`, ids int32 `[N, k]` → `[N · k, D]`,
    unweighted; an expert E gives zeros."""
    rows, flat = jnp.repeat(rows, ids.shape[1], axis=0), ids.reshape(-1, 1)
    alone = Routing(flat, jnp.ones(flat.shape, jnp.float32), jnp.zeros((rows.shape[0], 0), jnp.float32))
    # Every assignment runs, whatever room the model's own execution would give it.
    return summed(layer.experts(rows, alone, dataclasses.replace(layer.moe, execution="grouped")).out, rows)


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("sums",))
def _observe(
    graph: Any, state: Any, sums: Any, x: jax.Array, valid: jax.Array, share: jax.Array | None
) -> tuple[Any, jax.Array]:
    """Returns `sums` with what a layer's experts, if any, do with a batch; and the layer's output."""
    module, whole, seen = nnx.merge(graph, state), nnx.merge(graph, state).moe, dict(sums)

    def see(rows: jax.Array, routing: Routing, *_: Any) -> None:
        norms = jnp.linalg.norm(expert_outputs(whole, rows, routing.ids).astype(jnp.float32), axis=-1)
        flat, weights = routing.ids.reshape(-1), routing.weights.reshape(-1)
        terms = {"frequency": jnp.ones_like(weights), "router_mass": weights, "reap": weights * norms}
        seen.update({n: seen[n] + jax.ops.segment_sum(v, flat, whole.num_experts) for n, v in terms.items()})
        logits = jnp.where(valid.reshape(-1, 1), routing.logits, 0.0)
        seen["gram"] += jnp.matmul(logits.T, logits, precision=jax.lax.Precision.HIGHEST)

    if whole is not None:
        observe_at(module, "moe.experts", see)
    return seen, run_stage(module, x, valid, share)


def expert_usage(
    model: Decoder, tokens: np.ndarray, batch_size: int, progress: Progress | None = None
) -> dict[int, dict[str, np.ndarray]]:
    """Returns what the experts of each layer that has some do with tokens int32 `[S, L]`: by criterion, float
    `[E]`, and "likeness" `[E, E]`, the cosine of two experts' router logits."""
    E, hidden = model.config.num_experts, embedded(model, tokens, batch_size)
    found, layers = {}, [stage for stage in stages_of(model) if stage.prefix]
    for number, stage in enumerate(layers):
        if progress is not None:
            progress(0.5 * number / len(layers), f"observing {stage.name}")
        sums = {"gram": jnp.zeros((E, E))} | {name: jnp.zeros(E) for name in get_args(Criterion)}
        for batch in hidden.batches():
            sums, x = _observe(*nnx.split(stage.module), sums, batch.x, batch.valid, stage.share)
            hidden.put(batch, x)
        if model.config.moe_layers[number]:
            usage = {name: np.asarray(value, np.float64) for name, value in sums.items()}
            usage["reap"] /= np.maximum(usage["frequency"], 1)
            length = np.sqrt(np.maximum(np.diag(gram := usage.pop("gram")), 1e-30))
            found[number] = usage | {"likeness": gram / np.outer(length, length)}
    return found


def stand_ins(
    usage: Mapping[str, np.ndarray], experts: ExpertReduction, count: int, groups: int
) -> np.ndarray:
    """Returns for each expert the one that stands in its place, int `[E]`: itself where it is one of the
    `count` that stay, as many of each group; the one that it is merged into; or -1."""
    score = usage[experts.criterion].reshape(groups, -1)
    best = np.argsort(-score, axis=1, kind="stable")[:, : count // groups]
    kept = np.sort(best + np.arange(groups)[:, None] * score.shape[1], axis=1)
    result = np.full(score.size, -1)
    result[kept] = kept
    for expert in np.flatnonzero(result < 0) if experts.method == "merge" else ():
        mine = kept[expert // score.shape[1]]
        result[expert] = mine[np.argmax(usage["likeness"][expert, mine])]
    return result


def merged(values: Mapping[str, np.ndarray], places: np.ndarray, visits: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a layer's experts, canonical parameters by name, after merging into `places`, of `stand_ins`:
    averages by `visits` `[E]`, float32, of hidden units in the order in which their weights are most like
    those of the expert that another is merged into (arXiv 2209.04836)."""
    hidden = {"gate_proj": -1, "up_proj": -1, "down_proj": -2, "gate_bias": -1, "up_bias": -1}
    aligned = {name: np.array(value, np.float32) for name, value in values.items()}
    for expert, place in enumerate(places):
        if expert != place:
            gate, up, down = (aligned[f"{name}_proj"] for name in ("gate", "up", "down"))
            alike = gate[place].T @ gate[expert] + up[place].T @ up[expert] + down[place] @ down[expert].T
            order = linear_sum_assignment(alike, maximize=True)[1]
            for name in hidden.keys() & aligned.keys():
                aligned[name][expert] = np.take(aligned[name][expert], order, axis=hidden[name])
    share = (np.unique(places)[:, None] == places) * np.maximum(visits, 1e-9)
    share = (share / share.sum(1, keepdims=True)).astype(np.float32)
    return {name: np.tensordot(share, value, 1) for name, value in aligned.items()}


def reduce_experts(
    model: Decoder, small: Decoder, quant: QuantConfig, tokens: np.ndarray | None, progress: Progress | None
) -> list[StageReport]:
    """Gives `small`, of `reduced_config` and without values, what stays of the model's weights by what tokens
    int32 `[S, L]` show; returns a report for each layer with experts.

    Raises:
        ConfigError: no tokens, or such as the model cannot run; a model that is split over devices.
    """
    begin, experts, config = time.perf_counter(), quant.experts, model.config
    tokens = checked_tokens(tokens, model, quant)
    usage = expert_usage(model, tokens, min(quant.calibration.batch_size, len(tokens)), progress)
    count, groups = small.config.num_experts, config.router.groups
    places = {layer: stand_ins(used, experts, count, groups) for layer, used in usage.items()}
    source, averages = dict(iter_params(model)), dict[int, dict[str, np.ndarray]]()
    for name, param in iter_params(small):
        value, spec = canonical(source[name]), param.get_metadata("spec")
        part = re.fullmatch(r"layers\.(\d+)\.moe\.(experts|router)\.(\w+)", name)
        if part and value.shape != spec.canonical_shape:
            layer, stack = int(part[1]), part[2] == "experts"
            if stack and experts.method == "merge":
                if layer not in averages:
                    prefix = name.removesuffix(part[3])
                    stacks = {n: np.asarray(canonical(p)) for n, p in source.items() if n.startswith(prefix)}
                    stacks = {n.removeprefix(prefix): stack for n, stack in stacks.items()}
                    averages = {layer: merged(stacks, places[layer], usage[layer]["frequency"])}
                value = jnp.asarray(averages[layer][part[3]])
            else:
                kept = np.flatnonzero(places[layer] == np.arange(config.num_experts))
                value = jnp.take(value, kept, axis=0 if stack else -1)
        store(param, value)
    seconds = (time.perf_counter() - begin) / max(len(usage), 1)
    return [
        StageReport(
            f"layer {layer}", tokens.size, [int(n) for n in used["frequency"]], [], None, [], [],
            [f"{experts.method}: {count} of {config.num_experts} experts stay, by {experts.criterion}"],
            seconds, stand_ins=[int(e) for e in places[layer]],
        )
        for layer, used in usage.items()
    ]  # fmt: skip
