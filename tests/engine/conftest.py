"""Models and engines shared by the engine's tests: building and compiling them is most of the time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from tests.engine.tiny import FullForward, small_config, write_model

# Few buckets, each of which is a program to compile: `test_ledger` has those that an engine chooses itself.
ENGINE = EngineConfig(compile_cache=False, seq_buckets=[8], token_buckets=[16, 64], block_buckets=[16])


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The main model: one layer, weights, tokenizer, chat template."""
    return write_model(tmp_path_factory.mktemp("main"), small_config())


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


@pytest.fixture(scope="module")
def equal_steps_once() -> Iterator[None]:
    """Variants of one engine whose steps are equal have one set of programs in a file: as a variant and the
    engine that it is made of have one. Not for tests that count compilations."""
    made: list[tuple[Any, Any, Any]] = []
    plain = LLM.variant

    def variant(llm: LLM, engine: EngineConfig) -> LLM:
        other = plain(llm, engine)
        sizes = other.runner.cache, other.runner.limits
        if len(other.stages) == 1:
            alike = (ledger for weights, known, ledger in made if weights is llm._weights and known == sizes)
            if (ledger := next(alike, None)) is not None:
                other.ledger.share(ledger)
            else:
                made.append((llm._weights, sizes, other.ledger))
        return other

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "variant", variant)
        yield
