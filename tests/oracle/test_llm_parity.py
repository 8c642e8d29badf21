"""The public interface against transformers: prompts of different lengths in one call, the shipped model."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import moejax
from moejax.checkpoint.directory import resolve_model_dir, shipped_models
from moejax.checkpoint.hf import load_pretrained
from tests.decoding import forward
from tests.numerics import assert_close, relative_l2
from tests.oracle import hf

pytestmark = pytest.mark.oracle

NAMES = [
    "mixtral-window-k1-wide-head", "qwen2_moe-dense-layer", "qwen2_moe-window-sparse-step",
    "qwen3_moe-dense-layers-bias-tied", "olmoe-clip-bias-gqa", "llama-biases-mqa-tied-llama3",
    "qwen3-window-biases-tied", "granitemoe-factors", "gemma3_text-windows-linear",
    "phimoe-biases-window-mqa",
    "deepseek_v2-groups-yarn-scaling-dense-layer", "deepseek_v3-groups",
    "glm4_moe-groups-qk-norm-bias-dense-layer-yarn", "dots1-window-layer-types-groups-bias-dense-layer",
    "minimax_m2-plain", "minimax-factors", "minimax-default-layers-mqa-tied-wide-head-window",
    "ernie4_5_moe-every-second-layer-no-shared-norm-min-yarn",
    "hunyuan_v1_moe-lists-alpha-bias", "gpt_oss-published", "gpt_oss-k1-mqa-tied-windows-limit",
]  # fmt: skip
STEPS = 32


def open_llm(directory, **engine):
    # No compile cache on disk: it would make a second run test what the first compiled.
    return moejax.LLM(directory, dtype="float32", engine=moejax.EngineConfig(compile_cache=False, **engine))


@pytest.mark.parametrize("name", NAMES)
def test_generate_and_score(pair, name):
    both = pair(name)
    prompts = [hf.random_tokens(96, 1, length, seed=length)[0] for length in (3, 16, 9)]
    llm = open_llm(both.directory)
    params = moejax.SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = hf.greedy(both.theirs, prompt[None], STEPS)[0]
        np.testing.assert_array_equal(output.outputs[0].token_ids, expected)
    for prompt, score in zip(prompts, llm.score(prompts), strict=True):
        log_p = torch.log_softmax(torch.tensor(hf.logits(both.theirs, prompt[None])[0]), -1).numpy()
        assert_close(score, log_p[np.arange(len(prompt) - 1), prompt[1:]], 1e-4)


@pytest.mark.skipif("tiny" not in shipped_models(), reason="no model is shipped yet")
def test_the_shipped_model():
    """Same logits on its own held-out text, same tokens for a text and same greedy continuation."""
    directory = resolve_model_dir("tiny")
    theirs = hf.load(directory)
    text = (directory / "held_out.txt").read_text(encoding="utf-8")[:600]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokens = np.asarray(tokenizer(text)["input_ids"], np.int32)[None, :96]
    ours, _ = load_pretrained(directory, dtype="float32")
    logits, expected = np.asarray(forward(ours, tokens)[0]), hf.logits(theirs, tokens)
    assert_close(logits, expected, 1e-4)
    assert relative_l2(logits, expected) <= 1e-5

    llm = open_llm("tiny", max_model_len=128)
    prompt = text[:120]
    ids = np.asarray(tokenizer(prompt)["input_ids"], np.int32)
    params = moejax.SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    output = llm.generate(prompt, params)[0]
    np.testing.assert_array_equal(output.prompt_token_ids, ids)
    chosen = hf.greedy(theirs, ids[None], STEPS)[0]
    np.testing.assert_array_equal(output.outputs[0].token_ids, chosen)
    assert output.outputs[0].text == tokenizer.decode(chosen)
