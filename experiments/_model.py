"""Opens the model that an inference experiment's configuration names."""

from typing import Any

from experiments._schema import InferenceSections
from moejax.engine.llm import LLM


def open_llm(config: InferenceSections) -> LLM:
    """Raises what `LLM` raises."""
    model = config.model
    source: Any = model.path if model.path is not None else model.hf_config
    return LLM(
        source,
        dtype=model.dtype,
        parallel=config.parallel,
        engine=config.engine,
        quant=config.quant,
        seed=config.seed,
        load_format=model.load_format,
    )
