"""LoRA adapters that a benchmark's requests have in turns: in an engine's slots, or merged."""

import time
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.disaggregating import DisaggregatingBackend
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.backends.reconfiguring import ReconfiguringBackend
from moejax.bench.experiment_run import DRY_RUN
from moejax.checkpoint.peft import Adapter, merge_adapter, read_adapter
from moejax.core.config import EngineConfig
from moejax.core.errors import RequestError
from moejax.engine.adapters import random_factors
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.models.decoder import Decoder


class MergedBackend(MoejaxBackend):
    """The plain twin of slots: a copy of the model for each adapter, merged into it. A batch runs one's
    requests after another's, and weights are swapped in between."""

    def __init__(self, llm: LLM, models: Sequence[Decoder]) -> None:
        super().__init__(llm)
        self.models = models

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], **options: bool
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        start, count = time.perf_counter(), len(self.models)
        for number, model in enumerate(self.models[: len(prompts)]):
            mine = range(number, len(prompts), count)
            self.llm.update_weights(model)
            done = super().generate([prompts[i] for i in mine], [params[i] for i in mine], **options)
            outputs |= zip(mine, done, strict=True)
        for output in outputs.values():
            output.metrics.arrival_time = start  # all were asked for together
        return [outputs[i] for i in range(len(prompts))]

    def beside(self, engine: EngineConfig) -> MoejaxBackend:
        """Itself: an engine on the same weights would have those of the moment."""
        return self

    def submit(self, *args: object, **options: object) -> RequestOutput:
        raise RequestError("backend.merged=true is for fixed batches (experiments.latency)")


def open_ours(options: BackendOptions, llm: LLM) -> MoejaxBackend:
    """Returns our engine, with the adapters that the options ask for.

    Raises:
        ConfigError, CheckpointError: one cannot be loaded, or merged.
    """
    asked, config = options.adapters, llm.engine_config.adapters
    names = [f"random{i}" for i in range(asked)] if isinstance(asked, int) else list(asked)

    def adapter(number: int, name: str) -> Adapter:
        if not isinstance(asked, int):
            return read_adapter(name, llm.config)
        factors = random_factors(llm.config, number, config.rank, config.targets)
        return Adapter(Path(name), f"{name}_of_rank_{config.rank}", factors)

    if DRY_RUN.get() is not None:
        return MoejaxBackend(llm)
    if options.disaggregate != "none":
        return DisaggregatingBackend(llm, options)
    if options.reconfigure_after:
        return ReconfiguringBackend(llm, options.reconfigure_after, options.reconfigure_to)
    if not options.merged:
        for number, name in enumerate(names):
            if name not in llm.adapters:
                llm.load_adapter(name, adapter(number, name))
        return MoejaxBackend(llm, names)
    models = [nnx.clone(llm.model) for _ in names]
    for number, (name, model) in enumerate(zip(names, models, strict=True)):
        merge_adapter(model, adapter(number, name))
    return MergedBackend(llm, models)
