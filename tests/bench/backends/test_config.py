"""Mistakes in the configuration's `backend` section: one line each, before anything is written."""

import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.launch.app import launch
from experiments.launch.schema import LatencyConfig
from moejax.bench.backends import config as module
from moejax.bench.backends.config import BackendOptions, BackendSection
from moejax.core.errors import ConfigError

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launched(*argv: str) -> tuple[int, list[LatencyConfig]]:
    found: list[LatencyConfig] = []

    def main(config: LatencyConfig) -> None:
        found.append(config)

    return launch(main, "latency", list(argv)), found


LLAMA = f"backend.python={PYTHON}"
MISTAKES = [
    (["backend=lama_cpp"], ["backend=lama_cpp: unknown option", "did you mean 'llama_cpp'?"]),
    (["backend.kind=hf"], ["backend.kind: unknown value 'hf'", "hf_transformers"]),
    (["backend.pyton=x"], ["unknown key 'backend.pyton'; did you mean 'backend.python'?"]),
    (["backend.compare_with=hf_transformers"], ["must be a list"]),
    (["backend.compare_with=[hf_transformer]"], ["unknown backend", "did you mean 'hf_transformers'?"]),
    (["backend.compare_with=[moejax]"], ["moejax is measured already"]),
    (["backend.disaggregate=mesh"], ["backend.disaggregate", "none", "devices", "process"]),
    (
        ["backend.disaggregate=devices", "backend.adapters=1"],
        ["backend.disaggregate=devices does not go with"],
    ),
    (["backend.url=http://x/v1"], ["backend.url is for openai_endpoint, and this is moejax"]),
    (["backend.threads=2"], ["backend.threads is for hf_transformers and llama_cpp, and this is moejax"]),
    (["backend=llama_cpp", LLAMA], ["backend.path is missing", "GGUF", "convert_hf_to_gguf.py"]),
    (["backend=llama_cpp", LLAMA, "backend.path=no.gguf"], ["there is no file 'no.gguf'", "convert_hf"]),
    (
        ["backend=llama_cpp", "backend.python=no/python", "backend.path=x"],
        ["there is no program 'no/python'"],
    ),
    (["backend=hf_transformers", LLAMA, "backend.path=."], ["'.' is no Hugging Face directory"]),
    (["backend=hf_transformers", LLAMA, "backend.threads=0"], ["backend.threads must be"]),
    (["backend=hf_transformers", LLAMA, "backend.dtype=float8"], ["backend.dtype", "float8"]),
    (["backend=hf_transformers", LLAMA, "backend.options=[1]"], ["backend.options"]),
    (["backend=hf_transformers", LLAMA, "backend.timeout_s=0"], ["backend.timeout_s must be a positive"]),
    (["backend=openai_endpoint"], ["backend.url is missing", "http://localhost:8000/v1"]),
    (["backend=openai_endpoint", "backend.url=localhost:8000"], ["backend.url must be http://HOST:PORT/v1"]),
    (["backend=openai_endpoint", "backend.url=http://x/v1", "backend.path=x"], ["backend.path is for hf_"]),
    (["backend=openai_endpoint", "backend.url=http://me:pass@x/v1"], ["backend.url must hold no name"]),
    (
        ["backend=openai_endpoint", "backend.url=http://x/v1", "backend.api_key_env=sk-123"],
        ["backend.api_key_env must be the name", "never the key itself"],
    ),
    (["backend=hf_transformers", LLAMA, "model.load_format=dummy"], ["reads weights", "only moejax has"]),
    (["backend=hf_transformers", LLAMA, "engine.capture_routing=true"], ["capture_routing is moejax's own"]),
    (["backend=hf_transformers", LLAMA, "quant=int8"], ["quant is moejax's own"]),
    (["backend.compare_with=[openai_endpoint]"], ["backend.peers.openai_endpoint.url is missing"]),
]


@pytest.mark.parametrize(("argv", "expected"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistake_is_one_line_and_leaves_nothing(
    argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, configs = launched(*argv)
    out, err = capsys.readouterr()
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for text in expected:
        assert text in err
    assert (out, configs, list(tmp_path.iterdir())) == ("", [], [])


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("hf_transformers", "transformers", "hf"), ("llama_cpp", "llama_cpp", "llama_cpp")],
)
def test_a_peer_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, package: str, extra: str
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    code, configs = launched(f"backend={kind}")
    err = capsys.readouterr().err
    assert code == 2 and configs == [] and err.count("\n") == 1
    assert f"needs the package {package}" in err and f"pip install 'moejax[{extra}]'" in err
    assert "backend.python=PYTHON" in err
    with pytest.raises(ConfigError, match=r"openai_endpoint needs the package openai.*moejax\[openai\]"):
        BackendOptions(kind="openai_endpoint", url="http://x/v1").check()


def test_peers_take_what_they_lack_from_the_section() -> None:
    argv = [
        f"backend.python={PYTHON}", "backend.threads=3", "backend.compare_with=[hf_transformers]",
        "backend.peers.hf_transformers.threads=1",
    ]  # fmt: skip
    code, (config,) = launched(*argv)
    assert code == 0
    (first, _), (name, options) = config.backend.chosen()
    assert (first, name) == ("moejax", "hf_transformers")
    assert (options.python, options.threads, options.kind) == (PYTHON, 1, "hf_transformers")


def test_a_peer_of_ones_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers beside each other."""
    second = "+backend@backend.peers.sglang=openai_endpoint"
    urls = ["backend.url=http://a/v1", "backend.peers.sglang.url=http://b/v1"]
    code, configs = launched("backend=openai_endpoint", second, *urls, "backend.compare_with=[sglang]")
    assert code == 0, capsys.readouterr().err
    chosen = configs[0].backend.chosen()
    assert [(name, options.url) for name, options in chosen] == [
        ("openai_endpoint", "http://a/v1"), ("sglang", "http://b/v1")
    ]  # fmt: skip


def test_our_engine_beside_a_peer() -> None:
    fields: dict[str, Any] = {"kind": "hf_transformers", "python": PYTHON, "compare_with": ("moejax",)}
    assert [name for name, _ in BackendSection(**fields).chosen()] == ["hf_transformers", "moejax"]
