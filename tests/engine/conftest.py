"""Models and engines shared by the engine's tests: building and compiling them is most of the time."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from tests.engine.tiny import FullForward, main_config, small_config, write_model

# Compiled programs stay out of the user's cache folder.
ENGINE = EngineConfig(compile_cache=False)


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs compiled twice in these tests (a second LLM of one model) are read back from a folder."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("xla")), 0.2, 0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The main model: weights, tokenizer, chat template."""
    return write_model(tmp_path_factory.mktemp("main"), main_config())


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> LLM:
    """The main model's engine. Tests may use it, not change it."""
    return LLM(model_dir, engine=ENGINE)


@pytest.fixture(scope="session")
def oracle(llm: LLM) -> FullForward:
    """The main model without a cache."""
    return FullForward(llm.model)


@pytest.fixture(scope="session")
def bare_llm() -> LLM:
    """One layer, random weights, no directory, hence no tokenizer."""
    return LLM(small_config(), load_format="dummy", engine=ENGINE)
