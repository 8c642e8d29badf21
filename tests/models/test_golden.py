"""Hugging Face parity without torch: checkpoints, logits and greedy tokens that transformers left behind.

`python -m tests.golden.make_golden` makes the files; `-m oracle` compares with transformers itself.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from moejax.checkpoint.hf import load_pretrained
from moejax.models.registry import FAMILIES
from tests.decoding import prefill_and_greedy
from tests.examples import slow_but
from tests.numerics import assert_close, relative_l2
from tests.oracle.cases import GOLDEN, by_name

ROOT = Path(__file__).resolve().parent.parent / "golden"


def test_there_is_a_golden_file_for_every_family_and_they_stay_small():
    # Two names are of others' models: Kimi-K2 is a DeepSeek-V3, Gemma 3's text a model of its own.
    assert {by_name(name).family for name in GOLDEN} == FAMILIES.keys() - {
        "kimi_k2",
        "gemma3",
        "two_level_moe",
    }
    assert sorted(GOLDEN) == sorted(path.parent.name for path in ROOT.glob("*/golden.npz"))
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 2_000_000
    assert {by_name(name).dtype for name in GOLDEN} == {"float32", "bfloat16", "float16"}
    assert any((ROOT / name / "model.safetensors.index.json").exists() for name in GOLDEN)


# One of each family; the others are in the slow lane, and all in `make test-oracle`.
FAST = list({by_name(name).family: name for name in GOLDEN}.values())


@pytest.mark.parametrize("name", slow_but(FAST, GOLDEN))
def test_golden(name):
    directory = ROOT / name
    assert json.loads((directory / "config.json").read_text())["model_type"] == by_name(name).family
    golden = np.load(directory / "golden.npz")
    model, _ = load_pretrained(directory, dtype="float32")
    logits, greedy = prefill_and_greedy(model, golden["tokens"], golden["greedy"].shape[1])
    assert golden["logits"].std() > 0.5 and len(np.unique(golden["greedy"])) > 8
    # The limits of the oracle tests: one on each logit, and a stricter one on the whole.
    assert_close(logits, golden["logits"], 1e-4)
    assert relative_l2(logits, golden["logits"]) <= 1e-5
    np.testing.assert_array_equal(greedy, golden["greedy"])
