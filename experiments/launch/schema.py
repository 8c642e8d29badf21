"""The configuration of each experiment, as the experiment's `main` receives it.

Sections that the library knows are the library's own dataclasses; here are only the ones that exist for the
command line. `experiments.launch.structured.mirror` makes OmegaConf's schema from these.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from statistics import mean
from typing import Annotated, Any, Literal

from moejax.bench.ab.config import AblationSection, AbSection
from moejax.bench.backends.config import BackendSection
from moejax.bench.kernels.config import KernelSelection
from moejax.bench.objective import ObjectiveCase, check_objective
from moejax.bench.offload.config import OffloadSection
from moejax.bench.profile.config import ProfileSection, ProfileWorkload
from moejax.bench.program.config import ProgramSection
from moejax.bench.quantization.config import QuantizationSection
from moejax.bench.ramp.config import RampConfig
from moejax.bench.routing.config import RoutingSelection, needs_model
from moejax.bench.routing_policies.config import RoutingPoliciesSection
from moejax.bench.scaling.config import ScalingSection
from moejax.bench.simulate.config import SimulateSection
from moejax.bench.stress.config import StressSection
from moejax.bench.traffic import ThroughputWorkload, plan_requests
from moejax.bench.workload import WorkloadConfig, latency_cases
from moejax.checkpoint.directory import read_raw_config, reduced_shape
from moejax.core.checked import Among, Checked, Must, Name, PositiveInt, Seed
from moejax.core.config import DTYPES, EngineConfig
from moejax.core.errors import ConfigError, os_errors
from moejax.core.hardware import KNOWN
from moejax.core.host import HostConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.price import Price
from moejax.core.quant import QuantConfig
from moejax.engine.requests.api import SamplingParams
from moejax.results.goals import Goal
from moejax.results.run_folders import usable_runs
from moejax.serving.config import ServeSection
from moejax.tracking.base import TrackerConfig
from moejax.tracking.dashboard import DashboardConfig
from moejax.tracking.telemetry import TelemetryConfig
from moejax.train.config import TrainConfig

LoadFormat = Literal["auto", "dummy"]
RunFolder = Annotated[
    str, Must(lambda name: name in ("outputs", "multirun") or Path(name).is_dir(), "a folder that is there")
]


@dataclass(frozen=True)
class ModelSection(Checked, section="model"):
    """Which model.

    Attributes:
        path: a shipped model's name or a Hugging Face directory.
        dtype: computation and weight type; `auto` lets the engine choose for the device.
        load_format: `dummy` fills the weights at random from the model's config.json alone.
        hf_config: the content of a config.json, for a shape without a checkpoint; excludes `path`.
        num_hidden_layers: only the first so many layers of a `dummy` model, whose name says so; None: all.
    """

    path: str | None
    dtype: Annotated[str, Among(("auto", *DTYPES))] = "auto"
    load_format: LoadFormat = "auto"
    hf_config: dict[str, Any] | None = None
    num_hidden_layers: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is None) == (self.hf_config is None):
            fault = "both are set" if self.path is not None else "neither is set"
            raise ConfigError(
                f"set either model.path or model.hf_config ({fault}); for a Hugging Face directory write"
                " model=checkpoint model.path=DIR"
            )
        if self.hf_config is not None and self.load_format != "dummy":
            raise ConfigError(
                "model.hf_config describes a shape without weights: it needs model.load_format=dummy"
            )
        if self.num_hidden_layers is not None and self.load_format != "dummy":
            raise ConfigError(
                "model.num_hidden_layers makes another shape, which no checkpoint has weights for: it needs"
                " model.load_format=dummy"
            )

    @property
    def source(self) -> str | dict[str, Any]:
        """Returns what `LLM` opens: the path, or the shape."""
        if self.num_hidden_layers is None:
            return self.path if self.path is not None else self.hf_config or {}
        shape = self.hf_config or {"_name_or_path": self.path, **read_raw_config(str(self.path))}
        return reduced_shape(shape, self.num_hidden_layers)

    @property
    def name(self) -> str:
        """A short name for tables and run names."""
        source = self.source if isinstance(self.source, str) else self.source.get("_name_or_path", "custom")
        return PurePath(str(source)).name


@dataclass(frozen=True)
class HardwareSection(Checked, section="hardware"):
    """The device whose peaks bound the roofline: `auto` detects it, any other kind is taken as said."""

    kind: str = "auto"


@dataclass(frozen=True)
class PricedHardware(HardwareSection):
    """A device with its price, for experiments that measure the tokens/s to hold it against.

    Attributes:
        price_per_hour: of one device, in `currency`; with it the cost of a million tokens is reported.
    """

    price_per_hour: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.price

    @property
    def price(self) -> Price | None:
        """Raises `ConfigError` for one that makes no sense."""
        return None if self.price_per_hour is None else Price(self.price_per_hour, self.currency)


@dataclass(frozen=True, kw_only=True)
class RecordedSections(Checked):
    """The sections of every experiment that leaves a result, which has a verdict on each of the goals."""

    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    goals: list[Goal] = field(default_factory=list)
    overwrite: bool = False


@dataclass(frozen=True)
class ModelSections(Checked):
    """The sections of every experiment that opens a model."""

    model: ModelSection
    engine: EngineConfig = field(default_factory=EngineConfig)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    host: HostConfig = field(default_factory=HostConfig)
    seed: Seed = 0
    overwrite: bool = False
    verbose: bool = False

    def _refuse_capture(self, experiment: str) -> None:
        """Raises `ConfigError`: `experiment` writes no trace, and would only pile one up."""
        if self.engine.capture_routing:
            raise ConfigError(
                f"engine.capture_routing: {experiment} writes no routing.npz; latency and throughput do"
            )

    def _refuse_tiers(self, experiment: str, why: str) -> None:
        """Raises `ConfigError`: `experiment` does not go with experts in tiers."""
        if self.engine.experts_in_tiers:
            raise ConfigError(
                f"engine.experts.resident, engine.tiers.device_gb and resident_layers: {experiment} {why}; "
                "leave them null"
            )


@dataclass(frozen=True)
class InferenceSections(ModelSections):
    """The sections of every experiment that runs one model on one layout."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel.auto:
            object.__setattr__(self, "parallel", self._chosen_layout())

    def _chosen_layout(self) -> ParallelConfig:
        """Returns the layout that `parallel.auto` asks for. Raises `ConfigError`: no device is named, or what
        `choose_layout` raises."""
        from moejax.bench.simulate.plan import choose_layout
        from moejax.engine.opening.resolve import find_model

        if self.hardware.kind in ("auto", "cpu"):
            kinds = ", ".join(kind for kind, device in KNOWN.items() if device.bandwidth is not None)
            raise ConfigError(f"parallel.auto needs the devices that it chooses for: hardware.kind={kinds}")
        model = find_model(self.model.source, self.model.load_format)[1].replace(dtype="bfloat16")
        held = next((name for word, name in _HELD.items() if word in self.quant.format), "w8a16_int8")
        held = "bf16" if self.quant.method == "none" else held
        cache = "fp8" if self.quant.kv_cache in ("int8", "fp8_e4m3") else "bf16"
        section, load = (
            SimulateSection(weights=held, dense=held, cache=cache),
            getattr(self, "workload", None),
        )
        lengths, tpot_ms = (512.0, 128.0), None
        if isinstance(load, ThroughputWorkload):
            # Lengths alone count, for which four characters are near enough to a token.
            encode = lambda text: [0] * max(1, len(text) // 4)  # noqa: E731
            asked, tpot_ms = plan_requests(load, model.vocab_size, encode=encode), load.slo.tpot_ms
            lengths = (mean(each.prompt_len for each in asked), mean(each.output_len for each in asked))
        elif isinstance(load, WorkloadConfig):
            cases, tpot_ms = latency_cases(load), load.slo.tpot_ms
            lengths = (mean(case.prompt_len for case in cases), mean(case.output_len for case in cases))
        return choose_layout(
            model, self.engine, section, self.hardware.kind, self.parallel.auto, lengths, tpot_ms
        )


_HELD = {"int4": "w4a16_int4", "mxfp4": "w4a16_int4", "nvfp4": "w4a16_int4", "fp8": "fp8"}
"""The simulator's names of weights' formats; others' are of 8 bits."""


@dataclass(frozen=True)
class ServingSections(RecordedSections, InferenceSections):
    """The sections of the experiments that measure engines, ours and its peers.

    Attributes:
        objective: the flat metric that a search over settings is after (experiment=optuna_goodput).
    """

    hardware: PricedHardware = field(default_factory=PricedHardware)
    backend: BackendSection = field(default_factory=BackendSection)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    objective: str | None = None
    ab: AbSection = field(default_factory=AbSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.backend.check_run(self.model.load_format, self._ours_only())

    def _ours_only(self) -> dict[str, bool]:
        """Returns key → whether it asks for something that no other engine has."""
        return {
            "engine.capture_routing": self.engine.capture_routing,
            "engine.replay_routing": self.engine.replay_routing is not None,
            "parallel": not self.parallel.is_single,
            "quant": self.quant.method != "none" or self.quant.kv_cache != "auto",
        }


@dataclass(frozen=True)
class LatencyConfig(ServingSections):
    """`python -m experiments.latency`

    Attributes:
        objective_case: the case that `objective` is of, such as objective_case.batch_size=8.
    """

    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    objective_case: ObjectiveCase = field(default_factory=ObjectiveCase)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ab.tenant is not None:
            raise ConfigError("ab.tenant: a fixed batch has no tenants; experiments.throughput has them")
        cases = latency_cases(self.workload)
        check_objective(self.objective, "latency", self.workload.slo, cases=cases, chosen=self.objective_case)
        largest = max(case.batch_size for case in cases)
        if largest > self.engine.max_num_seqs:
            raise ConfigError(
                f"workload.batch_size {largest} exceeds engine.max_num_seqs {self.engine.max_num_seqs};"
                f" raise the limit with engine.max_num_seqs={largest}"
            )


@dataclass(frozen=True)
class ThroughputConfig(ServingSections):
    """`python -m experiments.throughput`

    Attributes:
        ramp: rising request rates instead of `workload.request_rate` (experiment=throughput_ramp).
    """

    workload: ThroughputWorkload = field(default_factory=ThroughputWorkload)
    ramp: RampConfig = field(default_factory=RampConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = "ramp" if self.ramp.enabled else "users" if len(self.workload.users) > 1 else "throughput"
        check_objective(self.objective, kind, self.workload.slo)
        self.ramp.check_alone(self.workload)
        if self.ramp.enabled:
            self._refuse_capture("a ramp")

    def _ours_only(self) -> dict[str, bool]:
        return super()._ours_only() | {"workload.compare": bool(self.workload.compare)}


@dataclass(frozen=True)
class AblationConfig(ServingSections):
    """`python -m experiments.ablation`: `ablation.of` says if of `workload` or `batches`, `ab` how often the
    stages take turns."""

    ablation: AblationSection = field(default_factory=AblationSection)
    workload: ThroughputWorkload = field(default_factory=ThroughputWorkload)
    batches: WorkloadConfig = field(default_factory=WorkloadConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ab.variants not in ({}, self.ablation.variants):
            raise ConfigError("ab.variants: the variants of an ablation are ablation.stages")
        metrics = self.ab.metrics or self.ablation.metrics
        ab = replace(self.ab, variants=self.ablation.variants, metrics=metrics)
        object.__setattr__(self, "ab", ab)


@dataclass(frozen=True)
class StressConfig(RecordedSections, InferenceSections):
    """`python -m experiments.stress`"""

    stress: StressSection = field(default_factory=StressSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_capture("stress")


@dataclass(frozen=True)
class ProfileConfig(RecordedSections, InferenceSections):
    """`python -m experiments.profile`: its workload is one case, its own."""

    workload: ProfileWorkload = field(default_factory=ProfileWorkload)
    profile: ProfileSection = field(default_factory=ProfileSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_tiers("profile", "takes whole steps apart, and not those that wait for experts")


@dataclass(frozen=True)
class ProgramConfig(RecordedSections, InferenceSections):
    """`python -m experiments.program`

    Attributes:
        target: "a100", "h100", or a file that describes a device (`moejax/assets/targets/`).
    """

    target: str = "a100"
    program: ProgramSection = field(default_factory=ProgramSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_capture("program")
        self._refuse_tiers("program", "compiles whole steps")


@dataclass(frozen=True)
class ScalingConfig(RecordedSections, ModelSections):
    """`python -m experiments.scaling`: its layouts are its own, so that it has no `parallel` section."""

    scaling: ScalingSection = field(default_factory=ScalingSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_tiers("scaling", "compares layouts of several devices, and slots are of one")


@dataclass(frozen=True)
class SimulateConfig(RecordedSections, ModelSections):
    """`python -m experiments.simulate`: its layouts are its own, so that it has no `parallel` section.

    Attributes:
        ablation: stages of configurations, which are simulated instead of the one described.
    """

    workload: ThroughputWorkload = field(default_factory=ThroughputWorkload)
    simulate: SimulateSection = field(default_factory=SimulateSection)
    hardware: PricedHardware = field(default_factory=PricedHardware)
    ablation: AblationSection = field(default_factory=AblationSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_capture("simulate")
        if self.engine.speculation.most:
            raise ConfigError(
                f"engine.speculation.method={self.engine.speculation.method}: what drafts get right depends "
                "on the tokens, which a simulation has not; use none"
            )
        self._refuse_tiers("a simulation", "has all experts on its devices")
        if (policy := self.engine.kv_policy.method) != "none":
            raise ConfigError(
                f"engine.kv_policy.method={policy}: a simulation's attention reads whole contexts; use none"
            )
        if changed := self.engine.moe.routing.changed:
            raise ConfigError(
                f"{changed}: who is sent where depends on the routers' scores, which a simulation has not; "
                "leave engine.moe.routing as it is"
            )
        self.simulate.asked(self.workload)
        if self.ablation.stages and self.simulate.mode != "run":
            raise ConfigError(f"ablation.stages: simulate.mode={self.simulate.mode} has none")
        if self.workload.iterations > 1 or self.workload.compare:
            raise ConfigError(
                "workload.iterations and workload.compare: a simulation has no noise to repeat for"
            )


@dataclass(frozen=True)
class QuantizationConfig(RecordedSections, ModelSections):
    """`python -m experiments.quantization`: its methods are its own, so that it has no `quant` section."""

    quantization: QuantizationSection = field(kw_only=True)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_capture("quantization")


@dataclass(frozen=True)
class RoutingPoliciesConfig(RecordedSections, ModelSections):
    """`python -m experiments.routing_policies`: its policies are its own."""

    routing_policies: RoutingPoliciesSection = field(kw_only=True)
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_capture("routing_policies")
        moe = self.engine.moe
        capacity = "engine.moe.execution=capacity" if moe.execution == "capacity" else None
        if changed := capacity or moe.routing.changed:
            raise ConfigError(
                f"{changed}: policies are compared with the model's own choice; "
                "name others in routing_policies.presets"
            )


@dataclass(frozen=True)
class OffloadConfig(RecordedSections, ModelSections):
    """`python -m experiments.offload`"""

    offload: OffloadSection = field(default_factory=OffloadSection)


@dataclass(frozen=True)
class ServeConfig(InferenceSections):
    """`python -m experiments.serve`: a model behind an address."""

    serve: ServeSection = field(default_factory=ServeSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_capture("serve")


@dataclass(frozen=True)
class GenerateConfig(InferenceSections):
    """`python -m experiments.generate`: text in, text out.

    Attributes:
        prompts: one text or a list of them.
        sampling: as in `moejax.SamplingParams`; `structured_outputs.json` may be the name of a schema's file.
        stream: print tokens as they come (one prompt only).
        chat: put each prompt into the model's chat template as the user's turn.
    """

    prompts: str | list[str] = field(default_factory=lambda: ["The function returns"])
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    chat: bool = False

    def __post_init__(self) -> None:
        prompts = [self.prompts] if isinstance(self.prompts, str) else self.prompts
        if not isinstance(prompts, (list, tuple)) or not prompts:
            raise ConfigError(f"prompts must be a text or a list of texts, got {self.prompts!r}")
        # A bare number or true on the command line arrives as such; as a prompt it is its text.
        texts = [item if isinstance(item, str) else _plain_text(item) for item in prompts]
        object.__setattr__(self, "prompts", texts)
        object.__setattr__(self, "sampling", _with_schema(self.sampling))
        super().__post_init__()
        self._refuse_capture("generate")
        if self.stream and (len(texts) > 1 or self.sampling.n > 1):
            raise ConfigError("stream=true prints one text as it comes: give one prompt and sampling.n=1")


@dataclass(frozen=True)
class TrainExperimentConfig(RecordedSections, TrainConfig):
    """`python -m experiments.train`: the library's `TrainConfig` and where its figures go."""

    hardware: HardwareSection = field(default_factory=HardwareSection)
    host: HostConfig = field(default_factory=HostConfig)
    verbose: bool = False


@dataclass(frozen=True)
class RoutingConfig(RecordedSections, RoutingSelection):
    """`python -m experiments.routing`

    Attributes:
        model: its shape, for a trace to be made or for traces to fit; None: traces are taken as they are.
    """

    model: ModelSection | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generate.kind is not None and self.model is None:
            raise needs_model(self.generate.kind)


@dataclass(frozen=True)
class KernelsConfig(RecordedSections, KernelSelection):
    """`python -m experiments.kernels`"""


def _plain_text(item: object) -> str:
    if isinstance(item, (bool, int, float)):
        return str(item).lower() if isinstance(item, bool) else str(item)
    raise ConfigError(f"prompts must be texts, got {item!r}")


def _with_schema(sampling: SamplingParams) -> SamplingParams:
    """Puts a JSON schema in the place of its file's name."""
    schema = sampling.structured_outputs.get("json")
    if not isinstance(schema, str) or schema.lstrip().startswith("{"):
        return sampling
    with os_errors(ConfigError, f"sampling.structured_outputs.json: cannot read {schema}"):
        text = Path(schema).read_text(encoding="utf-8")
    return replace(sampling, structured_outputs={"json": text})


@dataclass(frozen=True)
class CompareConfig(Checked):
    """`python -m experiments.compare`

    Attributes:
        runs: run folders, result.json files or offline W&B runs; the first is the baseline.
        metrics: names to judge by; none takes the usual ones.
        across: `model`, `workload` or `device`, where the runs are meant to differ in it.
        noise_floor: the relative difference of two sessions that is still noise; None takes the platform's.
        html: whether to write report.html as well.
    """

    runs: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    across: list[Literal["model", "workload", "device"]] = field(default_factory=list)
    noise_floor: Annotated[float, Must(lambda x: 0 <= x < 1, "at least 0 and below 1")] | None = None
    html: bool = False
    overwrite: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        usable_runs(self.runs)


@dataclass(frozen=True)
class GoalsConfig(Checked):
    """`python -m experiments.goals`: `runs` are folders with runs in them; the usual ones may be missing."""

    runs: list[RunFolder] = field(default_factory=lambda: ["outputs", "multirun"])


@dataclass(frozen=True)
class DashboardExperimentConfig(Checked):
    """`python -m experiments.dashboard`"""

    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    overwrite: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class DoctorConfig(Checked):
    """`python -m experiments.doctor`: `run` is a finished run's folder, to judge it beside the machine."""

    run: RunFolder | None = None
    json: bool = False


@dataclass(frozen=True)
class ModelsConfig(Checked):
    """`python -m experiments.models`: `root` is the repository, `path` the checkpoint to add, and
    `wandb_project` (PROJECT or ENTITY/PROJECT, online) has each version as an artifact, too."""

    action: Annotated[str, Among(("add", "list", "promote", "rollback"))] = "list"
    root: Name = "models"
    name: Name | None = None
    version: PositiveInt | None = None
    path: Name | None = None
    wandb_project: Name | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"add": ("name", "path"), "promote": ("name", "version"), "rollback": ("name",)}
        needs = needed.get(self.action, ())
        takes = (*needs, "wandb_project") if needs else ("name",)
        for key in ("name", "version", "path", "wandb_project"):
            given = getattr(self, key) is not None
            if given != (key in needs) and not (given and key in takes):
                words = "takes no {0}; leave it out" if given else "needs {0}=…"
                raise ConfigError(f"action={self.action} {words.format(key)}")
