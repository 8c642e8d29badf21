"""Clients that others wrote, over loopback: they get what `LLM` gives, and errors as their own exceptions."""

import asyncio
import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from moejax import LLM, SamplingParams
from moejax.bench.backends.base import BackendError
from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.moejax_server import MoejaxServer
from moejax.bench.backends.openai_endpoint import OpenAIEndpoint
from moejax.core.errors import ConfigError
from tests.engine.tiny import small_config, write_model
from tests.serving.test_server import ENGINE, served

PROMPTS = ["The router sends", "def route(tokens)"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
WANTED: dict[str, Any] = {
    "model": "toy",
    "temperature": 0,
    "max_tokens": 6,
    "extra_body": {"ignore_eos": True},
}
MESSAGES: list[Any] = [{"role": "user", "content": "Where does the router send tokens?"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("clients"), small_config())


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, engine=ENGINE) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with served(llm) as (found, _):
        yield found


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def test_openai_s_client_gets_llm_s_tokens(llm: LLM, client: openai.OpenAI, address: str) -> None:
    wanted = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
    told = client.completions.create(prompt=PROMPTS, **WANTED)
    assert [choice.text for choice in told.choices] == wanted
    assert told.usage is not None and told.usage.completion_tokens == 12
    chunks = list(client.completions.create(prompt=PROMPTS, stream=True, **WANTED))
    for index, text in enumerate(wanted):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.text for c in choices) == text and choices[-1].finish_reason == "length"

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as many:
            answers = [many.completions.create(prompt=PROMPTS[i % 2], **WANTED) for i in range(12)]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    assert asyncio.run(several()) == wanted * 6


def test_openai_s_client_chats(llm: LLM, client: openai.OpenAI) -> None:
    (wanted,) = llm.chat(MESSAGES, GREEDY)
    told = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **WANTED)
    choice = told.choices[0]
    assert choice.message.content == wanted.outputs[0].text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)  # greedy
    usage: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=usage, **WANTED)
    )
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == wanted.outputs[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
    stop = wanted.outputs[0].text[2:4]
    stopped = client.chat.completions.create(messages=MESSAGES, stop=[stop], **{**WANTED, "extra_body": None})
    assert stopped.choices[0].finish_reason == "stop" and stop not in (
        stopped.choices[0].message.content or ""
    )


@pytest.mark.slow  # another program
def test_openai_s_client_samples(client: openai.OpenAI) -> None:
    sampled: Any = {"model": "toy", "messages": MESSAGES, "n": 2, "max_tokens": 8, "seed": 4}
    first, again = (client.chat.completions.create(**sampled) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    assert first.choices[0].message.content != first.choices[1].message.content


def test_errors_are_openai_s_exceptions(client: openai.OpenAI, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.completions.create(prompt="a", model="other")
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.completions.create(prompt="a", model="toy", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool: Any = {"type": "function", "function": {"name": "f"}}
        client.chat.completions.create(messages=MESSAGES, model="toy", tools=[tool])
    (tmp_path / "keys").write_text("right\n")
    with served(llm, api_keys_file=str(tmp_path / "keys"), max_requests=1) as (address, _):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError, match="no valid key"):
                other.models.list()
        with openai.OpenAI(base_url=f"{address}/v1", api_key="right", max_retries=0) as other:
            with pytest.raises(openai.RateLimitError, match=r"serve\.max_requests"):
                other.completions.create(prompt=PROMPTS, **WANTED)


def endpoint(llm: LLM) -> dict[str, Any]:
    assert llm.tokenizer is not None
    known = {
        "vocab_size": llm.config.vocab_size,
        "max_model_len": llm.max_model_len,
        "checkpoint": llm.model_dir,
    }
    return {**known, "encode": llm.tokenizer.encode, "decode": llm.tokenizer.decode}


def test_our_own_client_sees_every_token(llm: LLM, address: str) -> None:
    prompts = [llm.encode(prompt) for prompt in PROMPTS]
    options = BackendOptions(kind="openai_endpoint", url=f"{address}/v1")
    backend = OpenAIEndpoint("server", options, **endpoint(llm))
    try:
        outputs = backend.generate(prompts, [GREEDY, GREEDY])
        assert backend.itl_known and "names its tokens" in backend.describe()["token_instants"]
        for output, wanted in zip(outputs, llm.generate(prompts, GREEDY), strict=True):
            assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert len(output.metrics.token_times) == 6
        long = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        backend.abort(backend.submit(prompts[0], long).request_id)
        assert not backend.step()
    finally:
        backend.close()


def open_small(model_dir: Path) -> LLM:
    return LLM(model_dir, engine=ENGINE)


def open_nothing() -> LLM:
    raise ConfigError("model.path: there is none")


@pytest.mark.slow
def test_a_server_in_a_process(model_dir: Path, llm: LLM, tmp_path: Path) -> None:
    """It gives `LLM`'s tokens, ends with its pipe, and what is wrong with it is one line."""
    options = BackendOptions(kind="moejax_server", timeout_s=120)
    log, more = tmp_path / "server.log", endpoint(llm)
    with pytest.raises(BackendError, match=r"^backend ours: model\.path: there is none$"):
        MoejaxServer("ours", options, open_nothing, log, **more)
    backend = MoejaxServer("ours", options, partial(open_small, model_dir), log, **more)
    try:
        backend.prepare(max_num_seqs=2, max_total_len=32, params=[GREEDY])
        prompts = [llm.encode(prompt) for prompt in PROMPTS]
        outputs = backend.generate(prompts, [GREEDY, GREEDY])
        told = [output.outputs[0].token_ids for output in outputs]
        assert told == [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        backend.reset_stats()
        assert backend.stats()["failed_steps"] == 0
        assert backend.describe()["kind"] == "moejax_server"
        process = backend._process
        process.kill()
        with pytest.raises(
            BackendError, match=r"^backend ours: its process ended with code -9; see .*\.log$"
        ):
            backend.stats()
    finally:
        backend.close()
    assert not process.is_alive()
    backend = MoejaxServer("ours", options, partial(open_small, model_dir), log, **more)
    backend.close()
    assert backend._process.exitcode == 0


TEXTS = [
    ("The router sends each", " token"),
    ("def route(tokens):", "\n    return"),
    ("naïve café", ", Größe"),
]
TASK = """
task: moejax_local
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{continuation}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean}]
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("LM_EVAL", "lm_eval")) is None, reason="needs lm-eval (moejax[clients])"
)
def test_lm_eval_s_log_likelihoods_are_score_s(
    model_dir: Path, llm: LLM, address: str, tmp_path: Path
) -> None:
    """The program that LM_EVAL names, else `lm_eval`, may be of another environment."""
    rows = [json.dumps({"context": a, "continuation": b}) for a, b in TEXTS]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "task.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
    arguments = {
        "model": "toy", "base_url": f"{address}/v1/completions", "tokenizer": tmp_path, "num_concurrent": 2,
        "tokenizer_backend": "huggingface", "max_length": 64,
    }  # fmt: skip
    command = [
        os.environ.get("LM_EVAL", "lm_eval"), "--model", "local-completions", "--tasks", "moejax_local",
        "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    done = run_program(command, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(told) == len(TEXTS)
    for row in told:
        whole = llm.encode(row["doc"]["context"] + row["doc"]["continuation"])
        context = len(llm.encode(row["doc"]["context"]))
        (wanted,) = llm.score([whole])
        likelihood, _ = row["resps"][0][0]
        assert math.isclose(float(likelihood), float(wanted[context - 1 :].sum()), abs_tol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("GUIDELLM", "guidellm")) is None,
    reason="needs guidellm (moejax[clients])",
)
@pytest.mark.parametrize("kind", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_counts_the_tokens_that_it_asked_for(
    kind: str, model_dir: Path, llm: LLM, address: str, tmp_path: Path
) -> None:
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    backend = {
        "kind": "openai_http", "target": address, "request_format": kind,
        "extras": {"body": {"temperature": 0}},
    }  # fmt: skip
    report = tmp_path / "report.json"
    done = run_program(
        [
            os.environ.get("GUIDELLM", "guidellm"), "run", "--backend", json.dumps(backend),
            "--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=7",
            "--tokenizer", f"kind=huggingface_auto,model={tmp_path}",
            "--data", "kind=synthetic_text,prompt_tokens=12,output_tokens=5",
            "--output", f"kind=json,path={report}", "--disable-console",
        ], tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == 7 and not requests["errored"] and not requests["incomplete"]
    for told in requests["successful"]:
        body = json.loads(told["request_args"])["body"]
        if "messages" in body:
            said = [{"role": m["role"], "content": m["content"][0]["text"]} for m in body["messages"]]
            prompt: Any = llm.chat_prompt(said)
        else:
            prompt = body["prompt"]
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        (wanted,) = llm.generate([prompt], [params])
        assert told["output"] == wanted.outputs[0].text
        assert told["output_tokens"] == 5 and told["input_metrics"]["text_tokens"] == len(
            wanted.prompt_token_ids
        )


def run_program(command: list[str], home: Path) -> "subprocess.CompletedProcess[str]":
    """Runs a program that may be of another environment, and has no network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home / "hub")}
    dropped = ("PYTHONPATH", "PYTHONWARNINGS")
    environ = {name: value for name, value in os.environ.items() if name not in dropped} | offline
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


def test_a_server_s_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"backend\.url is for openai_endpoint, and this is moejax_server"):
        BackendOptions(kind="moejax_server", url="http://localhost:8000/v1").check()
