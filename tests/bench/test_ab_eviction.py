"""The table of eviction: what forced tokens, needles and divergences say, and a row for each engine."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from moejax import LLM, EngineConfig
from moejax.bench.ab.eviction import NEEDLE, Forced, _needles, decode, eviction_rows, kl
from moejax.bench.ab.measure import BatchLoad
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.workload import WorkloadConfig
from moejax.core.scheduling import KvPolicyConfig
from moejax.engine.requests.api import Logprob
from moejax.report.determinism import eviction_table
from tests.model_shapes import ONE_LAYER

CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=4, compile_cache=False,
    seq_buckets=[4], token_buckets=[64], block_buckets=[64], overlap=False,
)  # fmt: skip
WINDOW = KvPolicyConfig(method="window", sinks=2, recent=6)


def test_a_forced_sample_has_no_choice() -> None:
    forced = Forced([33, 5], 3)
    for output, token in (([], 33), ([33], 5)):
        words = forced.words(output)
        assert [i for i in range(96) if words[i // 32] >> (i % 32) & 1] == [token]
    assert forced.needs_host


def test_divergence() -> None:
    base = Logprob(-1.0, 1, {1: np.log(0.5), 2: np.log(0.25)})
    assert kl(base, base) == pytest.approx(0)
    # Token 2 counts as the least likely that is told, and all others as one.
    other = Logprob(-1.0, 1, {1: np.log(0.5), 3: np.log(0.125)})
    want = 0.25 * np.log(0.25 / 0.125) + 0.25 * np.log(0.25 / 0.375)
    assert kl(base, other) == pytest.approx(want)


def test_needles_come_again_behind_themselves_and_behind_others() -> None:
    windows = [[100 * i + j for j in range(20)] for i in range(3)]
    behind, control = _needles(windows)
    for row, other, window in zip(behind, control, windows, strict=True):
        assert row[:NEEDLE] == row[-NEEDLE:] == other[-NEEDLE:] != other[:NEEDLE]
        assert row[NEEDLE:-NEEDLE] == other[NEEDLE:-NEEDLE] == window[:-NEEDLE]


@pytest.mark.slow
def test_text_is_decoded_as_it_is_scored() -> None:
    """Token by token what a score gives at once; a window holds less, of every sequence the same."""
    llm = LLM(ONE_LAYER, dtype="float32", load_format="dummy", engine=CONFIG)
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 90, 40).tolist() for _ in range(5)]
    held = {}
    for policy in (KvPolicyConfig(), WINDOW):
        engine = llm.variant(dataclasses.replace(CONFIG, kv_policy=policy))
        told, held[policy.method] = decode(engine, rows, 24)
        for row, scores in zip(told, engine.score(rows), strict=True):
            assert np.abs([x.logprob for x in row] - scores[23:]).max() < 1e-4
    block = 4 * 2 * 2 * 8 * 4  # tokens, keys and values, heads, numbers, bytes
    assert held["none"] == {"peak_cache_bytes": 10 * block, "end_cache_bytes": 10 * block}
    assert held["window"] == {"peak_cache_bytes": 6 * block, "end_cache_bytes": 3 * block}


@pytest.mark.slow
def test_rows_of_the_shipped_model() -> None:
    config = dataclasses.replace(CONFIG, max_model_len=128, block_buckets=[128])
    llm = LLM("tiny", dtype="float32", engine=config)
    engines = {"full": config, CONTROL: config, "window": dataclasses.replace(config, kv_policy=WINDOW)}
    arms = [Arm(name, [], MoejaxBackend(llm.variant(engine))) for name, engine in engines.items()]
    load = BatchLoad(
        WorkloadConfig(batch_size=4, prompt_len=48, output_len=20), [arm.backend for arm in arms]
    )
    full, window = eviction_rows(arms, load)
    assert (full["kl"], full["needle_recall"]) == (pytest.approx(0, abs=1e-9), 1.0)
    assert full["perplexity"] < window["perplexity"] and window["kl"] > 0.01
    assert window["end_cache_bytes"] < full["end_cache_bytes"] / 3
    assert full["needle_gain"] > 0.2 > abs(window["needle_gain"])
    assert eviction_rows(arms[:2], load) == []
    console = Console(width=200, record=True)
    console.print(eviction_table([full, window]))
    assert "window" in console.export_text()
