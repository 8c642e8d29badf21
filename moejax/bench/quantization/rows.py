"""Makes a row of the result and its details from an evaluation's sums. No JAX here."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moejax.bench.quantization.metrics import Evaluation, PopularityErrors, WindowBootstrap, total_variation
from moejax.results.pareto import pareto
from moejax.results.statistics import interval_fields

FULL = "full precision"
"""The name of the row that all others are compared with."""


def loss_fields(
    boot: WindowBootstrap, nats: np.ndarray, base: np.ndarray, bytes_per_token: float
) -> dict[str, Any]:
    """Perplexity against the base's; nats summed over each window, `[W]`."""
    ratio = boot.ratio(nats, base)
    percent = dataclasses.replace(
        ratio, estimate=100 * (ratio.estimate - 1), low=100 * (ratio.low - 1), high=100 * (ratio.high - 1)
    )
    mean = float(boot.means(nats)[0])
    return {
        "perplexity": float(np.exp(mean)),
        "bits_per_byte": mean / np.log(2) / bytes_per_token,
        **interval_fields("perplexity_delta", boot.difference(nats, base)),
        **interval_fields("perplexity_loss_percent", percent),
        "inside_noise": not ratio.excludes(1.0),
    }


def split_fields(boot: WindowBootstrap, sums: Evaluation) -> dict[str, Any]:
    """KL and agreement, and what of the loss the routing makes."""
    full, free, replayed = sums.nats
    routing = boot.ratio(free, replayed)
    return {
        **interval_fields("kl", boot.mean(sums.kl[0])),
        "top1_agreement": float(boot.means(sums.agree[0])[0]),
        "replayed_perplexity": float(np.exp(boot.means(replayed)[0])),
        **interval_fields("replayed_delta", boot.difference(replayed, full)),
        **interval_fields("routing_delta", boot.difference(free, replayed)),
        "routing_inside_noise": not routing.excludes(1.0),
        **interval_fields("replayed_kl", boot.mean(sums.kl[1])),
        "replayed_top1_agreement": float(boot.means(sums.agree[1])[0]),
    }


def routing_fields(
    sums: Evaluation, moe_layers: Sequence[bool], popularity: PopularityErrors | None
) -> dict[str, Any]:
    """Flips, load shift and experts' errors, over the expert layers; no errors where no weight changed."""
    layers = [i for i, sparse in enumerate(moe_layers) if sparse]
    if not layers:
        return {}
    flips, changed = flip_shares(sums)
    shift = total_variation(sums.counts[1], sums.counts[0])[layers]
    row: dict[str, Any] = {
        "router_flips": float(flips[0, layers].mean()),
        "router_flips_max": float(flips[0, layers].max()),
        "router_flips_replayed": float(flips[1, layers].mean()),
        "assignments_changed": float(changed[0, layers].mean()),
        "load_shift": float(shift.mean()),
        "load_shift_max": float(shift.max()),
    }
    if popularity is not None:
        row["expert_error_rare"], row["expert_error_popular"] = map(float, popularity.bins[[0, -1]])
        row["popularity_correlation"] = popularity.correlation
        row["expert_error_weighted"] = popularity.weighted
        row["expert_load_unmeasured"] = popularity.unmeasured
    return row


def by_document(
    sums: Evaluation, documents: Mapping[str, np.ndarray], boot: WindowBootstrap
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Returns each document's tokens and loss of perplexity, with its interval over windows; and row fields
    of the one that loses most, none for a text of a single document."""
    losses: dict[str, dict[str, Any]] = {}
    for name, (full, free, _) in sums.document_nats.items():
        tokens = documents[name].sum(axis=1)
        part = WindowBootstrap(tokens[tokens > 0], resamples=len(boot.counts) - 1, confidence=boot.confidence)
        fields = loss_fields(part, free[tokens > 0], full[tokens > 0], 1.0).items()
        loss = {n.replace("perplexity", "document"): v for n, v in fields if n.startswith("perplexity_loss")}
        losses[name] = {"document_tokens": int(tokens.sum()), **loss}
    worst = max(losses, key=lambda name: losses[name]["document_loss_percent"], default=None)
    return losses, {"worst_document": worst, **losses[worst]} if worst else {}


def flip_shares(sums: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """Returns as shares `[2, L]` the tokens whose set of experts differs, and the assignments changed."""
    return sums.flipped / sums.tokens, sums.changed / np.maximum(sums.counts[0].sum(-1), 1)


def detail(sums: Evaluation, moe_layers: Sequence[bool], popularity: PopularityErrors) -> dict[str, Any]:
    """Everything by layer, expert and window, for `quantization.json`."""
    flips, changed = flip_shares(sums)
    return {
        "moe_layers": list(moe_layers),
        "router_flips": flips[0],
        "router_flips_replayed": flips[1],
        "assignments_changed": changed[0],
        "assignments_changed_replayed": changed[1],
        "load_shift": total_variation(sums.counts[1], sums.counts[0]),
        "expert_counts": sums.counts[1],
        "expert_counts_full": sums.counts[0],
        "expert_error": popularity.error,
        "expert_share": popularity.share,
        "popularity_bins": popularity.bins,
        "popularity_bin_load": popularity.bin_share,
        "window_nats": sums.nats,
        "window_kl": sums.kl,
    }


def compare_methods(boot: WindowBootstrap, nats: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Every pair's perplexity ratio with its interval; the full-precision model is one of them."""
    rows = []
    for first, second in itertools.combinations(nats, 2):
        ratio = boot.ratio(nats[second], nats[first])
        ratios = interval_fields("perplexity_ratio", ratio)
        rows.append({"first": first, "second": second, **ratios, "inside_noise": not ratio.excludes(1.0)})
    return rows


def mark_pareto(rows: list[dict[str, Any]]) -> None:
    """Sets `pareto` in the rows of methods that change the weights: none smaller is as good."""
    points = [row for row in rows if row.get("error") is None and row["changes_weights"]]
    best = pareto([r["bits_per_weight"] for r in points], [r["perplexity"] for r in points])
    for i, row in enumerate(points):
        row["pareto"] = i in best


def against_rtn(boot: WindowBootstrap, rows: list[dict[str, Any]], nats: Mapping[str, np.ndarray]) -> None:
    """Sets `loss_vs_rtn` in rows whose format round-to-nearest has as well: what of its loss is left."""
    plain = {
        (row["format"], row["kv_cache"]): row["name"]
        for row in rows
        if row["method"] == "rtn" and row["name"] in nats
    }
    for row in rows:
        other = plain.get((row["format"], row["kv_cache"]))
        if other is None or row["name"] not in nats or row["method"] == "rtn":
            continue
        row["rtn"] = other
        row |= interval_fields("loss_vs_rtn", boot.loss_ratio(nats[row["name"]], nats[other], nats[FULL]))
