"""Rules about the repository itself, none of which needs a device."""

import ast
import graphlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    "wandb",
    "hydra",
    "torch",
    "transformers",
    "matplotlib",
    "tokenizers",
    "optax",
    "orbax",
    "scipy",
    "pandas",
)
# About 400 lines a file is the style; what is over is reported, what is far over is an error.
REPORTED, FORBIDDEN = 400, 600


def tracked() -> list[Path]:
    """Files that git tracks or would add; in an archive, everything outside hidden and output folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        return [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        outside = {"outputs", "multirun", "wandb", "build", "__pycache__"}
        return [
            path
            for path in ROOT.rglob("*")
            if path.is_file()
            and not any(part in outside or part.startswith(".") for part in path.relative_to(ROOT).parts[:-1])
        ]


def texts() -> list[tuple[str, str]]:
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            found.append((path.relative_to(ROOT).as_posix(), data.decode("utf-8", errors="replace")))
    return found


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_importing_moejax_is_light():
    """Trackers, plots and test oracles are imported by those who use them."""
    loaded = modules_after("import moejax")
    assert "moejax" in loaded
    assert not loaded & set(HEAVY), sorted(loaded & set(HEAVY))


@pytest.mark.parametrize(
    "module",
    [
        "moejax.core.config", "moejax.core.errors", "moejax.core.files", "moejax.engine.requests.api",
        "moejax.models.hf_config",
    ],
)  # fmt: skip
def test_host_modules_do_not_import_jax(module):
    """What schedules and configures runs without a device, and its tests in milliseconds.

    The parent packages' `__init__` files count: they must not pull JAX in on the way.
    """
    assert "jax" not in modules_after(f"import {module}")


# Imports at first use that close a circle: what objects show of themselves in a notebook.
LAZY = {
    ("moejax.engine.requests.api", "moejax.engine.requests.output_card"),
    ("moejax.engine.llm", "moejax.engine.llm_card"),
    ("moejax.results.compare.comparison", "moejax.report.compare_tables"),
}


def library() -> dict[str, Path]:
    """The modules of the library by name."""
    modules = {}
    for top in ("moejax", "experiments", "pallas_kernels"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """The library's modules that a file imports, at its top, in functions or for types alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner if inner <= modules.keys() else inner | {node.module}
    return names & modules.keys()


def test_no_circle_of_imports():
    """Not even through imports in functions, those of `LAZY` excepted."""
    modules = library()
    graph = {
        name: {other for other in imports_of(path, modules) if (name, other) not in LAZY}
        for name, path in modules.items()
    }
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_files_are_short():
    lines = {
        name: text.count("\n")
        for name, text in texts()
        if name.endswith(".py") and name.startswith(("moejax/", "pallas_kernels/", "experiments/", "tests/"))
    }
    assert len(lines) > 40
    long = {name: count for name, count in lines.items() if count > REPORTED}
    if long:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"files over {REPORTED} lines: {long}", stacklevel=1)
    assert not {name: count for name, count in long.items() if count > FORBIDDEN}


# A package index or mirror that one machine was installed from.
HOST = re.compile(
    r"https?://[^\s\"')>]*(?:pypi|simple/|artifactory|nexus|devpi|conda)[^\s\"')>]*", re.IGNORECASE
)
PUBLIC = re.compile(r"https?://(?:pypi\.org/project/|test\.pypi\.org/project/)")
# Somebody's home or work folder. Written in parts, so that this file does not match itself.
ABSOLUTE = re.compile(
    r"(?<![\w.:/$}~-])/(?:" + "|".join(["work", "home", "Users", "root", "mnt", "opt"]) + r")/[\w.-]+"
)


def test_no_registry_hosts():
    found = [
        f"{name}: {match.group()}"
        for name, text in texts()
        for match in HOST.finditer(text)
        if not PUBLIC.match(match.group())
    ]
    assert not found, found


def test_no_absolute_paths_of_a_machine():
    found = [f"{name}: {match.group()}" for name, text in texts() for match in ABSOLUTE.finditer(text)]
    assert not found, found


def test_no_large_files():
    """The shipped model is the largest thing that is meant to be here."""
    large = {
        path.relative_to(ROOT).as_posix(): path.stat().st_size
        for path in tracked()
        if path.stat().st_size > (10_500_000 if "assets" in path.parts else 1_000_000)
    }
    assert not large, large
