"""The configuration of each experiment, as the experiment's `main` receives it.

Sections that the library knows are the library's own dataclasses; here are only the ones that exist for the
command line. `experiments._structured.mirror` makes OmegaConf's schema from these.
"""

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, get_args

from moejax.bench.kernels.config import KernelSelection
from moejax.bench.quantization.config import QuantizationSection
from moejax.bench.scaling.config import ScalingSection
from moejax.bench.traffic import ThroughputWorkload
from moejax.bench.workload import WorkloadConfig
from moejax.core.config import DTYPES, EngineConfig, check_choice
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.engine.request import SamplingParams
from moejax.tracking.base import TrackerConfig
from moejax.train.config import TrainConfig

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True)
class ModelSection:
    """Which model.

    Attributes:
        path: a shipped model's name or a Hugging Face directory.
        dtype: computation and weight type; `auto` lets the engine choose for the device.
        load_format: `dummy` fills the weights at random from the model's config.json alone.
        hf_config: the content of a config.json, for a shape without a checkpoint; excludes `path`.
    """

    path: str | None
    dtype: str = "auto"
    load_format: LoadFormat = "auto"
    hf_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("model.dtype", self.dtype, ("auto", *DTYPES))
        check_choice("model.load_format", self.load_format, get_args(LoadFormat))
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

    @property
    def name(self) -> str:
        """A short name for tables and run names."""
        source = self.path if self.path is not None else (self.hf_config or {}).get("_name_or_path", "custom")
        return PurePath(str(source)).name


@dataclass(frozen=True)
class HardwareSection:
    """The device whose peaks bound the roofline: `auto` detects it, any other kind is taken as said."""

    kind: str = "auto"


@dataclass(frozen=True)
class InferenceSections:
    """What every experiment that runs the engine has."""

    model: ModelSection
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    seed: int = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be in [0, 2^32), got {self.seed}")


@dataclass(frozen=True)
class LatencyConfig(InferenceSections):
    """`python -m experiments.latency`"""

    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        batches = self.workload.batch_size
        largest = max(batches) if isinstance(batches, (list, tuple)) else batches
        if largest > self.engine.max_num_seqs:
            raise ConfigError(
                f"workload.batch_size {largest} exceeds engine.max_num_seqs {self.engine.max_num_seqs};"
                f" raise the limit with engine.max_num_seqs={largest}"
            )


@dataclass(frozen=True)
class ThroughputConfig(InferenceSections):
    """`python -m experiments.throughput`"""

    workload: ThroughputWorkload = field(default_factory=ThroughputWorkload)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


@dataclass(frozen=True)
class ScalingConfig:
    """`python -m experiments.scaling`: its layouts are its own, so that it has no `parallel` section."""

    model: ModelSection
    scaling: ScalingSection = field(default_factory=ScalingSection)
    engine: EngineConfig = field(default_factory=EngineConfig)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    seed: int = 0
    verbose: bool = False


@dataclass(frozen=True)
class QuantizationConfig:
    """`python -m experiments.quantization`: its methods are its own, so that it has no `quant` section."""

    model: ModelSection
    quantization: QuantizationSection
    engine: EngineConfig = field(default_factory=EngineConfig)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    seed: int = 0
    verbose: bool = False


@dataclass(frozen=True)
class GenerateConfig(InferenceSections):
    """`python -m experiments.generate`: text in, text out.

    Attributes:
        prompts: one text or a list of them.
        sampling: as in `moejax.SamplingParams`.
        stream: print tokens as they come (one prompt only).
        chat: put each prompt into the model's chat template as the user's turn.
    """

    prompts: str | list[str] = field(default_factory=lambda: ["The function returns"])
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    chat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = [self.prompts] if isinstance(self.prompts, str) else self.prompts
        if not isinstance(prompts, (list, tuple)) or not prompts:
            raise ConfigError(f"prompts must be a text or a list of texts, got {self.prompts!r}")
        # A bare number or true on the command line arrives as such; as a prompt it is its text.
        texts = [item if isinstance(item, str) else _plain_text(item) for item in prompts]
        object.__setattr__(self, "prompts", texts)
        if self.stream and (len(texts) > 1 or self.sampling.n > 1):
            raise ConfigError("stream=true prints one text as it comes: give one prompt and sampling.n=1")


@dataclass(frozen=True)
class TrainExperimentConfig(TrainConfig):
    """`python -m experiments.train`: the library's `TrainConfig` and where its figures go."""

    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    verbose: bool = False


@dataclass(frozen=True)
class KernelsConfig(KernelSelection):
    """`python -m experiments.kernels`"""

    tracker: TrackerConfig = field(default_factory=TrackerConfig)


def _plain_text(item: object) -> str:
    if isinstance(item, (bool, int, float)):
        return str(item).lower() if isinstance(item, bool) else str(item)
    raise ConfigError(f"prompts must be texts, got {item!r}")


@dataclass(frozen=True)
class CompareConfig:
    """`python -m experiments.compare`

    Attributes:
        runs: result.json files or run folders; ratios refer to the first.
        metrics: names to compare; none takes the usual ones.
    """

    runs: list[str]
    metrics: list[str] = field(default_factory=list)
    verbose: bool = False

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("runs is empty: give result.json files or run folders, 'runs=[DIR,DIR]'")
