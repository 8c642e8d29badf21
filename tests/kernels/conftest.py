"""Contract tests run interpreted on CPU, and compiled where JAX has a CUDA device (`make gpu-test`)."""

import os
import zlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        for item in items:
            if "tests/kernels/" in str(item.path) and "contract" in item.keywords:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Each interpreted case is a program of its own, and programs take memory maps, of which Linux allows a
    process 65,530 (vm.max_map_count): past them XLA crashes when it compiles."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random inputs of this test's own. KERNEL_SEED=n draws others; `make gpu-test` sets it to the time."""
    seed = int(os.environ.get("KERNEL_SEED", "0"))
    print(f"KERNEL_SEED={seed}")  # pytest shows it with a failure
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])
