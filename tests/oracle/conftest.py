"""One pair of equal models per case, theirs and ours, kept for the whole session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moejax.checkpoint.hf import load_pretrained
from moejax.models.decoder import Decoder
from tests.oracle.cases import Case, by_name


class Pair(NamedTuple):
    """A case's checkpoint as transformers wrote it, and both libraries' float32 models of it."""

    case: Case
    directory: Path
    theirs: Any
    ours: Decoder


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    from tests.oracle import hf

    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            case, directory = by_name(name), tmp_path_factory.mktemp("hf") / name
            hf.save(hf.build(case), directory, case.dtype)
            ours, _ = load_pretrained(directory, dtype="float32")
            made[name] = Pair(case, directory, hf.load(directory), ours)
        return made[name]

    return get
