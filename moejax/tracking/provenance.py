"""Records what a number came from: configuration, code, versions, machine, checkpoint and workload.

Collecting never fails: a part that cannot be had is None. Neither host nor user name is recorded.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from moejax.core.errors import CheckpointError
from moejax.core.files import content_hash, to_jsonable
from moejax.core.hardware import first_processor, processor_family
from moejax.core.host import format_cpus, usable_cpus
from moejax.tracking.machine import cpu_settings, gpu_settings, jax_settings, machine_state

DISTRIBUTIONS: tuple[str, ...] = (
    "moejax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "tokenizers",
    "safetensors", "ml-dtypes", "hydra-core", "wandb", "jax-cuda12-plugin", "jax-cuda12-pjrt",
    "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12",
    "nvidia-cublas", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "jax-triton", "triton",
)  # fmt: skip
"""Recorded where installed."""

_ENVIRONMENT = (
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC", "PJRT_NPROC", "PYTHONHASHSEED", "PYTHONOPTIMIZE",
    "MALLOC_ARENA_MAX", "LD_PRELOAD", "TF_GPU_ALLOCATOR",
)  # fmt: skip
_ENVIRONMENT_PREFIXES = ("JAX_", "XLA_PYTHON_CLIENT_", "NCCL_", "MOEJAX_", "GOMP_", "KMP_")
# Of those prefixes: keys (`backend.api_key_env` may name any variable), and a machine's name.
_NEVER = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)S?$|^JAX_COORDINATOR", re.IGNORECASE)

_PACKAGE = Path(__file__).resolve().parents[1]


def hash_directory(path: str | os.PathLike[str]) -> str:
    """sha256 over the sorted relative names and the contents of a model folder's files.

    Hidden files and folders are left out (download caches keep changing times there), links are followed,
    and neither times nor permissions count. Files are hashed side by side, a buffer at a time.

    Raises:
        CheckpointError: it is not a folder, or a file cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"no folder at {root}")
    names = sorted(
        file.relative_to(root).as_posix()
        for file in root.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )

    def digest(name: str) -> str:
        with open(root / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    try:
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(digest, names))
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror or error}") from error
    return content_hash(list(zip(names, digests, strict=True)))


def _git(directory: Path, *args: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *args], capture_output=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def git_state(directory: str | os.PathLike[str] = _PACKAGE) -> dict[str, Any]:
    """`commit`, `dirty` and `diff_hash` (sha256 over the difference to the commit and the untracked files;
    None when clean) of the repository that tracks the Python package in `directory`; all None outside one.

    A package installed into an environment that lies inside somebody's repository is not tracked by it, and
    that repository's commit would say nothing about our code.
    """
    state: dict[str, Any] = {"commit": None, "dirty": None, "diff_hash": None}
    folder = Path(directory)
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return state
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    if top is None or commit is None:
        return state
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    difference = _git(root, "diff", "HEAD", "--binary")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    state["commit"] = commit.decode().strip()
    if difference is None or untracked is None:
        return state
    state["dirty"] = bool(difference or untracked)
    if state["dirty"]:
        digest = hashlib.sha256(difference)
        for name in sorted(filter(None, untracked.split(b"\0"))):
            digest.update(name + b"\0")
            try:
                with open(root / os.fsdecode(name), "rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
            except OSError:
                continue  # an untracked folder with its own repository, or a file that is gone by now
        state["diff_hash"] = digest.hexdigest()
    return state


def versions() -> dict[str, str]:
    """Version of Python and of each installed distribution among `DISTRIBUTIONS`."""
    installed = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def environment() -> dict[str, str]:
    """The environment variables that change what is compiled or where it runs; none that may hold a key."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)) and not _NEVER.search(name)
    }


def cpu_info() -> dict[str, Any]:
    """`model`, `family`, `cores` (logical), `usable_cores` and `cpus` (this process's share), `memory_bytes`,
    `machine`, `os`, `nice` (this process's priority), and `machine.cpu_settings`."""
    return {
        "model": first_processor().get("model name") or platform.processor() or None,
        "family": processor_family(),
        "cores": os.cpu_count(),
        "usable_cores": len(usable_cpus()),
        "cpus": format_cpus(usable_cpus()),
        "memory_bytes": psutil.virtual_memory().total,
        "machine": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "nice": os.nice(0) if hasattr(os, "nice") else None,
        **cpu_settings(),
    }


def device_info() -> dict[str, Any]:
    """`platform`, `kind`, `count`, `process_count` and `platform_version` of JAX's default devices, and
    `machine.gpu_settings` where they are GPUs.

    It starts JAX's backend if nothing has yet.
    """
    info: dict[str, Any] = dict.fromkeys(("platform", "kind", "count", "process_count", "platform_version"))
    try:
        import jax

        devices = jax.devices()
        info.update(
            platform=devices[0].platform,
            kind=devices[0].device_kind,
            count=len(devices),
            process_count=jax.process_count(),
            platform_version=str(devices[0].client.platform_version),
        )
        if devices[0].platform == "gpu":
            info.update(gpu_settings())
    except (ImportError, RuntimeError, AttributeError):
        pass
    return info


def _command(argv: Sequence[str]) -> list[str]:
    """The command with its program relative to the working directory, or to the folder that the package lies
    in, so that machines' results agree."""
    if not argv:
        return []
    program = Path(argv[0])
    for folder in (Path.cwd(), _PACKAGE.parent):
        if program.is_relative_to(folder):
            return [program.relative_to(folder).as_posix(), *argv[1:]]
    return list(argv)


def collect(
    config: Mapping[str, Any],
    *,
    seeds: Mapping[str, int] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    workload: Any = None,
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Everything that tells two results apart, for `result["provenance"]` and a tracker's config.

    Args:
        config: the resolved configuration; it is repeated here beside its hash.
        seeds: name → seed.
        checkpoint: the model's folder, hashed here; leave it out where weights are random.
        workload: what was asked for (prompt token ids, lengths, arrival times) as JSON-like data; only its
            hash is kept.
        argv: the command; None takes this process's.

    Raises:
        CheckpointError: `checkpoint` is not a readable folder.
    """
    return to_jsonable(
        {
            "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "argv": _command(sys.argv if argv is None else argv),
            "config": config,
            "config_hash": content_hash(config),
            "git": git_state(),
            "versions": versions(),
            "env": environment(),
            "device": device_info(),
            "cpu": cpu_info(),
            "jax": jax_settings(),
            "state": machine_state(),
            "seeds": dict(seeds or {}),
            "checkpoint_hash": None if checkpoint is None else hash_directory(checkpoint),
            "workload_hash": None if workload is None else content_hash(workload),
        }
    )
