"""What engines with experts in tiers make of requests, each from empty slots."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.bench.common.held_out import read_windows
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.offload.config import OffloadSection
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.report.progress import progress
from moejax.results.metrics import summarize
from moejax.results.result import Result
from moejax.results.statistics import interval_fields, ratio_of_medians
from moejax.routing.residency import recorded_visits, replay


class Answered(NamedTuple):
    """Figures of the tiers; of all steps, lists of `start_s`, `step_ms`, `wait_ms`, `hits` and `misses`;
    outputs."""

    row: dict[str, Any]
    timeline: dict[str, list[float]]
    outputs: list[RequestOutput]


def answer(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> Answered:
    """Has an engine answer prompts once its slots are empty; where it captures routing, `best_hit_rate` is
    what Belady's bound would have hit on it. Without tiers there are no figures."""
    tiers, captures = llm.engine.tiers, llm.engine_config.capture_routing
    if captures:
        llm.reset_capture()
    if tiers is not None:
        tiers.clear()
    llm.reset_stats()
    start = time.perf_counter()
    outputs = llm.generate([list(prompt) for prompt in prompts], params)
    end, stats = time.perf_counter(), llm.stats()
    if tiers is None:
        return Answered({"resident_share": 1.0, "tier": "none"}, {}, outputs)
    best = None
    if captures:
        visits = recorded_visits(llm.routing_capture())
        absent = replay("belady", visits, [tiers.slots])[0, 0] & visits.needed[0]
        best = 1 - float(absent.sum() / visits.accesses[0])
    misses, foreseen, used = (stats[f"experts_{name}"] for name in ("misses", "foreseen", "foreseen_used"))
    config = tiers.config
    row = {
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
        "wait_share": stats["experts_wait_s"] / (end - start),
        "precision": used / foreseen if foreseen else None,
        "recall": used / misses if foreseen and misses else None,
        "slot_bytes": tiers.nbytes,
        "below_bytes": stats["experts_host_bytes"],
    }
    # Of what each step found when it began; the last one ends with the call.
    begun = np.array([*tiers.history, (end, tiers.hits, tiers.misses, tiers.wait_s, tiers.host_s)])
    seconds, hits, misses, waits, _ = np.diff(begun, axis=0).T
    timeline = {
        "start_s": begun[:-1, 0] - start, "step_ms": 1e3 * seconds, "wait_ms": 1e3 * waits,
        "hits": hits, "misses": misses,
    }  # fmt: skip
    return Answered(row, {name: np.round(each, 6).tolist() for name, each in timeline.items()}, outputs)


def run_measured(
    open_model: Callable[..., LLM], section: OffloadSection, run: ExperimentRun, *, seed: int
) -> Result:
    """Runs one engine after another and finishes `run`; `cases` begins with the engine that has all experts
    on the device. Arguments and errors are those of `run_offload`."""
    # The least share first: if it is too little, nothing has been measured yet.
    chosen = itertools.product(sorted(section.shares), section.ways, section.chosen)
    changes: list[dict[str, Any]] = [{"resident": None}]
    changes += [
        {"resident": share, "tier": tier, "prefetch": how, "policy": policy}
        for share, (tier, how), policy in chosen
        if share < 1
    ]
    cases: list[dict[str, Any]] = []
    timelines: list[dict[str, list[float]]] = []
    medians: list[list[float]] = []  # of each engine, a round's
    prompts: list[list[int]] = []
    params = SamplingParams(temperature=0, max_tokens=section.output_len, ignore_eos=True)
    with progress("engines", total=len(changes)) as task:
        for change in changes:
            task.describe(" ".join(str(value) for value in change.values() if value))
            with open_model(**change) as llm:
                if not prompts:
                    windows = read_windows(section, llm.model_dir, llm.tokenizer, llm.max_model_len, seed)
                    run.record(seeds={"seed": seed}, checkpoint=llm.model_dir, workload=windows.fingerprint)
                    length = section.seq_len - section.output_len
                    prompts = windows.tokens[windows.scored.all(axis=1), :length].tolist()
                    about = {"prompts": len(prompts), "prompt_len": length, "output_len": section.output_len}
                llm.generate(prompts[:1], params)  # compiles
                every = [answer(llm, prompts, params) for _ in range(section.rounds)]
                times = [[1e3 * output.metrics.tpot for output in one.outputs] for one in every]
                medians.append([float(np.median(each)) for each in times])
                cases.append(every[-1].row | summarize(np.ravel(times).tolist(), "tpot"))
                cases[-1] |= interval_fields("tpot_ratio", ratio_of_medians(medians[-1], medians[0]))
                timelines.append(every[-1].timeline)
            task.advance()
    run.track()
    metrics = {}
    for case in cases:
        if case.get("best_hit_rate") is not None:
            case["belady_gap"] = case["best_hit_rate"] - case["hit_rate"]
            name = "_".join(
                (case["policy"], f"{100 * case['resident_share']:g}", case["tier"], case["prefetch"])
            )
            metrics[f"hit_rate_{name}"] = case["hit_rate"]
    result = run.result(
        metrics=metrics, cases=cases, timelines=timelines, offload={"mode": "measured"} | about
    )
    return run.finish(result)
