"""Checks the machine for what slows or fails runs. It reads, and changes nothing.

Each check takes the root of the file system, so that it can be given another one's /proc and /sys. Only
`devices` starts JAX, which counts them.
"""

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

from moejax.core.host import host_memory, parse_cpus
from moejax.core.words import byte_words
from moejax.results.diagnosis import Answer, Finding, State, run_checks
from moejax.tracking import provenance
from moejax.tracking.machine import cpu_settings, gpu_settings, read_text

NVIDIA = "proc/driver/nvidia/version"
_PINS = "pip install -e . -c constraints.txt"

SETTINGS: dict[str, tuple[str, str, str, str]] = {
    "governor": ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", r"(\S+)", "performance",
        "sudo cpupower frequency-set -g performance"),
    "transparent pages": ("sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]", "always|madvise",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
    "idle huge pages": ("proc/meminfo", r"HugePages_Free:\s+(\d+)", "0", "sudo sysctl vm.nr_hugepages=0"),
    "swap": ("proc/meminfo", r"(SwapTotal:\s+\d+ kB\s+SwapFree:\s+\d+ kB)", r"\D+(\d+)\D+\1 kB",
        "sudo swapoff -a && sudo swapon -a, once there is room"),
    "open files": ("proc/self/limits", r"Max open files\s+(\S+)", r"unlimited|[4-9]\d{3}|\d{5,}",
        "ulimit -n 65536"),
    "locked memory": ("proc/self/limits", r"Max locked memory\s+(\S+)", r"unlimited|\d{9,}",
        "ulimit -l unlimited"),
    "clock source": ("sys/devices/system/clocksource/clocksource0/current_clocksource", r"(\S+)",
        "tsc|kvm-clock|arch_sys_counter|hyperv_clocksource\\w*", "boot with clocksource=tsc"),
    "throttling": ("sys/fs/cgroup/cpu.stat", r"nr_throttled (\d+)", "0", "a larger cpu.max; fewer host.cpus"),
}  # fmt: skip
"""Settings by name: a file below the root, the value in it, the values that are well, what mends another."""


def setting(name: str, root: Path) -> Answer:
    file, value, good, remedy = SETTINGS[name]
    found = re.search(value, read_text(root / file) or "")
    if found is None:
        return "unknown", f"/{file} does not tell it", ""
    return "ok" if re.fullmatch(good, found[1]) else "warn", " ".join(found[1].split()), remedy


def processors(root: Path) -> Answer:
    """Compares a control group's share and others' load with the processors that this process may use."""
    count, quota = len(_allowed(root)), cpu_settings(root)["quota_cores"]
    load = float((root / "proc/loadavg").read_text().split()[0])
    told = f"{count} processors, quota {quota or 'none'}, load {load:g}"
    bad = load > 0.5 * count or (quota is not None and quota < count)
    return "warn" if bad else "ok", told, "end what else runs; host.cpus=0-N for as many as the quota"


def memory(root: Path) -> Answer:
    left = host_memory(root)
    state: State = "fail" if left < 1e9 else "warn" if left < 4e9 else "ok"
    return state, f"{byte_words(left)} left to this process", "a larger memory.max, or end what else runs"


def numa(root: Path) -> Answer:
    lists = [file.read_text() for file in root.glob("sys/devices/system/node/node[0-9]*/cpulist")]
    mine = sum(bool(parse_cpus("cpulist", text) & _allowed(root)) for text in lists if text.strip())
    state: State = "unknown" if not lists else "warn" if mine > 1 else "ok"
    return state, f"processors of {mine} of {len(lists)} memory nodes", "host.numa=0 keeps a run to one"


def disk(folder: Path, root: Path) -> Answer:
    """Looks at free space, the disk and its scheduler, and whether its files open past the cache."""
    here = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free, number = shutil.disk_usage(here).free, here.stat().st_dev
    device = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    queue = next((q for q in (device / "queue", device.parent / "queue") if q.is_dir()), device)
    kind = {"0": "solid-state", "1": "rotating by the kernel"}.get(
        read_text(queue / "rotational") or "", "disk not known"
    )
    scheduler = re.search(r"\[(\S+)\]", read_text(queue / "scheduler") or "")
    told = f"{byte_words(free)} free, {kind}, scheduler {scheduler[1] if scheduler else 'not known'}"
    if free < 20e9:
        return "fail" if free < 1e9 else "warn", told, "another folder: MOEJAX_CACHE_DIR, hydra.run.dir"
    if kind.startswith("rotating"):
        return "warn", told, "a solid-state disk: engine.tiers.disk_dir, MOEJAX_CACHE_DIR"
    try:
        file = next((file for file in here.iterdir() if file.is_file()), None)
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT)) if file else None
    except OSError:
        return "warn", f"{told}, no O_DIRECT", "engine.tiers.direct=false"
    return "ok", f"{told}, {'O_DIRECT' if file else 'O_DIRECT not tried: no file there'}", ""


def links(root: Path) -> Answer:
    """Reads how GPUs reach each other."""
    if read_text(root / NVIDIA) is None or not shutil.which("nvidia-smi"):
        return "unknown", "no nvidia-smi here", ""
    command = ["nvidia-smi", "topo", "-m"]
    return pairs(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)


def pairs(text: str) -> Answer:
    """Counts the kinds of links in the table that `nvidia-smi topo -m` prints."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    gpus = [row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    kinds = Counter(row[j] for i, row in enumerate(gpus) for j in range(i + 1, len(gpus)))
    told = ", ".join(f"{count} pairs by {kind}" for kind, count in kinds.items()) or f"{len(gpus)} GPU"
    far = kinds["SYS"] + kinds["NODE"]
    return "warn" if far else "ok", told, "parallel= within GPUs of one switch: order CUDA_VISIBLE_DEVICES"


def devices(root: Path) -> Answer:
    """Counts JAX's devices, which starts its backend; memory is not taken before it is used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        found = importlib.import_module("jax").local_devices()
    except RuntimeError as error:
        return (
            "fail",
            f"JAX starts no backend: {str(error).splitlines()[0]}",
            "JAX_PLATFORMS=cpu, or its plugin",
        )
    limits = {device.memory_stats()["bytes_limit"] for device in found if device.memory_stats()}
    told = f"{len(found)} × {found[0].device_kind}" + "".join(f", {byte_words(size)}" for size in limits)
    driver = gpu_settings(root / NVIDIA).get("driver")
    told += f", NVIDIA driver: {driver or 'none'}"
    return "fail" if driver and found[0].platform == "cpu" else "ok", told, "pip install 'moejax[cuda12]'"


def versions(constraints: Path, root: Path) -> Answer:
    """Compares what is installed with what moejax requires and with constraints.txt."""
    here = provenance.versions()
    needs = [need for need in _requirements() if need.marker is None]
    if wrong := [str(need) for need in needs if (_version(need) or "0") not in need.specifier]:
        return "fail", f"not as moejax requires: {', '.join(wrong)}", _PINS
    pins = [Requirement(line) for line in constraints.read_text().splitlines() if line]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    if other := [f"{pin.name} {v}" for pin in pins if (v := _version(pin)) and v not in pin.specifier]:
        return "warn", f"other than in constraints.txt: {', '.join(other)}", _PINS
    return "ok", ", ".join(f"{name} {version}" for name, version in here.items()), ""


def extras(root: Path) -> Answer:
    """Lists which optional parts are not whole. None is needed."""
    names = importlib.metadata.metadata("moejax").get_all("Provides-Extra") or []
    needs = [(need, need.marker) for need in _requirements() if need.marker and _version(need) is None]
    absent = [name for name in names if any(marker.evaluate({"extra": name}) for _, marker in needs)]
    told = ", ".join(f"{name}: {'no' if name in absent else 'yes'}" for name in names)
    return "ok", f"{told} (pip install 'moejax[NAME]')", ""


def login(root: Path) -> Answer:
    """Looks for a W&B key; no server is asked."""
    from moejax.tracking.wandb import netrc_key

    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    known = os.environ.get("WANDB_API_KEY") or netrc_key(url)
    told = "there is a key" if known else "no key: W&B runs stay on this machine"
    return "ok" if known else "warn", told, "wandb login, or tracker=none"


def check_machine(folders: Mapping[str, Path], constraints: Path, root: Path = Path("/")) -> list[Finding]:
    """Returns what all checks find; `folders` are those that runs write, by what they are for."""
    checks = {"devices": devices, "links": links, "processors": processors, "memory": memory, "numa": numa}
    checks |= {name: partial(setting, name) for name in SETTINGS}
    checks |= {f"disk of {name}": partial(disk, folder) for name, folder in folders.items()}
    checks |= {"versions": partial(versions, constraints), "extras": extras, "W&B": login}
    return run_checks({name: partial(check, root) for name, check in checks.items()})


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in importlib.metadata.requires("moejax") or ()]


def _version(need: Requirement) -> str | None:
    try:
        return importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _allowed(root: Path) -> frozenset[int]:
    """Returns the processors that this process may use."""
    status = (root / "proc/self/status").read_text()
    return parse_cpus("Cpus_allowed_list", re.findall(r"Cpus_allowed_list:\s*(\S+)", status)[0])
