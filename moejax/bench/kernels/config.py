"""The configuration of `experiments.kernels`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from moejax.bench.kernels.occupancy import TARGETS
from moejax.core.checked import Among, Checked, PositiveInt
from moejax.core.errors import ConfigError
from moejax.routing.source import check_trace

Mode = Literal["static", "bench", "tune"]


@dataclass(frozen=True)
class BenchSection(Checked, section="bench"):
    """mode=bench.

    Attributes:
        repeats: timed samples per implementation, taken in turn; the median counts.
        baselines: time other libraries' implementations beside ours, where they can be imported.
        results_dir: a folder `<device>/` in it gets the table as JSON.
        routing: a routing trace or a run's folder with one: the grouped products are timed with the group
            sizes of its real steps in place of made-up ones; None: the operations' own specs.
        routing_model: whose experts' widths those are: a shipped model's name, a Hugging Face directory, or
            one of the kernels' own (`pallas_kernels.models`); None: those of the latter that have the trace's
            numbers of experts.
        routing_steps: of each phase, from the most even to the most skewed.
    """

    repeats: PositiveInt = 15
    baselines: bool = True
    results_dir: str = "results"
    routing: str | None = None
    routing_model: str | None = None
    routing_steps: PositiveInt = 3


@dataclass(frozen=True)
class TuneSection(Checked, section="tune"):
    """mode=tune.

    Attributes:
        max_configs: most configurations tried for a spec, spread evenly over its space.
        data_dir: where tables are written; none takes the user's own (`pallas_kernels.tuned`).
    """

    max_configs: PositiveInt = 24
    data_dir: str | None = None


@dataclass(frozen=True)
class KernelSelection(Checked):
    """Which kernels, implementations and specs.

    Attributes:
        ops: operations by name; none takes all.
        implementations: by name; none takes all.
        specs: parts of specs' names, of which one must occur; none takes all.
        targets: sm_80, sm_90 (mode=static).
        workers: compiling processes; for each target at least one, which may wait for its turn.
        baseline_dir: the committed reports that a static run is compared with.
        update_baseline: write this run's reports there.

    Raises:
        ConfigError: an unknown name, or values that do not fit each other.
    """

    mode: Mode = "static"
    ops: list[str] = field(default_factory=list)
    implementations: list[str] = field(default_factory=list)
    specs: list[str] = field(default_factory=list)
    targets: list[Annotated[str, Among(TARGETS)]] = field(default_factory=lambda: list(TARGETS))
    workers: PositiveInt = 2
    baseline_dir: str = "results/static"
    update_baseline: bool = False
    bench: BenchSection = field(default_factory=BenchSection)
    tune: TuneSection = field(default_factory=TuneSection)
    verbose: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ConfigError(f"targets is empty: choose among {', '.join(TARGETS)}")
        if self.bench.routing is not None:
            if self.mode != "bench":
                raise ConfigError(f"bench.routing is for mode=bench, and this is mode={self.mode}")
            check_trace("bench.routing", self.bench.routing)
            return  # its specs are known once the trace is read
        if self.bench.routing_model is not None:
            raise ConfigError("bench.routing_model names the widths for bench.routing, which is not set")
        if self.update_baseline and (self.implementations or self.specs or set(self.targets) != set(TARGETS)):
            raise ConfigError(
                "update_baseline=true writes whole operations: leave out implementations, specs and targets"
            )
        if self.ops or self.implementations or self.specs:
            # Here, so that a wrong name is found before a folder is made for the run; and only here, since it
            # imports the kernels.
            from moejax.bench.kernels.select import select

            select(self.ops, self.implementations, self.specs)
