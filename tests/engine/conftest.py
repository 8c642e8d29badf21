"""Models and engines shared by the engine's tests: building and compiling them is most of the time."""

from pathlib import Path

import pytest

from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from tests.engine.tiny import FullForward, main_config, small_config, write_model

# Few buckets, each of which is a program to compile: `test_ledger` has those that an engine chooses itself.
ENGINE = EngineConfig(compile_cache=False, seq_buckets=[8], token_buckets=[16, 64], block_buckets=[16])


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
