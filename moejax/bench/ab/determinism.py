"""What depends on the rest of the batch: the `determinism` table of an A/B run of fixed batches. No JAX here.

Each engine answers the same requests alone, in batches and with prompts cut into chunks. Where the tokens
before are the same, so is what is computed; that numbers differ, and with them the experts that a router
chooses, is then due to the batch alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.bench.ab.measure import BatchLoad, Load
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import engine_of
from moejax.bench.common.agreement import agreed_tokens, token_agreement
from moejax.bench.workload import LatencyCase
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.routing.capture import RoutingCapture, hash_tokens
from moejax.routing.difference import compare_captures, numbered


class Answers(NamedTuple):
    """Of each request its tokens and their log-probabilities; of all the routing, None without experts, and
    the share of drafts that were right, None without these."""

    tokens: list[list[int]]
    logprobs: list[np.ndarray]
    routing: RoutingCapture | None
    right: float | None


def determinism_rows(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns a row for each of our own engines and way to batch the largest case's requests. None where no
    engine is deterministic."""
    engines = [(arm.name, llm) for arm in arms if arm.name != CONTROL and (llm := engine_of(arm.backend))]
    asked = any(llm.engine_config.deterministic != "none" for _, llm in engines)
    if not isinstance(load, BatchLoad) or not asked:
        return []
    case, prompts, params = largest_batch(load)
    sizes = sorted({each.batch_size for each, _ in load.plan} - {1})
    rows = []
    for name, llm in engines:
        alone, *batched = answer(llm, prompts, params, [1, *sizes])
        ways = {f"{size} at once": answers for size, answers in zip(sizes, batched, strict=True)}
        # Not a divisor of the prompts' length, so that a chunk ends within a block.
        cut = {"max_num_seqs": 1, "max_num_batched_tokens": case.prompt_len // 3 + 1}
        [ways["in chunks"]] = answer(llm, prompts, params, [1], **cut)
        head = {"variant": name, "dtype": llm.config.dtype, "deterministic": llm.engine_config.deterministic}
        rows += [{**head, "batched": way, **_beside(prompts, alone, other)} for way, other in ways.items()]
    return rows


def largest_batch(load: BatchLoad) -> tuple[LatencyCase, list[list[int]], list[SamplingParams]]:
    """Returns the largest batch of a load, its prompts, and parameters that ask for log-probabilities."""
    case, prompts = max(load.plan, key=lambda each: each[0].batch_size)
    return case, prompts, [dataclasses.replace(p, logprobs=0) for p in load.workload.batch_sampling(case)]


def answer(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], sizes: Sequence[int], **options: Any
) -> list[Answers]:
    """Runs the requests so many at a time, for each of `sizes`, on an engine of the same weights that
    captures its routing and has forgotten those before."""
    sparse = any(llm.config.moe_layers)
    other = llm.variant(dataclasses.replace(llm.engine_config, capture_routing=sparse, **options))
    asked = True if llm.engine_config.deterministic == "verified" else None
    params = [dataclasses.replace(each, deterministic=asked) for each in params]
    parts = {size: [slice(i, i + size) for i in range(0, len(prompts), size)] for size in sizes}
    other.compile_for([(prompts[part], params[part]) for size in sizes for part in parts[size]])
    return [_answers(other, prompts, params, parts[size], sparse) for size in sizes]


def _answers(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], parts: list[slice], sparse: bool
) -> Answers:
    llm.clear_prefix_cache()
    llm.clear_drafts()
    if sparse:
        llm.reset_capture()
    before, outputs = llm.stats(), list[RequestOutput]()
    for part in parts:
        outputs += llm.generate(prompts[part], params[part])
    samples = [output.outputs[0] for output in outputs]
    drafted, accepted = (llm.stats()[name] - before[name] for name in ("drafted", "accepted"))
    return Answers(
        [list(sample.token_ids) for sample in samples],
        [np.asarray([each.logprob for each in sample.logprobs or []], np.float32) for sample in samples],
        llm.routing_capture() if sparse else None,
        accepted / drafted if drafted else None,
    )


def _beside(prompts: list[list[int]], alone: Answers, other: Answers) -> dict[str, Any]:
    """Returns how far answers agree with those of requests alone, where what is computed is the same."""
    same = [agreed_tokens(*pair) for pair in zip(other.tokens, alone.tokens, strict=True)]
    pairs = [
        (mine[:n], theirs[:n]) for mine, theirs, n in zip(other.logprobs, alone.logprobs, same, strict=True)
    ]
    mine, theirs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    flips = None
    if alone.routing is not None and other.routing is not None:
        ends = np.asarray([len(prompt) + n for prompt, n in zip(prompts, same, strict=True)])
        both = [(each, rows_of(each, prompts)) for each in (alone.routing, other.routing)]
        # Tokens whose context is the same are those before their request's end.
        compared = compare_captures(*(each.select(each.position < ends[row]) for each, row in both))
        flips = float(compared.flips.mean())
    return {
        "compared_tokens": sum(same),
        "equal_requests": token_agreement(other.tokens, alone.tokens)["equal_requests"],
        "equal_logprobs": float((mine.view(np.int32) == theirs.view(np.int32)).mean()) if len(mine) else 0.0,
        "largest_logprob_difference": float(np.abs(mine - theirs).max()) if len(mine) else None,
        "router_flips": flips,
        "draft_acceptance": other.right,
    }


def rows_of(capture: RoutingCapture, prompts: list[list[int]]) -> np.ndarray:
    """Returns int `[R]`: the prompt of each row of a trace; of equal ones the n-th request's is the n-th."""
    place = {key: index for index, key in enumerate(numbered(map(hash_tokens, prompts)))}
    keys = numbered(request.prompt_hash for request in capture.requests)
    return np.asarray([place[key] for key in keys], np.int64)[capture.request]
