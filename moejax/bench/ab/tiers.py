"""What experts in tiers cost: the `tiers` table of an A/B run of fixed batches."""

import time
from collections.abc import Sequence
from typing import Any

from moejax.bench.ab.determinism import largest_batch
from moejax.bench.ab.measure import BatchLoad, Load
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import engine_of
from moejax.routing.residency import recorded_visits, replay


def tiers_rows(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns a row for each of our own engines whose experts are in tiers, which answers the largest batch
    from empty slots; where it captures routing also what Belady's bound would have hit."""
    rows: list[dict[str, Any]] = []
    for arm in arms if isinstance(load, BatchLoad) else ():
        llm = engine_of(arm.backend)
        if arm.name == CONTROL or llm is None or (tiers := llm.engine.tiers) is None:
            continue
        assert isinstance(load, BatchLoad)
        _, prompts, params = largest_batch(load)
        llm.generate(prompts, params)  # compiles what reports log-probabilities
        captures = llm.engine_config.capture_routing
        if captures:
            llm.reset_capture()
        tiers.clear()
        llm.reset_stats()
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds, stats = time.perf_counter() - start, llm.stats()
        best = None
        if captures:
            visits = recorded_visits(llm.routing_capture())
            absent = replay("belady", visits, [tiers.slots])[0, 0] & visits.needed[0]
            best = 1 - float(absent.sum() / visits.accesses[0])
        misses, foreseen, used = (
            stats[f"experts_{name}"] for name in ("misses", "foreseen", "foreseen_used")
        )
        config = tiers.config
        rows.append(
            {
                "variant": arm.name,
                "tier": config.tier,
                "policy": config.policy,
                "prefetch": config.prefetch,
                "resident_share": stats["experts_share"],
                "slots": tiers.slots,
                "hit_rate": stats["experts_hit_rate"],
                "best_hit_rate": best,
                "step_misses": misses / stats["steps"],
                "step_moved_bytes": stats["experts_moved_bytes"] / stats["steps"],
                "step_read_bytes": stats["experts_read_bytes"] / stats["steps"],
                "wait_share": stats["experts_wait_s"] / seconds,
                "precision": used / foreseen if foreseen else None,
                "recall": used / misses if foreseen and misses else None,
                "slot_bytes": tiers.nbytes,
                "below_bytes": stats["experts_host_bytes"],
            }
        )
    return rows
