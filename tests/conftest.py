"""Strict settings for every test: eight virtual CPU devices, no implicit dtype or rank promotion, a cache of
compiled programs that is this run's only, and programs that compile fast.

They must be set before JAX starts its backend, hence the environment at import time: subprocesses, notebook
kernels and pytest-xdist's workers inherit it.
"""

import atexit
import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jaxlib
import pytest

from moejax.core import hardware
from moejax.core.config import ModelConfig
from tests.fast_hydra import keep_compositions
from tests.glossary import check_written_results
from tests.model_shapes import TWO_LAYERS

check_written_results()

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's CPU client has a thread a core; programs of eight devices wait for each other, and would hang.
os.environ.setdefault("PJRT_NPROC", "64")
# Tests never talk to a W&B server of the user's.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

# Compiled programs and kernels are shared by all processes of this run, and by no other: the first process
# makes the folder and removes it. What a session compiled before, or the user's own cache, must not decide a
# test.
if "MOEJAX_TEST_CACHE" not in os.environ:
    os.environ["MOEJAX_TEST_CACHE"] = tempfile.mkdtemp(prefix="moejax-tests-")
    atexit.register(shutil.rmtree, os.environ["MOEJAX_TEST_CACHE"], ignore_errors=True)
CACHE = Path(os.environ["MOEJAX_TEST_CACHE"])
os.environ["MOEJAX_CACHE_DIR"] = str(CACHE / "moejax")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# No test depends on how busy the machine is. `fast` is the lane without slow tests (tests/examples.py).
for profile, examples in {"all": 100, "fast": 25}.items():
    hypothesis.settings.register_profile(
        profile,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        max_examples=examples,
    )

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
# XLA optimises a test's program for longer than it runs: without that, in one part and without its own fusion
# compiler, compiling takes a fifth of the time.
QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if tuple(int(part) for part in jaxlib.__version__.split(".")[:2]) < (0, 11):  # later ones have no such flag
    QUICK.append("--xla_cpu_use_fusion_emitters=false")


@pytest.fixture(autouse=True)
def _peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run measures the machine's peaks before and after its work, a second each time."""
    monkeypatch.setattr(hardware, "measure_read_bandwidth", lambda: 1e11)
    monkeypatch.setattr(hardware, "measure_matmul_flops", lambda dtype: 1e12)


@pytest.fixture(autouse=True)
def _known_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run leaves in its folder is known to `run_files`: else `overwrite` would let it lie."""
    if (module := sys.modules.get("moejax.bench.experiment_run")) is None:
        return  # a test that runs no experiment
    from moejax.bench.run_folder import run_files

    run_class = module.ExperimentRun
    enter, leave = run_class.__enter__, run_class.__exit__
    before: dict[Any, set[Path]] = {}

    def entered(run: Any) -> Any:
        before[run.out_dir] = set(run.out_dir.glob("*"))
        return enter(run)

    def left(run: Any, *error: Any) -> None:
        leave(run, *error)
        unknown = set(run.out_dir.glob("*")) - before[run.out_dir] - set(run_files(run.out_dir))
        assert not unknown, f"moejax/bench/run_folder.py does not know {', '.join(p.name for p in unknown)}"

    monkeypatch.setattr(run_class, "__enter__", entered)
    monkeypatch.setattr(run_class, "__exit__", left)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--as-shipped",
        action="store_true",
        help="run the tests marked `optimized`, and only these, with XLA's default optimisation",
    )


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("fast" if "not slow" in config.option.markexpr else "all")
    flags = os.environ.get("XLA_FLAGS", "").split()
    quick = [] if config.getoption("as_shipped") or "cuda" in os.environ["JAX_PLATFORMS"] else QUICK
    wanted = [*quick, *([] if any("device_count" in flag for flag in flags) else [EIGHT_DEVICES])]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *(flag for flag in wanted if flag not in flags)])
    # Tracing makes and keeps many objects: looking for circles among them as often as Python does by default
    # takes a tenth of the suite's time. Each operation's lines of Python in its program cost some, too.
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.unfreeze)  # what `forget_programs` froze: else extensions tell of leaks at the end
    if quick:
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    import jax

    keep_compositions()
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


# The first stays: the library and an experiment.
SLOW_NOTEBOOKS = (
    "02_routing_and_experts.ipynb",
    "03_latency_throughput_tradeoffs.ipynb",
    "04_quantization_pareto.ipynb",
    "05_roofline_and_kernels.ipynb",
    "06_comparing_runs.ipynb",
    "07_conversations.ipynb",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of what ships, `optimized`, run under `--as-shipped` and nowhere else; and of a product marked
    `each_value` what brings no value that another case has not is slow."""
    seen: set[tuple[str, int, str]] = set()
    for item in items:
        if item.path.name in SLOW_NOTEBOOKS:
            item.add_marker(pytest.mark.slow)
        case: Any = getattr(item, "callspec", None)
        if case and item.get_closest_marker("each_value") and not item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            values = {(function, place, value) for place, value in enumerate(case._idlist)}
            if values <= seen:
                item.add_marker(pytest.mark.slow)
            seen |= values
    shipped = bool(config.getoption("as_shipped"))
    other = [item for item in items if (item.get_closest_marker("optimized") is not None) != shipped]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in set(other)]


MANY_MAPS, TOO_MANY_MAPS = 16_000, 40_000
TESTS_DONE = itertools.count(1)


def forget_above(most: int) -> None:
    """Compiled programs take memory maps, of which Linux allows a process 65,530 (vm.max_map_count): past
    them XLA crashes when it compiles. So programs are dropped once there are many."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > most:
        import jax

        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """After a file few are used again. What else is left of it no later search for circles visits: with the
    objects of all files, each `gc.collect()` takes a second, as do the five at the end of a process."""
    yield
    forget_above(MANY_MAPS)
    gc.collect(1)
    gc.freeze()


@pytest.fixture(autouse=True)
def forget_programs_of_a_long_file() -> Iterator[None]:
    """Looking takes a while, so not after each test."""
    yield
    if next(TESTS_DONE) % 10 == 0:
        forget_above(TOO_MANY_MAPS)


@pytest.fixture(autouse=True)
def captured_stderr_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's logging set-up closes every handler that exists. Absl's (orbax brings it) closes its stream
    too, which under pytest is the captured stderr, so it is kept from doing that whatever test ran before."""
    absl = sys.modules.get("absl.logging")
    if absl is not None:
        monkeypatch.setattr(absl.PythonHandler, "close", lambda self: None)
        monkeypatch.setattr(absl.ABSLHandler, "close", lambda self: None)


@pytest.fixture
def tiny_config() -> ModelConfig:
    """A Qwen3-MoE of two layers that compiles in a second or two."""
    return TWO_LAYERS
