"""Contract tests run interpreted on CPU, and compiled where JAX has a CUDA device (`make gpu-test`)."""

import os
import zlib

import jax
import numpy as np
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        for item in items:
            if "tests/kernels/" in str(item.path) and "contract" in item.keywords:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random inputs of this test's own. KERNEL_SEED=n draws others; `make gpu-test` sets it to the time."""
    seed = int(os.environ.get("KERNEL_SEED", "0"))
    print(f"KERNEL_SEED={seed}")  # pytest shows it with a failure
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])
