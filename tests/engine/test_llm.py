"""`LLM` from outside: the forms a prompt may take, per-prompt parameters, ends, metrics, construction."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import moejax
from moejax.checkpoint.hf import save_pretrained
from moejax.core.config import EngineConfig
from moejax.core.errors import CheckpointError, OutputError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.models.registry import config_to_hf
from tests.engine.conftest import ENGINE
from tests.engine.tiny import FullForward, small_config, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)


def tokens(outs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in out.outputs] for out in outs]


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory without weights: configuration and tokenizer."""
    directory = tmp_path_factory.mktemp("small")
    (directory / "config.json").write_text(json.dumps(config_to_hf(small_config())), encoding="utf-8")
    write_tokenizer(directory)
    return directory


# -- prompts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        [5, 6, 7],
        (5, 6, 7),
        [[5, 6, 7]],
        [(5, 6, 7)],
        np.array([5, 6, 7]),
        np.array([[5, 6, 7]], np.int16),
        [np.array([5, 6, 7], np.uint8)],
        [np.int64(5), np.int32(6), 7],
        iter([[5, 6, 7]]),
        jnp.array([5, 6, 7]),
        [jnp.array([5, 6, 7])],
    ],
    ids=lambda form: f"{type(form).__name__}",
)
def test_forms_of_a_prompt(form: Any, llm: LLM, oracle: FullForward) -> None:
    (out,) = llm.generate(form, GREEDY)
    assert out.prompt is None and out.prompt_token_ids == [5, 6, 7]
    assert all(type(token) is int for token in out.prompt_token_ids + out.outputs[0].token_ids)
    assert out.outputs[0].token_ids == oracle.greedy([5, 6, 7], 6)


def test_text(llm: LLM, oracle: FullForward) -> None:
    assert llm.tokenizer is not None
    text = "the router"
    ids = llm.tokenizer.encode(text)
    for prompts in (text, [text]):
        (out,) = llm.generate(prompts, GREEDY)
        assert (out.prompt, out.prompt_token_ids) == (text, ids)
        assert out.outputs[0].token_ids == oracle.greedy(ids, 6)
        assert out.outputs[0].text == llm.tokenizer.decode(out.outputs[0].token_ids)


def test_text_and_tokens_in_one_call_keep_their_order(llm: LLM) -> None:
    outs = llm.generate(["a cup", [5, 6, 7], "experts"], GREEDY)
    assert [out.prompt for out in outs] == ["a cup", None, "experts"]
    assert [int(out.request_id) for out in outs] == list(
        range(int(outs[0].request_id), int(outs[0].request_id) + 3)
    )
    assert outs[1].outputs[0].token_ids == llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids


def test_scoring_takes_the_same_forms(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "the router"
    (want,) = llm.score([llm.tokenizer.encode(text)])
    for form in (text, [text], np.array(llm.tokenizer.encode(text)), llm.tokenizer.encode(text)):
        np.testing.assert_array_equal(llm.score(form)[0], want)


def test_default_parameters(llm: LLM) -> None:
    (out,) = llm.generate([[5, 6, 7]])
    assert len(out.outputs) == 1 and 1 <= len(out.outputs[0].token_ids) <= 16


def test_parameters_per_prompt(llm: LLM, oracle: FullForward) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outs = llm.generate([[5, 6], [7], [8, 9, 10]], params)
    for out, ids, n in zip(outs, ([5, 6], [7], [8, 9, 10]), (1, 5, 3), strict=True):
        assert out.outputs[0].token_ids == oracle.greedy(ids, n)


# -- ends ----------------------------------------------------------------------------------------------


def test_ends(llm: LLM, oracle: FullForward) -> None:
    """Each by the third token of a known continuation."""
    plain = oracle.greedy([5, 6, 7], 6)
    third = plain[2]
    assert third not in plain[:2]
    cases: list[tuple[dict[str, Any], int, str, Any]] = [
        ({"stop_token_ids": [third]}, 3, "stop", third),
        ({"max_tokens": 4}, 4, "length", None),
        ({"max_tokens": 1}, 1, "length", None),
    ]
    for fields, count, reason, stop in cases:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | fields))
        sample = llm.generate([5, 6, 7], params)[0].outputs[0]
        assert sample.token_ids == plain[:count]
        assert (sample.finish_reason, sample.stop_reason) == (reason, stop)


def test_eos_from_generation_config_joins_the_models(
    model_dir: Path, tmp_path: Path, oracle: FullForward
) -> None:
    plain = oracle.greedy([5, 6, 7], 6)
    shutil.copytree(model_dir, tmp_path / "model")
    settings = tmp_path / "model" / "generation_config.json"
    for extra, want in (
        (plain[2], (0, plain[2])),
        ([plain[2], plain[4]], tuple(sorted((0, plain[2], plain[4])))),
    ):
        settings.write_text(json.dumps({"eos_token_id": extra}), encoding="utf-8")
        llm = LLM(tmp_path / "model", engine=ENGINE)
        assert llm.eos_token_ids == want
    params = SamplingParams(temperature=0.0, max_tokens=6)
    sample = llm.generate([5, 6, 7], params)[0].outputs[0]
    assert sample.token_ids == plain[:3] and (sample.finish_reason, sample.stop_reason) == ("stop", None)
    settings.write_text("{}", encoding="utf-8")
    assert LLM(tmp_path / "model", engine=ENGINE).eos_token_ids == (0,)
    for bad in ('{"eos_token_id": "x"}', "[]", "{"):
        settings.write_text(bad, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            LLM(tmp_path / "model", engine=ENGINE)


def test_a_stop_string_ends_the_row_and_not_its_neighbours(llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompts = [[5, 6, 7], [8, 9, 10], [11, 12]]
    long = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = [out.outputs[0] for out in llm.generate(prompts, long)]
    stop = next(c for c in plain[0].text[2:] if c not in plain[0].text[:2] and c != "\ufffd")
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop]), long, long]
    ended, *others = [out.outputs[0] for out in llm.generate(prompts, params)]
    assert ended.text == plain[0].text[: plain[0].text.index(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert len(ended.token_ids) < 12
    assert [o.token_ids for o in others] == [p.token_ids for p in plain[1:]]


def test_the_models_length_cuts_the_output(llm: LLM) -> None:
    prompt = [5] * 60
    out = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))[0].outputs[
        0
    ]
    assert len(out.token_ids) == llm.max_model_len - 60 == 4
    assert out.finish_reason == "length" and out.stop_reason is None


# -- several samples and seeds -------------------------------------------------------------------------


def test_samples_differ_and_use_seed_plus_i(llm: LLM) -> None:
    (out,) = llm.generate(
        [5, 6, 7], SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=40, n=3)
    )
    samples = tokens([out])[0]
    assert [sample.index for sample in out.outputs] == [0, 1, 2]
    assert len({tuple(sample) for sample in samples}) == 3
    assert len(out.metrics.token_times) == 6  # the first sample's
    for i in range(3):
        params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=40 + i)
        assert tokens(llm.generate([5, 6, 7], params)) == [[samples[i]]]


def test_greedy_samples_are_equal(llm: LLM) -> None:
    (out,) = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6, n=3))
    assert len({tuple(sample.token_ids) for sample in out.outputs}) == 1


def test_the_same_call_twice_draws_the_same(llm: LLM) -> None:
    prompts = [[5, 6, 7]] * 4
    first = tokens(llm.generate(prompts, SAMPLED))
    assert first == tokens(llm.generate(prompts, SAMPLED))
    assert len({tuple(row[0]) for row in first}) == 4  # each place in the call has its own stream


@pytest.mark.slow
def test_another_instance_draws_the_same_and_another_seed_does_not(llm: LLM, model_dir: Path) -> None:
    prompts = [[5, 6, 7], [8, 9], [10], [11, 12]]
    first = tokens(llm.generate(prompts, SAMPLED))
    assert first == tokens(LLM(model_dir, engine=ENGINE).generate(prompts, SAMPLED))
    other = tokens(LLM(model_dir, engine=ENGINE, seed=1).generate(prompts, SAMPLED))
    assert all(a != b for a, b in zip(first, other, strict=True))
    seeded = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=9)
    own = tokens(llm.generate(prompts, seeded))
    assert own == tokens(LLM(model_dir, engine=ENGINE, seed=1).generate(prompts, seeded))


def test_more_prompts_than_max_num_seqs(llm: LLM, model_dir: Path) -> None:
    """Equal to one batch; and no batch is over the limit, not even for one request of many samples."""
    narrow = LLM(model_dir, engine=EngineConfig(compile_cache=False, max_num_seqs=2))
    running: list[int] = []
    narrow.engine.on_step = lambda record: running.append(record.running)
    prompts = [[5, 6, 7], [8, 9], [10]]
    assert tokens(narrow.generate(prompts, SAMPLED)) == tokens(llm.generate(prompts, SAMPLED))
    many = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=3)
    (out,) = narrow.generate([5, 6, 7], many)
    assert tokens([out]) == tokens(llm.generate([5, 6, 7], many))
    assert out.finished and max(running) == 2


# -- metrics -------------------------------------------------------------------------------------------


def test_metrics(llm: LLM) -> None:
    outs = llm.generate([[5, 6, 7], [8, 9]], [GREEDY, SamplingParams(temperature=0.0, max_tokens=1)])
    for out in outs:
        m, count = out.metrics, len(out.outputs[0].token_ids)
        assert out.finished and len(m.token_times) == count
        assert m.token_times == sorted(m.token_times)
        assert 0 < m.ttft <= m.e2e
        np.testing.assert_allclose(m.ttft + m.tpot * (count - 1), m.e2e, rtol=1e-6)
        np.testing.assert_allclose(sum(m.itl), m.e2e - m.ttft, atol=1e-9)
    assert outs[0].metrics.arrival_time == outs[1].metrics.arrival_time
    assert outs[1].metrics.tpot == 0.0


# -- construction --------------------------------------------------------------------------------------


def test_dummy_weights(small_dir: Path, bare_llm: LLM) -> None:
    """From a directory without weights, a path as text, a dictionary: the same weights by the same seed."""
    raw = json.loads((small_dir / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        LLM(small_dir, engine=ENGINE)
    table = bare_llm.model.embedding.table[...]
    for model in (small_dir, str(small_dir), raw):
        llm = LLM(model, load_format="dummy", engine=ENGINE)
        assert llm.config == bare_llm.config
        assert (llm.tokenizer is None) == (model is raw)
        np.testing.assert_array_equal(llm.model.embedding.table[...], table)
    other = LLM(raw, load_format="dummy", engine=ENGINE, seed=1)
    assert (other.model.embedding.table[...] != table).any()


def test_saved_dummy_weights_load_as_they_were(bare_llm: LLM, tmp_path: Path) -> None:
    save_pretrained(bare_llm.model, tmp_path)
    loaded = LLM(tmp_path, engine=ENGINE)
    assert loaded.config == bare_llm.config
    np.testing.assert_array_equal(loaded.model.embedding.table[...], bare_llm.model.embedding.table[...])


def test_a_saved_model_opens_with_its_text(llm: LLM, tmp_path: Path) -> None:
    """Tokenizer and generation settings go along; a directory in use is refused, then replaced."""
    assert llm.model_dir is not None
    out = tmp_path / "saved"
    llm.save_pretrained(out)
    given = {path.name for path in llm.model_dir.iterdir()}
    assert {path.name for path in out.iterdir()} == given > {"tokenizer.json", "tokenizer_config.json"}
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(OutputError, match=r"saved holds a model; .*overwrite=True"):
        llm.save_pretrained(out)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(OutputError, match="is no model directory"):
        llm.save_pretrained(tmp_path, overwrite=True)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "old.txt").write_text("of the model before")
    llm.save_pretrained(out, overwrite=True)
    assert {path.name for path in out.iterdir()} == given
    again, params = LLM(out, engine=ENGINE), SamplingParams(temperature=0.0, max_tokens=4)
    wanted, got = (each.generate("def route(", params)[0].outputs[0].text for each in (llm, again))
    assert got == wanted and again.eos_token_ids == llm.eos_token_ids
    chat = [{"role": "user", "content": "Hi"}]
    assert again.chat_prompt(chat) == llm.chat_prompt(chat)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "saved"]


def test_limits_and_resolutions(small_dir: Path) -> None:
    engine = EngineConfig(compile_cache=False, max_model_len=10)
    llm = LLM(small_dir, load_format="dummy", engine=engine, dtype="float32")
    assert llm.max_model_len == 10
    assert LLM(small_dir, load_format="dummy", engine=ENGINE).max_model_len == 64
    assert {r.key: r.value for r in llm.resolutions} == {
        "memory": "1.4 MB",
        "engine.platform": "cpu",
        "model.dtype": "float32",
        "engine.kernels": "xla",
        "engine.moe.grouped_matmul": "blocks_mixed",
        "engine.moe.expert_layout": "efd",
        "engine.autotune": "rules",
        "quant.kv_cache": "float32",
        "engine.num_blocks": "64",
    }
    assert all(r.reason for r in llm.resolutions)


def test_the_public_names() -> None:
    assert moejax.LLM is LLM and moejax.SamplingParams is SamplingParams
    assert set(moejax.__all__) <= {*dir(moejax)}
    for name in moejax.__all__:
        assert getattr(moejax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        moejax.LMM  # noqa: B018
