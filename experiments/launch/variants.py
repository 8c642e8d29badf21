"""`experiment=ab`: the variants' configurations, composed as the command line would with their overrides."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from experiments.launch.command_line import override_key
from experiments.launch.compose import composer
from experiments.launch.schema import (
    AblationConfig,
    LatencyConfig,
    ServeConfig,
    SimulateConfig,
    ThroughputConfig,
)
from moejax.core.errors import ConfigError, MoejaxError
from moejax.core.words import one_line

Config = LatencyConfig | ThroughputConfig | AblationConfig

# What all variants share: the requests, the objectives, where results go.
_SHARED = (
    "workload", "batches", "ab", "ablation", "tracker", "telemetry", "hardware", "seed", "objective",
    "objective_case", "verbose", "goals",
)  # fmt: skip

_composed: list[Any] = []  # what was asked for last, and what it came to


def compose_variants(config: Any, experiment: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns name → configuration of every variant of `config`, the baseline first; empty without variants.

    Args:
        overrides: the command line that gave `config`.

    Raises:
        ConfigError: an override that the command line would refuse, in its words; one of something that all
            variants share; or a variant that is the same as another.
    """
    section, where = getattr(config, "ab", None), "ab.variants"
    named = section.all_variants if section is not None and section.variants else {}
    if isinstance(config, AblationConfig | SimulateConfig):
        where, named = "ablation.stages", config.ablation.variants
        if len(named) == 1 or (not named and isinstance(config, AblationConfig)):
            raise ConfigError(f"{where} needs at least two: add '{where}.NAME=[KEY=VALUE]'")
    if not named:
        return {}
    # A run asks for them before its folder is there, looking ahead and as it begins: seconds each time.
    asked = experiment, config, [item for item in overrides if not item.startswith("hydra.")]
    if _composed and _composed[0] == asked:
        return dict(_composed[1])
    variants: dict[str, Any] = {}
    with composer(experiment, type(config)) as compose:
        for name, changes in named.items():
            keys = {override_key(item) for item in changes}
            kept = [item for item in overrides if override_key(item) not in keys]
            try:
                variant = compose.build([*kept, *changes])
            except MoejaxError as error:
                raise ConfigError(f"{where}.{name}: {one_line(error)}") from error
            _check(f"{where}.{name}", config, variant)
            alone = [] if section is None else section.alone
            same = [n for n, v in variants.items() if v == variant and (n in alone) == (name in alone)]
            if same:
                raise ConfigError(
                    f"{where}.{name} is the same configuration as {same[0]}; a control of the baseline is"
                    " measured anyway"
                )
            variants[name] = variant
    _composed[:] = asked, variants
    return dict(variants)


def compose_models(config: ServeConfig) -> dict[str, ServeConfig]:
    """Returns name → configuration of each of `serve.models`. Raises `ConfigError`: an override is wrong, or
    of the server, which all models share."""
    hydra, composed = HydraConfig.get(), dict[str, ServeConfig]()
    with composer(str(hydra.job.config_name), ServeConfig) as compose:
        for name, changes in config.serve.models.items():
            keys = {override_key(item) for item in changes}
            kept = [item for item in hydra.overrides.task if override_key(item) not in keys]
            try:
                composed[name] = compose.build([*kept, *changes])
            except MoejaxError as error:
                raise ConfigError(f"serve.models.{name}: {one_line(error)}") from error
            if dataclasses.replace(composed[name], serve=config.serve) != composed[name]:
                raise ConfigError(f"serve.models.{name} changes the server, which all models share")
    return composed


def _check(name: str, config: Any, variant: Any) -> None:
    for section in _SHARED:
        if getattr(config, section, None) != getattr(variant, section, None):
            raise ConfigError(f"{name} changes {section!r}, which all variants share: set it for all of them")
    if hasattr(variant, "backend") and variant.backend.compare_with:
        raise ConfigError(f"{name}: backend.compare_with has no place in an A/B run; make it a variant")


def job_variants(config: Any) -> dict[str, Any]:
    """Returns `compose_variants` of the job that Hydra runs."""
    hydra = HydraConfig.get()
    return compose_variants(config, str(hydra.job.config_name), list(hydra.overrides.task))


def run_variants(config: Config, out: Path) -> None:
    """Opens every variant and measures them in turns.

    Raises what opening a model and `moejax.bench.ab.run.run_ab` raise.
    """
    from moejax.bench.ab.run import run_ab
    from moejax.bench.ab.variants import Arm
    from moejax.bench.experiment_run import ExperimentRun

    experiment, configs = str(HydraConfig.get().job.config_name), job_variants(config)
    with ExitStack() as stack:
        workload: Any = config.workload
        ablation, name = None, f"{experiment}_ab"
        if isinstance(config, AblationConfig):
            ablation, name = config.ablation, experiment
            workload = config.batches if ablation.of == "latency" else workload
        run = stack.enter_context(ExperimentRun.open(name, config, out))
        arms: list[Arm] = []
        for name, composed in configs.items():
            backend, shares = _open(composed, out, configs, arms, stack.enter_context)
            arms.append(Arm(name, config.ab.all_variants[name], backend, shares))
        run_ab(arms, workload, config.ab, run, ablation)


def _open(
    config: Config, out: Path, configs: dict[str, Any], opened: Sequence[Any], enter: Callable[[Any], Any]
) -> tuple[Any, str | None]:
    """A variant's backend, and the variant whose weights it shares. Weights are shared where all but the
    engine's own settings is the same, so that their place in memory is no difference either."""
    from experiments.launch.model import open_backends
    from moejax.bench.backends.adapters import open_ours
    from moejax.bench.backends.moejax import MoejaxBackend

    for other in opened:
        theirs = configs[other.name]
        if not isinstance(other.backend, MoejaxBackend) or other.shares is not None:
            continue
        laid_out = all(getattr(config.engine, n) == getattr(theirs.engine, n) for n in _WITH_WEIGHTS)
        ours = config.backend.kind == "moejax" and not (config.backend.merged or theirs.backend.merged)
        same = dataclasses.replace(config, engine=theirs.engine, backend=theirs.backend) == theirs
        if laid_out and ours and same:
            backend = open_ours(config.backend, other.backend.llm.variant(config.engine))
            return enter(closing(backend)), other.name
    return enter(open_backends(config, out))[0], None


# Of the engine's settings, what is settled as the weights are laid out, or moves them.
_WITH_WEIGHTS = (
    "moe", "adapters", "experts", "tiers", "kernels", "platform", "compile_cache", "capture_routing",
    "replay_routing", "rebalance", "autotune", "autotune_budget_s", "autotune_choices",
)  # fmt: skip
