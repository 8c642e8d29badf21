"""From an evaluation's sums to a row of the result and its details. No JAX here."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from moejax.bench.quantization.metrics import PopularityErrors, WindowBootstrap, total_variation
from moejax.results.pareto import pareto
from moejax.results.statistics import Interval

FULL = "full precision"
"""The name of the row that all others are compared with."""


class Sums(Protocol):
    """`moejax.bench.quantization.evaluate.Evaluation`."""

    nats: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    flipped: np.ndarray
    changed: np.ndarray
    counts: np.ndarray
    squared_error: np.ndarray
    squared_norm: np.ndarray
    tokens: int


def spread(name: str, interval: Interval | None) -> dict[str, float | None]:
    """An interval as three flat fields."""
    values = (None,) * 3 if interval is None else (interval.estimate, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


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
        **spread("perplexity_delta", boot.difference(nats, base)),
        **spread("perplexity_loss_percent", percent),
        "inside_noise": not ratio.excludes(1.0),
    }


def split_fields(boot: WindowBootstrap, sums: Sums) -> dict[str, Any]:
    """KL and agreement, and what of the loss the routing makes."""
    full, free, replayed = sums.nats
    routing = boot.ratio(free, replayed)
    return {
        **spread("kl", boot.mean(sums.kl[0])),
        "top1_agreement": float(boot.means(sums.agree[0])[0]),
        "replayed_perplexity": float(np.exp(boot.means(replayed)[0])),
        **spread("replayed_delta", boot.difference(replayed, full)),
        **spread("routing_delta", boot.difference(free, replayed)),
        "routing_inside_noise": not routing.excludes(1.0),
        **spread("replayed_kl", boot.mean(sums.kl[1])),
        "replayed_top1_agreement": float(boot.means(sums.agree[1])[0]),
    }


def routing_fields(
    sums: Sums, moe_layers: Sequence[bool], popularity: PopularityErrors | None
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


def flip_shares(sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    """`[2, L]` each: tokens whose set of experts differs, and assignments changed, as shares."""
    return sums.flipped / sums.tokens, sums.changed / np.maximum(sums.counts[0].sum(-1), 1)


def detail(sums: Sums, moe_layers: Sequence[bool], popularity: PopularityErrors) -> dict[str, Any]:
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
    names = list(nats)
    found = []
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            ratio = boot.ratio(nats[second], nats[first])
            found.append(
                {"first": first, "second": second, **spread("perplexity_ratio", ratio),
                 "inside_noise": not ratio.excludes(1.0)}
            )  # fmt: skip
    return found


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
        row |= spread("loss_vs_rtn", boot.loss_ratio(nats[row["name"]], nats[other], nats[FULL]))
