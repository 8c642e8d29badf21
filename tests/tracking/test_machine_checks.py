"""Checks of the machine on file trees made up, and on this machine."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from moejax.tracking import doctor
from moejax.tracking.doctor import SETTINGS, check_machine, disk, memory, numa, pairs, processors, setting

LIMITS = "Max locked memory  {lock}  {lock}  bytes\nMax open files  {files}  9999999  files\n"
MEMORY = "MemTotal: 64000000 kB\nSwapTotal:  {total} kB\nSwapFree:   {free} kB\nHugePages_Free:   {pages}\n"
CONTENTS = {
    "governor": ("performance", "powersave"),
    "transparent pages": ("always [madvise] never", "always madvise [never]"),
    "idle huge pages": (MEMORY.format(total=0, free=0, pages=0), MEMORY.format(total=0, free=0, pages=512)),
    "swap": (MEMORY.format(total=800, free=800, pages=0), MEMORY.format(total=800, free=80, pages=0)),
    "open files": (LIMITS.format(lock="unlimited", files=4096), LIMITS.format(lock="unlimited", files=1024)),
    "locked memory": (LIMITS.format(lock="unlimited", files=1), LIMITS.format(lock=8388608, files=1)),
    "clock source": ("hyperv_clocksource_tsc_page", "hpet"),
    "throttling": ("nr_periods 9\nnr_throttled 0\n", "nr_periods 9\nnr_throttled 7\n"),
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_well_or_bad_or_not_told(name: str, tmp_path: Path) -> None:
    assert setting(name, tmp_path)[0] == "unknown"
    for state, text in zip(("ok", "warn"), CONTENTS[name], strict=True):
        answer = setting(name, write(tmp_path, {SETTINGS[name][0]: text}))
        assert (answer[0], answer[2]) == (state, SETTINGS[name][3]) and answer[1], answer


@pytest.mark.parametrize(
    ("load", "quota", "state"),
    [("0.10", "max 100000", "ok"), ("3.9", "max 100000", "warn"), ("0.1", "150000 100000", "warn")],
)
def test_processors(load: str, quota: str, state: str, tmp_path: Path) -> None:
    files = {"proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-3\n", "proc/loadavg": f"{load} 1 1 1/9 5\n"}
    answer = processors(write(tmp_path, {**files, "sys/fs/cgroup/cpu.max": quota}))
    assert answer[0] == state and answer[1].startswith("4 processors, quota ")


@pytest.mark.parametrize(("left", "state"), [(60e9, "ok"), (3e9, "warn"), (1e8, "fail")])
def test_memory(left: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=90e9))
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{int(left) + 5}"}
    assert memory(write(tmp_path, {**files, "sys/fs/cgroup/memory.current": "5"}))[0] == state


def test_memory_nodes(tmp_path: Path) -> None:
    nodes = {f"sys/devices/system/node/node{n}/cpulist": f"{4 * n}-{4 * n + 3}\n" for n in (0, 1)}
    write(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t0-3\n"})
    assert numa(tmp_path)[0] == "unknown"
    assert numa(write(tmp_path, nodes)) == (
        "ok",
        "processors of 1 of 2 memory nodes",
        "host.numa=0 keeps a run to one",
    )
    assert numa(write(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t0-7\n"}))[0] == "warn"


@pytest.mark.parametrize(
    ("free", "rotational", "state", "words"),
    [
        (90e9, "0", "ok", "90.0 GB free, solid-state, scheduler none"),
        (90e9, "1", "warn", "rotating"),
        (9e9, "0", "warn", "9.0 GB free"),
        (5e8, "0", "fail", "500 MB free"),
        (90e9, None, "ok", "disk not known, scheduler not known"),
    ],
)
def test_a_disk(free, rotational, state, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = os.stat(tmp_path).st_dev
    queue = f"sys/dev/block/{os.major(number)}:{os.minor(number)}/queue"
    if rotational is not None:
        write(tmp_path, {f"{queue}/rotational": rotational, f"{queue}/scheduler": "[none] mq-deadline"})
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    answer = disk(tmp_path / "not" / "there", tmp_path)
    assert answer[0] == state and words in answer[1], answer


def test_a_disk_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=90e9))
    monkeypatch.setattr(os, "open", refused)
    answer = disk(write(tmp_path, {"some.file": "x"}), tmp_path)
    assert (
        answer[0] == "warn" and answer[1].endswith("no O_DIRECT") and answer[2] == "engine.tiers.direct=false"
    )


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t{a}\t0-63\n"
    "GPU1\tNV18\t X \t{a}\t0-63\nGPU2\t{a}\t{a}\t X \t0-63\n"
)


def test_links_between_gpus() -> None:
    assert pairs(TOPOLOGY.format(a="NV18"))[:2] == ("ok", "3 pairs by NV18")
    assert pairs(TOPOLOGY.format(a="SYS"))[:2] == ("warn", "1 pairs by NV18, 2 pairs by SYS")
    assert pairs("GPU0\t X \t0-63\n")[:2] == ("ok", "1 GPU")


def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    pins = write(
        tmp_path,
        {"constraints.txt": f"jax=={jax.__version__}\nnobody==1\nflax==0.0.1 ; python_version < '3'\n"},
    )
    assert doctor.versions(pins / "constraints.txt", tmp_path)[0] == "ok"
    write(tmp_path, {"constraints.txt": "jax==0.0.1\n"})
    assert doctor.versions(pins / "constraints.txt", tmp_path)[:2] == (
        "warn", f"other than in constraints.txt: jax {jax.__version__}",
    )  # fmt: skip
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda _: ["jax>=99", "numpy>=1", "x==3 ; extra == 'y'"]
    )
    assert doctor.versions(pins / "constraints.txt", tmp_path)[:2] == (
        "fail",
        "not as moejax requires: jax>=99",
    )


def test_a_gpu_that_jax_does_not_see(tmp_path: Path) -> None:
    assert doctor.devices(tmp_path)[0] == "ok"
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n"
    answer = doctor.devices(write(tmp_path, {doctor.NVIDIA: version}))
    assert answer[0] == "fail" and "550.54.15" in answer[1]


def test_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert doctor.login(tmp_path)[0] == "warn"
    write(tmp_path, {"netrc": "machine api.wandb.ai\n  login user\n  password 123\n"})
    assert doctor.login(tmp_path)[0] == "ok"


def test_an_empty_tree_is_unknown_and_raises_nothing(tmp_path: Path) -> None:
    states = {f.check: f.state for f in check_machine({}, tmp_path / "none", tmp_path)}
    of_the_tree = ["links", "processors", "numa", *SETTINGS, "versions"]
    assert {name: states[name] for name in of_the_tree} == dict.fromkeys(of_the_tree, "unknown")


def test_on_this_machine_every_check_answers(tmp_path: Path) -> None:
    findings = check_machine({"runs": tmp_path}, Path(__file__).parents[2] / "constraints.txt")
    assert [f for f in findings if f.reason.startswith("cannot be read")] == []
    assert {"devices", "versions", "disk of runs", "memory", *SETTINGS} <= {f.check for f in findings}
    assert all(f.remedy for f in findings if f.state in ("warn", "fail"))
    assert list(tmp_path.iterdir()) == []
