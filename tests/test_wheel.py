"""A wheel is the library: built from a checkout, it runs on its own what README shows in Python."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import moejax
from moejax import notebook
from moejax.core.errors import ConfigError

print(moejax.__file__)
llm = moejax.LLM("tiny")
params = moejax.SamplingParams(max_tokens=4, temperature=0.7, seed=1)
out = llm.generate(["The function returns"], params)[0]
print(len(out.outputs[0].token_ids))
print(len([chunk.text for chunk in llm.generate_stream("This class is", params)]))
try:
    notebook.load_config()
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_wheel_is_the_library_and_runs_outside_the_repository(tmp_path: Path) -> None:
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools 77 (make test installs it)")
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("moejax", "pallas_kernels", "experiments", "configs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("moejax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        archive.extractall(target)
    assert {name for name in tops if not name.endswith(".dist-info")} == {"moejax", "pallas_kernels"}

    # Without `site` an editable install of the checkout does not count, and the path is what is given here.
    path = os.pathsep.join([str(target), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-S", "-c", USE], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, tokens, chunks, error = done.stdout.splitlines()
    assert where == str(target / "moejax" / "__init__.py")
    assert tokens == "4" and int(chunks) >= 1
    assert (
        error.startswith("experiments run in a checkout of moejax's repository") and "pip install -e" in error
    )
