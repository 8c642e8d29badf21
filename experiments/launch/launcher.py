"""Whether a sweep's jobs can be started as asked for, found out before any folder exists."""

import importlib.util
import shutil

from omegaconf import DictConfig

from moejax.core.errors import ConfigError

_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_NEEDED = {"hydra_submitit_launcher": "submitit"}


def check_launcher(config: DictConfig, *, sweep: bool) -> None:
    """Checks `hydra/launcher` of a composed config.

    Raises:
        ConfigError: it starts jobs of sweeps and there is none, its plugin is not installed, or it is SLURM's
            and there is no SLURM here.
    """
    target = str(config.hydra.launcher.get("_target_", _BASIC))
    if target == _BASIC:
        return
    name = config.hydra.runtime.choices.get("hydra/launcher") or target.rpartition(".")[2]
    override = f"hydra/launcher={name}"
    if not sweep:
        raise ConfigError(f"{override} starts the jobs of a sweep: add -m")
    parts = target.split(".")
    package = parts[1] if parts[0] == "hydra_plugins" and len(parts) > 2 else ""
    if package in _NEEDED and not (_installed(f"hydra_plugins.{package}") and _installed(_NEEDED[package])):
        raise ConfigError(f"{override} needs a plugin that is not installed: pip install 'moejax[sweep]'")
    if target.endswith(".SlurmLauncher"):
        missing = [command for command in ("sbatch", "srun") if shutil.which(command) is None]
        if missing:
            raise ConfigError(
                f"{override}: there is no SLURM here (no {' and no '.join(missing)} on the PATH); run it on"
                " a login node of the cluster, or on this machine with hydra/launcher=submitit_local"
            )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
