"""Settings of the machine are read where they are and are None where not."""

from types import SimpleNamespace

import pytest

from moejax.tracking import machine
from moejax.tracking.provenance import collect


def tree(root, **files):
    for name, text in files.items():
        place = root / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def test_cpu_settings_are_read_from_where_linux_has_them(tmp_path):
    root = tree(
        tmp_path,
        sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave\n",
        sys__devices__system__cpu__intel_pstate__no_turbo="1",
        sys__devices__system__cpu__smt__active="1",
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never",
        proc__cpuinfo="processor: 0\nflags\t\t: fpu avx2 sse fma amx_bf16\n",
    )
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("150000 100000")
    (root / "etc").mkdir()
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    found = machine.cpu_settings(root)
    key = found.pop("machine_key")
    assert found == {
        "governor": "powersave", "boost": False, "smt": True, "quota_cores": 1.5, "hugepages": "madvise",
        "isa": "avx2 fma amx_bf16",
    }  # fmt: skip
    assert len(key) == 12 and "0123456789" not in key
    (root / "etc/machine-id").write_text("f123456789abcdef0123456789abcdef\n")
    (root / "sys/fs/cgroup/cpu.max").write_text("max 100000")
    other = machine.cpu_settings(root)
    assert other["machine_key"] != key and other["quota_cores"] is None


def test_a_machine_without_any_of_it_has_none(tmp_path):
    assert set(machine.cpu_settings(tmp_path).values()) == {None}
    assert machine.gpu_settings(tmp_path / "version") == {}


def test_a_gpus_driver_and_limits_come_with_it(tmp_path, monkeypatch):
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\nGCC version: 12\n"
    )

    def ecc(handle):
        raise RuntimeError("Not Supported")

    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 400_000, NVML_CLOCK_SM=1,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1410, nvmlDeviceGetEccMode=ecc,
        nvmlDeviceGetPersistenceMode=lambda handle: 1, nvmlDeviceGetMigMode=lambda handle: (0, 0),
    )  # fmt: skip
    monkeypatch.setattr(machine.importlib, "import_module", lambda name: nvml)
    assert machine.gpu_settings(version) == {
        "driver": "570.86.15", "power_limit_w": 400.0, "max_sm_clock_mhz": 1410, "persistence": True,
        "ecc": None, "mig": False,
    }  # fmt: skip
    open_driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n"
    version.write_text(open_driver)

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(machine.importlib, "import_module", missing)
    assert machine.gpu_settings(version) == {"driver": "575.57.08"}


def test_jax_settings_follow_jax():
    import jax

    before = machine.jax_settings()
    assert before["jax_default_matmul_precision"] is None
    with jax.default_matmul_precision("highest"):
        assert machine.jax_settings()["jax_default_matmul_precision"] == "highest"
    assert machine.jax_settings() == before
    assert "jax_cpu_enable_async_dispatch" in before and before["jax_enable_x64"] is False


@pytest.mark.parametrize("key", ["busy_percent", "load_1min", "memory_available_bytes"])
def test_the_machines_state_is_measured(key):
    assert machine.machine_state()[key] >= 0


def test_shares_are_of_all_cores_times(monkeypatch):
    """Two cores, a look of a tenth of a second: 0.05 s of 0.2 were busy, 0.02 of them stolen."""
    times = machine.psutil.cpu_times()
    if not hasattr(times, "steal"):
        pytest.skip("this system does not tell what others have stolen")
    first = times._replace(**dict.fromkeys(times._fields, 1.0))
    last = first._replace(user=1.03, idle=1.14, iowait=1.01, steal=1.02)
    seen = iter([first, first, last, last])  # here, twice by `cpu_percent`, and here
    monkeypatch.setattr(machine.psutil, "cpu_times", lambda percpu=False: next(seen))
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda: 2)
    state = machine.machine_state()
    assert (state["busy_percent"], state["steal_percent"]) == (25.0, 10.0)


def test_collecting_all_has_every_part():
    found = collect({}, argv=[])
    assert {"cpu", "device", "jax", "state", "versions", "env"} <= set(found)
    assert "machine_key" in found["cpu"] and "busy_percent" in found["state"]
