"""Reads metrics' names: whether less of it is better, its unit, and how to write it in a table."""

import re

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E", "queue": "queue"}

CASE_FIELDS = ("variant", "backend", "batching", "request_rate", "batch_size", "prompt_len", "output_len")
"""Fields of a case's row that say what was asked for or of whom, in the order in which they are shown."""

RATES = ("output_throughput", "request_throughput", "total_token_throughput", "request_goodput")
"""Rates that a throughput run notes of each iteration."""

JUDGED = (
    "median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms", "output_throughput",
    "request_goodput",
)  # fmt: skip
"""The metrics that runs are judged by unless others are asked for: few, since each costs the others power,
and nearly all others follow from them."""

EXACT = (
    "weight_bytes", "bits_per_weight", "kv_cache_bytes", "dropped_assignments", "rerouted_assignments",
    "recompiles_after_warmup", "failed", "aborted", "failed_steps", "completed", "total_input_tokens",
    "total_output_tokens", "num_params", "exported_bytes", "perplexity", "held_out_perplexity",
)  # fmt: skip
"""Counted or computed, not timed: a difference in them is one, however often they are measured."""

# The first pattern that fits a name decides: True: less is better, False: more is, None: neither.
_DIRECTIONS: tuple[tuple[str, bool | None], ...] = (
    (r"(ratio|speedup)_(low|high)$|_(low|high)$", None),
    (r"(^|_)p99_ttft_ratio$|^decode_ratio_.*_(low|high)", None),
    (r"speedup|(^|/)decode_ratio", False),
    (r"(tokens|bytes|flops|mbytes|gb|requests|steps|images)_per_s(_|$)", False),
    (r"throughput|goodput|tokens_per_second|tok_s$|bandwidth|flops_per_second|tflops|gb_s$", False),
    (r"roofline_percent|percent_of_(bound|roof|peak)|of_roofline|(^|_)(mfu|mbu)(_|$)|occupancy|slo_attainment",
     False),
    (r"perplexity|cross_entropy|bits_per_(byte|weight|parameter)|(^|[_/])loss|(^|_)kl(_|$)", True),
    (r"router_flips", True),
    (r"_(ms|us|ns|seconds)$", True),
    (r"(^|_)(bytes|mbytes|gbytes)(_|$)|_mb$|_gb$", True),
    (r"energy|(^|_)cost(_|$)|joules|_j$|_wh$", True),
    (r"failed|failures|preemptions|preempted|dropped|rerouted|recompiles|overflow|grown|leak", True),
    (r"_waste$|max_over_mean|gini|drift", True),
    (r"spill|max_registers|max_shared", True),
    (r"^(duration|train|train_cpu|wall)_(s|seconds)$", True),
    (r"_s$", True),
)  # fmt: skip


def lower_is_better(name: str) -> bool | None:
    """True for times, sizes, losses and failures, False for rates and shares of a bound, None where neither
    is known to be better (a batch size, a clock, a number of requests)."""
    return next((lower for pattern, lower in _DIRECTIONS if re.search(pattern, name)), None)


def latency_name(name: str) -> tuple[str, str] | None:
    """Returns the statistic and the latency of `p99_itl_ms` and its like; None for other names."""
    match = re.fullmatch(rf"({'|'.join(STATISTICS)})_({'|'.join(LATENCIES)})_ms", name)
    return (match[1], match[2]) if match else None


def percentile_of(statistic: str) -> float | None:
    """50 for `median`, 99 for `p99`; None for mean and std."""
    if statistic == "median":
        return 50.0
    return float(statistic[1:]) if re.fullmatch(r"p\d+", statistic) else None


def short_name(name: str) -> str:
    """As a table has it: `TTFT p50 (ms)`, `output tok/s`."""
    parts = latency_name(name)
    if parts is not None:
        statistic, latency = parts
        return f"{LATENCIES[latency]} {'p50' if statistic == 'median' else statistic} (ms)"
    known = {
        "output_throughput": "output tok/s",
        "total_token_throughput": "total tok/s",
        "request_throughput": "requests/s",
        "request_goodput": "good req/s",
    }
    return known.get(name, name)


def better_word(name: str, *, better: bool) -> str:
    """`faster` or `slower` for a time, `higher` or `lower` for a rate, `less` or `more` for a size,
    `better` or `worse` for the rest."""
    lower = lower_is_better(name)
    if re.search(r"_(ms|us|ns|s|seconds)$", name) and lower:
        return "faster" if better else "slower"
    if lower is False:
        return "higher" if better else "lower"
    if lower and re.search(r"bytes|bits|energy|cost|_j$", name):
        return "less" if better else "more"
    return "better" if better else "worse"
