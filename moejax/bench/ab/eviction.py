"""What evicting keys and values costs in quality: the `eviction` table of an A/B run of fixed batches.

Each engine is given held-out text, a prompt and what really follows it, token by token, so that it decodes
under its policy what the baseline decodes under its own; and needles: a short passage at the beginning of a
prompt that comes again after it, once behind itself and once behind another passage in its place.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from moejax.bench.ab.determinism import largest_batch
from moejax.bench.ab.measure import BatchLoad, Load
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import engine_of
from moejax.bench.common.held_out import HeldOutText, read_windows
from moejax.cache.pool import block_bytes
from moejax.engine.grammar import Constraint
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Logprob, SamplingParams

NEEDLE = 16
"""Tokens of a needle, each of which counts but the first two, that show which one it is."""
_WINDOWS, _NEEDLES = 16, 48
_LIKELIEST = 100


class Forced(Constraint):
    """Leaves a sample no choice: it puts out these tokens."""

    needs_host = True

    def __init__(self, tokens: Sequence[int], words: int) -> None:
        super().__init__(np.zeros(words, np.int32))
        self._tokens = tokens

    def words(self, output: Sequence[int]) -> np.ndarray:
        """Returns the mask of the one token that follows."""
        bits = np.zeros((len(self.allowed), 32), np.uint8)
        bits.reshape(-1)[self._tokens[len(output)]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def eviction_rows(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns a row for each of our own engines; none where no engine evicts, there is no held-out text in
    the model's folder, or outputs are shorter than a needle."""
    engines = [(arm.name, llm) for arm in arms if arm.name != CONTROL and (llm := engine_of(arm.backend))]
    asked = any(llm.engine_config.kv_policy.method != "none" for _, llm in engines)
    folder = engines[0][1].model_dir if engines else None
    if not isinstance(load, BatchLoad) or not asked or folder is None:
        return []
    case = largest_batch(load)[0]
    if not (folder / "held_out.txt").is_file() or case.output_len < NEEDLE:
        return []
    llm, length = engines[0][1], case.prompt_len + case.output_len
    windows, others = whole_windows(llm, length, _WINDOWS), whole_windows(llm, case.prompt_len, _NEEDLES)
    behind, control = _needles(others)
    rows: list[dict[str, Any]] = []
    base: list[list[Logprob]] = []
    for name, llm in engines:
        plain = llm.variant(dataclasses.replace(llm.engine_config, overlap=False))
        told, held = decode(plain, windows, case.prompt_len)
        again, other = (decode(plain, prompts, -NEEDLE)[0] for prompts in (behind, control))
        base = base or told
        gain = np.array([[x.logprob for x in row[2:]] for row in again])
        gain -= [[x.logprob for x in row[2:]] for row in other]
        nats = np.array([[x.logprob for x in row] for row in told])
        policy = llm.engine_config.kv_policy
        rows.append(
            {
                "variant": name,
                "kv_policy": policy.method,
                "kv_cache": llm.kv_cache_dtype,
                "compared_tokens": nats.size,
                "perplexity": float(np.exp(-nats.mean())),
                "kl": mean_kl(base, told),
                **held,
                "needle_gain": float(gain.mean()),
                "needle_recall": float(gain.mean() / rows[0]["needle_gain"]) if rows else 1.0,
            }
        )
    return rows


def whole_windows(llm: LLM, length: int, count: int) -> list[list[int]]:
    """Returns windows of so many tokens of the held-out text in the model's folder."""
    # The token more that a window has is left out.
    section = HeldOutText("auto", length, count)
    text = read_windows(section, llm.model_dir, llm.tokenizer, llm.max_model_len + 1, 0)
    return text.tokens[text.scored.all(axis=1), :-1].tolist()


def decode(
    llm: LLM, sequences: Sequence[list[int]], prompt_len: int
) -> tuple[list[list[Logprob]], dict[str, float]]:
    """Decodes what is given of each sequence from `prompt_len` on, all at once where they fit.

    Returns:
        What the engine thinks of each token; and what a sequence takes of the cache, in bytes: at most, and
        in the last step that the most of them run in.
    """
    used: list[tuple[int, int]] = []
    size = block_bytes(llm.config, llm.engine_config.block_size, llm.kv_cache_dtype)
    llm.engine.on_step = lambda record: used.append((record.running, record.used_blocks * size))
    outputs = [row[prompt_len:] for row in sequences]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(row),
            ignore_eos=True,
            logprobs=_LIKELIEST,
            allowed_token_ids=list(set(row)),
        )
        for row in outputs
    ]
    requests = llm.builder.to_generate([row[:prompt_len] for row in sequences], params)
    words = -(-llm.config.vocab_size // 32)
    for request, row in zip(requests, outputs, strict=True):
        request.sequences[0].constraint = Forced(row, words)
    llm.engine.run(requests)
    most = max(count for count, _ in used)
    end = [each / count for count, each in used if count == most][-1]
    told = [request.output.outputs[0].logprobs or [] for request in requests]
    return told, {"peak_cache_bytes": max(each / count for count, each in used), "end_cache_bytes": end}


def mean_kl(base: list[list[Logprob]], other: list[list[Logprob]]) -> float:
    """Returns the mean of `kl` over all tokens."""
    return float(np.mean([kl(*pair) for pair in zip(chain(*base), chain(*other), strict=True)]))


def kl(base: Logprob, other: Logprob) -> float:
    """Returns the divergence of the next token's distribution from the baseline's, of its likeliest tokens
    and all others as one. One that is not among the other's likeliest counts as the least likely of these."""
    p = np.exp(np.array([*base.top.values()]))
    least = min(other.top.values())
    q = np.exp(np.array([other.top.get(token, least) for token in base.top]))
    p, q = (np.append(x, max(1.0 - x.sum(), 1e-9)) for x in (p, q))
    return float((p * np.log(p / q)).sum())


def _needles(windows: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts that begin with a needle, which follows them again; and the same behind others."""
    # The end of another window, so that the text before does not lead to it.
    first, second = ([row[-NEEDLE:] for row in [*windows[n:], *windows[:n]]] for n in (1, 2))
    behind, control = (
        [each + row[:-NEEDLE] + needle for each, row, needle in zip(side, windows, first, strict=True)]
        for side in (first, second)
    )
    return behind, control
