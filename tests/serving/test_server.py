"""The server over a socket: the answers of `LLM`, mistakes in one line, and who leaves is let go."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moejax import LLM, EngineConfig, SamplingParams
from moejax.core.errors import ConfigError
from moejax.serving.app import Server
from moejax.serving.async_llm import AsyncLLM
from moejax.serving.config import ServeSection
from moejax.serving.run import listen
from moejax.serving.tenants import Tenants
from tests.engine.tiny import small_config, write_model

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[8], token_buckets=[16], block_buckets=[16], max_model_len=64,
    max_num_seqs=8, block_size=8, num_blocks=96, max_num_batched_tokens=16, autotune="rules",
)  # fmt: skip
GREEDY = {"temperature": 0.0, "max_tokens": 6}


@contextlib.contextmanager
def served(llm: LLM, name: str = "toy", **section: Any) -> Iterator[tuple[str, Server]]:
    """The server's address, in a thread with an event loop of its own."""
    began, told = threading.Event(), dict[str, Any]()

    async def run() -> None:
        config = ServeSection(**section)
        engine = AsyncLLM(llm, **config.limits)
        server = Server(engine, config, name)
        options = uvicorn.Config(server.app(), log_config=None, lifespan="off", http="h11")
        listener = uvicorn.Server(options)
        with listen("127.0.0.1", 0) as listening:
            told.update(server=server, listener=listener, port=listening.getsockname()[1])
            began.set()
            await listener.serve(sockets=[listening])
        server.close()
        await engine.close(drain=False)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    began.wait(60)
    address = f"http://127.0.0.1:{told['port']}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{address}/health")
                break
        yield address, told["server"]
    finally:
        told["listener"].should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"), small_config())


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, engine=ENGINE) as opened:
        yield opened


@pytest.fixture(scope="module")
def running(llm: LLM) -> Iterator[tuple[str, Server]]:
    with served(llm, max_body_bytes=20_000, read_timeout_s=0.5, write_timeout_s=0.5) as both:
        yield both


@pytest.fixture
def client(running: tuple[str, Server]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running[0], timeout=120) as opened:
        yield opened


def error_of(response: httpx.Response) -> str:
    """The line of an answer that is an error."""
    message = response.json()["error"]["message"]
    assert isinstance(message, str) and message and "\n" not in message and "Traceback" not in message
    return message


def events(response: httpx.Response) -> list[dict[str, Any]]:
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def test_completions_are_llm_s(llm: LLM, client: httpx.Client) -> None:
    prompts = ["The router sends", "def route(tokens)"]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    wanted = llm.generate(prompts, params)
    body = {**GREEDY, "prompt": prompts, "logprobs": 2, "return_token_ids": True, "user": "somebody"}
    told = client.post("/v1/completions", json=body).json()
    for choice, output in zip(told["choices"], wanted, strict=True):
        sample = output.outputs[0]
        assert (choice["token_ids"], choice["text"]) == (sample.token_ids, sample.text)
        assert choice["prompt_token_ids"] == output.prompt_token_ids
        assert choice["logprobs"]["token_logprobs"] == [x.logprob for x in sample.logprobs or ()]
        assert choice["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 12
    assert told["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in wanted)
    both = {"include_usage": True, "continuous_usage_stats": True}
    stream = events(client.post("/v1/completions", json=body | {"stream": True, "stream_options": both}))
    assert stream[-1]["choices"] == [] and stream[-1]["usage"]["completion_tokens"] == 12
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream]
    assert counts == sorted(counts)
    for index, output in enumerate(wanted):
        mine = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
        assert [token for c in mine for token in c["token_ids"]] == output.outputs[0].token_ids
        assert "".join(c["text"] for c in mine) == output.outputs[0].text
        assert [c["finish_reason"] for c in mine] == [None] * 5 + ["length"]


def test_prompts_are_scored_as_llm_scores_them(llm: LLM, client: httpx.Client) -> None:
    ids = llm.encode("The router sends each token")
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    told = client.post("/v1/completions", json=body).json()
    entries = told["choices"][0]["logprobs"]
    assert entries["token_logprobs"][0] is None and entries["top_logprobs"][0] is None
    assert entries["token_logprobs"][1:] == pytest.approx(llm.score([ids])[0].tolist(), abs=1e-5)
    assert len(entries["tokens"]) == len(ids) and told["usage"]["completion_tokens"] == 0
    asked = client.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"][0]
    assert asked["token_ids"] == [] and asked["prompt_token_ids"] == ids
    more = client.post("/v1/completions", json=body | {"max_tokens": 3}).json()["choices"][0]
    assert more["logprobs"]["tokens"][: len(ids)] == entries["tokens"]
    assert len(more["logprobs"]["tokens"]) == len(ids) + 3


def test_chat_is_llm_s(llm: LLM, client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Where does the router send tokens?"}]
    (wanted,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=6))
    body = {**GREEDY, "messages": messages, "logprobs": True, "top_logprobs": 2, "model": "toy"}
    told = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert told["message"] == {"role": "assistant", "content": wanted.outputs[0].text}
    assert len(told["logprobs"]["content"]) == 6 and len(told["logprobs"]["content"][0]["top_logprobs"]) == 2
    stream = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == wanted.outputs[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Where does the router send tokens?"}]}]
    again = client.post("/v1/chat/completions", json=body | {"messages": parts}).json()["choices"][0]
    assert again["message"] == told["message"]


def test_samples_differ_from_call_to_call_unless_a_seed_is_given(client: httpx.Client) -> None:
    def texts(**more: Any) -> list[str]:
        body = {"prompt": "The router", "max_tokens": 12, "n": 2, **more}
        return [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]

    assert texts(seed=3) == texts(seed=3) and len({*texts(seed=3)}) == 2
    assert texts() != texts()


def test_schemas_stops_and_tokens(llm: LLM, client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": wanted,
        "seed": 1,
        "max_tokens": 60,
    }
    told = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    if told["finish_reason"] == "stop":
        assert isinstance(json.loads(told["message"]["content"])["n"], bool)
    text = llm.generate("The router", SamplingParams(temperature=0.0, max_tokens=6))[0].outputs[0].text
    stopped = client.post(
        "/v1/completions", json={**GREEDY, "prompt": "The router", "stop": [text[2:4]]}
    ).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == text[: text.index(text[2:4])]
    tokens = client.post("/tokenize", json={"prompt": "naïve café"}).json()
    assert tokens["tokens"] == llm.encode("naïve café") and tokens["max_model_len"] == 64
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "naïve café"}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["toy"]
    assert client.get("/ready").json() == {"ready": True}
    text = client.get("/metrics").text
    assert re.search(r'moejax:request_success_total{finished_reason="stop",model_name="toy"} [1-9]', text)


USER = {"role": "user", "content": "a"}
WRONG: list[tuple[str, Any, int, str]] = [
    ("completions", {"prompt": "a", "model": "other"}, 404, r"unknown model 'other' \(known: toy\)"),
    ("completions", {"prompt": "a", "model": "../../etc/passwd"}, 404, "unknown model"),
    ("completions", {"prompt": "a", "max_token": 3}, 400, "did you mean 'max_tokens'"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ("completions", {"prompt": "a", "n": 10**30}, 400, "at most 128"),
    ("completions", {"prompt": "a", "n": 10**400}, 400, "at most 128"),
    ("completions", {"prompt": [10**9]}, 400, "out of range"),
    ("completions", {"prompt": []}, 400, "empty"),
    ("completions", {"prompt": "a b c " * 200}, 400, r"over the limit of 64"),
    ("completions", {"prompt": "a", "echo": True, "stream": True}, 400, "echo does not go with stream"),
    ("completions", {"prompt": "a", "response_format": {"type": "xml"}}, 400, "unknown type 'xml'"),
    ("completions", {}, 400, "prompt: Field required"),
    ("completions", [1], 400, "body"),
    ("completions", "{", 400, "Invalid JSON"),
    ("completions", "[" * 5000, 400, "body"),
    ("completions", b"\xff\xfe{}", 400, "body"),
    ("completions", {"prompt": "a", "user": "x" * 30_000}, 413, "over 20000 bytes"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, 400, "unknown role robot"),
    ("chat/completions", {"messages": "hello"}, 400, "messages"),
    ("chat/completions", {"messages": [USER], "top_logprobs": 2}, 400, "logprobs="),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "url"}]}]}, 400, "no text"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "body", "status", "message"), WRONG)
def test_mistakes_are_one_line(
    client: httpx.Client, where: str, body: Any, status: int, message: str
) -> None:
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    response = client.post(f"/v1/{where}", content=data)
    assert response.status_code == status

    assert re.search(message, error_of(response)), response.text


def test_other_addresses_and_methods(client: httpx.Client) -> None:
    for method, path in (
        ("GET", "/v1/completions"),
        ("GET", "/"),
        ("POST", "/admin/pause"),
        ("GET", "/%2e%2e/"),
    ):
        response = client.request(method, path)
        assert response.status_code in (404, 405) and error_of(response)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["prompt", "max_tokens", "temperature", "stop", "n", "logprobs", "stream", "stream_options", "logit_bias",
     "seed", "response_format", "echo", "structured_outputs", "priority", "model", "top_p", "messages"]
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(FIELDS, ANY, max_size=5), chat=st.booleans())
def test_strange_bodies(client: httpx.Client, body: dict[str, Any], chat: bool) -> None:
    where = "/v1/chat/completions" if chat else "/v1/completions"
    response = client.post(where, content=json.dumps(body))
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        error_of(response)


def test_who_leaves_is_let_go(llm: LLM, running: tuple[str, Server]) -> None:
    address, server = running
    long = {"prompt": "The router", "max_tokens": 50, "ignore_eos": True}

    def idle() -> None:
        began = time.monotonic()
        while server.engine.num_requests or llm.stats()["running"]:
            assert time.monotonic() - began < 30
            time.sleep(0.01)

    with httpx.Client(base_url=address, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=long | {"stream": True}) as response:
            next(response.iter_bytes())
    idle()
    with httpx.Client(base_url=address, timeout=0.02) as client, pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json=long | {"n": 4})
    idle()
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:  # a body that never comes
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert b" 408 " in slow.recv(1000).split(b"\r\n")[0]
    assert httpx.get(f"{address}/health").json() == {"state": "healthy", "reasons": []}


@pytest.mark.parametrize("streams", [False, True])
def test_a_defect_is_the_log_s_alone(
    client: httpx.Client, running: tuple[str, Server], monkeypatch: pytest.MonkeyPatch, streams: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And a failed step is the server's fault, in one line, whether an answer has begun or not."""
    server, body = running[1], {**GREEDY, "prompt": "The router", "stream": streams}

    def ask() -> dict[str, Any]:
        response = client.post("/v1/completions", json=body)
        assert streams or response.status_code == 500
        told = events(response)[0] if streams else response.json()
        assert told["error"]["code"] == 500
        return told

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.llm.runner, "launch", fails)
        assert "a step failed: RuntimeError: a secret" in ask()["error"]["message"]
    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "_begin", fails)
        assert "a secret" not in str(ask())
        assert "a secret" in caplog.text
    assert client.post("/v1/completions", json={**GREEDY, "prompt": "The router"}).status_code == 200


def test_a_bound_on_requests(llm: LLM) -> None:
    with (
        served(llm, max_requests=1) as (address, server),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        llm.pause("keep")
        with ThreadPoolExecutor(1) as threads:
            held = threads.submit(client.post, "/v1/completions", json={"prompt": "The router", **GREEDY})
            while not server.engine.num_requests:
                time.sleep(0.01)
            refused = httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert "serve.max_requests" in error_of(refused)
            llm.unpause()
            assert held.result().status_code == 200
        two = httpx.post(f"{address}/v1/completions", json={"prompt": ["a", "b"]})
        assert two.status_code == 429
        server.ready = False
        assert httpx.post(f"{address}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert httpx.get(f"{address}/ready").status_code == 503


def test_tenants_and_their_quotas(llm: LLM, tmp_path: Path) -> None:
    """Who is over a quota is told when to come again; what was reserved is given back, streams' too."""
    keys = tmp_path / "tenants.toml"
    quotas = "tokens_per_minute = 150\nrequests_per_minute = 6"
    keys.write_text(f'[gold]\nkeys = ["k1"]\n{quotas}\nslo_class = "batch"\n[free]\nkeys = ["k2"]\n')
    with served(llm, api_keys_file=str(keys)) as (address, server):
        server.tenants.clock = lambda: 7.0

        def ask(key: str, where: str = "completions", **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": [1, 2, 3, 4], "max_tokens": 6, "ignore_eos": True, **body}
            if where != "completions":
                del body["prompt"]
            return httpx.post(f"{address}/v1/{where}", json=body, headers=headers, timeout=60)

        assert ask("k1", prompt=[[1, 2], [3, 4]]).status_code == 200  # 16 tokens
        assert events(ask("k1", stream=True))[-1]["choices"]  # 10
        assert ask("k1", prompt=[]).status_code == 400  # none
        over = ask("k1", n=21)  # 130
        assert over.status_code == 429 and over.headers["retry-after"] == "60"
        assert re.search("over tokens_per_minute=150 of this key; try again in", error_of(over))
        assert ask("k1", n=30).status_code == 400 and ask("k1", slo_class="interactive").status_code == 400
        assert ask("k2", n=20).status_code == 200
        chat = ask("k1", "chat/completions", messages=[USER], stream=True, max_tokens=40, n=3)
        assert chat.status_code == 429
        llm.pause("keep")
        with httpx.Client(base_url=address, timeout=0.5) as client, pytest.raises(httpx.TimeoutException):
            body = {"prompt": [1], "max_tokens": 60, "stream": True}
            client.post("/v1/completions", json=body, headers={"Authorization": "Bearer k1"})
        began = time.monotonic()
        while server.tenants.accounts["gold"].running:
            assert time.monotonic() - began < 30
            time.sleep(0.01)
        llm.unpause()
        assert ask("k1", n=15).status_code == 200  # 94, beside 27
        told = httpx.get(f"{address}/metrics").text
        assert 'moejax:tenant_requests_total{tenant="gold"} 6.0' in told
        assert 'moejax:tenant_tokens_total{kind="generation",tenant="free"} 120.0' in told
        assert 'moejax:tenant_requests_refused_total{quota="tokens_per_minute",tenant="gold"} 2.0' in told
        over = ask("k1", max_tokens=1)
        assert "over requests_per_minute=6" in error_of(over)


def test_keys_and_admin(model_dir: Path, tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("first\nsecond\n")
    admin.write_text("root\n")
    with LLM(model_dir, engine=ENGINE) as llm:
        with served(llm, api_keys_file=str(keys), admin_keys_file=str(admin)) as (address, _):

            def ask(where: str, key: str | None, **body: Any) -> httpx.Response:
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                return httpx.post(f"{address}{where}", json=body, headers=headers, timeout=60)

            for key in (None, "third", "root", "firs", "\x7f"):
                assert ask("/v1/completions", key, prompt="a").status_code == 401
            wanted = ask("/v1/completions", "second", prompt="a", **GREEDY)
            assert wanted.status_code == 200
            assert ask("/admin/pause", "first").status_code == 401
            assert ask("/admin/pause", "root").json() == {"done": "pause"} and llm.stats()["paused"]
            assert ask("/admin/unpause", "root").json() == {"done": "unpause"}
            assert ask("/admin/reload", "root", path=str(model_dir)).json() == {"done": "reload"}
            kept = ask("/admin/reload", "root", path=str(model_dir), running="keep")
            assert kept.json() == {"done": "reload"}
            again = ask("/v1/completions", "first", prompt="a", **GREEDY)
            assert again.json()["choices"] == wanted.json()["choices"]
            for path, body, message in (
                ("/admin/explode", {}, "unknown action 'explode'"),
                ("/admin/reload", {}, "path must be a text"),
                ("/admin/reload", {"path": str(tmp_path / "none")}, "none"),
                ("/admin/reload", {"path": str(model_dir), "running": "later"}, "unknown mode 'later'"),
                ("/admin/pause", {"x": 1}, "takes none"),
                ("/admin/rebalance", {}, "rebalance"),
                ("/admin/profile_stop", {}, "profile_stop"),
                ("/admin/load_adapter", {"name": "a", "path": "b"}, "engine.adapters"),
            ):
                response = ask(path, "root", **body)
                assert response.status_code in (400, 404) and message in error_of(response), response.text
    for path, message in ((tmp_path / "no", "cannot be read"), (tmp_path / "empty", "has no key")):
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(ConfigError, match=message):
            Tenants(str(path))


@pytest.mark.slow
def test_the_command_ends_by_a_signal_after_what_runs(tmp_path: Path) -> None:
    """`python -m experiments.serve` in a process: a request that runs at SIGTERM is answered, exit code 0."""
    overrides = [
        "serve.port=0",
        "engine.max_num_seqs=4",
        "engine.max_model_len=512",
        "engine.max_num_batched_tokens=64",
    ]
    command = [sys.executable, "-m", "experiments.serve", *overrides, f"hydra.run.dir={tmp_path / 'out'}"]
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving tiny at "))
        address, told = line.split()[3].rstrip(";"), dict[str, Any]()
        body = {"prompt": "The function", "max_tokens": 300, "ignore_eos": True}

        def ask() -> None:
            told["answer"] = httpx.post(f"{address}/v1/completions", json=body, timeout=120).json()

        httpx.post(f"{address}/v1/completions", json=body | {"max_tokens": 2}, timeout=120)
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert process.wait(60) == 0
    assert told["answer"]["usage"]["completion_tokens"] == 300


def test_connections_send_at_once() -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_is_wrong_with_settings_is_told() -> None:
    with pytest.raises(ConfigError, match=r"serve\.port must be at most 65535"):
        ServeSection(port=70000)
    with pytest.raises(ConfigError, match=r"serve\.max_requests"):
        ServeSection(max_requests=0)
