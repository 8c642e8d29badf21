"""XLA:GPU as a compiler on a machine without a GPU: where its plugin lies, and JAX with devices of a target.

All of the experiment's uses of private parts of JAX and XLA are here. Tried with jaxlib 0.10.2 and 0.12.0.
"""

import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.core.errors import ConfigError, DeviceError
from moejax.core.words import one_line

FOLDER = "MOEJAX_GPU_COMPILER"
"""The environment variable that names the plugin's folder."""

TARGETS = {"a100": "a100_sxm_80gb", "h100": "h100_sxm"}

OPTIONS = {"xla_gpu_autotune_level": 0, "xla_dump_hlo_as_text": True}
"""Options of each compilation. Autotuning would time candidates on the GPU."""

_DESCRIPTIONS = Path(__file__).resolve().parents[2] / "assets" / "targets"
_PLATFORM = "moejax_target"  # JAX leaves out the platform "cuda" where no GPU is to be seen
_LIBRARY = "jax_plugins/xla_cuda*/xla_cuda_plugin.so"


def plugin_folder() -> Path:
    """Returns the folder with the plugin of this jaxlib's version, which `make gpu-compiler` fills.

    Raises:
        ConfigError: there is none, or it is another version's.
    """
    version = importlib.metadata.version("jaxlib")
    folder = Path(os.environ.get(FOLDER) or Path(".gpu-compiler") / version).absolute()
    if not any(folder.glob(_LIBRARY)):
        raise ConfigError(
            f"no GPU compiler in {folder}: `make gpu-compiler` puts it there (570 MB), or name its folder by"
            f" {FOLDER}"
        )
    if not any(folder.glob(f"jax_cuda*_pjrt-{version}.dist-info")):
        raise ConfigError(f"the GPU compiler in {folder} is not for jaxlib {version}: `make gpu-compiler`")
    return folder


def describe(target: str) -> str:
    """Returns the description of a target, "a100", "h100" or a file, in the compiler's format.

    Raises:
        ConfigError: there is no such target, or the file does not describe one.
    """
    path = _DESCRIPTIONS / f"{TARGETS[target]}.txtpb" if target in TARGETS else Path(target)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise ConfigError(
            f"target={target}: neither of {', '.join(TARGETS)} nor a file with a device's description ({why})"
        ) from None
    for field in ("gpu_device_info", "device_memory_size", "device_description_str"):
        if field not in text:
            raise ConfigError(f"target={target}: {field} is missing; see {_DESCRIPTIONS} for examples")
    return text


def device_name(description: str) -> str:
    """Returns the device's own name, such as "NVIDIA A100-SXM4-80GB"."""
    named = re.search(r'device_description_str:\s*"([^"]*)"', description)
    return named[1] if named else "?"


def capability(description: str) -> int:
    """Returns a device's compute capability, as 80 for 8.0: the newest of those that kernels know, 80 and 90,
    that it has."""
    major = re.search(r"cuda_compute_capability \{\s*major:\s*(\d+)", description)
    return 90 if major and int(major[1]) >= 9 else 80


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a process that compiles for a target."""
    # XLA runs ptxas, by preference the one that the plugin's users have, and says what it says at this level.
    assembler = os.pathsep.join([str(folder / "nvidia" / "cuda_nvcc" / "bin"), os.environ.get("PATH", "")])
    return os.environ | {
        "JAX_PLATFORMS": f"{_PLATFORM},cpu",
        "XLA_FLAGS": "",  # tests switch optimisation off by it
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "subprocess_compilation=2",
        "PATH": assembler,
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }


def use_target(folder: Path, description: str, devices: int) -> None:
    """Makes the target's devices, of one node, JAX's default ones, so that every choice "for this device" is
    made for them. Programs can be compiled for them, and nothing can run on them.

    Raises:
        DeviceError: this version of jaxlib makes no such devices.
    """
    import jax
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    library = str(next(folder.glob(_LIBRARY)))

    def client() -> Any:
        plugin = xla_client.load_pjrt_plugin_dynamically("cuda", library)
        if not xla_client.pjrt_plugin_initialized("cuda"):
            xla_client.initialize_pjrt_plugin("cuda")
        topology: Any = xla_client.make_c_api_device_topology(
            plugin, "gpu", target_config=description, topology=f"1x1x{devices}"
        )
        return topology._make_compile_only_devices()[0].client

    try:
        xla_bridge.register_backend_factory(_PLATFORM, client, priority=500, fail_quietly=False)
        number = jax.device_count()
    except Exception as error:
        version, why = importlib.metadata.version("jaxlib"), one_line(error)[:200]
        raise DeviceError(f"jaxlib {version} makes no devices to compile for (0.12.0 does): {why}") from None
    if (jax.default_backend(), number) != ("gpu", devices):
        raise DeviceError(f"JAX has {number} devices of {jax.default_backend()} in place of {devices} GPUs")


def compile_into(folder: Path, lowered: Any, options: Mapping[str, Any] = {}) -> tuple[Any, str]:
    """Compiles a lowered program, with XLA's dumps in a folder; returns it, and what XLA and ptxas said
    meanwhile on stderr, which must be a file."""
    said = os.lseek(2, 0, os.SEEK_CUR)
    compiled = lowered.compile({**options, **OPTIONS, "xla_dump_to": str(folder)})
    return compiled, os.pread(2, os.lseek(2, 0, os.SEEK_CUR) - said, said).decode(errors="replace")
