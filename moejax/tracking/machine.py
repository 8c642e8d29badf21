"""Reads the machine's settings that explain a number, and what it was doing when a run began.

Each function returns what it could read; a setting that cannot be had is None. Together they take about a
tenth of a second, nearly all of it a look at what other processes do. No names of hosts or users are read.
"""

import hashlib
import hmac
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from moejax.core.hardware import first_processor

# Instruction sets that XLA's and Eigen's code paths depend on, in /proc/cpuinfo's words.
_ISA = (
    "avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16",
    "amx_int8", "asimd", "sve", "bf16", "i8mm",
)  # fmt: skip
_LOOK_S = 0.1  # over which other processes' use of the CPU is looked at

# JAX's switches that change numbers or how they are computed. Those that only change messages are left out.
JAX_SETTINGS: tuple[str, ...] = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_disable_jit", "jax_disable_most_optimizations", "jax_debug_nans", "jax_debug_infs",
    "jax_enable_checks", "jax_numpy_dtype_promotion", "jax_use_shardy_partitioner", "jax_enable_pgle",
    "jax_cpu_enable_async_dispatch", "jax_cpu_collectives_implementation", "jax_num_cpu_devices",
    "jax_compiler_enable_remat_pass", "jax_optimization_level", "jax_exec_time_optimization_effort",
    "jax_memory_fitting_level", "jax_pallas_use_mosaic_gpu", "jax_allow_f16_reductions",
    "jax_ragged_dot_use_ragged_dot_instruction", "jax_ragged_dot_use_gpu_pallas_triton_lowering",
    "jax_enable_compilation_cache", "jax_log_compiles", "jax_explain_cache_misses",
)  # fmt: skip


def cpu_settings(root: str | os.PathLike[str] = "/") -> dict[str, Any]:
    """Returns how the CPU is run: `governor` of the first core, `boost` (whether the clock may rise above the
    base), `smt`, `quota_cores` (a container's share; None: unlimited), `hugepages`, `isa` (instruction sets)
    and `machine_key`, a keyed hash that tells machines of one kind apart and nothing else."""
    top = Path(root)
    cpu, kernel = top / "sys/devices/system/cpu", top / "sys/kernel/mm"
    no_turbo = read_text(cpu / "intel_pstate/no_turbo")
    boost = read_text(cpu / "cpufreq/boost") or {"0": "1", "1": "0"}.get(no_turbo or "")
    pages = re.search(r"\[(\w+)\]", read_text(kernel / "transparent_hugepage/enabled") or "")
    smt = read_text(cpu / "smt/active")
    processor = first_processor(top)
    flags = processor.get("flags") or processor.get("Features")
    return {
        "governor": read_text(cpu / "cpu0/cpufreq/scaling_governor"),
        "boost": None if boost is None else boost == "1",
        "smt": None if smt is None else smt == "1",
        "quota_cores": _quota(top / "sys/fs/cgroup"),
        "hugepages": pages[1] if pages else None,
        "isa": None if flags is None else " ".join(flag for flag in _ISA if flag in flags.split()),
        "machine_key": _machine(top / "etc/machine-id"),
    }


def read_text(path: Path) -> str | None:
    """Returns a small file's text without the space around it; None where there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _quota(cgroup: Path) -> float | None:
    """Cores that the control group may use, by version 2's file or version 1's pair."""
    words = (read_text(cgroup / "cpu.max") or "").split()
    if not words:
        words = [read_text(cgroup / f"cpu/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = int(words[0]), int(words[1])
    except (ValueError, IndexError):
        return None  # "max", or no such file
    return quota / period if quota > 0 and period > 0 else None


def _machine(path: Path) -> str | None:
    """The machine's id keyed with our name, as machine-id(5) asks: the id itself must not be given away."""
    machine_id = read_text(path)
    if machine_id is None:
        return None
    return hmac.new(machine_id.encode(), b"moejax", hashlib.sha256).hexdigest()[:12]


def machine_state() -> dict[str, Any]:
    """Returns what the machine does while this process waits: `busy_percent` of all cores together,
    `steal_percent` (taken by other virtual machines), `load_1min` and `memory_available_bytes`."""
    state: dict[str, Any] = dict.fromkeys(
        ("busy_percent", "steal_percent", "load_1min", "memory_available_bytes")
    )
    try:
        # Not `cpu_times_percent`: where all cores' times are below a second together, its shares are of one.
        before, state["busy_percent"] = psutil.cpu_times(), psutil.cpu_percent(interval=_LOOK_S)
        stolen, cores = getattr(psutil.cpu_times(), "steal", None), psutil.cpu_count() or 1
        if stolen is not None:
            state["steal_percent"] = round(100.0 * (stolen - before.steal) / (_LOOK_S * cores), 1)
        state["load_1min"] = round(psutil.getloadavg()[0], 2)
        state["memory_available_bytes"] = psutil.virtual_memory().available
    except (psutil.Error, OSError, NotImplementedError):
        pass
    return state


def jax_settings() -> dict[str, Any]:
    """JAX's switches of `JAX_SETTINGS` that this version has."""
    try:
        config = importlib.import_module("jax").config
    except ImportError:
        return {}
    settings = {}
    for name in JAX_SETTINGS:
        # Some switches have no attribute.
        value = getattr(config, name, getattr(config, "values", {}).get(name))
        settings[name] = value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    return settings


def gpu_settings(driver_file: str | os.PathLike[str] = "/proc/driver/nvidia/version") -> dict[str, Any]:
    """`driver` of NVIDIA's GPUs, and where nvidia-ml-py is installed the first GPU's `power_limit_w`,
    `max_sm_clock_mhz`, `persistence`, `ecc` and `mig`. Empty on a machine without."""
    text = read_text(Path(driver_file))
    if text is None:
        return {}
    version = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", text)
    settings: dict[str, Any] = {"driver": version[1] if version else None}
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or NVML's own errors
        return settings
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        readings: dict[str, Callable[[], Any]] = {
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
            "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(gpu)),
            "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),
            "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]),
        }
        for name, get in readings.items():
            try:
                settings[name] = get()
            except Exception:  # a GPU without the setting
                settings[name] = None
    except Exception:  # no GPU that NVML sees
        pass
    finally:
        nvml.nvmlShutdown()
    return settings
