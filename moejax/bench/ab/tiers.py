"""What experts in tiers cost: the `tiers` table of an A/B run of fixed batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moejax.bench.ab.determinism import largest_batch
from moejax.bench.ab.eviction import decode, mean_kl, whole_windows
from moejax.bench.ab.measure import BatchLoad, Load
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import engine_of
from moejax.bench.offload.measure import answer
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Logprob

_WINDOWS = 8


def tiers_rows(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns a row for each of our own engines whose experts are in tiers, which answers the largest batch
    from empty slots; where it captures routing also what Belady's bound would have hit. Where an engine is
    lossy, and the model's folder has held-out text, `kl` is from the first engine."""
    rows: list[dict[str, Any]] = []
    engines = [(arm.name, llm) for arm in arms if arm.name != CONTROL and (llm := engine_of(arm.backend))]
    if not isinstance(load, BatchLoad) or not any(llm.engine.tiers for _, llm in engines):
        return []
    case, prompts, params = largest_batch(load)
    base, windows = list[list[Logprob]](), list[list[int]]()
    folder = engines[0][1].model_dir
    if any(_lossy(llm) for _, llm in engines) and folder and (folder / "held_out.txt").is_file():
        windows = whole_windows(engines[0][1], case.prompt_len + case.output_len, _WINDOWS)
        base = _decoded(engines[0][1], windows, case.prompt_len)
    for name, llm in engines:
        if llm.engine.tiers is None:
            continue
        llm.generate(prompts, params)  # compiles what reports log-probabilities
        row = answer(llm, prompts, params).row
        kl = mean_kl(base, _decoded(llm, windows, case.prompt_len)) if windows else None
        rows.append({"variant": name, **row, "kl": kl})
    return rows


def _lossy(llm: LLM) -> bool:
    config = llm.engine_config
    return config.experts_in_tiers and (config.tiers.codes, config.experts.miss) != ("none", "wait")


def _decoded(llm: LLM, windows: list[list[int]], prompt_len: int) -> list[list[Logprob]]:
    return decode(llm.variant(dataclasses.replace(llm.engine_config, overlap=False)), windows, prompt_len)[0]
