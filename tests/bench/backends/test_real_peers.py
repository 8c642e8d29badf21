"""The real workers on a small random model: the same greedy tokens as ours, and instants in order.

transformers: `make test-oracle`. llama.cpp: with MOEJAX_PEERS_PYTHON=PYTHON, an interpreter that has
llama-cpp-python, gguf and safetensors; it is then used for both.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moejax
from moejax.bench.backends.base import Backend, BackendError
from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.peer import WorkerBackend
from moejax.bench.driver import drive
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload
from moejax.engine.requests.api import SamplingParams
from tests.engine.tiny import main_config, write_model

PYTHON = os.environ.get("MOEJAX_PEERS_PYTHON")
PROMPTS = [[5, 9, 200, 31, 7], [17], [250, 3, 3]]
LENGTHS = (6, 12, 9)


def greedy(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), main_config(), tokenizer=False)


@pytest.fixture(scope="module")
def gguf(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if PYTHON is None:
        pytest.skip("no MOEJAX_PEERS_PYTHON with llama-cpp-python, gguf, safetensors")
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    subprocess.run([PYTHON, Path(__file__).with_name("write_gguf.py"), directory, path], check=True)
    return path


def expected(directory: Path) -> list[list[int]]:
    llm = moejax.LLM(directory, dtype="float32", engine=moejax.EngineConfig(compile_cache=False))
    outputs = llm.generate(PROMPTS, [greedy(length) for length in LENGTHS])
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(backend: Backend, tokens: list[list[int]]) -> None:
    """Prompts of different lengths in one batch; then as traffic that does not fit into one batch."""
    params = [greedy(length) for length in LENGTHS]
    backend.prepare(max_num_seqs=3, max_total_len=32, params=params)
    for output, ids in zip(backend.generate(PROMPTS, params), tokens, strict=True):
        assert output.outputs[0].token_ids == ids
        instants = [output.metrics.arrival_time, *output.metrics.token_times]
        assert instants == sorted(instants) and len(instants) == len(ids) + 1
    backend.prepare(max_num_seqs=2, max_total_len=32, params=params)
    asked = [PlannedRequest(0.0, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    run = drive(backend, asked, ThroughputWorkload().sampling)
    assert [list(item.token_ids) for item in run.served] == tokens
    assert max(step.running for step in run.steps) == 2
    # Sampling: a seed gives the same tokens again, another seed others.
    warm = [SamplingParams(max_tokens=12, temperature=1.0, top_k=50, top_p=0.9, seed=s, ignore_eos=True)
            for s in (1, 1, 2)]  # fmt: skip
    backend.prepare(max_num_seqs=3, max_total_len=32, params=warm)
    one, again, other = (output.outputs[0].token_ids for output in backend.generate([[5, 9]] * 3, warm))
    assert one == again != other
    memory = backend.memory()
    assert memory["model_bytes"] and memory["process_peak_bytes"] and memory["bits_per_parameter"] == 32


@pytest.mark.oracle
def test_hf_transformers(directory: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model_dir": directory, "encode": None, "max_num_seqs": 2, "log_dir": tmp_path}
    options = BackendOptions(kind="hf_transformers", python=PYTHON or sys.executable, threads=1)
    backend = WorkerBackend("hf_transformers", options, **fields)
    try:
        assert backend.vocab_size == 320 and backend.batching == "static"
        assert backend.describe()["dtype"] == "float32" and backend.describe()["threads"] == 1
        check(backend, expected(directory))
    finally:
        backend.close()
    bad = BackendOptions(
        kind="hf_transformers", python=PYTHON or sys.executable, options={"attn_implementation": "nonsense"}
    )
    with pytest.raises(BackendError, match=r"backend hf_transformers: cannot load .*nonsense"):
        WorkerBackend("hf_transformers", bad, **fields)


@pytest.mark.slow
@pytest.mark.oracle
def test_prompt_lookup_of_transformers(directory: Path, tmp_path: Path) -> None:
    """Our tokens, in fewer rounds; samples of a seed; a stop token; one that is left."""
    llm = moejax.LLM(directory, dtype="float32", engine=moejax.EngineConfig(compile_cache=False))
    prompt = (llm.generate([PROMPTS[0]], greedy(24))[0].outputs[0].token_ids * 2)[:40]
    fields: dict[str, Any] = {"model_dir": directory, "encode": None, "max_num_seqs": 1, "log_dir": tmp_path}
    python = PYTHON or sys.executable
    options = BackendOptions(
        kind="hf_transformers", python=python, threads=1, options={"prompt_lookup_num_tokens": 3}
    )
    backend = WorkerBackend("hf_transformers", options, **fields)
    try:
        assert backend.describe()["prompt_lookup_num_tokens"] == 3
        for asked in ([prompt], PROMPTS):
            for params in (greedy(20), greedy(1)):
                (*ours,) = llm.generate(asked, params)
                (*theirs,) = backend.generate(asked, [params] * len(asked))
                for mine, other in zip(ours, theirs, strict=True):
                    assert other.outputs[0].token_ids == mine.outputs[0].token_ids
                    times = other.metrics.token_times
                    assert times == sorted(times) and len(times) == params.max_tokens
        (output,) = backend.generate([prompt], [greedy(20)])
        assert len(output.metrics.itl) < 19
        seeds = [SamplingParams(max_tokens=12, temperature=1.0, seed=s, ignore_eos=True) for s in (1, 1, 2)]
        one, again, other = (out.outputs[0].token_ids for out in backend.generate([[5, 9]] * 3, seeds))
        assert one == again != other and len(one) == 12
        left = backend.submit(prompt, greedy(400))
        while not left.outputs[0].token_ids:
            backend.step()
        backend.abort(left.request_id)
        after = backend.submit(prompt, greedy(20))
        while not after.finished:
            backend.step()
        assert after.outputs[0].token_ids == output.outputs[0].token_ids
    finally:
        backend.close()
    bad = BackendOptions(kind="hf_transformers", python=python, options={"prompt_lookup_num_tokens": 0})
    with pytest.raises(BackendError, match=r"prompt_lookup_num_tokens must be a positive integer, got 0"):
        WorkerBackend("hf_transformers", bad, **fields)


@pytest.mark.oracle
def test_llama_cpp(directory: Path, gguf: Path, tmp_path: Path) -> None:
    backend = WorkerBackend(
        "llama_cpp",
        BackendOptions(kind="llama_cpp", python=PYTHON, path=str(gguf), threads=1,
                       options={"type_k": 0, "type_v": 0}),
        model_dir=directory, encode=None, max_num_seqs=2, log_dir=tmp_path,
    )  # fmt: skip
    try:
        assert backend.batching == "continuous" and backend.describe()["kv_cache_dtype"] == "float32"
        check(backend, expected(directory))
    finally:
        backend.close()


@pytest.mark.oracle
def test_prompt_lookup_of_llama_cpp(directory: Path, gguf: Path, tmp_path: Path) -> None:
    """The tokens without it, in fewer steps; several at a time; samples of a seed."""
    llm = moejax.LLM(directory, dtype="float32", engine=moejax.EngineConfig(compile_cache=False))
    prompt = (llm.generate([PROMPTS[0]], greedy(24))[0].outputs[0].token_ids * 2)[:40]
    fields: dict[str, Any] = {"model_dir": directory, "encode": None, "max_num_seqs": 3, "log_dir": tmp_path}
    types = {"type_k": 0, "type_v": 0}

    def opened(**options: Any) -> WorkerBackend:
        given = BackendOptions(
            kind="llama_cpp", python=PYTHON, path=str(gguf), threads=1, options={**types, **options}
        )
        return WorkerBackend("llama_cpp", given, **fields)

    seeds = [SamplingParams(max_tokens=12, temperature=1.0, seed=s, ignore_eos=True) for s in (1, 1, 2)]
    plain, drafting = opened(), opened(prompt_lookup_num_tokens=3)
    try:
        assert drafting.describe()["prompt_lookup_num_tokens"] == 3
        drafting.prepare(max_num_seqs=3, max_total_len=80, params=[greedy(20)])
        plain.prepare(max_num_seqs=3, max_total_len=80, params=[greedy(20)])
        for params in (greedy(20), greedy(1), *seeds[1:]):
            for asked in ([prompt], [prompt, *PROMPTS[:2]]):
                told, wanted = (b.generate(asked, [params] * len(asked)) for b in (drafting, plain))
                for mine, other in zip(told, wanted, strict=True):
                    assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        (output,) = drafting.generate([prompt], [greedy(20)])
        assert len(output.metrics.itl) < 19
    finally:
        plain.close()
        drafting.close()
    with pytest.raises(BackendError, match=r"prompt_lookup_num_tokens must be a positive integer, got 0"):
        opened(prompt_lookup_num_tokens=0)


def test_a_file_that_is_no_gguf_or_no_weights(tmp_path: Path) -> None:
    """Needs neither package: a folder without weights is found before a process starts."""
    (tmp_path / "config.json").write_text("{}")
    options = BackendOptions(kind="hf_transformers")
    with pytest.raises(
        BackendError, match=r"reads weights, and .* has none: model=checkpoint model.path=DIR"
    ):
        WorkerBackend(
            "hf_transformers", options, model_dir=tmp_path, encode=None, max_num_seqs=1, log_dir=tmp_path
        )
